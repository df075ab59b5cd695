"""The peers of ``benchmarks/peers``, as their own command finds them."""

from __future__ import annotations

import sys

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
