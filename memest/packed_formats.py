"""GPTQ and AWQ: what a checkpoint's ``quantization_config`` says of its packed weights. Torch-free.

Source: transformers 5.23 ``GPTQConfig``, ``AwqConfig`` (names, legacy names, checks), gptqmodel 7.7
``TorchLinear``, ``TritonV2Linear``, ``AwqGEMMLinear`` (bits and groups that train).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memest.errors import ConfigError

__all__ = ["METHODS", "check_packed", "packed_fields"]

METHODS = ("gptq", "awq")
_BITS = {"gptq": (2, 3, 4, 8), "awq": (4,)}
_GROUPS = {
    "gptq": (-1, 16, 32, 64, 128, 256, 512, 1024),
    "awq": (-1, 16, 32, 64, 128),
}
_LAYOUTS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
_DEFAULT_BITS = {"gptq": None, "awq": 4}


def packed_fields(method: str, values: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Fields of a :class:`~memest.quantization.Quantization` from a config of transformers.

    What changes no size is not kept: ``desc_act`` (``g_idx`` is there with it and without), ``sym``
    and ``zero_point`` (so are the zero points), and everything that a quantiser needs only while
    it quantises.

    Args:
        method: ``gptq`` or ``awq``.
        values: the mapping with transformers' names.
        option: how messages call it.

    Raises:
        ConfigError: a layout, width or group that no kernel trains, or settings of single modules.
    """
    layout = values.get("checkpoint_format") or values.get("version") or values.get("format")
    layout = str(getattr(layout, "value", layout) or _LAYOUTS[method][0]).lower()
    if layout not in _LAYOUTS[method]:
        raise ConfigError(
            f"{option}: the layout {layout!r} of {method} is not modelled. Legal: "
            f"{', '.join(_LAYOUTS[method])}."
        )
    if values.get("dynamic"):
        raise ConfigError(
            f"{option}: dynamic gives single modules settings of their own, which is not modelled: "
            "transformers does not read it either."
        )
    if values.get("lm_head"):
        raise ConfigError(f"{option}: a quantised lm_head is not modelled.")
    bits = values.get("bits", values.get("w_bit", _DEFAULT_BITS[method]))
    group = values.get("group_size", values.get("q_group_size", 128))
    fields: dict[str, Any] = {"format": method, "bits": bits, "group_size": group}
    if method == "awq":
        kept = values.get("modules_to_not_convert")
        fields["skip_modules"] = (kept,) if isinstance(kept, str) else kept
    else:
        fields["block_name"] = values.get("block_name_to_quantize")
        lists = values.get("modules_in_block_to_quantize")
        if lists is not None:
            fields["only_modules"] = _flat(lists, option)
    if "prepare" in values:
        fields["prepare"] = values["prepare"]
    return {name: value for name, value in fields.items() if value is not None}


def check_packed(method: str, bits: Any, group_size: Any) -> None:
    """Width and group are ones that a kernel which trains takes.

    Raises:
        ConfigError: they are not.
    """
    for name, value, legal in (
        ("bits", bits, _BITS[method]), ("group_size", group_size, _GROUPS[method]),
    ):  # fmt: skip
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value not in legal:
            raise ConfigError(
                f"{name} {value!r} of {method} is not legal: kernels that train take "
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
