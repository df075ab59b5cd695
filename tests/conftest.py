"""Options of the whole suite."""

from __future__ import annotations


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files of tests/golden"
    )
