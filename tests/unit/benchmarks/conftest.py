"""The suite of ``benchmarks/speed``, as its own command finds it."""

from __future__ import annotations

import sys

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
