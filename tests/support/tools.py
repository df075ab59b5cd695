"""Programs of ``tools/`` as modules."""

import importlib.util
import sys
from types import ModuleType

from support.paths import ROOT


def load_tool(name: str) -> ModuleType:
    """``tools/NAME.py``; loaded once."""
    module_name = f"memest_tool_{name}"
    if module_name not in sys.modules:
        if str(ROOT / "tools") not in sys.path:  # as where a tool is run: others stand beside it
            sys.path.append(str(ROOT / "tools"))
        spec = importlib.util.spec_from_file_location(module_name, ROOT / "tools" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return sys.modules[module_name]
