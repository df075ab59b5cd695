"""Adapters of peft as an input: which method, with which of its settings. Torch-free."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memest.config.library_sources import peft_methods
from memest.errors import ConfigError, not_legal
from memest.files.texts import read_mapping

__all__ = [
    "LINEAR_TOO",
    "METHODS",
    "VIRTUAL_TOKENS",
    "Adapter",
    "method_of",
    "methods",
    "read_adapter",
]

LINEAR_TOO = "and-all-linear"
"""Among names of modules: all linear layers besides; ``all-linear`` of peft's stands alone."""

METHODS: dict[str, str] = {
    "lora": "LoRA",
    "adalora": "AdaLoRA",
    "ia3": "IA3",
    "vera": "VeRA",
    "loha": "LoHa",
    "lokr": "LoKr",
    "oft": "OFT",
    "boft": "BOFT",
    "ln_tuning": "LN tuning",
    "prompt_tuning": "prompt tuning",
    "p_tuning": "p-tuning",
    "prefix_tuning": "prefix tuning",
}
"""Methods by peft's names (of ``PeftType``, in small letters), and what people call them.

Those that the installed peft has besides (:func:`methods`) go by its names."""
_UNPRICED = {
    "adamss": "the shapes of its adapters follow from clusters of the weights' values",
    "frod": "it multiplies by sparse tensors, and no trace follows their CUDA kernels",
    "multitask_prompt_tuning": "its forward takes task_ids, which no batch here has",
    "poly": "its forward takes task_ids, which no batch here has",
    "shira": "it adds sparse tensors to weights, and no trace follows their CUDA kernels",
    "xlora": "it weighs adapters that were trained before, and loads them",
}
"""Methods of peft 0.21 that cannot be traced, and why."""
_SPELLINGS = {
    "prompt": "prompt_tuning",
    "prefix": "prefix_tuning",
    "dora": "lora",
    "ln": "ln_tuning",
}
VIRTUAL_TOKENS = frozenset({"prompt_tuning", "p_tuning", "prefix_tuning", "cartridge"})
"""Methods that add tokens, as many as they are told, instead of weights beside the model's own."""

_IRRELEVANT_KEYS = frozenset(
    """auto_mapping base_model_name_or_path revision peft_version inference_mode
    tokenizer_name_or_path""".split()
)
"""Keys of a saved configuration that describe where it came from, not what is trained."""
_CAST = "autocast_adapter_dtype"
_DEFAULTS: dict[str, Any] = {
    "bias": "none",
    "lora_dropout": 0,
    "task_type": "CAUSAL_LM",  # of LoRA it chooses the class around the model, whose forward is its
    "use_dora": False,
    "use_rslora": False,
}
_DROPOUT = 0.05
"""Stands for each probability of a dropout that there is."""
_LORA_RANK = 8
"""``r`` of ``peft.LoraConfig`` where nobody names one, in every release."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What is trained beside a frozen model.

    Attributes:
        method: one of :func:`methods`.
        config: settings of the method's configuration class as canonical JSON; what is left out is
            as peft has it.
        autocast_adapter_dtype: as ``peft.get_peft_model`` takes it: half-precision adapters are
            made float32; None is as the release of peft does, which a setup fills in.
    """

    method: str
    config: str = "{}"
    autocast_adapter_dtype: bool | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the configuration class, by its names."""
        values: dict[str, Any] = json.loads(self.config)
        return values

    @property
    def rank(self) -> int | None:
        """The rank of LoRA, which is a size as the batch is one; None where there is none."""
        rank: int | None = self.settings.get("r") if self.method == "lora" else None
        return rank

    @property
    def unsized(self) -> Adapter:
        """What decides which tensors there are: what has the same is the same to trace.

        Without its rank, and without ``lora_alpha``, which changes no tensor. Of LoRA the order of
        modules, how much a dropout drops and what is peft's default anyway change none either.
        """
        kept = {n: v for n, v in self.settings.items() if n != "lora_alpha"}
        if self.rank is not None:
            del kept["r"]
            kept = {n: v for n, v in kept.items() if n not in _DEFAULTS or v != _DEFAULTS[n]}
            if "lora_dropout" in kept:
                kept["lora_dropout"] = _DROPOUT
            if isinstance(kept.get("target_modules"), list):
                kept["target_modules"] = sorted(set(kept["target_modules"]))
        return replace(self, config=_canonical(kept))

    def at_rank(self, rank: int) -> Adapter:
        """The same adapter with another :attr:`rank`."""
        return replace(self, config=_canonical({**self.settings, "r": rank}))

    @property
    def virtual_tokens(self) -> int:
        """Positions that the method takes for itself."""
        if self.method == "cpt":
            return len(self.settings.get("cpt_token_ids") or ())
        count = self.settings.get("num_virtual_tokens", 0) if self.method in VIRTUAL_TOKENS else 0
        return int(count)

    @property
    def words(self) -> str:
        """In a phrase: ``LoRA, r 16 on q_proj, v_proj``."""
        settings = self.settings
        name = METHODS.get(self.method, self.method.upper())
        if self.method == "lora":
            name = "DoRA" if settings.get("use_dora") else name
            name = "rank-stabilised " + name if settings.get("use_rslora") else name
        details = [name]
        rank = settings.get("r", settings.get("init_r"))
        if rank is not None:
            details.append(f"r {rank}")
        if settings.get("num_virtual_tokens"):
            details.append(f"{settings['num_virtual_tokens']} virtual tokens")
        text = ", ".join(details)
        targets = settings.get("target_modules")
        if targets:
            text += f" on {targets if isinstance(targets, str) else ', '.join(targets)}"
        whole_modules = settings.get("modules_to_save")
        return f"{text}, and {', '.join(whole_modules)} as a whole" if whole_modules else text

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as :func:`read_adapter` takes them."""
        out = {"peft_type": self.method.upper(), **self.settings}
        return {**out, _CAST: False} if self.autocast_adapter_dtype is False else out


def read_adapter(
    source: Any, *, option: str = "--peft-config", flags: Mapping[str, str] | None = None
) -> Adapter:
    """An adapter from what people have of it.

    Args:
        source: a mapping as peft writes it to ``adapter_config.json``, the path of such a file or
            of its folder, one of peft's own configuration objects, or an :class:`Adapter`.
        option: how messages call it.
        flags: how messages call single settings, by name: those that flags of their own give.

    Raises:
        ConfigError: it is none of these, or names a method or a value that cannot be.
    """
    if isinstance(source, Adapter):
        return source
    values = _mapping_of(source, option)
    cast = values.pop(_CAST, None)
    if cast is not None and not isinstance(cast, bool):
        raise ConfigError(f"{option}: {_CAST} {cast!r} is neither true nor false.")
    method = method_of(values.pop("peft_type", None), option)
    settings = {
        name: _plain(value)
        for name, value in values.items()
        if value is not None and name not in _IRRELEVANT_KEYS
    }
    if method == "lora":
        settings.setdefault("r", _LORA_RANK)  # a size of the run, so that it is one of a family
    _check(method, settings, {name: f"{option}: {name}" for name in settings} | dict(flags or {}))
    try:
        text = _canonical(settings)
    except TypeError as error:
        raise ConfigError(f"{option} holds what JSON cannot: {error}.") from None
    return Adapter(method, text, cast)


def _canonical(settings: Mapping[str, Any]) -> str:
    """Settings as :attr:`Adapter.config` holds them."""
    return json.dumps(settings, sort_keys=True, separators=(",", ":"))


def _mapping_of(source: Any, option: str) -> dict[str, Any]:
    if isinstance(source, (str, Path)) and not str(source).lstrip().startswith("{"):
        path = Path(source).expanduser()
        source = path / "adapter_config.json" if path.is_dir() else source
    return read_mapping(
        source,
        option,
        takes="give the path of an adapter_config.json, a mapping, or a configuration of peft",
        instead="give the path of an adapter_config.json, as peft saves it beside the adapter's "
        "weights",
    )


def method_of(name: Any, option: str) -> str:
    """A method by peft's name in small letters, from any way to write it.

    Raises:
        ConfigError: none, or one that cannot be priced.
    """
    text = str(getattr(name, "value", name)).strip().lower().replace("-", "_")
    text = _SPELLINGS.get(text, text)
    label = f"{option}: the method {str(name)!r}"
    if text in _UNPRICED:
        raise ConfigError(f"{label} is not modelled: {_UNPRICED[text]}.")
    if text in METHODS or text in methods():
        return text
    if name is None:
        raise ConfigError(f"{option} names no peft_type: add for example peft_type LORA.")
    raise not_legal(label, text, methods(), state="is not modelled")


def methods() -> tuple[str, ...]:
    """What can be priced: :data:`METHODS`, and what the installed peft has besides."""
    found = peft_methods()
    return tuple(dict.fromkeys(name for name in (*METHODS, *found) if name not in _UNPRICED))


def _plain(value: Any) -> Any:
    """Sets as peft keeps them, and its enumerations, as JSON has them."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return getattr(value, "value", value)


def _check(method: str, settings: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Refuse numbers that no adapter has; names are the configuration class's own business.

    Args:
        method: of the adapter.
        settings: to check.
        names: what messages call each of them.
    """
    for name in ("r", "init_r", "target_r", "num_virtual_tokens"):
        value = settings.get(name)
        low = 0 if (method, name) in {("oft", "r"), ("adalora", "r")} else 1
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= 1 << 20:
            raise ConfigError(
                f"{names[name]} {value!r} is out of range: it must be a whole number, {low} to "
                f"{1 << 20:,}."
            )
    for name in ("lora_dropout", "module_dropout", "vera_dropout"):
        value = settings.get(name)
        if value is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < 1:
            raise ConfigError(f"{names[name]} {value!r} is out of range: 0 to below 1.")
    alpha = settings.get("lora_alpha")
    if alpha is not None and (
        isinstance(alpha, bool)
        or not isinstance(alpha, (int, float))
        or not abs(alpha) <= sys.float_info.max
    ):
        raise ConfigError(f"{names['lora_alpha']} {alpha!r} is not a number.")
    if method in VIRTUAL_TOKENS and not settings.get("num_virtual_tokens"):
        raise ConfigError(
            f"{METHODS.get(method, method)} needs the number of its tokens: add "
            "--num-virtual-tokens 20."
        )
