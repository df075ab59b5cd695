"""A run that was measured where it trained, as a measurement of the calibration store."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from memest.calibration.case import Case, Parallel
from memest.calibration.measurement import Status, is_out_of_memory
from memest.catalog.models import lookup
from memest.config.parallelism import ONE_GPU, Strategy
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.files.texts import write_text

__all__ = [
    "case_of",
    "model_reference",
    "status_of",
]


def model_reference(model: Any, folder: Path) -> str:
    """How a record names a live model, so that ``memest estimate`` builds it again where it can be.

    A transformers model whose configuration is the catalogue's goes by its name; another has its
    configuration written beside the store. Any other module is named by its class, which tells
    readers what ran and builds nothing.

    Args:
        model: live.
        folder: where configurations are kept.
    """
    config = getattr(model, "config", None)
    if config is None or hasattr(model, "peft_config") or not hasattr(config, "model_type"):
        return f"{type(model).__module__}:{type(model).__qualname__}"
    document = json.loads(json.dumps(config.to_dict(), default=str))
    document["architectures"] = [type(model).__name__]
    name = str(getattr(config, "_name_or_path", "") or "")
    entry = lookup(name) if name else None
    catalog_config = None if entry is None else entry.config()
    if catalog_config is not None and all(
        document.get(k) == v for k, v in catalog_config.items() if _shapes(k)
    ):
        return name
    text = json.dumps(document, indent=1, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = folder / "models" / f"{document['model_type']}-{digest}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return str(path)


def _shapes(name: str) -> bool:
    """Whether a name of a configuration may decide shapes; names of files and versions do not."""
    return name not in (
        "_name_or_path",
        "architectures",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "id2label",
        "label2id",
    )


def case_of(model: str, setup: Setup, steps: int) -> Case:
    """The case that a run was.

    Raises:
        ConfigError: cases of the store have no such run.
    """
    distributed = setup.distributed
    parallel = {
        Strategy.NONE: Parallel.NONE,
        Strategy.DDP: Parallel.DDP,
        Strategy.FSDP: Parallel.FSDP,
    }.get(distributed.strategy)
    if parallel is None:
        raise ConfigError(
            f"the store has no cases of {distributed.strategy} yet: no record is kept."
        )
    alone = dataclasses.replace(setup, distributed=ONE_GPU, num_steps=max(min(steps, 4), 1))
    return Case(
        model=model,
        setup=alone,
        parallel=parallel,
        processes=distributed.num_gpus if parallel is not Parallel.NONE else 1,
    )


def status_of(error: BaseException | None) -> Status:
    """How a run ended."""
    if error is None:
        return Status.OK
    if is_out_of_memory(error):
        return Status.OOM
    interrupted = isinstance(error, (KeyboardInterrupt, SystemExit))
    return Status.INTERRUPTED if interrupted else Status.FAILED
