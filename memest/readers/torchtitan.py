"""torchtitan's settings: TOML of releases until February 2026, and what its functions set.

Source: ``train_configs/*.toml`` and ``config/job_config.py`` (``config_manager.py``) of that time,
``config/configs.py`` and ``models/*/config_registry.py`` since.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from memest.errors import ConfigError
from memest.readers.mapping import DocumentKeys, Key, KeyTable, by_key, read_part, read_table
from memest.readers.torchtitan_parallel import parallel_table
from memest.readers.values import Bounded, Either, KeyOrigin, Level, Saving

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
_OWN_CODE = Either("code of one's own, which is not run")
_RECOMPUTED_SHAPES = (
    "per_op_sac_force_recompute_mm_shapes_by_fqns",
    "force_recompute_mm_shapes_by_fqns",
)
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


_MOVED = {
    ("training", "compile"): ("compile", "enable"),
    ("training", "data_parallel_degree"): ("parallelism", "data_parallel_shard_degree"),
    ("compile", "enable_async_tensor_parallel"): ("parallelism", "enable_async_tensor_parallel"),
    **{
        (section, key): ("parallelism", key)
        for section in ("training", "experimental")
        for key in """data_parallel_replicate_degree data_parallel_shard_degree
            disable_loss_parallel tensor_parallel_degree fsdp_reshard_after_forward
            enable_async_tensor_parallel enable_compiled_autograd context_parallel_degree
            context_parallel_rotate_method pipeline_parallel_degree pipeline_parallel_schedule
            pipeline_parallel_schedule_csv pipeline_parallel_split_points
            pipeline_parallel_microbatches""".split()
    },
}
"""Where keys stand that older releases had elsewhere (and one that newer ones moved)."""


def _section(keys: DocumentKeys, name: str) -> DocumentKeys:
    """A section with the keys that other releases have elsewhere."""
    part = keys.part(name)
    document = {key: v for key, v in part.document.items() if (name, key) not in _MOVED}
    origins = dict(part.origins)
    for (section, key), (target, new_name) in _MOVED.items():
        other = keys.document.get(section)
        if target == name and isinstance(other, Mapping) and key in other:
            document.setdefault(new_name, other[key])
            origins[f"{name}.{new_name}"] = replace(keys, prefix=f"{section}.").origin(key)
    return replace(part, document=document, origins=origins, samples_per_step=None)


def _parts(keys: DocumentKeys) -> None:
    training = _section(keys, "training")
    offload = bool(training.switch("enable_cpu_offload"))
    read_table(training, _TRAINING)
    keys.absorb(training)
    read_part(keys, "model", _MODEL)
    read_part(keys, "hf_transformers", _HUB_MODEL)
    read_part(keys, "optimizer", _OPTIMIZER)
    read_part(keys, "activation_checkpoint", _CHECKPOINTING)
    mixed = training.value_of("precision") == "bf16"
    parallel = parallel_table(offload=offload, mixed=mixed, batch=training.value_of("batch"))
    for name, table in (("parallelism", parallel), ("compile", _COMPILATION)):
        part = _section(keys, name)
        read_table(part, table)
        keys.absorb(part)
    for name, table in _SECTIONS.items():
        if isinstance(keys.document.get(name), Mapping):
            read_part(keys, name, table)


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
        part.miss("converters", Either(f"{converters}: linears are replaced"))
    if str(part.document.get("norm_type") or "rmsnorm").endswith("rmsnorm"):
        part.pass_over(("norm_type",), "priced as it is")
    attention = part.scalar("attn_backend")
    if attention == "sdpa":
        part.ignore("attn_backend", "priced as it is")
    elif attention is not None:
        part.miss("attn_backend", Either(f"{attention} attention: priced is sdpa"))


def _compilation(part: DocumentKeys) -> None:
    """Each layer, and the loss, is compiled by itself (``apply_compile``)."""
    components = part.take("components", ["model", "loss"])
    if not part.switch("enable"):
        part.pass_over(("enable", "components"), "off")
    elif components in (["loss"], ("loss",), "loss"):
        part.miss("enable", Saving("the loss is compiled: priced eagerly"))
    else:
        part.miss("enable", Either("each layer is compiled by itself: priced eagerly"))


def _loss(part: DocumentKeys) -> None:
    name = str(part.take("class") or "")
    if "Chunked" in name:
        remark = f"{name} takes logits in pieces: priced are all at once"
        part.miss("class", Saving(remark))
    elif name in ("CrossEntropyLoss", ""):
        part.ignore("class", "priced is cross entropy")
    else:
        part.miss("class", Either(f"{name}: priced is cross entropy"))


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
                Bounded("how many micro-batches a step has, which holds no more: one is priced"),
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


def _older(training: DocumentKeys) -> None:
    """Keys of 2024."""
    kind = training.scalar("data_parallel_type")
    if kind is not None and str(kind) != "fsdp":
        training.miss("data_parallel_type", f"{kind}: priced as FSDP2")
    if training.switch("enable_loss_parallel") is False:
        training.miss("enable_loss_parallel", "beside tensor parallelism logits are whole")


def _optimizer(part: DocumentKeys) -> None:
    name = str(part.scalar("name") or "AdamW")
    fused = part.switch("fused")
    older = "foreach" if fused is False else "fused"
    implementation = str(part.scalar("implementation") or older)
    optim = _OPTIMIZERS.get((name, implementation))
    if optim is None:
        raise ConfigError(
            f"{part.where('name')}: {name}, {implementation} is not modelled. Legal: "
            f"{', '.join(' '.join(pair) for pair in _OPTIMIZERS)}; or name one with --optim."
        )
    named_keys = [key for key in ("implementation", "fused", "name") if part.has(key)]
    if named_keys:
        part.set("optim", optim, named_keys[0])
    else:
        part.default("optim", optim)


def _checkpointing(part: DocumentKeys) -> None:
    mode = part.scalar("mode")
    if part.document.get("mode", "") is None:
        mode = "none"  # a command line's word for it
    option = str(part.scalar("selective_ac_option") or "2")
    if mode is None:
        mode = "selective"
        origin = KeyOrigin(f"default of {part.framework}", Level.DEFAULT)
    else:
        origin = part.origin("mode")
        part.take("mode")
    if mode in ("none", "full"):
        part.set_at("checkpointing", mode, origin)
    elif mode == "selective" and re.fullmatch(r"\d+", option) and int(option) > 0:
        part.set_at("checkpointing", f"every_n:{int(option)}", origin)
    elif mode == "selective" and option == "op":
        part.set_at("checkpointing", "selective", origin)
    elif mode == "memory_budget":
        part.set_at("checkpointing", "none", origin)
        part.miss("mode", Saving("what the compiler recomputes: priced without, which is more"))
    else:
        raise ConfigError(
            f"{origin.origin} {mode!r} is not known. Legal: none, selective (selective_ac_option "
            "op or a number), full, memory_budget."
        )
    for key in _RECOMPUTED_SHAPES:
        if option != "op" or part.document.get(key) in ([], ["moe.router.gate"]):
            part.pass_over((key,), "its default, or not by operator")


_TRAINING = KeyTable(
    options={
        "dtype": Key("dtype", "scalar", "float32"),
        "max_norm": Key("max_grad_norm", "scalar", 1.0),
    },
    readers=(_sizes, _precision, _older),
    ignored_keys=by_key(
        {
            _NO_TENSOR: """steps dataset dataset_path gc_freq gc_debug mixed_precision_reduce
                dataloader seed warmup_steps debug_moe_force_load_balance""",
            "graphs keep their own memory, which holds what is priced": "disable_cuda_graphs",
        }
    ),
    unmodelled_keys={
        "deterministic": "deterministic kernels may take more",
        "img_size": "images",
        "classifier_free_guidance_prob": "images",
        "classifer_free_guidance_prob": "images",
        **dict.fromkeys(
            """fp8_linear enable_fp8_linear enable_float8_linear enable_fsdp_fp8_all_gather
            enable_fsdp_float8_all_gather""".split(),
            Either("fp8 linears"),
        ),
    },
)
_MODEL = KeyTable(
    readers=(_model,),
    ignored_keys=by_key({_NO_TENSOR: "print_after_conversion attn_mask_type"}),
    unmodelled_keys={
        "norm_type": "norms of another kind than the model's",
        "use_flex_attn": Either("flex attention: priced is sdpa"),
        "num_mtp_layers": "layers that predict further tokens",
        "moe_comm_backend": "how experts get their tokens",
        "non_blocking_capacity_factor": "room for a fixed number of tokens at every expert",
        "tp_gemm_backend": "collectives inside of matmuls",
    },
)
_HUB_MODEL = KeyTable(options={"model": Key("model", "text")}, rest=_NO_TENSOR)
_OPTIMIZER = KeyTable(
    options={
        "weight_decay": Key("weight_decay", "scalar", 0.1),
        "early_step_in_backward": Key("optim_in_backward", "enabled"),
    },
    readers=(_optimizer,),
    ignored_keys=by_key({"a number of the host": "lr beta1 beta2 betas eps"}),
    unmodelled_keys={
        "param_groups": Either("optimizers of several kinds: AdamW is priced"),
        "optimizer_factory_kwargs_by_name": Either("optimizers of several kinds: AdamW is priced"),
        "class": Either("no AdamW of torchtitan's own: AdamW is priced; --optim says it"),
    },
)
_CHECKPOINTING = KeyTable(
    defaults={"use_reentrant": False},
    readers=(_checkpointing,),
    ignored_keys=by_key(
        {
            "how it recomputes": """preserve_rng_state determinism_check debug early_stop
                visualize_memory_budget_pareto selective_ac_option memory_budget"""
        }
    ),
    unmodelled_keys=dict.fromkeys(_RECOMPUTED_SHAPES, "matmuls by name are recomputed"),
)
_COMPILATION = KeyTable(
    readers=(_compilation,),
    ignored_keys=by_key({"how it compiles": "backend"}),
)
_SECTIONS = {
    "loss": KeyTable(
        readers=(_loss,), ignored_keys=by_key({"in pieces": "num_chunks global_vocab_size"})
    ),
    **dict.fromkeys(
        ("validation", "validator"),
        KeyTable(
            ignored_keys=by_key(
                {
                    "of the validation": """dataset dataset_path freq steps local_batch_size seq_len
                        dataloader class enable_classifier_free_guidance save_img_count
                        classifier_free_guidance_scale denoising_steps save_img_folder
                        all_timesteps"""
                }
            ),
            unmodelled_keys={"enable": "a validation between the steps"},
        ),
    ),
    "fault_tolerance": KeyTable(
        ignored_keys=by_key(
            {
                "of TorchFT": """process_group process_group_timeout_ms replica_id group_size
                    min_replica_size semi_sync_method sync_steps num_fragments should_quantize
                    fragment_sync_delay fragment_update_alpha module_fqns_per_model_fragment"""
            }
        ),
        unmodelled_keys={"enable": "TorchFT: copies of weights beside the run's"},
    ),
    "float8": KeyTable(
        ignored_keys=by_key(
            {
                "of fp8 linears, which model.converters name": """enable_fsdp_float8_all_gather
                    precompute_float8_dynamic_scale_for_fsdp filter_fqns emulate recipe_name
                    force_recompute_fp8_weight_in_bwd moe_fqns_prototype scaling_type_input
                    scaling_type_weight scaling_type_grad_output"""
            }
        ),
        unmodelled_keys={"enable_float8_linear": Either("fp8 linears")},
    ),
    "mx": KeyTable(rest="of MX linears, which model.converters name"),
    "quantize": KeyTable(rest="of replaced linears, which model.converters name"),
    "experimental": KeyTable(
        ignored_keys=dict.fromkeys(
            (key for section, key in _MOVED if section == "experimental"), "read as parallelism"
        ),
        unmodelled_keys=dict.fromkeys(
            "custom_import custom_args_module custom_model_path torch_spmd".split(),
            _OWN_CODE,
        ),
    ),
    "debug": KeyTable(
        ignored_keys=by_key(
            {
                _NO_TENSOR: """seed moe_force_load_balance spmd_typechecking print_config
                    save_config_file enable_structured_logging deterministic_warn_only
                    detect_anomaly"""
            }
        ),
        unmodelled_keys={
            "deterministic": "deterministic kernels may take more",
            "batch_invariant": "other kernels",
        },
    ),
    "job": KeyTable(
        ignored_keys=by_key(
            {
                _NO_TENSOR: """dump_folder description print_config save_config_file config_file
                    use_for_integration_test print_args save_config_folder"""
            }
        ),
        unmodelled_keys={"custom_config_module": _OWN_CODE},
    ),
    "override": KeyTable(unmodelled_keys={"imports": _OWN_CODE}),
}
"""Further sections, each by itself."""
TORCHTITAN = KeyTable(
    defaults={
        "attn_implementation": "sdpa",
        "alloc_conf": ("expandable_segments:True", "its run_train.sh sets it"),
    },
    readers=(_parts,),
    ignored_keys=by_key(
        {
            _NO_TENSOR: """job profiling profiler metrics lr_scheduler checkpoint comm
                memory_estimation dataloader tokenizer logging dump_folder compile
                parallelism training"""
        }
    ),
    unmodelled_keys={
        "model_converters": Either("linears are replaced"),
        "encoder": "further models",
        "data": "images",
        "eval": "generation between the steps",
        "inference": "generation",
        "class": Either("a trainer of its own: priced is torchtitan's"),
        "trainer": Either("reinforcement learning: priced is nothing of it"),
        "generator": Either("reinforcement learning: priced is nothing of it"),
    },
)
"""What becomes of the keys of its configuration."""
