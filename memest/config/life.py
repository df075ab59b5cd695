"""The life of a run around its steps: saving, resuming, evaluating, and the host memory of a node.

Torch-free. What of it is asked about is no part of a step: it changes no trace.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from memest.config.kinds import check_whole_number, choose
from memest.config.option import Kind, Panel, legal_values, option, read_parts
from memest.errors import ConfigError
from memest.units import MIB, format_size, parse_size

__all__ = [
    "GPUS_ALONE",
    "Life",
    "LifePart",
    "StateDicts",
    "merge_life",
    "read_life",
    "refuse_host_memory",
]

GPUS_ALONE = ("max-batch", "compare", "advise")
"""Commands whose answers are about GPUs alone."""

_MAX_PROCESSES = 1 << 10
_USUAL_PROCESSES = 8
"""Processes of a node where nobody says how many: GPUs of most machines."""


class LifePart(enum.StrEnum):
    """What of a run can be asked about beside its steps."""

    SAVE = "save"
    RESUME = "resume"
    EVAL = "eval"


class StateDicts(enum.StrEnum):
    """How FSDP writes a checkpoint: accelerate's ``fsdp_state_dict_type``."""

    FULL = "full_state_dict"
    SHARDED = "sharded_state_dict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What is asked about a run around its steps.

    Attributes:
        parts: what of it; an evaluation is also one of the setup (``eval_batch``).
        host_memory: bytes of host memory that a node has for the run; None = not said.
        processes_per_node: processes that share a node's memory; None = all, up to 8.
        fsdp_state_dict_type: None = as the loop does.
        stage3_gather_16bit_weights_on_model_save: of DeepSpeed's configuration.
    """

    parts: tuple[LifePart, ...] = option(
        (),
        f"What else of the run is priced, with commas between: {legal_values(LifePart)}. Saving "
        "and resuming on the GPU, and the host memory of every phase; eval is an evaluation in "
        "batches of 8.",
        "--with PHASES with_",
        name="life",
        kind=Kind.TEXT,
        panel=Panel.LIFE,
        short="Besides the steps: save, resume, eval.",
    )
    host_memory: int | None = option(
        None,
        "Host memory that a node has for the run: 64GiB. Says whether loading, training, and what "
        "--with names fit it.",
        "SIZE",
        kind=Kind.TEXT,
        short="Host memory of a node: 64GiB.",
    )
    processes_per_node: int | None = option(
        None,
        "Processes of the run that share a node's memory; left out, all of them, 8 at most.",
        between=(1, _MAX_PROCESSES),
    )
    fsdp_state_dict_type: StateDicts | None = option(
        None,
        f"How FSDP writes a checkpoint: {legal_values(StateDicts)}; left out, as the loop does: "
        "the Trainer a full one, accelerate a sharded one under FSDP2.",
        "TYPE",
    )
    stage3_gather_16bit_weights_on_model_save: bool = option(
        False,
        "ZeRO-3 gathers whole weights when the Trainer saves a model, as a DeepSpeed file says "
        "it; else parts alone are written.",
    )

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "parts", _parts(self.parts))
        set_field(self, "host_memory", _host_memory(self.host_memory))
        if self.processes_per_node is not None:
            number = self.processes_per_node
            check_whole_number("--processes-per-node", number, 1, _MAX_PROCESSES)
        if self.fsdp_state_dict_type is not None:
            name = str(self.fsdp_state_dict_type).lower()
            kind = choose("--fsdp-state-dict-type", name, StateDicts)
            set_field(self, "fsdp_state_dict_type", kind)

    @property
    def is_asked(self) -> bool:
        """Whether an answer tells of it."""
        return bool(self.parts) or self.host_memory is not None

    def node_processes(self, num_gpus: int) -> int:
        """Processes of the fullest node."""
        return min(num_gpus, self.processes_per_node or _USUAL_PROCESSES)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "with": [part.value for part in self.parts],
            "host_memory": self.host_memory,
            "processes_per_node": self.processes_per_node,
            "fsdp_state_dict_type": self.fsdp_state_dict_type,
            "stage3_gather_16bit_weights_on_model_save": (
                self.stage3_gather_16bit_weights_on_model_save
            ),
        }


_PHASES = {
    "saving": LifePart.SAVE,
    "resuming": LifePart.RESUME,
    "evaluating": LifePart.EVAL,
    "evaluation": LifePart.EVAL,
}
"""What answers call them."""


def _parts(value: Any) -> tuple[LifePart, ...]:
    """Names in one text with commas between, or in a list: each once, in their one order.

    Raises:
        ConfigError: there is no such part.
    """
    texts: Iterable[Any] = [value] if isinstance(value, str) else value
    names = [name.strip() for text in texts for name in str(text).split(",") if name.strip()]
    if not names and isinstance(value, str):
        raise ConfigError(f"--with names nothing: write for example --with {LifePart.SAVE}.")
    chosen = {choose("--with", _PHASES.get(name.lower(), name.lower()), LifePart) for name in names}
    return tuple(part for part in LifePart if part in chosen)


def _host_memory(value: Any) -> int | None:
    if value is None:
        return None
    try:
        size = parse_size(value if isinstance(value, int) else str(value))
    except (ConfigError, OverflowError) as error:
        raise ConfigError(f"--host-memory: {error}") from None
    if size < MIB:
        what = "leaves no memory" if size <= 0 else f"is {format_size(size)}, and no node has that"
        raise ConfigError(
            f"--host-memory {value} {what}: write for example --host-memory 64GiB, the memory of "
            "one node, or of the container that the run is in."
        )
    return size


def read_life(source: Any) -> Life | None:
    """A life from a mapping of its names, or itself; None where nothing is said of it.

    Raises:
        ConfigError: another kind of value, or names that there are not.
    """
    return read_parts(
        Life,
        source,
        "life",
        takes="give a mapping of parts and host_memory",
        instead="use --with and --host-memory",
    )


def refuse_host_memory(life: Life | None, command: str) -> None:
    """For those of :data:`GPUS_ALONE`.

    Raises:
        ConfigError: the memory of a host is named.
    """
    if life is not None and life.host_memory is not None:
        raise ConfigError(
            f"--host-memory says nothing to memest {command}, which goes by GPUs: ask memest "
            "estimate or memest fits, or leave it out."
        )


def merge_life(
    parts: Mapping[str, Any], values: dict[str, Any], base: Life | None, *, evaluates: bool
) -> None:
    """Put what options say into ``values``; an evaluation that is asked for becomes one.

    Args:
        parts: what the options say, by the fields of :class:`Life`.
        values: options by name, among them those of evaluations.
        base: what the options change.
        evaluates: an evaluation follows the last step anyway.

    Raises:
        ConfigError: an evaluation is asked for and excluded.
    """
    whole = parts.get("parts")
    if isinstance(whole, Life):
        base, parts = whole, {name: v for name, v in parts.items() if name != "parts"}
    values["life"] = life = dataclasses.replace(base or Life(), **parts)
    if LifePart.EVAL not in life.parts or evaluates:
        return
    if str(values.get("eval_strategy", "")).strip().lower() == "no":
        raise ConfigError("--with eval and --eval-strategy no contradict each other: drop one.")
    values.setdefault("eval_strategy", "steps")
