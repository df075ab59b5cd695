"""How much GPU memory a PyTorch training run will take, before it runs.

    import memest

    answer = memest.estimate("bert-large-uncased", batch=8, seq_len=512, fp16=True, gpu="rtx-3090")
    print(answer)
    answer.peak.allocated_bytes, answer.peak.reserved_bytes, answer.peak.device_bytes

Importing memest loads nothing heavy: torch comes in with the first trace.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memest.errors import (
        ConfigError,
        DeviceError,
        MemestError,
        MissingDependencyError,
        ModelLoadError,
        ReplayError,
        TraceError,
        UnknownGpuError,
        UnknownModelError,
    )
    from memest.estimator import estimate
    from memest.findings import Advice, Comparison
    from memest.limits import MaxBatch
    from memest.result import Estimate, Verdict
    from memest.search.advise import advise
    from memest.search.compare import compare
    from memest.search.max_batch import max_batch
    from memest.search.points import Sweep, SweepPoint
    from memest.search.stages import stages
    from memest.search.sweep import sweep
    from memest.setup import Setup, Software
    from memest.stage_table import StageTable
    from memest.what_if import Profile, profile

    __version__: str

__all__ = [
    "Advice",
    "Comparison",
    "ConfigError",
    "DeviceError",
    "Estimate",
    "MaxBatch",
    "MemestError",
    "MissingDependencyError",
    "ModelLoadError",
    "Profile",
    "ReplayError",
    "Setup",
    "Software",
    "StageTable",
    "Sweep",
    "SweepPoint",
    "TraceError",
    "UnknownGpuError",
    "UnknownModelError",
    "Verdict",
    "__version__",
    "advise",
    "compare",
    "estimate",
    "max_batch",
    "profile",
    "stages",
    "sweep",
]

_HOMES = {
    "Advice": "memest.findings",
    "Comparison": "memest.findings",
    "advise": "memest.search.advise",
    "compare": "memest.search.compare",
    "Estimate": "memest.result",
    "MaxBatch": "memest.limits",
    "max_batch": "memest.search.max_batch",
    "Setup": "memest.setup",
    "Software": "memest.setup",
    "Verdict": "memest.result",
    "estimate": "memest.estimator",
    "Profile": "memest.what_if",
    "profile": "memest.what_if",
    "Sweep": "memest.search.points",
    "SweepPoint": "memest.search.points",
    "StageTable": "memest.stage_table",
    "stages": "memest.search.stages",
    "sweep": "memest.search.sweep",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("memest")
    elif name in __all__:
        value = getattr(importlib.import_module(_HOMES.get(name, "memest.errors")), name)
    else:
        raise AttributeError(f"module 'memest' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
