"""axolotl's YAML.

Source: axolotl at July 2026: ``utils/schemas/`` (fields and defaults), ``utils/config`` (dtype,
checkpointing), ``loaders/model.py`` (quantisation), ``core/builders/base.py`` (training arguments).
"""

from __future__ import annotations

from memest.errors import ConfigError
from memest.readers.mapping import DocumentKeys, Key, KeyTable, by_key
from memest.readers.sharding import read_deepspeed_value, read_fsdp
from memest.readers.training_arguments import (
    IGNORED_KEYS,
    UNMODELLED_KEYS,
    read_checkpointing,
    set_adapter_value,
)
from memest.readers.values import Bounded, names_of

__all__ = ["AXOLOTL"]

_IGNORED_KEYS = {
    **IGNORED_KEYS,
    **by_key(
        {
            "data is prepared on the host": """base_model_config cls_model_config tokenizer_config
                tokenizer_type tokenizer_use_fast tokenizer_legacy tokenizer_save_jinja_files
                processor_type special_tokens tokens dataset_prepared_path dataset_processes
                test_datasets shuffle_merged_datasets pretraining_dataset dataset_shard_num
                dataset_shard_idx skip_prepare_dataset chat_template_jinja default_system_message
                eot_tokens max_prompt_len min_sample_len sample_packing_group_size
                sample_packing_bin_size sample_packing_sequentially pad_to_sequence_len
                eval_sample_packing excess_length_strategy dataset_exact_deduplication
                roles_to_train roles_to_mask field_messages""",
            "names, logging and saving allocate nothing on the GPU": """saves_per_epoch
                evals_per_epoch save_first_step wandb_viz early_stopping_patience
                loss_watchdog_threshold loss_watchdog_patience eval_table_size
                eval_max_new_tokens use_wandb use_mlflow use_comet mlflow_tracking_uri
                mlflow_experiment_name comet_project_name profiler_steps
                auto_resume_from_checkpoints strict""",
            "the model's own config says it": """model_type type_of_model is_llama_derived_model
                is_mistral_derived_model is_falcon_derived_model is_qwen_derived_model
                trust_remote_code""",
            "Python's collector": "gc_steps gc_collect_steps",
            "changes no size": "lora_fan_in_fan_out peft_init_lora_weights lora_alpha_pattern",
            "adapters that are there already have the sizes named here": "lora_model_dir",
            "speed only": "tf32",
            "after training": "merge_lora",
            "the launch command says it": "world_size ddp",
        }
    ),
}
_UNMODELLED_KEYS = {
    **UNMODELLED_KEYS,
    "flash_attn_cross_entropy": Bounded("flash-attn's cross entropy"),
    "flash_attn_fuse_mlp": Bounded("flash-attn's MLP"),
    "chunked_cross_entropy": Bounded("logits come in chunks; priced is all at once"),
    "tiled_mlp": Bounded("the MLP works in tiles"),
    "lora_mlp_kernel": Bounded("a fused kernel for LoRA"),
    "lora_qkv_kernel": Bounded("a fused kernel for LoRA"),
    "lora_o_kernel": Bounded("a fused kernel for LoRA"),
    "lora_embedding_kernel": Bounded("a fused kernel for LoRA"),
    "unfrozen_parameters": Bounded(
        "only these parameters train; all are priced: --freeze names the others"
    ),
    "layer_offloading": Bounded("layers move to the host"),
    "selective_checkpointing": Bounded("what is recomputed is chosen by operator"),
    "lora_rank_pattern": "ranks by module",
    "peft_layers_to_transform": Bounded("adapters on some layers only; priced on all"),
    "peft_layer_replication": "layers are repeated",
    "relora": "ReLoRA",
    "gptq": "GPTQ bases",
    "qat": "quantisation-aware training",
    "fp8": "fp8",
    "reward_model": "a reward model",
    "process_reward_model": "a reward model",
    "model_quantization_config": "a base quantised otherwise",
    "quantize_moe_experts": Bounded("experts are quantised"),
    "batch_flattening": "batches are flattened",
    "flex_attention": "flex attention: priced as the default",
    "xformers_attention": "xformers: priced as the default",
    "sage_attention": "SageAttention: priced as the default",
    "resize_token_embeddings_to_32x": "a few rows of the embeddings",
    "eval_causal_lm_metrics": "the evaluation generates",
    "do_bench_eval": "the evaluation generates",
    "gpu_memory_limit": Bounded("a limit of the process"),
    "max_memory": Bounded("weights are placed on several devices"),
    "deepcompile": "compilation",
}


def _batch(keys: DocumentKeys) -> None:
    micro, total = keys.value_of("batch"), keys.whole("batch_size")
    grad_accum = Key("grad_accum", "whole", 1)
    if keys.set_from("gradient_accumulation_steps", grad_accum) is not None:
        if total is not None:
            keys.ignore("batch_size", "gradient_accumulation_steps says it")
    elif total is not None:
        if "gradient_accumulation_steps" in keys.document:
            keys.set("grad_accum", max(1, total // max(1, micro)), "batch_size")
        else:
            keys.ignore("batch_size", "gradient_accumulation_steps is 1 where it is not named")


def _precision(keys: DocumentKeys) -> None:
    """Autocast and the dtype of the weights (``resolve_dtype``)."""
    bf16, fp16 = keys.scalar("bf16"), keys.switch("fp16")
    key, is_set = "bf16", bf16 is not None
    full = str(bf16).lower() == "full"
    auto = "bf16" not in keys.document or bf16 == "auto"
    on = full or (auto and not fp16) or str(bf16).lower() == "true"
    pure_bf16, pure_fp16 = keys.switch("bfloat16"), keys.switch("float16")
    if on and is_set:
        keys.set("precision", "bf16", key)
        keys.set("dtype", "bfloat16", key)
        if full:
            keys.miss(key, Bounded("full: weights are bfloat16 in evaluation too"))
    elif on:
        keys.default("precision", "bf16", "bf16 auto, on a GPU that has it")
        keys.default("dtype", "bfloat16", "bf16 auto, on a GPU that has it")
    elif fp16:
        keys.set("precision", "fp16", "fp16")
        keys.set("dtype", "float16", "fp16")
    else:
        if is_set:
            keys.set("precision", "fp32", key)
        else:
            keys.default("precision", "fp32")
        for name, value in (("bfloat16", pure_bf16), ("float16", pure_fp16)):
            if value:
                keys.set("dtype", name, name)
        if keys.value_of("dtype") is None and keys.document.get("load_in_8bit"):
            keys.default("dtype", "float16", "of 8-bit bases")
        elif keys.value_of("dtype") is None:
            keys.default("dtype", "float32")
    if on and fp16 is False:
        keys.ignore("fp16", "off")
    keys.take("float32")


def _checkpointing(keys: DocumentKeys) -> None:
    value = keys.document.get("gradient_checkpointing")
    if value in ("offload", "offload_disk"):
        keys.take("gradient_checkpointing")
        keys.set("checkpointing", "full", "gradient_checkpointing")
        keys.miss("gradient_checkpointing", Bounded(f"{value}: activations move to the host"))
    elif value is None:
        keys.take("gradient_checkpointing")
        keys.default("checkpointing", "none")
    if value and not keys.has("gradient_checkpointing_kwargs") and not keys.has("rl"):
        keys.default("use_reentrant", True)
    read_checkpointing(keys)


_ADAPTER = {
    "lora_r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "lora_target_modules",
    "lora_modules_to_save": "modules_to_save",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "peft_autocast_adapter_dtype": "autocast_adapter_dtype",
}


def _adapter(keys: DocumentKeys) -> None:
    kind = keys.scalar("adapter")
    four, eight = keys.switch("load_in_4bit"), keys.switch("load_in_8bit")
    linear = keys.switch("lora_target_linear")
    if kind is None:
        keys.pass_over((*_ADAPTER, "lora_target_linear"), "no adapter is named")
        for key, on in (("load_in_4bit", four), ("load_in_8bit", eight)):
            if on:
                raise ConfigError(
                    f"{keys.where(key)}: a quantised base does not train without adapters; "
                    "axolotl wants adapter: qlora."
                )
        return
    kind = str(kind).lower()
    if kind in ("lora", "qlora"):
        keys.default("lora_dropout", 0.0)
    keys.set("peft", "lora" if kind == "qlora" else kind, "adapter")
    for key, option in _ADAPTER.items():
        value = keys.take(key)
        if value not in (None, False) and value != []:
            set_adapter_value(keys, option, value, key)
    if linear:
        keys.set("lora_target_modules", ("all-linear",), "lora_target_linear")
        if keys.has("lora_target_modules"):
            keys.miss("lora_target_modules", "named besides lora_target_linear: all linear layers")
    if kind == "qlora" and eight:
        raise ConfigError(
            f"{keys.where('adapter')} qlora is for 4-bit bases, and load_in_8bit is on."
        )
    if four or kind == "qlora":
        _four_bits(keys, "load_in_4bit" if four else "adapter")
    elif eight:
        keys.set("load_in_8bit", True, "load_in_8bit")
    if four or eight or kind == "qlora":
        keys.default("prepare_kbit", False, "norms and embeddings are converted back after it")
    kernels = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
    if not any(key in keys.document for key in kernels) and not eight and not keys.has("rl"):
        keys.miss_default(
            "fused LoRA kernels", Bounded("on wherever the model allows; priced without")
        )


def _four_bits(keys: DocumentKeys, key: str) -> None:
    keys.set("load_in_4bit", True, key)
    part = keys.part("bnb_config_kwargs")
    for option, value in (
        ("bnb_4bit_quant_type", "nf4"),
        ("bnb_4bit_use_double_quant", True),
        ("bnb_4bit_compute_dtype", str(keys.value_of("dtype"))),
        ("bnb_4bit_quant_storage", "bfloat16"),
    ):
        part.set_from(option, Key(option, default=value))
    part.ignore_rest({}, {})
    keys.absorb(part)


def _attention(keys: DocumentKeys) -> None:
    for key, name in (
        ("flash_attention", "flash_attention_2"),
        ("sdp_attention", "sdpa"),
        ("eager_attention", "eager"),
    ):
        if keys.on(key):
            keys.set("attn_implementation", name, key)


def _optimizer(keys: DocumentKeys) -> None:
    arguments = keys.take("optim_args")
    if isinstance(arguments, dict):
        arguments = ",".join(f"{key}={value}" for key, value in arguments.items())
    if arguments:
        keys.set("optim_args", str(arguments), "optim_args")
    targets = keys.take("optim_target_modules")
    if targets is not None:
        targets = "all-linear" if targets == "all_linear" else targets
        keys.set("optim_target_modules", targets, "optim_target_modules")


def _kernels(keys: DocumentKeys) -> None:
    """Liger's kernels have a key each; together they are what the Trainer's switch does."""
    names = [key for key in keys.document if key.startswith("liger_")]
    active_keys = [key for key in names if keys.switch(key)]
    if not active_keys:
        keys.pass_over(names, "off")
        return
    loss = "liger_fused_linear_cross_entropy" in active_keys
    parts = ("liger_rope", "liger_rms_norm", "liger_glu_activation")
    if loss and all(key in active_keys for key in parts):
        keys.set("use_liger_kernel", True, "liger_fused_linear_cross_entropy")
        for key in names:
            if key != "liger_fused_linear_cross_entropy":
                keys.ignore(key, "part of Liger's kernels, which are priced together")
    else:
        for key in active_keys:
            keys.miss(
                key, Bounded("some of Liger's kernels: priced are all of them or none; here none")
            )


def _sharding(keys: DocumentKeys) -> None:
    read_deepspeed_value(keys, "deepspeed", keys.take("deepspeed"))
    fsdp = keys.take("fsdp")
    version = keys.whole("fsdp_version")
    part = keys.part("fsdp_config")
    if fsdp or part.document:
        key = "fsdp" if fsdp else "fsdp_config"
        if version is not None:
            keys.ignore("fsdp_version", "with fsdp_config")
        read_fsdp(keys, part, fsdp or True, key, version=version or 1)
    for key in ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"):
        value = keys.whole(key)
        if value is None:
            continue
        if value <= 1:
            keys.ignore(key, "off")
        elif key == "tensor_parallel_size":
            keys.offer("tp", value, key, f"{key} {value}: this parallelism")
        else:
            ring = "ring attention of ring-flash-attn, which is not torch's"
            keys.miss(key, Bounded(f"{key} {value}: {ring}"))
    for key in ("dp_shard_size", "dp_replicate_size"):
        value = keys.whole(key)
        if value is not None and value > 1:
            keys.miss(key, Bounded("--num-gpus and --fsdp-shard-size say it"))


def _evaluation(keys: DocumentKeys) -> None:
    """An evaluation runs where there is a set for it and a time."""
    share = keys.scalar("val_set_size")
    tests = keys.document.get("test_datasets")
    strategy, steps = keys.scalar("eval_strategy"), keys.document.get("eval_steps")
    batch = keys.whole("eval_batch_size")
    schedule = steps or keys.document.get("evals_per_epoch") or strategy
    runs = (share or tests) and schedule and str(strategy).lower() != "no"
    key = "val_set_size" if share else "test_datasets"
    if runs and batch is not None:
        keys.set("eval_batch", batch, "eval_batch_size")
    elif runs:
        keys.default("eval_batch", keys.value_of("batch"), "as in training")
        keys.ignore(key, "an evaluation runs")
    else:
        names = ("val_set_size", "eval_strategy", "eval_batch_size", "eval_accumulation_steps")
        keys.pass_over(names, "no evaluation runs")


def _preference(keys: DocumentKeys) -> None:
    value = keys.take("rl")
    if value:
        keys.miss("rl", f"{value}: its loss and reference model; priced is fine-tuning")


def _plugins(keys: DocumentKeys) -> None:
    """Plugins whose keys say nothing themselves; cut-cross-entropy is on with its plugin."""
    names = names_of(keys.take("plugins") or (), keys.where("plugins"))
    switch = keys.switch("cut_cross_entropy")
    with_plugin = any("CutCrossEntropy" in name for name in names)
    if switch or (with_plugin and switch is None):
        keys.set("fused_loss", "cce", "cut_cross_entropy" if switch else "plugins")
    elif switch is False:
        keys.ignore("cut_cross_entropy", "off")
    if names and not with_plugin:
        keys.ignore("plugins", "those that matter have keys of their own")


def _packing(keys: DocumentKeys) -> None:
    """Packed samples: one row of the whole micro-batch, or rows of ``sequence_len``.

    Source: axolotl ``core/builders/base.py``: ``multipack_real_batches`` where it is not set is
    ``not (flash_attention or flex_attention or xformers_attention)``.
    """
    rows, key = keys.switch("multipack_real_batches"), "sample_packing"
    if not keys.on(key):
        return
    attention = str(
        keys.document.get("attn_implementation") or keys.value_of("attn_implementation")
    )
    flat = attention.startswith(("flash_attention", "flex")) or any(
        keys.document.get(each) is True for each in ("flex_attention", "xformers_attention")
    )
    flat = flat if rows is None else not rows
    keys.set("packing", "bfd" if flat else "wrapped", key)
    if not flat:
        keys.miss(key, "masks between the samples of a row: priced are full rows without")


AXOLOTL = KeyTable(
    defaults={
        "loop": "trainer",
        "max_grad_norm": (1.0, "of transformers, which it leaves alone"),
        # set_pytorch_cuda_alloc_conf of its command line, for torch 2.9 and newer
        "alloc_conf": ("expandable_segments:True", "its command line sets it"),
        "weight_decay": 0.0,
    },
    options={
        "base_model": Key("model", "text"),
        "micro_batch_size": Key("batch", "whole", 1),
        "sequence_len": Key("seq_len", "whole", 512),
        "optimizer": Key("optim", "text", "adamw_torch_fused", words={"adamw_hf": "adamw_torch"}),
    },
    readers=(
        _batch,
        _precision,
        _checkpointing,
        _adapter,
        _attention,
        _optimizer,
        _kernels,
        _sharding,
        _evaluation,
        _preference,
        _plugins,
        _packing,
    ),
    own_names=True,
    ignored_keys=_IGNORED_KEYS,
    unmodelled_keys=_UNMODELLED_KEYS,
)
"""What becomes of the keys of its configuration."""
