"""``python calibration run ...`` from a checkout: what ``memest calibrate`` is when installed.

A machine with a GPU may have no way to install anything. The top-level folders ``calibration`` and
``data`` become ``memest.calibration`` and ``memest.data`` when the package is built; here, the
checkout itself is made to look so.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def _main() -> int:
    # python puts this folder itself in front: its modules are no top-level ones
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != CHECKOUT / "calibration"]
    if importlib.util.find_spec("memest") is None:
        sys.path.insert(0, str(CHECKOUT))
    if importlib.util.find_spec("memest.calibration") is None:
        import memest

        memest.__path__.append(str(CHECKOUT))
    if sys.argv[1:2] == ["--nursery"]:
        from memest.calibration.running.nursery import main

        return main(int(sys.argv[2]))
    sys.argv[1:1] = ["calibrate"]
    runpy.run_module("memest", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
