"""How a script shares its model between GPUs: FSDP and DeepSpeed, its own or Lightning's.

Sources: ``strategies/fsdp.py``, ``strategies/deepspeed.py`` and ``plugins/precision`` of Lightning
2.6 (Fabric's alike), ``torch.distributed.fsdp`` of torch 2.13.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from memest.errors import ConfigError
from memest.readers.documents import read_document
from memest.readers.scripts.calling import root_of
from memest.readers.scripts.document import CallDocument
from memest.readers.scripts.expressions import as_text
from memest.readers.scripts.found import Found
from memest.readers.scripts.things import Call, Class, Symbol, Unknown, Value, is_unknown, known
from memest.readers.values import Bounded, Either, Saving

__all__ = [
    "DEEPSPEED_KEY",
    "FSDP_KEY",
    "put_ddp",
    "put_own_sharding",
    "put_plugins",
    "put_strategy",
    "reads_deepspeed",
    "with_deepspeeds_optimizer",
]

DEEPSPEED_KEY, FSDP_KEY = "deepspeed", "fsdp_plugin"
_LIKE_DDP = re.compile(r"auto|single_device|ddp(_spawn|_fork|_notebook)?(_find_unused_\w+)?")
"""Names of strategies that are DDP; one that looks for unused parameters copies what
``training_step`` returns, which is a number."""
_NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("FSDPStrategy", {}),
    "fsdp_cpu_offload": ("FSDPStrategy", {"cpu_offload": True}),
    "deepspeed": ("DeepSpeedStrategy", {}),
    "deepspeed_stage_1": ("DeepSpeedStrategy", {"stage": 1}),
    "deepspeed_stage_1_offload": ("DeepSpeedStrategy", {"stage": 1, "offload_optimizer": True}),
    "deepspeed_stage_2": ("DeepSpeedStrategy", {"stage": 2}),
    "deepspeed_stage_2_offload": ("DeepSpeedStrategy", {"stage": 2, "offload_optimizer": True}),
    "deepspeed_stage_3": ("DeepSpeedStrategy", {"stage": 3}),
    "deepspeed_stage_3_offload": (
        "DeepSpeedStrategy",
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    ),
}
"""``register_strategies`` of the classes."""
_ZERO_DEFAULTS = {
    "stage": 2,
    "contiguous_gradients": True,
    "overlap_comm": True,
    "allgather_partitions": True,
    "reduce_scatter": True,
    "allgather_bucket_size": 200_000_000,
    "reduce_bucket_size": 200_000_000,
    "sub_group_size": 1_000_000_000_000,
}
"""Arguments of ``DeepSpeedStrategy`` that are keys of ``zero_optimization``."""
_OFFLOADS = (
    ("offload_optimizer", "offload_optimizer", "offload_optimizer_device"),
    ("offload_parameters", "offload_param", "offload_params_device"),
)
_SIZELESS = frozenset(
    """accelerator parallel_devices cluster_environment checkpoint_io process_group_backend timeout
    module dim device_ids output_device process_group check_reduction comm_hook_args
    state_dict_type device_id sync_module_states logging_level load_full_weights
    exclude_frozen_parameters logging_batch_size_per_gpu loss_scale initial_scale_power
    loss_scale_window hysteresis min_loss_scale zero_allow_untested_optimizer pin_memory
    param_init_fn start_method broadcast_buffers static_graph""".split()
)
"""Arguments that change no tensor of a step."""
_DDP = {
    "bucket_cap_mb": "ddp_bucket_cap_mb",
    "gradient_as_bucket_view": "ddp_gradient_as_bucket_view",
    "find_unused_parameters": "ddp_find_unused_parameters",
}
_ONE_UNIT = Either(
    "nothing says which layers are units, so the whole model is one, gathered at once: priced are "
    "the model's layers as units, which take less"
)
_LAYERS = re.compile(r"\.(layers?|h|blocks?)(\[.*\])?$")
"""How models call the list of their layers, at the end of what a loop goes over."""


def put_strategy(document: CallDocument, call: Call) -> bool:
    """``strategy=`` of Lightning's Trainer, or of Fabric.

    Returns:
        Whether the model is sharded, as it is by a script of the same calls.
    """
    value = call.keywords.get("strategy", Value("auto"))
    data, line = value.data, value.line or call.line
    name = ""
    arguments: dict[str, Value] = {}
    if isinstance(data, str) and _LIKE_DDP.fullmatch(data):
        return False
    if isinstance(data, str) and data in _NAMED:
        name, plain = _NAMED[data]
        arguments = {key: Value(each) for key, each in plain.items()}
    elif isinstance(data, Call) and not data.subclass and "**" not in data.keywords:
        name, arguments = data.name, data.keywords
    if name == "DDPStrategy":
        # it wraps training_step, which returns a number: there is nothing to copy
        _ddp(document, {k: v for k, v in arguments.items() if "unused" not in k}, line)
        return False
    if name == "FSDPStrategy":
        document.say("fsdp_use_orig_params", True, line)
        _fsdp1(document, arguments, line)
        if document.get("precision") == "bf16" and "mixed_precision" not in arguments:
            document.say("fsdp_mixed_precision", True, line)
        elif document.get("precision") == "fp16":
            why = "FSDP's own half precision is priced in bfloat16 alone: priced is autocast"
            document.miss(line, "precision", Either(why))
        elif "mixed_precision" in arguments:
            why = "dtypes of FSDP's own: priced are those of precision="
            document.miss(line, "mixed_precision", Either(why))
        if call.name == "Trainer" and document.get("grad_accum") not in (None, 1):
            # ``block_backward_sync`` asks for a ``no_sync``, which FSDP's class has, too
            why = "until the last micro-batch every GPU keeps the gradients whole: it is not priced"
            document.miss(line, "accumulate_grad_batches", why)
        if call.name == "Trainer" and document.get("max_grad_norm") is not None:
            document.miss(line, "gradient_clip_val", "Lightning stops here: FSDP clips no norm")
    elif name == "DeepSpeedStrategy":
        _deepspeed_strategy(document, arguments, call, line)
    else:
        why = "is not read: priced is DDP, or one GPU; --fsdp or --zero say it"
        said = data.why if isinstance(data, Unknown) else getattr(data, "name", data)
        document.miss(line, "strategy", Either(f"Lightning's {said} {why}"))
        return False
    return True


def put_ddp(document: CallDocument, found: Found) -> None:
    """Arguments of DDP that a script gives itself, or by accelerate's handler."""
    for call in found.named("DistributedDataParallel", "DistributedDataParallelKwargs"):
        _ddp(document, call.keywords, call.line)
        return


def _ddp(document: CallDocument, arguments: dict[str, Value], line: int) -> None:
    for key, value in arguments.items():
        if option := _DDP.get(key):
            document.put(option, value, Call("DDP", line))
        elif key not in _SIZELESS and value.data not in (None, False):
            document.miss(line, key, "of DDP: it is not read")


def _deepspeed_strategy(
    document: CallDocument, arguments: dict[str, Value], call: Call, line: int
) -> None:
    """``_create_default_config`` of ``DeepSpeedStrategy``; a configuration takes its place."""
    precision = str(call.keywords.get("precision", Value("")).data)
    half = {"bf16-true": "bf16", "16-true": "fp16"}.get(precision)
    if half is not None:  # the engine is in half precision, too (``_format_precision_config``)
        document.say("precision", half, line)
    config = arguments.get("config")
    if config is not None and config.data is not None:
        _deepspeed_config(document, config, line)
        return
    if arguments.get("zero_optimization", Value(True)).data is False:
        document.miss(line, "strategy", Either("DeepSpeed without ZeRO: priced is DDP"))
        return
    zero: dict[str, Any] = {}
    for key, usual in _ZERO_DEFAULTS.items():
        given = arguments.get(key, Value(usual))
        if is_unknown(known(given.data)):
            document.miss_unknown("zero", Unknown(f"{key} of DeepSpeedStrategy"), line)
        else:
            zero[key] = given.data
    read = {*_ZERO_DEFAULTS, "zero_optimization", "config", "precision_plugin"}
    for key, part, where in _OFFLOADS:
        read |= {key, where}
        device = arguments.get(where, Value("cpu")).data
        if arguments.get(key, Value(False)).data:
            zero[part] = {"device": device}
    for key, value in arguments.items():
        if key not in read and key not in _SIZELESS and value.data not in (None, False):
            document.miss(line, key, Either("of DeepSpeedStrategy: it is not read"))
    document.say(DEEPSPEED_KEY, {"zero_optimization": zero}, line)


def _deepspeed_config(document: CallDocument, value: Value, line: int) -> None:
    """A configuration of DeepSpeed's: a mapping, or a file beside the script."""
    data = known(value.data)
    folder = document.source.folder
    if isinstance(data, str) and folder is not None and (folder / data).is_file():
        data = str(folder / data)
    if is_unknown(data) or not isinstance(data, (str, dict)):
        why = "its configuration cannot be told without running: priced without; --deepspeed says"
        document.miss(line, "config", Either(f"{why} it"))
        return
    document.used.update(value.given)
    document.say(DEEPSPEED_KEY, data, line)


def reads_deepspeed(found: Found) -> Call | None:
    """``deepspeed.initialize`` with a configuration that stands in the call."""
    for call in found.calls:
        if call.path == "deepspeed.initialize":
            config = call.argument(7, "config") or call.keywords.get("config_params")
            if config is not None and not is_unknown(known(config.data)):
                return call
    return None


def put_plugins(document: CallDocument, accelerator: Call) -> None:
    """``fsdp_plugin=`` and ``deepspeed_plugin=`` of accelerate 1.15, as its files have them."""
    fsdp = accelerator.keywords.get("fsdp_plugin", Value(None)).data
    if isinstance(fsdp, Call) and fsdp.name == "FullyShardedDataParallelPlugin":
        settings = {name: _plain(each.data) for name, each in fsdp.keywords.items()}
        mixed = settings.pop("mixed_precision_policy", None)
        if mixed is not None and mixed != document.get("precision"):
            why = "dtypes of FSDP's own: priced are those of mixed_precision="
            document.miss(fsdp.line, "mixed_precision_policy", Either(why))
        for name in [name for name, each in settings.items() if is_unknown(each)]:
            document.miss_unknown(name, Unknown("an argument of its plugin"), fsdp.line)
            del settings[name]
        document.say(FSDP_KEY, settings, fsdp.line)
    elif fsdp is not None:
        why = "FSDP of the script is not read: priced whole; --fsdp says it"
        document.miss(accelerator.line, "fsdp_plugin", Saving(why))
    plugin = accelerator.keywords.get("deepspeed_plugin", Value(None)).data
    if plugin is not None and not _deepspeed_plugin(document, plugin):
        why = "DeepSpeed of the script is not read; --deepspeed says it"
        document.miss(accelerator.line, "deepspeed_plugin", why)


def _deepspeed_plugin(document: CallDocument, plugin: Any) -> bool:
    """``DeepSpeedPlugin``, whose stage is 2; False where it cannot be told."""
    if not isinstance(plugin, Call) or plugin.name != "DeepSpeedPlugin":
        return False
    given = {name: known(each.data) for name, each in plugin.keywords.items()}
    if is_unknown(given):
        return False
    if given.get("hf_ds_config") is not None:
        _deepspeed_config(document, Value(given["hf_ds_config"]), plugin.line)
        return True
    zero: dict[str, Any] = {"stage": given.get("zero_stage", 2)}
    for part in ("offload_optimizer", "offload_param"):
        if (device := given.get(f"{part}_device")) not in (None, "none"):
            zero[part] = {"device": device}
    keys = ("gradient_accumulation_steps", "gradient_clipping")
    settings = {key: given[key] for key in keys if given.get(key) is not None}
    document.say(DEEPSPEED_KEY, {"zero_optimization": zero, **settings}, plugin.line)
    return True


def _plain(data: Any) -> Any:
    """A setting as a file has it: the name of what torch has an enumeration for."""
    if isinstance(data, Symbol):
        return data.name
    if isinstance(data, Call) and data.name == "CPUOffload":
        inner = data.argument(0, "offload_params")
        return bool(inner is not None and inner.data)
    return known(data)


def with_deepspeeds_optimizer(found: Found) -> bool:
    """Whether the configuration that DeepSpeed is given makes the optimizer."""
    call = reads_deepspeed(found)
    if call is None:
        return False
    config = call.argument(7, "config") or call.keywords.get("config_params")
    data, folder = (None if config is None else known(config.data)), found.source.folder
    if isinstance(data, str) and folder is not None:
        try:
            data = read_document(folder / data, data)
        except ConfigError:  # whoever reads it says what is wrong with it
            return False
    return isinstance(data, Mapping) and "optimizer" in data


def put_own_sharding(document: CallDocument, found: Found) -> None:
    """What a script's own loop does to its model: FSDP's class, ``fully_shard``, DeepSpeed."""
    call = reads_deepspeed(found)
    if call is not None:
        config = call.argument(7, "config") or call.keywords.get("config_params")
        assert config is not None
        _deepspeed_config(document, config, call.line)
    named = found.named("FullyShardedDataParallel", "FSDP")
    flat = [each for each in named if each.receiver is None and each.library == "torch"]
    for each in flat[:1]:
        _fsdp1(document, each.keywords, each.line)
        if "use_orig_params" in each.keywords:
            document.put("fsdp_use_orig_params", each.keywords["use_orig_params"], each)
        _mixed(document, each.keywords.get("mixed_precision"), each.line)
    if not flat:
        _fsdp2(document, found)
    put_ddp(document, found)
    if "fsdp" in document:
        for each in found.named("no_sync", "no_backward_sync", "set_requires_gradient_sync"):
            why = "gradients that are not reduced stay whole on every GPU: it is not read"
            document.miss(each.line, each.name, Either(why))
            return


def _fsdp1(document: CallDocument, arguments: dict[str, Value], line: int) -> None:
    """Arguments of ``FullyShardedDataParallel``, which Lightning's strategy hands on."""
    call = Call("FSDP", line)
    strategy = arguments.get("sharding_strategy", Value("FULL_SHARD"))
    name = strategy.data.name if isinstance(strategy.data, Symbol) else str(strategy.data)
    mode = name.lower()
    if mode.startswith("hybrid_shard") or "device_mesh" in arguments:
        why = "hybrid sharding: as if over all GPUs; --fsdp-shard-size says otherwise"
        document.miss(line, "fsdp_shard_size", why)
        mode = "full_shard"
    elif mode not in ("full_shard", "shard_grad_op", "no_shard"):
        document.miss_unknown("fsdp", Unknown("sharding_strategy"), line)
        mode = "full_shard"
    document.say("fsdp", mode, line)
    document.say("fsdp_version", 1, line)
    offload = arguments.get("cpu_offload", Value(None)).data
    if isinstance(offload, Call):
        inner = offload.argument(0, "offload_params")
        offload = inner is not None and inner.data
    if offload:
        document.say("fsdp_offload", True, line)
    prefetch = arguments.get("backward_prefetch")
    if prefetch is not None:
        data = prefetch.data
        data = data.name.lower() if isinstance(data, Symbol) else (data or "no_prefetch")
        document.put("fsdp_backward_prefetch", prefetch.with_data(data), call)
    else:
        document.say("fsdp_backward_prefetch", "backward_pre", line)
    _units(document, arguments.get("auto_wrap_policy"), line)
    _recomputed(document, arguments, line)
    if arguments.get("forward_prefetch", Value(False)).data:
        document.miss(line, "forward_prefetch", "the next unit is gathered ahead in forward")
    if arguments.get("limit_all_gathers", Value(True)).data is False:
        document.miss(line, "limit_all_gathers", "gathers run ahead without a limit")
    for key in ("ignored_modules", "ignored_states", "process_group"):
        if arguments.get(key, Value(None)).data is not None:
            document.miss(line, key, Either("it is not read"))


def _units(document: CallDocument, policy: Value | None, line: int) -> None:
    """Which modules are units."""
    if policy is None or policy.data is None:
        document.miss(line, "auto_wrap_policy", _ONE_UNIT)
        return
    names = _classes(policy.data)
    if names:
        document.say("fsdp_wrap", names, line)
    else:
        why = "which layers are units cannot be told: priced are the model's; --fsdp-wrap says it"
        document.miss(line, "auto_wrap_policy", Either(why))


def _classes(data: Any) -> list[str]:
    """Classes that a policy wraps, by their names; empty where they cannot be told.

    They stand in a set, in ``ModuleWrapPolicy({...})``, or in ``partial(
    transformer_auto_wrap_policy, transformer_layer_cls={...})``.
    """
    if isinstance(data, Call):
        given = data.argument(0, "module_classes") if data.name == "ModuleWrapPolicy" else None
        given = given or data.keywords.get("transformer_layer_cls")
        return [] if given is None else _classes(given.data)
    if isinstance(data, (Symbol, Class)):
        return [data.name]
    if isinstance(data, (list, tuple, set, frozenset)):
        names = [_classes(each) for each in data]
        return [name for each in names for name in each] if all(names) else []
    return []


def _recomputed(document: CallDocument, arguments: dict[str, Value], line: int) -> None:
    """Layers that Lightning's strategy has recomputed, by checkpoints that are not reentrant."""
    for key in ("activation_checkpointing_policy", "activation_checkpointing"):
        value = arguments.get(key)
        if value is None or value.data is None:
            continue
        document.say("checkpointing", "full", line)
        document.say("use_reentrant", False, line)
        why = "checkpoints around its units: priced as the model's of its layers"
        names = _classes(value.data)
        same = bool(names) and names == document.get("fsdp_wrap")
        document.miss(line, key, Bounded(why) if same else Either(why))


def _mixed(document: CallDocument, policy: Value | None, line: int) -> None:
    """``MixedPrecision`` of a script's own FSDP1: half precision, in autocast as others have it."""
    told = _told_half(document, policy, "mixed_precision", line)
    if told is None:
        return
    dtype, made = told
    if document.get("precision") in (None, "fp32"):
        why = "FSDP casts without autocast, which is priced beside it: --fsdp-version 2 has none"
        document.miss(line, "mixed_precision", Either(why))
        document.say("precision", dtype, line)
    if dtype == "bf16":
        document.say("fsdp_mixed_precision", True, line)
    else:
        why = "FSDP's own half precision is priced in bfloat16 alone: priced is autocast"
        document.miss(line, "mixed_precision", Either(why))
    reduce = made.argument(1, "reduce_dtype")
    if reduce is not None and getattr(reduce.data, "name", "") == "float32":
        why = "gradients are reduced in float32: priced in half precision"
        document.miss(line, "reduce_dtype", why)


def _told_half(
    document: CallDocument, policy: Value | None, key: str, line: int
) -> tuple[str, Call] | None:
    """The half precision of a policy, and the call that makes it; None where there is none.

    Where it cannot be told, that is noted.
    """
    if policy is None or policy.data is None:
        return None
    dtype = _half_of(policy.data, 0)
    if dtype is None:
        document.miss(line, key, Either("its dtypes cannot be told; --bf16 says it"))
    return (dtype, policy.data) if dtype else None


def _half_of(policy: Any, place: int) -> str | None:
    """The half precision of a policy; empty for none, None where it cannot be told."""
    if not isinstance(policy, Call):
        return None
    value = policy.argument(place, "param_dtype")
    if value is None or value.data is None:
        return ""
    name = value.data.name if isinstance(value.data, Symbol) else ""
    return {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": ""}.get(name)


def _fsdp2(document: CallDocument, found: Found) -> None:
    """``fully_shard`` of layers in a loop, and of the model."""
    calls = [each for each in found.named("fully_shard") if each.library in ("torch", "")]
    if not calls:
        return
    first = calls[0]
    units = [each for each in calls if each.loops]
    document.say("fsdp", "full_shard", first.line)
    arguments = first.keywords
    if "**" in arguments:
        document.miss(first.line, "fully_shard", Either("further arguments cannot be told: **"))
    reshard = arguments.get("reshard_after_forward", Value(True)).data
    if reshard is False:
        document.say("fsdp", "shard_grad_op", first.line)
    elif reshard is not True and reshard is not None:
        why = "between: priced is that they are given back; --fsdp says it"
        document.miss(first.line, "reshard_after_forward", Either(why))
    offload = arguments.get("offload_policy", Value(None)).data
    if offload is not None:
        document.say("fsdp_offload", True, first.line)
    _policy(document, arguments.get("mp_policy"), first.line)
    mesh = arguments.get("mesh", Value(None)).data
    shape = mesh.argument(1, "mesh_shape") if isinstance(mesh, Call) else None
    is_flat = shape is not None and isinstance(shape.data, (list, tuple)) and len(shape.data) == 1
    if mesh is not None and not is_flat:
        why = "a mesh that may not be of one dimension: as if over all GPUs; --fsdp-shard-size says"
        document.miss(first.line, "mesh", Either(f"{why} otherwise"))
    if not units:
        document.miss(first.line, "fully_shard", _ONE_UNIT)
        return
    names = list(_loops(found, units[0].line))
    if names and all(names):
        document.say("fsdp_wrap", names, first.line)
    elif not names:
        why = "which modules are units cannot be told: priced are the model's layers; --fsdp-wrap"
        document.miss(units[0].line, "fully_shard", Either(f"{why} says it"))
    whole = [each for each in calls if not each.loops]
    if not any(root_of(_given(each)) in (found.load, root_of(found.model)) for each in whole):
        document.miss(first.line, "fully_shard", Either("the model itself is no unit: it is taken"))
    ends = [each for each in whole if root_of(_given(each)) is not found.load]
    if ends:
        why = "units of their own besides the layers: --fsdp-wrap-ends says it"
        document.miss(ends[0].line, "fully_shard", Either(why))


def _given(call: Call) -> Any:
    value = call.argument(0, "module")
    return None if value is None else value.data


def _policy(document: CallDocument, policy: Value | None, line: int) -> None:
    """``MixedPrecisionPolicy``: half parameters, gradients that are reduced in float32."""
    told = _told_half(document, policy, "mp_policy", line)
    if told is None:
        return
    dtype, made = told
    if document.get("precision") not in (None, "fp32"):
        why = "autocast beside FSDP's own half precision: priced is that without autocast"
        document.miss(line, "mp_policy", Either(why))
    document.say("precision", dtype, line)
    document.say("fsdp_mixed_precision", True, line)
    reduce = made.argument(1, "reduce_dtype")
    if reduce is None or getattr(reduce.data, "name", "") != "float32":
        why = "gradients are reduced in half precision: priced in float32"
        document.miss(line, "reduce_dtype", Saving(why))


def _loops(found: Found, line: int) -> Iterator[str]:
    """What a loop around a line goes over: the classes that it asks for, or ``""`` for layers."""
    around = [
        node
        for statement in found.source.body
        for node in ast.walk(statement)
        if isinstance(node, ast.For) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not around:
        return
    node = around[-1]
    over = as_text(node.iter)
    if _LAYERS.search(over.removesuffix(")")) or _LAYERS.search(over):
        yield ""
        return
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and as_text(each.func) == "isinstance":
            kinds = each.args[1]
            names = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
            yield from (as_text(name).rpartition(".")[2] for name in names)
            return
