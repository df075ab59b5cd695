"""Quantised weights of a frozen base as an input: which format, with which settings. Torch-free.

Source of GPTQ: transformers 5.23 ``GPTQConfig`` (names, checks), gptqmodel 7.7 ``TorchLinear``,
``TritonV2Linear`` (bits and groups that train).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memest.config.option import option
from memest.errors import ConfigError, hint, not_legal
from memest.files.texts import read_mapping

__all__ = [
    "METHODS",
    "Format",
    "Quantization",
    "is_key_of_bases",
    "own_quantization",
    "prepares_base",
    "read_quantization",
]


class Format(enum.StrEnum):
    """How the weights of linear layers are stored."""

    BNB_4BIT = "bnb-4bit"
    """bitsandbytes, 4 bits a weight in blocks: NF4 or FP4."""
    BNB_8BIT = "bnb-8bit"
    """bitsandbytes LLM.int8(): rows of int8 with one scale each."""
    GPTQ = "gptq"
    """GPTQ: int32 words of weights and zero points, float16 scales, a group for each input."""

    @property
    def packed(self) -> bool:
        """Whether weights are packed words of a checkpoint, which are buffers."""
        return self is Format.GPTQ


QUANT_TYPES = ("fp4", "nf4")
_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
METHODS = ("gptq",)
_BITS = (2, 3, 4, 8)
_GROUPS = (-1, 16, 32, 64, 128, 256, 512, 1024)
_LAYOUTS = ("gptq", "gptq_v2")
STORAGES = ("uint8", "float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How a base is quantised, by the names of transformers' ``BitsAndBytesConfig``.

    Attributes:
        format: what the weights are stored as.
        skip_modules: names that stay as they are; None = what transformers leaves out by itself:
            the output embedding, what is tied to it, and the last module.
        prepare: ``peft.prepare_model_for_kbit_training`` is called: what is not quantised becomes
            float32; None = wherever adapters are trained.
        bits: of a weight of GPTQ.
        group_size: inputs that share a scale; -1 = all of them. GPTQ.
        block_name: under which GPTQ quantises; None = the first that optimum knows.
        only_modules: names of layers under it that are quantised; None = all. GPTQ.
    """

    format: Format
    quant_type: str = option(
        "fp4", "Kind of 4-bit numbers: nf4 or fp4.", "TYPE quant_type", name="bnb_4bit_quant_type"
    )
    double_quant: bool = option(
        False,
        "The scales of the blocks are quantised too.",
        "--bnb-4bit-use-double-quant --double-quant use_bnb_nested_quant use_nested_quant "
        "double_quantization",
        name="bnb_4bit_use_double_quant",
    )
    compute_dtype: str = option(
        "float32", "Dtype of the matmuls of 4-bit layers.", "DTYPE", name="bnb_4bit_compute_dtype"
    )
    quant_storage: str = option(
        "uint8",
        "Dtype of the tensor that holds 4-bit weights.",
        "DTYPE",
        name="bnb_4bit_quant_storage",
    )
    threshold: float = option(
        6.0,
        "Values above it are outliers, multiplied in half precision; 0 looks for none.",
        "VALUE",
        name="llm_int8_threshold",
    )
    skip_modules: tuple[str, ...] | None = option(
        None,
        "Modules that are not quantised, in place of the output embedding. Repeatable.",
        "NAMES",
        name="llm_int8_skip_modules",
    )
    prepare: bool | None = option(
        None,
        "Whether peft.prepare_model_for_kbit_training is called: it makes float32 of what is not "
        "quantised, and switches checkpointing on unless --checkpointing none says otherwise; "
        "left out, it is wherever adapters are trained.",
        name="prepare_kbit",
    )
    bits: int | None = None
    group_size: int = 128
    block_name: str | None = None
    only_modules: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        try:
            set_field(self, "format", Format(self.format))
        except ValueError:
            raise ConfigError(
                f"quantization format {self.format!r} is not known. Legal: "
                f"{', '.join(f.value for f in Format)}."
            ) from None
        dtype = str(self.compute_dtype).removeprefix("torch.").lower()
        set_field(self, "compute_dtype", _one_of("--bnb-4bit-compute-dtype", dtype, _DTYPES))
        set_field(self, "compute_dtype", _DTYPES[self.compute_dtype])
        storage = str(self.quant_storage).removeprefix("torch.").lower()
        set_field(self, "quant_storage", _one_of("--bnb-4bit-quant-storage", storage, STORAGES))
        kind = str(self.quant_type).lower()
        set_field(self, "quant_type", _one_of("--bnb-4bit-quant-type", kind, QUANT_TYPES))
        if self.skip_modules is not None:
            set_field(self, "skip_modules", tuple(map(str, self.skip_modules)))
        if self.only_modules is not None:
            set_field(self, "only_modules", tuple(map(str, self.only_modules)))
        if self.format.packed:
            _check_packed(self.bits, self.group_size)
        if not 0 <= self.threshold < float("inf"):
            raise ConfigError(
                f"--llm-int8-threshold {self.threshold} is out of range: it must be a finite "
                "number, 0 or more."
            )

    @property
    def words(self) -> str:
        """In a phrase: ``4-bit base (nf4, double quantisation, bfloat16 compute)``."""
        if self.format.packed:
            group = "one group" if self.group_size == -1 else f"groups of {self.group_size}"
            return f"{self.bits}-bit base ({self.format.value.upper()}, {group})"
        if self.format is Format.BNB_8BIT:
            return f"8-bit base (LLM.int8, threshold {self.threshold:g})"
        details = [self.quant_type, f"{self.compute_dtype} compute"]
        if self.double_quant:
            details.insert(1, "double quantisation")
        return f"4-bit base ({', '.join(details)})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values of what is not as by default, as :func:`read_quantization` takes them."""
        out: dict[str, Any] = {"format": self.format.value}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "format" and value != field.default:
                out[field.name] = list(value) if isinstance(value, tuple) else value
        return out


_SPELLINGS = {
    "bnb_4bit_quant_type": "quant_type",
    "bnb_4bit_use_double_quant": "double_quant",
    "bnb_4bit_compute_dtype": "compute_dtype",
    "bnb_4bit_quant_storage": "quant_storage",
    "llm_int8_threshold": "threshold",
    "llm_int8_skip_modules": "skip_modules",
}
_IRRELEVANT_KEYS = frozenset(
    """quant_method _load_in_4bit _load_in_8bit llm_int8_enable_fp32_cpu_offload
    llm_int8_has_fp16_weight modules_to_not_convert""".split()
)


def is_key_of_bases(name: str) -> bool:
    """Whether ``BitsAndBytesConfig`` takes an argument of this name; it warns of any other."""
    return name in (*_SPELLINGS, *_IRRELEVANT_KEYS, "load_in_4bit", "load_in_8bit")


def read_quantization(source: Any, *, option: str = "--quantization-config") -> Quantization | None:
    """A quantisation from what people have of it.

    Args:
        source: a mapping with our names or those of transformers' ``quantization_config``, its
            JSON, the path of a file that holds it, transformers' own object, or a
            :class:`Quantization`.
        option: how messages call it.

    Returns:
        None where it says that nothing is quantised.

    Raises:
        ConfigError: it is none of these, or of a format that is not modelled.
    """
    if isinstance(source, Quantization):
        return source
    values = _mapping_of(source, option)
    method = values.get("quant_method", "bitsandbytes")
    method = str(getattr(method, "value", method))
    if method in METHODS:
        return Quantization(**_packed_fields(values, option))
    if method not in ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"):
        raise ConfigError(
            f"{option}: weights quantised by {method} are not modelled. Legal: bitsandbytes, "
            f"{', '.join(METHODS)}."
        )
    if values.get("llm_int8_has_fp16_weight"):
        raise ConfigError(
            f"{option}: llm_int8_has_fp16_weight keeps float16 weights and is not modelled."
        )
    four, eight = (bool(values.pop(f"load_in_{bits}bit", False)) for bits in (4, 8))
    if four and eight:
        raise ConfigError(f"{option}: load_in_4bit and load_in_8bit exclude each other: drop one.")
    if not four and not eight and "format" not in values:
        return None
    fields = {field.name for field in dataclasses.fields(Quantization)}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        key = _SPELLINGS.get(name, name)
        if name in _IRRELEVANT_KEYS or value is None:
            continue
        if key not in fields:
            suggestion = hint(name, [*fields, *_SPELLINGS])
            raise ConfigError(f"{option} has the key {name!r}, which is not known.{suggestion}")
        arguments[key] = value
    if "format" not in arguments:
        arguments["format"] = Format.BNB_4BIT if four else Format.BNB_8BIT
    if not four and not eight and "bits" not in arguments and arguments["format"] in METHODS:
        raise ConfigError(f"{option}: {arguments['format']} needs bits, for example 4.")
    if isinstance(arguments.get("skip_modules"), str):
        arguments["skip_modules"] = (arguments["skip_modules"],)
    return Quantization(**arguments)


_BITS_ALONE = dict.fromkeys(("4", "4bit", "nf4", "fp4", "int4"), 4) | dict.fromkeys(
    ("8", "8bit", "int8"), 8
)
"""What people give in the place of a configuration."""


def _mapping_of(source: Any, option: str) -> dict[str, Any]:
    if bits := _BITS_ALONE.get(str(source).strip().lower().replace("-", "")):
        raise ConfigError(f"{option} {source!r} is no configuration: write --load-in-{bits}bit.")
    values = read_mapping(
        source,
        option,
        takes="give a mapping, JSON, or a BitsAndBytesConfig",
        instead="give JSON, for example '{\"load_in_4bit\": true}', or the path of a file that "
        "holds it",
    )
    # a file may be the model's whole config.json
    part = isinstance(source, (str, Path)) and values.get("quantization_config")
    return dict(part or values)


def _one_of(option: str, value: str, legal: Any) -> str:
    if value in legal:
        return value
    raise not_legal(f"{option} {value!r}", value, legal)


def _packed_fields(values: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Fields of a :class:`~memest.config.quantization.Quantization` from a config of transformers.

    What changes no size is not kept: ``desc_act`` (``g_idx`` is there with it and without), ``sym``
    (so are the zero points), and everything that a quantiser needs only while
    it quantises.
    """
    layout = values.get("checkpoint_format") or values.get("version") or values.get("format")
    layout = str(getattr(layout, "value", layout) or _LAYOUTS[0]).lower()
    if layout not in _LAYOUTS:
        raise ConfigError(
            f"{option}: the layout {layout!r} of gptq is not modelled. Legal: "
            f"{', '.join(_LAYOUTS)}."
        )
    if values.get("dynamic"):
        raise ConfigError(
            f"{option}: dynamic gives single modules settings of their own, which is not modelled: "
            "transformers does not read it either."
        )
    if values.get("lm_head"):
        raise ConfigError(f"{option}: a quantised lm_head is not modelled.")
    lists = values.get("modules_in_block_to_quantize")
    fields: dict[str, Any] = {
        "format": Format.GPTQ.value,
        "bits": values.get("bits"),
        "group_size": values.get("group_size", 128),
        "block_name": values.get("block_name_to_quantize"),
        "only_modules": None if lists is None else _flat(lists, option),
        "prepare": values.get("prepare"),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _check_packed(bits: Any, group_size: Any) -> None:
    """Width and group are ones that a kernel which trains takes."""
    for name, value, legal in (
        ("bits", bits, _BITS),
        ("group_size", group_size, _GROUPS),
    ):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value not in legal:
            raise ConfigError(
                f"{name} {value!r} of gptq is not legal: kernels that train take "
                f"{', '.join(map(str, legal))}."
            )


def _flat(lists: Any, option: str) -> tuple[str, ...]:
    """``[["q_proj"], ["o_proj"]]`` as one list."""
    if isinstance(lists, (list, tuple)):
        parts = [[part] if isinstance(part, str) else part for part in lists]
        if all(isinstance(part, (list, tuple)) for part in parts):
            return tuple(str(name) for part in parts for name in part)
    raise ConfigError(
        f"{option}: modules_in_block_to_quantize is {lists!r}, and must be lists of names, for "
        'example [["self_attn.q_proj"]].'
    )


_NOT_MODELLED = (
    "the checkpoint is quantised {}: the weights are priced as if they were not quantised"
)


def prepares_base(quantization: Quantization | None, *, adapts: bool) -> bool:
    """Whether ``peft.prepare_model_for_kbit_training`` is called for a base.

    It is where somebody says so, and where nobody does, beside adapters. Its
    ``use_gradient_checkpointing`` is on unless named (``utils/other.py`` of peft 0.4 to 0.21).

    Args:
        quantization: of the base; None for none.
        adapts: adapters train beside it, and not by TRL's own trainers, which do without.
    """
    if quantization is None:
        return False
    return adapts if quantization.prepare is None else quantization.prepare


def own_quantization(
    config: Mapping[str, Any], request: Quantization | None
) -> tuple[Quantization | None, tuple[str, ...]]:
    """The quantisation that a checkpoint has already, as its config says.

    Args:
        config: of the model, as written in its file.
        request: the quantisation that was asked for; of unpacked weights it is not touched.

    Returns:
        That of the run, and what there is to say.

    Raises:
        ConfigError: the request is another quantisation of packed weights, or the checkpoint
            has one whose layers take other memory than is known.
    """
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping):
        return request, ()
    method = str(settings.get("quant_method", "bitsandbytes"))
    is_packed, is_ours = method in METHODS, method.startswith("bitsandbytes")
    if request is not None and request.format.value != method and not is_ours:
        raise ConfigError(
            f"The checkpoint is quantised by {method} already, and transformers quantises no "
            f"{request.words} of it: drop that option, or name the model it was made of."
        )
    if method == "awq":
        raise ConfigError(
            "The checkpoint is quantised by awq, whose layers are not modelled: name the model it "
            "was made of, with --load-in-4bit for a base of 4 bits, or a checkpoint of gptq."
        )
    if not is_packed and not is_ours:
        return request, (_NOT_MODELLED.format(f"by {method}, which is not modelled"),)
    try:
        quantization = read_quantization(settings, option="quantization_config of the checkpoint")
    except ConfigError as error:
        if not is_packed:
            raise
        return request, (
            _NOT_MODELLED.format(f"by {method} in a way that is not modelled ({error})"),
        )
    if request is None or quantization is None:
        return quantization or request, ("the checkpoint is quantised already",)
    if request.format is not quantization.format:
        has, wanted = (
            4 if each is Format.BNB_4BIT else 8 for each in (quantization.format, request.format)
        )
        raise ConfigError(
            f"The checkpoint is quantised to {has} bits already, and transformers makes no "
            f"{wanted} bits of it: drop --load-in-{wanted}bit, or name the model it was made of."
        )
    # transformers takes the checkpoint's own (quantizers/auto.py, merge_quantization_configs)
    quantization = dataclasses.replace(quantization, prepare=request.prepare)
    note = "the checkpoint is quantised already"
    if is_ours and quantization != request:
        note += f": transformers takes its {quantization.words}, whatever is asked for"
    return quantization, (note,)
