"""FSDP and DeepSpeed, as training arguments, accelerate and frameworks write them.

Sources: ``TrainingArguments._process_fsdp_args`` and ``_apply_legacy_fsdp_to_config`` of
transformers 5.23, ``FullyShardedDataParallelPlugin`` and ``DeepSpeedPlugin`` of accelerate 1.15.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from memest.config.deepspeed import (
    HALF_PRECISION_KEYS,
    ON_SAVE,
    DeepSpeedFile,
    own_key,
    read_deepspeed,
)
from memest.errors import ConfigError
from memest.readers.documents import find_file, read_document
from memest.readers.mapping import DocumentKeys
from memest.readers.published_deepspeed import published
from memest.readers.values import Bounded, Either, Level, Missing, Saving, StepSize, names_of

__all__ = [
    "ON_DISK",
    "is_on",
    "note_shared_layers",
    "read_deepspeed_document",
    "read_deepspeed_value",
    "read_fsdp",
]

_STRATEGIES = {
    "1": "full_shard",
    "2": "shard_grad_op",
    "3": "no_shard",
    "4": "hybrid_shard",
    "5": "hybrid_shard_zero2",
    "true": "full_shard",
    "false": "shard_grad_op",
}
_IGNORED_FSDP_KEYS = dict.fromkeys(
    """final_state_dict_type cpu_ram_efficient_loading sync_module_states
    xla xla_fsdp_v2 xla_fsdp_grad_ckpt xla_fsdp_settings cpu_offload_pin_memory""".split(),
    "how weights are loaded and saved",
) | dict.fromkeys(
    "forward_prefetch backward_prefetch backward_prefetch_policy limit_all_gathers".split(),
    "FSDP2 has no such switch",
)
_STATE_DICTS = {
    "full_state_dict": "full_state_dict",
    "1": "full_state_dict",
    "sharded_state_dict": "sharded_state_dict",
    "3": "sharded_state_dict",
}
"""``StateDictType`` of torch by name and number; local ones are FSDP1's."""
_UNMODELLED_FSDP_KEYS = {
    "mixed_precision_policy": Either("a policy of its own; the run's precision is priced"),
    "activation_cpu_offload": Saving("activations move to the host between forward and backward"),
}
_IGNORED_DEEPSPEED_KEYS = {
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
_UNMODELLED_DEEPSPEED_KEYS = {
    "activation_checkpointing": Bounded(
        "DeepSpeed's own checkpointing, which models must call themselves"
    ),
    "amp": Either("Apex"),
    "sparse_attention": Either("DeepSpeed's sparse attention"),
    "tensor_parallel": Either("tensor parallelism: whole layers are priced"),
    "sequence_parallel_size": Either("sequence parallelism: whole sequences are priced"),
    "aio": Bounded("offloading to disks"),
    "compile": Either("compilation fuses operators"),
    "compression_training": Either("compression"),
    "hybrid_engine": "generation in the same memory",
    "pipeline": Either("pipeline parallelism: all stages are priced"),
    "torch_autocast": Either("autocast inside the engine"),
    "sparse_gradients": Either("sparse gradients"),
    "optimizer": "the optimizer's arguments",
}
_IDLE_ZERO_KEYS = ("cpu_offload_use_pin_memory",)
_CHECKED_KEYS = {
    "batch": "train_micro_batch_size_per_gpu",
    "grad_accum": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
}


def read_fsdp(
    keys: DocumentKeys,
    part: DocumentKeys,
    switch: Any,
    key: str,
    *,
    version: int,
    wraps: bool = True,
) -> None:
    """FSDP, switched on by ``key`` with the settings of ``part``.

    Args:
        keys: where ``key`` stands.
        part: settings; a prefix ``fsdp_`` of their names is dropped.
        switch: True, or words of older releases: ``full_shard auto_wrap offload``.
        key: that switches it on.
        version: FSDP's where the settings name none.
        wraps: layers are units where the settings name no policy, as the Trainer has it
            (``_process_fsdp_args``); accelerate has NO_WRAP then.
    """
    part = part.without_prefix("fsdp_")
    words = [] if isinstance(switch, bool) else _words(switch)
    offloads = [is_on(part.take(name)) for name in ("cpu_offload", "offload_params")]
    named_version = part.take("version")
    if named_version is not None:
        if str(named_version).strip() not in ("1", "2"):
            raise ConfigError(
                f"{part.where('version')} {named_version!r} is no version of FSDP. Legal: 1, 2."
            )
        version = int(str(named_version))
    if not _mode(keys, part, words, key, version):
        return
    if version != 2:
        part.offer("fsdp_version", version, "version", "FSDP1: priced as FSDP2")
    elif named_version is not None:
        part.ignore("version", "2 is what is priced")
    if "offload" in words or any(offloads):
        name = _first(part, "offload_params", "cpu_offload")
        keys.set_at("fsdp_offload", True, part.origin(name) if name else keys.origin(key))
    _wrapping(keys, part, wraps=wraps)
    if is_on(part.take("activation_checkpointing")):
        keys.set_at("checkpointing", "full", part.origin("activation_checkpointing"))
        keys.miss(
            key,
            Bounded("FSDP's own checkpointing of its units: priced as the model's of its layers"),
        )
    if version == 1:
        for name in ("use_orig_params", "cpu_ram_efficient_loading"):
            if (value := part.take(name)) is not None:
                keys.set_at(f"fsdp_{name}", is_on(value), part.origin(name))
        if is_on(part.take("forward_prefetch")):
            part.miss("forward_prefetch", "the next unit is gathered ahead in forward")
        elif "forward_prefetch" in part.document:
            part.ignore("forward_prefetch", "off")
        limits = part.take("limit_all_gathers")
        if limits is not None and not is_on(limits):
            part.miss("limit_all_gathers", "gathers run ahead without a limit")
        elif limits is not None:
            part.ignore("limit_all_gathers", "as it is priced")
        prefetch = part.take("backward_prefetch") or part.take("backward_prefetch_policy")
        if prefetch is not None:
            name = _first(part, "backward_prefetch", "backward_prefetch_policy")
            keys.set_at("fsdp_backward_prefetch", str(prefetch).lower(), part.origin(name))
    elif "use_orig_params" in part.document:
        part.take("use_orig_params")
        part.ignore("use_orig_params", "FSDP2 keeps the original parameters always")
    kind = part.take("state_dict_type")
    if (written := _STATE_DICTS.get(str(kind).lower())) is not None:
        keys.set_at("fsdp_state_dict_type", written, part.origin("state_dict_type"))
    elif kind is not None:
        part.ignore("state_dict_type", "how weights are saved")
    part.ignore_rest(_IGNORED_FSDP_KEYS, _UNMODELLED_FSDP_KEYS)
    keys.absorb(part)


def note_shared_layers(keys: DocumentKeys, key: str) -> None:
    """Which release runs accelerate's FSDP2 over layers that ``key`` shares.

    Source: ``Accelerator._prepare_tp`` of accelerate 1.12 to 1.15.
    """
    keys.default("software", "transformers=5.14", "the last whose shared layers accelerate shards")
    keys.miss(
        key,
        Bounded(
            "later transformers than 5.14 stop beside accelerate's FSDP2 (ImportError: "
            "ReplicateParallel), so that release is priced; --software transformers=5.23 prices "
            "a model that from_pretrained shards (DistributedConfig)"
        ),
    )


def _first(part: DocumentKeys, *names: str) -> str:
    return next((name for name in names if name in part.document), "")


def _mode(keys: DocumentKeys, part: DocumentKeys, words: list[str], key: str, version: int) -> bool:
    """How it shards; False where it does not."""
    strategy, reshard = part.take("sharding_strategy"), part.take("reshard_after_forward")
    name = _first(part, "reshard_after_forward", "sharding_strategy")
    choice = strategy if version == 1 and strategy is not None else reshard
    choice = strategy if choice is None else choice
    modes = [word for word in words if word not in ("auto_wrap", "offload", "true")]
    if choice is None and modes:
        choice, name = modes[0], ""
    text = str(True if choice is None else choice).strip().lower()
    mode = _STRATEGIES.get(text, text)
    origin = part.origin(name) if name else keys.origin(key)
    if mode in ("full_shard", "shard_grad_op") or (mode == "no_shard" and version == 1):
        keys.set_at("fsdp", mode, origin)
    elif mode.startswith("hybrid_shard"):
        keys.set_at("fsdp", "full_shard", origin)
        keys.miss(key, "hybrid sharding: as if over all GPUs; --fsdp-shard-size says otherwise")
    elif mode == "no_shard":
        keys.miss(key, Bounded("NO_SHARD keeps whole copies, as DDP does, which is priced"))
        return False
    else:
        raise ConfigError(
            f"{origin.origin} {choice!r} is no way to shard. Legal: true, false, full_shard, "
            "shard_grad_op, hybrid_shard, no_shard."
        )
    return True


def _wrapping(keys: DocumentKeys, part: DocumentKeys, *, wraps: bool) -> None:
    named = part.take("auto_wrap_policy")
    policy = str(named or ("TRANSFORMER_BASED_WRAP" if wraps else "NO_WRAP")).upper()
    words = f"{policy}: the model's layers are priced as units"
    classes = part.take("transformer_layer_cls_to_wrap")
    if policy == "TRANSFORMER_BASED_WRAP":
        part.pass_over(("auto_wrap_policy",), "units are the model's layers")
        if classes:
            origin = part.origin("transformer_layer_cls_to_wrap")
            keys.set_at("fsdp_wrap", names_of(classes, origin.origin, split=True), origin)
    elif named:
        part.miss("auto_wrap_policy", words)
    else:
        part.miss_default("auto_wrap_policy", words)
    if policy != "TRANSFORMER_BASED_WRAP" and classes:
        why = f"auto_wrap_policy is {policy}, which asks for no classes"
        part.ignore("transformer_layer_cls_to_wrap", why)
    if part.take("min_num_params"):
        part.miss("min_num_params", "units by size: the model's layers are priced as units")
    elif "min_num_params" in part.document:
        part.ignore("min_num_params", "off")


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return value.lower().replace(",", " ").split()
    return [str(word).lower() for word in value] if isinstance(value, (list, tuple)) else []


def is_on(value: Any) -> bool:
    """Whether a value says yes, in any spelling."""
    return str(value).strip().lower() in ("true", "1", "yes", "on")


def read_deepspeed_value(keys: DocumentKeys, key: str, value: Any) -> None:
    """A DeepSpeed configuration that a document names, or holds.

    Raises:
        ConfigError: no such file, or no configuration.
    """
    if value in (None, "", False):
        if key in keys.document:
            keys.ignore(key, "off")
        return
    if value is True:
        # add_config_arguments of DeepSpeed: a switch, with the file in --deepspeed_config
        why = "DeepSpeed by a switch, and no file is named: priced without; --zero says it"
        keys.miss(key, Either(why))
        return
    origin = keys.origin(key)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{origin.origin} is not JSON: {error}.") from None
    if isinstance(value, Mapping):
        part = DocumentKeys(
            dict(value),
            source=keys.source,
            framework="DeepSpeed",
            prefix=f"{key}.",
            level=origin.level,
        )
    else:
        try:
            path = find_file(str(value), folder=keys.folder, origin=origin.origin)
        except ConfigError as error:
            keys.miss(key, Missing(str(error), str(value), published(keys.framework, str(value))))
            return
        part = DocumentKeys(
            read_document(path, str(value)),
            source=str(value),
            framework="DeepSpeed",
            folder=path.parent,
            level=min(origin.level, Level.FILE),
        )
        keys.ignore(key, f"{value} was read")
    read_deepspeed_document(part)
    keys.absorb(part)


def read_deepspeed_document(keys: DocumentKeys) -> None:
    """DeepSpeed's own JSON; what cannot be priced is noted and left out.

    Raises:
        ConfigError: a value that DeepSpeed would refuse too.
    """
    document = _present_spelling(keys)
    zero = keys.document.get("zero_optimization")
    deep_speed_file = None
    while deep_speed_file is None:
        try:
            deep_speed_file = read_deepspeed({"zero_optimization": {}, **document})
        except ConfigError as error:
            key = _culprit(str(error), document)
            if key is None:
                raise ConfigError(
                    str(error).replace("the DeepSpeed configuration", keys.source)
                ) from None
            if key in document:
                document.pop(key)
                keys.take(key)
            else:
                document["zero_optimization"] = {
                    k: v for k, v in document["zero_optimization"].items() if k != key
                }
                key = f"zero_optimization.{key}"
            why = str(error).partition(": ")[2].rstrip(".")
            keys.miss(key, why if key.rpartition(".")[2] in _COPIES_OF_WEIGHTS else Either(why))
    key_of = {
        **_CHECKED_KEYS,
        "precision": "",
        "zero": "zero_optimization.stage",
        **{
            present: f"zero_optimization.{present if present in (zero or ()) else former}"
            for former, present in _FORMER_OFFLOADS.items()
        },
    }
    key_of |= {
        own_key(key): f"zero_optimization.{key}"
        for key in (zero if isinstance(zero, Mapping) else ())
        if own_key(key) == ON_SAVE
    }
    stage = deep_speed_file.options.get("zero", 0)
    for option, value in deep_speed_file.options.items():
        key = key_of.get(option, option)
        if option == "precision":
            key = f"{value}.enabled"
        if stage == 0 and option.startswith(("zero", "offload")):
            continue
        keys.set(option, value, key, checked=option in _CHECKED_KEYS or option == "precision")
    if stage == 0:
        keys.miss(
            "zero_optimization.stage",
            # float32 weights under autocast are priced; BF16_Optimizer shards its float32 copies
            Either("DeepSpeed without ZeRO: its copies of half-precision weights are not priced"),
        )
    elif deep_speed_file.settings:
        keys.set("zero_settings", dict(deep_speed_file.settings), "zero_optimization")
    _deepspeed_rest(keys, zero if isinstance(zero, Mapping) else {}, deep_speed_file)


_COPIES_OF_WEIGHTS = ("zero_hpz_partition_size", "mics_shard_size")
"""Keys of ``zero_optimization`` that are not modelled, and can take nothing less."""
_FORMER_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param"}
"""Switches of ``zero_optimization`` that are sections today (``DeepSpeedZeroConfig``)."""
ON_DISK = Bounded("nvme: priced as cpu, which takes the same of a GPU")


def _present_spelling(keys: DocumentKeys) -> dict[str, Any]:
    """The document as :func:`read_deepspeed` takes it; what has no place there is noted."""
    document = dict(keys.document)
    for precision in ("bf16", "fp16"):
        part = document.get(precision)
        if not isinstance(part, Mapping):
            continue
        document[precision] = {k: v for k, v in part.items() if k not in HALF_PRECISION_KEYS}
        for key in HALF_PRECISION_KEYS:
            if part.get(key) and part.get("enabled", "auto") is not False:
                why = "master weights, gradients or states in half precision: float32 is priced"
                keys.miss(f"{precision}.{key}", Saving(why))
    zero = document.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return document
    zero = {key: value for key, value in zero.items() if key not in _IDLE_ZERO_KEYS}
    for former, present in _FORMER_OFFLOADS.items():
        if zero.pop(former, None) is True and present not in zero:
            zero[present] = {"device": "cpu"}
    for key in _FORMER_OFFLOADS.values():
        if isinstance(zero.get(key), Mapping):
            zero[key] = _on_host(keys, f"zero_optimization.{key}", zero[key], zero.get("stage"))
    return {**document, "zero_optimization": zero}


def _on_host(
    keys: DocumentKeys, place: str, part: Mapping[str, Any], stage: Any
) -> Mapping[str, Any]:
    """An offload as one to host memory, all of it."""
    ratio = part.get("ratio", 1.0)
    if part.get("device") == "nvme":
        keys.miss(f"{place}.device", ON_DISK)
    if ratio != 1.0 and stage == 3 and part.get("device") in ("cpu", "nvme"):
        why = f"a share of {ratio} moves to the host, the rest stays: all of it is priced there"
        keys.miss(f"{place}.ratio", why)
    elif "ratio" in part:
        keys.ignore(f"{place}.ratio", "all of it" if ratio == 1.0 else "of stage 3 alone")
    rest = {key: value for key, value in part.items() if key != "ratio"}
    return {**rest, "device": "cpu"} if part.get("device") == "nvme" else rest


def _deepspeed_rest(keys: DocumentKeys, zero: Mapping[str, Any], read: DeepSpeedFile) -> None:
    for key in ("zero_optimization", "data_types", *_CHECKED_KEYS.values(), "bf16", "fp16"):
        value = keys.take(key)
        if value == "auto":
            keys.ignore(key, "auto: the run's own")
    for key in zero:
        full, name = f"zero_optimization.{key}", own_key(key)
        acts = name in ("stage", "offload_optimizer", "offload_param")
        acts = acts or name in read.settings or name in read.options
        present = _FORMER_OFFLOADS.get(key, "")
        acts = acts or (zero[key] is True and present not in zero and present in read.options)
        if not acts and not keys.has_missed(full):
            keys.ignore(full, _why_idle(name, zero[key], read.options["zero"]))
    degree = keys.document.get("tensor_parallel")
    if isinstance(degree, Mapping) and degree.get("autotp_size", 0) in (0, 1):
        keys.pass_over(("tensor_parallel",), "off")
    if keys.document.get("sequence_parallel_size") == 1:
        keys.pass_over(("sequence_parallel_size",), "off")
    total = keys.take("train_batch_size")
    if isinstance(total, int) and not isinstance(total, bool):
        keys.samples_per_step = StepSize(total, keys.where("train_batch_size"))
        keys.ignore("train_batch_size", "checked against batch, accumulation and GPUs")
    elif total is not None:
        keys.ignore("train_batch_size", "auto: the run's own")
    kind = keys.mapping("optimizer").get("type")
    if str(kind).lower() in ("adam", "adamw"):
        keys.set("optim", "adamw_torch_fused", "optimizer.type")
        keys.miss(
            "optimizer.type",
            Bounded(
                f"DeepSpeed's {kind}: priced as torch's fused kernel, whose states are the same"
            ),
        )
    elif kind is not None:
        why = f"DeepSpeed's {kind} is not modelled: name one with --optim"
        keys.miss("optimizer.type", Either(why))
    keys.ignore_rest(_IGNORED_DEEPSPEED_KEYS, _UNMODELLED_DEEPSPEED_KEYS)


def _why_idle(name: str, value: Any, stage: int) -> str:
    """Why a key of ``zero_optimization`` changes nothing."""
    if name == ON_SAVE and value is True:
        return f"stage 3 alone gathers weights to save, and this is stage {stage}"
    return "no size at this stage depends on it"


def _culprit(message: str, document: Mapping[str, Any]) -> str | None:
    """Which key a refusal is about, if it says that the value is not modelled."""
    if "not modelled" not in message and "not known" not in message:
        return None
    zero = document.get("zero_optimization")
    inner = list(zero) if isinstance(zero, Mapping) else []
    for key in sorted([*inner, *document], key=len, reverse=True):
        named = re.search(rf"(?<![\w]){re.escape(str(key))}(?![\w])", message)
        if named and key not in ("zero_optimization", "stage"):
            return str(key)
    return None
