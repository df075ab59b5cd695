"""torchtitan's settings: TOML of releases until February 2026, and what its functions set.

Source: ``train_configs/*.toml`` and ``config/job_config.py`` of that time, ``config/configs.py``
and ``models/*/config_registry.py`` since.
"""

from __future__ import annotations

import re
from typing import Any

from memest.errors import ConfigError
from memest.readers.mapping import DocumentKeys, Key, KeyTable, by_key, read_part, read_table
from memest.readers.values import Bounded, KeyOrigin, Level

__all__ = ["TORCHTITAN"]

_MODELS = {
    ("llama3", "8B"): "meta-llama/Llama-3.1-8B",
    ("llama3", "70B"): "meta-llama/Llama-3.1-70B",
    ("llama3", "405B"): "meta-llama/Llama-3.1-405B",
    ("llama3", "1B"): "meta-llama/Llama-3.2-1B",
    ("llama3", "3B"): "meta-llama/Llama-3.2-3B",
    ("llama4", "17bx16e"): "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    ("llama4", "17bx128e"): "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    **{
        ("qwen3", size): f"Qwen/Qwen3-{size}"
        for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")
    },
    ("deepseek_v3", "671B"): "deepseek-ai/DeepSeek-V3",
}
_NO_TENSOR = "no tensor of a training step depends on it"
_DEGREES = {
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
    "context_parallel_degree": "cp",
    "expert_parallel_degree": "ep",
}
_OWNERS = {
    "Llama": "meta-llama",
    "Meta-Llama": "meta-llama",
    "Qwen3": "Qwen",
    "DeepSeek": "deepseek-ai",
}
_OPTIMIZERS = {
    ("AdamW", "fused"): "adamw_torch_fused",
    ("AdamW", "foreach"): "adamw_torch_foreach",
    ("AdamW", "for-loop"): "adamw_torch_loop",
    ("Adam", "fused"): "adam_fused",
    ("Adam", "foreach"): "adam",
    ("Adam", "for-loop"): "adam_loop",
}


def _parts(keys: DocumentKeys) -> None:
    read_part(keys, "model", KeyTable(readers=(_model,), rest=_NO_TENSOR))
    training = keys.part("training")
    offload = bool(training.switch("enable_cpu_offload"))
    read_table(training, _TRAINING)
    read_part(keys, "optimizer", _OPTIMIZER)
    read_part(keys, "activation_checkpoint", _CHECKPOINTING)

    def parallel(part: DocumentKeys) -> None:
        _parallel(part, offload=offload, mixed=training.value_of("precision") == "bf16")

    read_part(
        keys,
        "parallelism",
        KeyTable(readers=(parallel,), rest="how parallel parts are scheduled"),
    )
    keys.absorb(training)
    read_part(keys, "compile", KeyTable(readers=(_compilation,), rest="how it compiles"))


def _model(part: DocumentKeys) -> None:
    name, flavor = part.scalar("name"), part.scalar("flavor")
    assets = part.scalar("hf_assets_path") or part.scalar("tokenizer_path")
    model, key = _MODELS.get((str(name or "llama3"), str(flavor))), "flavor"
    if model is None and assets:
        base = str(assets).rstrip("/").rpartition("/")[2]
        owner = next((o for prefix, o in _OWNERS.items() if base.startswith(prefix)), None)
        model, key = (f"{owner}/{base}" if owner else None), "hf_assets_path"
    if model is not None:
        part.set("model", model, key)
        label = f"torchtitan's {name or 'llama3'} {flavor}"
        part.miss_default(
            "the model's code", Bounded(f"{label}: priced is transformers' model of its sizes")
        )
    elif flavor is not None or name is not None:
        part.miss("flavor", Bounded(f"{name} {flavor} is not known: name the model yourself"))
    converters = part.take("converters")
    if converters:
        part.miss("converters", f"{converters}: linears are replaced")


def _compilation(part: DocumentKeys) -> None:
    if part.switch("enable"):
        part.offer("torch_compile", True, "enable", "compilation fuses operators; eager is priced")


def _sizes(training: DocumentKeys) -> None:
    length, key = training.whole("seq_len"), "seq_len"
    if length is None:
        length, key = training.whole("max_context_length"), "max_context_length"
    if length is None:
        length = 2048
        training.default("seq_len", length)
    else:
        training.set("seq_len", length, key)
    tokens = training.whole("num_tokens_per_microbatch_per_dp_rank")
    batch, key = training.whole("local_batch_size"), "local_batch_size"
    if batch is None:
        batch, key = training.whole("batch_size"), "batch_size"
    if batch is not None:
        training.set("batch", batch, key)
    elif tokens is not None:
        name = "num_tokens_per_microbatch_per_dp_rank"
        if length < 1 or tokens % length:
            training.miss(
                name, Bounded(f"{tokens} tokens are no whole number of samples of {length}")
            )
        training.set("batch", max(1, tokens // max(1, length)), name)
        training.miss(name, Bounded("documents are packed: priced as full samples"))
    elif training.has("max_context_length"):
        training.default("batch", max(1, 16384 // max(1, length)), "16384 tokens")
    else:
        training.default("batch", 8)
    for name in ("global_batch_size", "num_tokens_per_train_step"):
        total = training.whole(name)
        if total is not None and total > 0:
            training.miss(
                name,
                Bounded("micro-batches of a step depend on the GPUs: --grad-accum says how many"),
            )


def _precision(training: DocumentKeys) -> None:
    words = {"bfloat16": "bf16", "float32": "fp32"}
    dtype = training.set_from(
        "mixed_precision_param",
        Key("precision", "text", "bf16", "mixed_precision_param bfloat16", words),
    )
    if dtype is not None and dtype not in words:
        raise ConfigError(
            f"{training.where('mixed_precision_param')} "
            f"{training.document['mixed_precision_param']!r} is not known. Legal: "
            "bfloat16, float32."
        )


def _optimizer(part: DocumentKeys) -> None:
    name, implementation = (
        str(part.scalar("name") or "AdamW"),
        str(part.scalar("implementation") or "fused"),
    )
    optim = _OPTIMIZERS.get((name, implementation))
    if optim is None:
        raise ConfigError(
            f"{part.where('name')}: {name}, {implementation} is not modelled. Legal: "
            f"{', '.join(' '.join(pair) for pair in _OPTIMIZERS)}; or name one with --optim."
        )
    if part.has("name") or part.has("implementation"):
        part.set("optim", optim, "implementation" if part.has("implementation") else "name")
    else:
        part.default("optim", optim)


def _checkpointing(part: DocumentKeys) -> None:
    mode = part.scalar("mode")
    option = str(part.scalar("selective_ac_option") or "2")
    if mode is None:
        mode = "selective"
        origin = KeyOrigin(f"default of {part.framework}", Level.DEFAULT)
    else:
        origin = part.origin("mode")
    if mode in ("none", "full"):
        part.set_at("checkpointing", mode, origin)
    elif mode == "selective" and re.fullmatch(r"\d+", option) and int(option) > 0:
        part.set_at("checkpointing", f"every_n:{int(option)}", origin)
    elif mode in ("selective", "memory_budget"):
        part.set_at("checkpointing", "none", origin)
        part.miss("mode", Bounded(f"{mode} by operator: priced without, which is more"))
    else:
        raise ConfigError(
            f"{origin.origin} {mode!r} is not known. Legal: none, selective, full, memory_budget."
        )


def _parallel(part: DocumentKeys, *, offload: bool, mixed: bool) -> None:
    shard = part.whole("data_parallel_shard_degree")
    copies = part.whole("data_parallel_replicate_degree") or 1
    degrees = {key: part.whole(key) or 1 for key in _DEGREES}
    reshard = part.scalar("fsdp_reshard_after_forward")
    world: Any = None
    if shard is not None and shard > 0:
        world = shard * copies
        for key, degree in degrees.items():
            # ranks that share experts are among those that share data and layers (ParallelDims)
            world *= 1 if key == "expert_parallel_degree" else degree
        if world > 1:
            part.set("num_gpus", world, "data_parallel_shard_degree")
    else:
        part.miss_default(
            "data_parallel_shard_degree -1", Bounded("all GPUs there are: --num-gpus says it")
        )
    context_degree = degrees["context_parallel_degree"]
    # the mesh of the parameters is dp_shard x cp
    sharded = shard is None or shard != 1 or context_degree > 1
    if sharded:
        mode = "shard_grad_op" if reshard == "never" else "full_shard"
        key = "fsdp_reshard_after_forward" if reshard else "data_parallel_shard_degree"
        part.set_at("fsdp", mode, KeyOrigin(part.where(key), Level.DEFAULT))
        if copies > 1 and shard is not None and shard > 1:
            part.set("fsdp_shard_size", shard * context_degree, "data_parallel_shard_degree")
        if offload:
            part.set("fsdp_offload", True, "data_parallel_shard_degree")
    # FSDP's own mixed precision, which Setup has for loops that are not plain scripts
    part.default("loop", "accelerate" if sharded and mixed else "plain")
    for key, keyword in _DEGREES.items():
        if degrees[key] > 1:
            part.offer(keyword, degrees[key], key, f"{key} {degrees[key]}: this parallelism")
    if degrees["tensor_parallel_degree"] > 1:
        _sequence(part, degrees, sharded=sharded, mixed=mixed)
    rotate = part.scalar("context_parallel_rotate_method")
    if rotate is not None and context_degree > 1:
        part.offer("cp_rotate", rotate, "context_parallel_rotate_method", "how keys rotate")
    elif rotate is not None:
        part.ignore("context_parallel_rotate_method", "no context parallelism")
    inside = part.whole("expert_tensor_parallel_degree")
    if inside not in (None, 1):
        remark = f"{inside}: experts are sharded inside, not only shared"
        part.miss("expert_tensor_parallel_degree", remark)


def _sequence(part: DocumentKeys, degrees: dict[str, int], *, sharded: bool, mixed: bool) -> None:
    """What torchtitan does beside tensor parallelism unasked: sequence and loss parallelism.

    Source: ``apply_tp`` of ``models/llama3/infra/parallelize.py`` and ``ParallelismConfig``, which
    had ``disable_loss_parallel`` until June 2026 and has ``enable_sequence_parallel`` since March;
    ``maybe_enable_amp`` of ``distributed/utils.py``.
    """
    on, no_loss = part.switch("enable_sequence_parallel"), part.switch("disable_loss_parallel")
    if part.switch("enable_async_tensor_parallel"):
        part.miss(
            "enable_async_tensor_parallel", "collectives in pieces among matmuls: priced without"
        )
    if mixed and not sharded:
        part.miss_default(
            "mixed precision beside tensor parallelism",
            Bounded("FSDP2's own, or none in releases before April 2026: autocast is priced"),
        )
    others = [
        key for key in ("expert_parallel_degree", "pipeline_parallel_degree") if degrees[key] > 1
    ]
    if on is False:
        part.miss(
            "enable_sequence_parallel",
            Bounded("priced by transformers' plan, which gathers logits"),
        )
    elif others:
        remark = Bounded(f"not modelled beside {others[0]}: activations are priced whole")
        if on:
            part.miss("enable_sequence_parallel", remark)
        else:
            part.miss_default("sequence parallelism", remark)
    else:
        if on:
            part.set("tp_sequence_parallel", True, "enable_sequence_parallel")
        else:
            part.default("tp_sequence_parallel", True, "beside tensor parallelism")
        if no_loss:
            part.set("tp_loss_parallel", False, "disable_loss_parallel")
        return
    if no_loss is not None:
        part.ignore("disable_loss_parallel", "logits are gathered in any case")


_TRAINING = KeyTable(
    options={
        "dtype": Key("dtype", "scalar", "float32"),
        "max_norm": Key("max_grad_norm", "scalar", 1.0),
    },
    readers=(_sizes, _precision),
    ignored_keys=by_key(
        {
            _NO_TENSOR: """steps dataset dataset_path gc_freq gc_debug mixed_precision_reduce
                disable_cuda_graphs dataloader seed deterministic"""
        }
    ),
)
_OPTIMIZER = KeyTable(
    options={
        "weight_decay": Key("weight_decay", "scalar", 0.1),
        "early_step_in_backward": Key("optim_in_backward", "enabled"),
    },
    readers=(_optimizer,),
    rest="a number of the host",
)
_CHECKPOINTING = KeyTable(
    defaults={"use_reentrant": False}, readers=(_checkpointing,), rest="how it recomputes"
)
TORCHTITAN = KeyTable(
    defaults={
        "attn_implementation": "sdpa",
        "alloc_conf": ("expandable_segments:True", "its run_train.sh sets it"),
    },
    readers=(_parts,),
    ignored_keys=by_key(
        {
            _NO_TENSOR: """job profiling profiler metrics lr_scheduler checkpoint comm debug
                experimental fault_tolerance memory_estimation validation validator dataloader
                tokenizer logging"""
        }
    ),
    unmodelled_keys={"quantize": "fp8 and MX linears", "float8": "fp8", "mx": "MX linears"},
)
"""What becomes of the keys of its configuration."""
