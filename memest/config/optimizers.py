"""The optimizers by name: whose code they are, what they take, what pricing them needs. Torch-free.

The names are those of transformers' ``OptimizerNames`` (``TrainingArguments.optim``) where it has
one; torch's own optimizers beyond them have names in the same style.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from memest.errors import ConfigError, not_legal

__all__ = [
    "ALIASES",
    "MIN_8BIT_SIZE",
    "OPTIMIZER_FACTS",
    "PAGED_SIZE",
    "TRAINER_NAMES",
    "OptimizerFacts",
    "check_since",
    "facts_of",
    "find_optimizer",
    "read_arguments",
    "typed_arguments",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """What is known of an optimizer before it runs.

    Attributes:
        about: one line for people.
        package: on PyPI, where its own code is traced and torch and transformers lack it.
        module: what its class is imported from; "" for those of torch and transformers.
        kind: name of that class.
        options: what the class is given beside parameters and a learning rate.
        note: what to say of its price.
        arguments: what ``--optim-args`` may name.
        by_module: what it does to a weight depends on the module that owns it.
        targets: it needs ``--optim-target-modules``.
        layerwise: it steps in backward, one parameter at a time, so gradients never pile up.
        accumulates: steps in backward, and takes every micro-batch for a step of its own.
        block_states: bitsandbytes' states, whose block size follows from its version.
        size_limits: numbers of elements from which the states of a weight are others.
    """

    about: str
    package: str = ""
    module: str = ""
    kind: str = ""
    options: tuple[tuple[str, bool], ...] = ()
    note: str = ""
    arguments: tuple[str, ...] = ()
    by_module: bool = False
    targets: bool = False
    layerwise: bool = False
    accumulates: bool = False
    block_states: bool = False
    size_limits: tuple[int, ...] = ()


MIN_8BIT_SIZE = 4096
"""Weights with fewer elements have fp32 states where others of bitsandbytes have 8-bit ones."""
PAGED_SIZE = 100_000
"""States of weights with fewer elements are ordinary tensors where others are paged.

Both: ``init_state`` and ``get_state_buffer`` of ``bitsandbytes/optim/optimizer.py``, 0.50.2.
"""


def _torch(about: str, arguments: str = "") -> OptimizerFacts:
    return OptimizerFacts(about=f"torch {about}", arguments=tuple(arguments.split()))


_SGD = "momentum dampening weight_decay nesterov"
_RMSPROP = "momentum alpha eps weight_decay centered"
_ADAGRAD = "lr_decay weight_decay eps"

_TORCH = {
    "adamw_torch_fused": _torch("AdamW, fused kernel: the Trainer's default since torch 2.8"),
    "adamw_torch": _torch("AdamW, implementation as torch chooses on CUDA: foreach since 2.0"),
    "adamw_torch_foreach": _torch("AdamW, foreach"),
    "adamw_torch_loop": _torch("AdamW, one parameter after the other"),
    "adamw_hf": OptimizerFacts(
        about="the AdamW that transformers had until 4.x, one parameter after the other"
    ),
    "adam": _torch("Adam, foreach"),
    "adam_fused": _torch("Adam, fused kernel"),
    "adam_loop": _torch("Adam, one parameter after the other"),
    "sgd": _torch("SGD, no momentum, foreach", _SGD),
    "sgd_momentum": _torch("SGD, momentum 0.9, foreach", _SGD),
    "sgd_loop": _torch("SGD, no momentum, one parameter after the other", _SGD),
    "sgd_momentum_loop": _torch("SGD, momentum 0.9, one parameter after the other", _SGD),
    "rmsprop": _torch("RMSprop, foreach", _RMSPROP),
    "rmsprop_loop": _torch("RMSprop, one parameter after the other", _RMSPROP),
    "adagrad": _torch("Adagrad, foreach", _ADAGRAD),
    "adagrad_loop": _torch("Adagrad, one parameter after the other", _ADAGRAD),
    "adadelta": _torch("Adadelta, foreach"),
    "adamax": _torch("Adamax, foreach"),
    "nadam": _torch("NAdam, foreach"),
    "radam": _torch("RAdam, foreach"),
    "adafactor": OptimizerFacts(
        about="Adafactor of transformers as the Trainer makes it: no first moment"
    ),
    "adafactor_torch": _torch("Adafactor, one parameter after the other"),
    "muon": OptimizerFacts(
        about="torch Muon for hidden matrices, AdamW for embeddings, head and vectors",
        arguments=("momentum", "nesterov", "ns_steps"),
        by_module=True,
    ),
}


def _blocks(about: str, arguments: str = "") -> OptimizerFacts:
    is_8bit, is_paged = "8-bit" in about, "managed" in about
    return OptimizerFacts(
        about=f"bitsandbytes {about}",
        arguments=tuple(arguments.split()),
        # only 8-bit states make an exception of embeddings
        by_module=is_8bit,
        block_states=True,
        size_limits=(MIN_8BIT_SIZE,) * is_8bit + (PAGED_SIZE,) * is_paged,
    )


_MIX = "beta1 beta2 beta3 alpha eps t_alpha t_beta3"

_BITSANDBYTES = {
    "adamw_bnb_8bit": _blocks("AdamW, 8-bit states"),
    "adamw_8bit": _blocks("AdamW, 8-bit states: another name of adamw_bnb_8bit"),
    "paged_adamw_8bit": _blocks("AdamW, 8-bit states in managed memory"),
    "paged_adamw_32bit": _blocks("AdamW, fp32 states in managed memory"),
    "lion_32bit": _blocks("Lion, fp32 state"),
    "lion_8bit": _blocks("Lion, 8-bit state"),
    "paged_lion_32bit": _blocks("Lion, fp32 state in managed memory"),
    "paged_lion_8bit": _blocks("Lion, 8-bit state in managed memory"),
    "ademamix": _blocks("AdEMAMix, fp32 states", _MIX),
    "ademamix_8bit": _blocks("AdEMAMix, 8-bit states", _MIX),
    "paged_ademamix_32bit": _blocks("AdEMAMix, fp32 states in managed memory", _MIX),
    "paged_ademamix_8bit": _blocks("AdEMAMix, 8-bit states in managed memory", _MIX),
    "rmsprop_bnb": _blocks("RMSprop, fp32 state"),
    "rmsprop_bnb_32bit": _blocks("RMSprop, fp32 state: another name of rmsprop_bnb"),
    "rmsprop_bnb_8bit": _blocks("RMSprop, 8-bit state"),
}

_GALORE = ("rank", "update_proj_gap", "scale", "proj_type")
_APOLLO = ("rank", "proj", "scale_type", "update_proj_gap", "scale", "proj_type")


_galore = partial(
    OptimizerFacts,
    package="galore-torch",
    module="galore_torch",
    note="galore: what cuSOLVER takes for a singular value decomposition is not known.",
    arguments=_GALORE,
    by_module=True,
    targets=True,
)
_apollo = partial(
    OptimizerFacts,
    package="apollo-torch",
    module="apollo_torch",
    kind="APOLLOAdamW",
    arguments=_APOLLO,
    by_module=True,
    targets=True,
)
_lomo = partial(
    OptimizerFacts, package="lomo-optim", module="lomo_optim", layerwise=True, accumulates=True
)
_QUIET = (("no_deprecation_warning", True),)


def _schedule_free(kind: str) -> OptimizerFacts:
    return OptimizerFacts(
        about=f"schedule-free {kind}",
        package="schedulefree",
        module="schedulefree",
        kind=f"{kind}ScheduleFree",
        arguments=("weight_lr_power", "r"),
    )


def _torchao(bits: int) -> OptimizerFacts:
    return OptimizerFacts(
        about=f"torchao AdamW, {bits}-bit states",
        module="torchao.optim",
        kind=f"AdamW{bits}bit",
        note=(
            f"adamw_torch_{bits}bit: states are exact; that its compiled step needs no memory of "
            "its own is assumed."
        ),
        arguments=("block_size", "bf16_stochastic_round"),
    )


_LIBRARIES = {
    "adamw_torch_8bit": _torchao(8),
    "adamw_torch_4bit": _torchao(4),
    "galore_adamw": _galore(
        about="GaLore AdamW on low-rank projections", kind="GaLoreAdamW", options=_QUIET
    ),
    "galore_adafactor": _galore(
        about="GaLore Adafactor on low-rank projections",
        kind="GaLoreAdafactor",
        options=(("scale_parameter", False), ("relative_step", False)),
    ),
    "galore_adamw_layerwise": _galore(
        about="GaLore AdamW on low-rank projections, in backward",
        kind="GaLoreAdamW",
        options=_QUIET,
        layerwise=True,
    ),
    "apollo_adamw": _apollo(about="APOLLO AdamW, scaled by low-rank states"),
    "apollo_adamw_layerwise": _apollo(
        about="APOLLO AdamW, scaled by low-rank states, in backward", layerwise=True
    ),
    "lomo": _lomo(about="LOMO: SGD in backward", kind="Lomo"),
    "adalomo": _lomo(
        about="AdaLomo: adaptive learning rates from rows and columns, in backward", kind="AdaLomo"
    ),
    "schedule_free_adamw": _schedule_free("AdamW"),
    "schedule_free_radam": _schedule_free("RAdam"),
    "schedule_free_sgd": _schedule_free("SGD"),
    "stable_adamw": OptimizerFacts(
        about="StableAdamW of optimi, with its Triton kernels",
        module="optimi",
        kind="StableAdamW",
        arguments=("decouple_lr", "max_lr", "kahan_sum"),
    ),
}

OPTIMIZER_FACTS: dict[str, OptimizerFacts] = {
    **_TORCH,
    **_BITSANDBYTES,
    **_LIBRARIES,
    "none": OptimizerFacts(about="no optimizer step: forward and backward only"),
}
"""Every optimizer that is modelled, by name."""
TRAINER_NAMES = frozenset(OPTIMIZER_FACTS) - frozenset(
    """adamw_torch_foreach adamw_torch_loop adamw_hf adam adam_fused adam_loop sgd_momentum sgd_loop
    sgd_momentum_loop rmsprop_loop adagrad_loop adadelta adamax nadam radam adafactor_torch muon
    none""".split()
)
"""Those that ``TrainingArguments.optim`` takes (``OptimizerNames`` of transformers 5.23)."""

ALIASES = {
    "adamw": "adamw_torch",
    "adamw_fused": "adamw_torch_fused",
    "adamw_foreach": "adamw_torch_foreach",
    "adamw_loop": "adamw_torch_loop",
    "lion": "lion_32bit",
    "paged_adamw": "paged_adamw_32bit",
    "paged_lion": "paged_lion_32bit",
    "paged_ademamix": "paged_ademamix_32bit",
}

_NOT_YET = "not modelled yet, and memest does not guess"
REFUSALS = {
    "adamw_anyprecision": _NOT_YET,
    "adamw_apex_fused": _NOT_YET,
    "grokadamw": _NOT_YET,
    "adam_mini": "modelled no more: its code stops on many models, and few train with it",
    "galore_adamw_8bit": _NOT_YET,
    "galore_adamw_8bit_layerwise": _NOT_YET,
    "galore_adafactor_layerwise": (
        "refused by the library: the Trainer hands it a learning rate and leaves relative_step on"
    ),
    "adamw_torch_xla": "for TPUs, and memest prices GPUs",
    "adamw_torch_npu_fused": "for Ascend NPUs, and memest prices GPUs",
}
"""Names that people use and memest cannot price, with the reason: refused, never guessed."""


def facts_of(name: str) -> OptimizerFacts:
    """The facts of a modelled optimizer."""
    return OPTIMIZER_FACTS[name]


def find_optimizer(name: object) -> str:
    """The name under which an optimizer is known here; ``auto`` for the Trainer's own.

    Raises:
        ConfigError: it is not; the message has the closest names that are.
    """
    text = ALIASES.get(str(name), str(name))
    if text in OPTIMIZER_FACTS or text == "auto":
        return text
    state = f"is {REFUSALS[text]}" if text in REFUSALS else "is not known"
    raise not_legal(f"--optim {name!r}", text, OPTIMIZER_FACTS, state=state, listed_by=_LISTED_BY)


_LISTED_BY = "memest estimate --help optimizer"


def read_arguments(optim: str, text: str) -> dict[str, str]:
    """The Trainer's ``optim_args``, ``name=value`` with commas between.

    Args:
        optim: a modelled optimizer.
        text: as given; blanks do not count.

    Raises:
        ConfigError: not of that form, or a name that this optimizer does not take.
    """
    legal = facts_of(optim).arguments
    values: dict[str, str] = {}
    for item in filter(None, text.replace(" ", "").split(",")):
        name, equals, value = item.partition("=")
        if not (name and equals and value):
            raise ConfigError(
                f"--optim-args {text!r}: {item!r} is not of the form name=value, as in "
                "rank=64,update_proj_gap=200."
            )
        if name not in legal:
            legal_text = f"It takes {', '.join(legal)}." if legal else "It takes none."
            raise ConfigError(
                f"--optim-args {text!r}: {name!r} is no argument of {optim} that memest knows. "
                f"{legal_text}"
            )
        values[name] = value
    return values


def _is_true(text: str) -> bool:
    return text.lower() in ("true", "1", "yes")


_TYPES: dict[str, Callable[[str], Any]] = {
    "nesterov": _is_true,
    "centered": _is_true,
    "ns_steps": int,
}
"""How arguments of torch's optimizers that are no floats are read."""
_WHOLE = ("rank", "block_size")
"""Arguments of libraries that are whole numbers from 1 on."""


def typed_arguments(optim: str, text: str) -> dict[str, Any]:
    """What ``optim_args`` says, as classes take it: numbers of torch's, else text.

    Args:
        optim: a modelled optimizer.
        text: as for :func:`read_arguments`.

    Raises:
        ConfigError: as there, or a value that is no number where one is meant.
    """
    facts = facts_of(optim)
    of_torch = not facts.kind and not facts.block_states
    values: dict[str, Any] = {}
    for name, value in read_arguments(optim, text).items():
        values[name] = value
        if name in _WHOLE and (not value.isdigit() or int(value) < 1):
            raise ConfigError(
                f"--optim-args {text!r}: {name} is {value!r}, and must be a whole number from 1 on."
            )
        if of_torch:
            try:
                values[name] = _TYPES.get(name, float)(value)
            except ValueError:
                raise ConfigError(
                    f"--optim-args {text!r}: {name} is {value!r}, which is not a number."
                ) from None
        elif name in _WHOLE:
            values[name] = int(value)
    return values


_MUON_SINCE = (2, 9)
_POST_HOOKS = (2, 1)


def check_since(optim: str, torch: tuple[int, int] | None, *, in_backward: bool) -> None:
    """Whether the torch that will train has what an optimizer is made of.

    Args:
        optim: a modelled optimizer.
        torch: (major, minor) that will train; None for the installed one, which has it.
        in_backward: it steps there.

    Raises:
        ConfigError: it has not.
    """
    if torch is None:
        return
    release = ".".join(map(str, torch))
    if in_backward and torch < _POST_HOOKS and optim not in ("lomo", "adalomo"):
        raise ConfigError(
            f"--optim {optim} in backward needs hooks that torch has since 2.1, and {release} is "
            "asked for."
        )
    if optim == "muon" and torch < _MUON_SINCE:
        raise ConfigError(
            f"--optim muon: torch.optim.Muon is there since torch 2.9, and {release} is asked for."
        )
