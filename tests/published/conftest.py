"""The tool that runs published records, as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "published.py"


def load_tool():
    if "published_tool" not in sys.modules:
        spec = importlib.util.spec_from_file_location("published_tool", TOOL)
        module = importlib.util.module_from_spec(spec)
        sys.modules["published_tool"] = module
        spec.loader.exec_module(module)
    return sys.modules["published_tool"]


@pytest.fixture(scope="session")
def tool():
    return load_tool()


@pytest.fixture(scope="session")
def by_id(tool):
    return {r.id: r for r in tool.records()}
