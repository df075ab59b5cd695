"""The tool that runs published records, as a module."""

from __future__ import annotations

import pytest

from support.tools import load_tool


@pytest.fixture(scope="session")
def tool():
    return load_tool("published")


@pytest.fixture(scope="session")
def by_id(tool):
    return {r.id: r for r in tool.records()}
