"""How much GPU memory a PyTorch training run will take, before it runs.

    import memest

    answer = memest.estimate("bert-large-uncased", batch=8, seq_len=512, fp16=True, gpu="rtx-3090")
    print(answer)
    answer.peak.allocated_bytes, answer.peak.reserved_bytes, answer.peak.device_bytes

Importing memest loads nothing heavy: torch comes in with the first trace.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memest.calibration.live import MemestCallback as MemestCallback
    from memest.calibration.live.measure import measure
    from memest.calibration.validation import Validation, validate
    from memest.config.setup import Setup, Software
    from memest.errors import (
        ConfigError,
        DeviceError,
        DoesNotFitError,
        MemestError,
        MissingDependencyError,
        ModelLoadError,
        ReplayError,
        TraceError,
        UnknownGpuError,
        UnknownModelError,
    )
    from memest.estimation.estimate import estimate
    from memest.readers.reading import read_command, read_config
    from memest.readers.run_config import RunConfig
    from memest.report.findings import Advice, Comparison
    from memest.report.growth_result import GrowthExplanation
    from memest.report.max_batch_result import MaxBatch
    from memest.report.oom_result import OomExplanation
    from memest.report.result import Estimate, Verdict
    from memest.report.stages_result import StageTable
    from memest.report.suggestions import Suggestions
    from memest.search.advise import advise
    from memest.search.compare import compare
    from memest.search.explain_growth import explain_growth
    from memest.search.explain_oom import explain_oom
    from memest.search.max_batch import max_batch
    from memest.search.points import Sweep, SweepPoint
    from memest.search.profile import Profile, profile
    from memest.search.stages import stages
    from memest.search.suggest import suggest
    from memest.search.sweep import sweep

    __version__: str

__all__ = [
    "Advice",
    "Comparison",
    "ConfigError",
    "DeviceError",
    "DoesNotFitError",
    "Estimate",
    "GrowthExplanation",
    "MaxBatch",
    "MemestError",
    "MissingDependencyError",
    "ModelLoadError",
    "OomExplanation",
    "Profile",
    "ReplayError",
    "RunConfig",
    "Setup",
    "Software",
    "StageTable",
    "Suggestions",
    "Sweep",
    "SweepPoint",
    "TraceError",
    "UnknownGpuError",
    "UnknownModelError",
    "Validation",
    "Verdict",
    "__version__",
    "advise",
    "compare",
    "estimate",
    "explain_growth",
    "explain_oom",
    "max_batch",
    "measure",
    "profile",
    "read_command",
    "read_config",
    "stages",
    "suggest",
    "sweep",
    "validate",
]

_HOMES = {
    # in no star import: it loads transformers
    "MemestCallback": "memest.calibration.live",
    "Advice": "memest.report.findings",
    "Comparison": "memest.report.findings",
    "advise": "memest.search.advise",
    "compare": "memest.search.compare",
    "Estimate": "memest.report.result",
    "GrowthExplanation": "memest.report.growth_result",
    "MaxBatch": "memest.report.max_batch_result",
    "OomExplanation": "memest.report.oom_result",
    "explain_growth": "memest.search.explain_growth",
    "explain_oom": "memest.search.explain_oom",
    "max_batch": "memest.search.max_batch",
    "RunConfig": "memest.readers.run_config",
    "read_command": "memest.readers.reading",
    "read_config": "memest.readers.reading",
    "measure": "memest.calibration.live.measure",
    "Setup": "memest.config.setup",
    "Software": "memest.config.setup",
    "Verdict": "memest.report.result",
    "estimate": "memest.estimation.estimate",
    "Profile": "memest.search.profile",
    "profile": "memest.search.profile",
    "Sweep": "memest.search.points",
    "SweepPoint": "memest.search.points",
    "StageTable": "memest.report.stages_result",
    "stages": "memest.search.stages",
    "Suggestions": "memest.report.suggestions",
    "suggest": "memest.search.suggest",
    "sweep": "memest.search.sweep",
    "Validation": "memest.calibration.validation",
    "validate": "memest.calibration.validation",
}


_TREE = Path(__file__).parent.parent
if (_TREE / "pyproject.toml").is_file():
    # a checkout: app, calibration and data stand beside this folder, and are found there however it
    # came to be imported
    __path__.append(str(_TREE))


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("memest-gpu")
    elif name in __all__ or name in _HOMES:
        value = getattr(importlib.import_module(_HOMES.get(name, "memest.errors")), name)
    else:
        raise AttributeError(f"module 'memest' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
