"""Programs of ``tools/`` as modules."""

import importlib.util
import sys
from types import ModuleType

from support.paths import ROOT


def load_tool(name: str) -> ModuleType:
    """``tools/NAME.py``; loaded once."""
    known = f"memest_tool_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, ROOT / "tools" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[known] = module
        spec.loader.exec_module(module)
    return sys.modules[known]
