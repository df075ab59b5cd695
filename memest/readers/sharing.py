"""FSDP and DeepSpeed, as training arguments, accelerate and frameworks write them.

Sources: ``TrainingArguments._process_fsdp_args`` and ``_apply_legacy_fsdp_to_config`` of
transformers 5.23, ``FullyShardedDataParallelPlugin`` and ``DeepSpeedPlugin`` of accelerate 1.15.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from memest.deepspeed_file import read_deepspeed
from memest.errors import ConfigError
from memest.readers.documents import find_file, read_document
from memest.readers.findings import Level
from memest.readers.sheet import Sheet, names_of

__all__ = ["read_deepspeed_document", "read_deepspeed_value", "read_fsdp"]

_STRATEGIES = {
    "1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard",
    "5": "hybrid_shard_zero2", "true": "full_shard", "false": "shard_grad_op",
}  # fmt: skip
_FSDP_REASONS = dict.fromkeys(
    """state_dict_type final_state_dict_type cpu_ram_efficient_loading sync_module_states
    xla xla_fsdp_v2 xla_fsdp_grad_ckpt xla_fsdp_settings cpu_offload_pin_memory""".split(),
    "how weights are loaded and saved",
) | dict.fromkeys(
    "forward_prefetch backward_prefetch backward_prefetch_policy limit_all_gathers".split(),
    "FSDP2 has no such switch",
)
_FSDP_MATTERS = {
    "mixed_precision_policy": "a policy of its own; the run's precision is priced",
    "activation_cpu_offload": "activations move to the host between forward and backward",
}
_DEEPSPEED_REASONS = {
    **dict.fromkeys(
        """steps_per_print wall_clock_breakdown dump_state tensorboard wandb csv_monitor
        comms_logger flops_profiler memory_breakdown prescale_gradients
        gradient_predivide_factor zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
        checkpoint nebula data_efficiency autotuning seq_parallel_communication_data_type
        communication_data_type disable_allgather scheduler dataloader_drop_last
        elasticity""".split(),
        "changes no tensor of a step",
    ),
    "$schema": "a remark",
}
_DEEPSPEED_MATTERS = {
    "activation_checkpointing": "DeepSpeed's own checkpointing, which models must call themselves",
    "amp": "Apex",
    "sparse_attention": "DeepSpeed's sparse attention",
    "tensor_parallel": "tensor parallelism",
    "sequence_parallel_size": "sequence parallelism",
    "aio": "offloading to disks",
    "compile": "compilation fuses operators",
    "compression_training": "compression",
    "hybrid_engine": "generation in the same memory",
    "pipeline": "pipeline parallelism",
    "torch_autocast": "autocast inside the engine",
    "sparse_gradients": "sparse gradients",
    "optimizer": "the optimizer's arguments",
}
_CHECKED = {
    "batch": "train_micro_batch_size_per_gpu",
    "grad_accum": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
}


def read_fsdp(sheet: Sheet, part: Sheet, asked: Any, key: str, *, version: int) -> None:
    """FSDP, switched on by ``key`` with the settings of ``part``.

    Args:
        sheet: where ``key`` stands.
        part: settings; a prefix ``fsdp_`` of their names is dropped.
        asked: True, or words of older releases: ``full_shard auto_wrap offload``.
        key: that switches it on.
        version: FSDP's where the settings name none.
    """
    names = {name.removeprefix("fsdp_"): name for name in part.document}

    def take(name: str) -> Any:
        return part.take(names.get(name, name))

    words = [] if isinstance(asked, bool) else _words(asked)
    offloads = "offload" in words or _true(take("cpu_offload"))
    offloads = _true(take("offload_params")) or offloads
    version_key = names.get("version", "version")
    given_version = take("version")
    if given_version is not None:
        if str(given_version).strip() not in ("1", "2"):
            raise ConfigError(
                f"{part.place(version_key).origin} {given_version!r} is no version of FSDP. Legal: "
                "1, 2."
            )
        version = int(str(given_version))
    modes = [word for word in words if word not in ("auto_wrap", "offload", "true")]
    strategy, reshard = take("sharding_strategy"), take("reshard_after_forward")
    mode_key = names.get("reshard_after_forward", names.get("sharding_strategy", ""))
    chosen = strategy if version == 1 and strategy is not None else reshard
    chosen = strategy if chosen is None else chosen
    if chosen is None and modes:
        chosen, mode_key = modes[0], ""
    text = str(True if chosen is None else chosen).strip().lower()
    mode = _STRATEGIES.get(text, text)
    place = part.place(mode_key) if mode_key else sheet.place(key)
    if mode in ("full_shard", "shard_grad_op") or (mode == "no_shard" and version == 1):
        sheet.say_at("fsdp", mode, place)
    elif mode.startswith("hybrid_shard"):
        sheet.say_at("fsdp", "full_shard", place)
        sheet.miss(key, "hybrid sharding: as if over all GPUs; --fsdp-shard-size says otherwise")
    elif mode == "no_shard":
        sheet.miss(key, "NO_SHARD keeps whole copies, as DDP does, which is priced")
        return
    else:
        raise ConfigError(
            f"{place.origin} {chosen!r} is no way to shard. Legal: true, false, full_shard, "
            "shard_grad_op, hybrid_shard, no_shard."
        )
    if version != 2:
        part.offer("fsdp_version", version, version_key, "FSDP1: priced as FSDP2")
    elif given_version is not None:
        part.ignore(version_key, "2 is what is priced")
    if offloads:
        where = names.get("offload_params", names.get("cpu_offload", ""))
        place = part.place(where) if where in part.document else sheet.place(key)
        sheet.say_at("fsdp_offload", True, place)
    wrap_key = names.get("transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap")
    wrap = take("transformer_layer_cls_to_wrap")
    if wrap:
        classes = names_of(wrap, part.place(wrap_key).origin, split=True)
        sheet.say_at("fsdp_wrap", classes, part.place(wrap_key))
    _wrapping(part, names, take)
    if _true(take("activation_checkpointing")):
        name = names["activation_checkpointing"]
        sheet.say_at("checkpointing", "full", part.place(name))
        sheet.miss(
            key, "FSDP's own checkpointing of its units: priced as the model's of its layers"
        )
    if version == 1:
        for name in ("use_orig_params", "cpu_ram_efficient_loading"):
            if (said := take(name)) is not None:
                sheet.say_at(f"fsdp_{name}", _true(said), part.place(names[name]))
        said = take("backward_prefetch") or take("backward_prefetch_policy")
        name = names.get("backward_prefetch", names.get("backward_prefetch_policy", ""))
        if said is not None:
            sheet.say_at("fsdp_backward_prefetch", str(said).lower(), part.place(name))
    elif "use_orig_params" in names:
        take("use_orig_params")
        part.ignore(names["use_orig_params"], "FSDP2 keeps the original parameters always")
    part.ignore_rest(
        {names.get(k, k): why for k, why in _FSDP_REASONS.items()},
        {names.get(k, k): why for k, why in _FSDP_MATTERS.items()},
    )
    sheet.absorb(part)


def _wrapping(part: Sheet, names: Mapping[str, str], take: Any) -> None:
    policy, key = str(take("auto_wrap_policy") or ""), names.get("auto_wrap_policy", "")
    if policy.upper() in ("SIZE_BASED_WRAP", "NO_WRAP"):
        part.miss(key, f"{policy}: the model's layers are priced as units")
    elif key:
        part.ignore(key, "units are the model's layers")
    least = take("min_num_params")
    if least:
        part.miss(names["min_num_params"], "units by size: the model's layers are priced as units")
    elif "min_num_params" in names:
        part.ignore(names["min_num_params"], "off")


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return value.lower().replace(",", " ").split()
    return [str(word).lower() for word in value] if isinstance(value, (list, tuple)) else []


def _true(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "1", "yes", "on")


def read_deepspeed_value(sheet: Sheet, key: str, value: Any) -> None:
    """A DeepSpeed configuration that a document names, or holds.

    Raises:
        ConfigError: no such file, or no configuration.
    """
    if value in (None, "", False):
        if key in sheet.document:
            sheet.ignore(key, "off")
        return
    place = sheet.place(key)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{place.origin} is not JSON: {error}.") from None
    if isinstance(value, Mapping):
        part = Sheet(
            value, source=sheet.source, framework="DeepSpeed", prefix=f"{key}.", level=place.level
        )
    else:
        path = find_file(str(value), beside=sheet.folder, origin=place.origin)
        part = Sheet(
            read_document(path, str(value)), source=str(value), framework="DeepSpeed",
            folder=path.parent, level=min(place.level, Level.FILE),
        )  # fmt: skip
        sheet.ignore(key, f"{value} was read")
    read_deepspeed_document(part)
    sheet.absorb(part)


def read_deepspeed_document(sheet: Sheet) -> None:
    """DeepSpeed's own JSON; what cannot be priced is noted and left out.

    Raises:
        ConfigError: a value that DeepSpeed would refuse too.
    """
    document = dict(sheet.document)
    zero = document.get("zero_optimization")
    found = None
    while found is None:
        try:
            found = read_deepspeed({"zero_optimization": {}, **document})
        except ConfigError as error:
            key = _culprit(str(error), document)
            if key is None:
                raise ConfigError(
                    str(error).replace("the DeepSpeed configuration", sheet.source)
                ) from None
            if key in document:
                document.pop(key)
                sheet.take(key)
            else:
                document["zero_optimization"] = {
                    k: v for k, v in document["zero_optimization"].items() if k != key
                }
                key = f"zero_optimization.{key}"
            sheet.miss(key, str(error).partition(": ")[2])
    keys = {**_CHECKED, "precision": "", "zero": "zero_optimization.stage",
            "offload_optimizer": "zero_optimization.offload_optimizer",
            "offload_param": "zero_optimization.offload_param"}  # fmt: skip
    stage = found.options.get("zero", 0)
    for option, value in found.options.items():
        key = keys.get(option, option)
        if option == "precision":
            key = f"{value}.enabled"
        if stage == 0 and option.startswith(("zero", "offload")):
            continue
        sheet.say(option, value, key, checked=option in _CHECKED or option == "precision")
    if stage == 0:
        sheet.miss(
            "zero_optimization.stage",
            "DeepSpeed without ZeRO: its copies of half-precision weights are not priced",
        )
    elif found.settings:
        sheet.say("zero_settings", dict(found.settings), "zero_optimization")
    _deepspeed_rest(sheet, zero if isinstance(zero, Mapping) else {}, found.settings)


def _deepspeed_rest(sheet: Sheet, zero: Mapping[str, Any], used: Mapping[str, Any]) -> None:
    for key in ("zero_optimization", "data_types", *_CHECKED.values(), "bf16", "fp16"):
        value = sheet.take(key)
        if value == "auto":
            sheet.ignore(key, "auto: the run's own")
    for key in zero:
        full = f"zero_optimization.{key}"
        acts = key in used or key in ("stage", "offload_optimizer", "offload_param")
        if not acts and not sheet.has_missed(full):
            sheet.ignore(full, "no size at this stage depends on it")
    total = sheet.take("train_batch_size")
    if isinstance(total, int) and not isinstance(total, bool):
        sheet.samples_per_step = (total, sheet.place("train_batch_size").origin)
        sheet.ignore("train_batch_size", "checked against batch, accumulation and GPUs")
    elif total is not None:
        sheet.ignore("train_batch_size", "auto: the run's own")
    optimizer = sheet.take("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if str(kind).lower() in ("adam", "adamw"):
        sheet.say("optim", "adamw_torch_fused", "optimizer.type")
        sheet.miss("optimizer.type", f"DeepSpeed's {kind}: priced as torch's fused kernel, whose "
                   "states are the same")  # fmt: skip
    elif kind is not None:
        sheet.miss("optimizer.type", f"DeepSpeed's {kind} is not modelled: name one with --optim")
    sheet.ignore_rest(_DEEPSPEED_REASONS, _DEEPSPEED_MATTERS)


def _culprit(message: str, document: Mapping[str, Any]) -> str | None:
    """Which key a refusal is about, if it says that the value is not modelled."""
    if "not modelled" not in message and "not known" not in message:
        return None
    zero = document.get("zero_optimization")
    inner = list(zero) if isinstance(zero, Mapping) else []
    for key in sorted([*inner, *document], key=len, reverse=True):
        if str(key) in message and key not in ("zero_optimization", "stage"):
            return str(key)
    return None
