"""axolotl's YAML.

Source: axolotl at July 2026: ``utils/schemas/`` (fields and defaults), ``utils/config`` (dtype,
checkpointing), ``loaders/model.py`` (quantisation), ``core/builders/base.py`` (training arguments).
"""

from __future__ import annotations

from memest.errors import ConfigError
from memest.readers.findings import Level
from memest.readers.sharing import read_deepspeed_value, read_fsdp
from memest.readers.sheet import Place, Sheet, names_of
from memest.readers.trainer_keys import MATTERS, REASONS
from memest.readers.training_arguments import read_checkpointing

__all__ = ["read_axolotl"]

_REASONS = {
    **REASONS,
    **dict.fromkeys(
        """base_model_config cls_model_config tokenizer_config tokenizer_type tokenizer_use_fast
        tokenizer_legacy tokenizer_save_jinja_files processor_type special_tokens tokens
        dataset_prepared_path dataset_processes test_datasets shuffle_merged_datasets
        pretraining_dataset dataset_shard_num dataset_shard_idx skip_prepare_dataset
        chat_template_jinja default_system_message eot_tokens max_prompt_len min_sample_len
        sample_packing_group_size sample_packing_bin_size sample_packing_sequentially
        pad_to_sequence_len eval_sample_packing excess_length_strategy dataset_exact_deduplication
        roles_to_train roles_to_mask field_messages""".split(),
        "data is prepared on the host",
    ),
    **dict.fromkeys(
        """saves_per_epoch evals_per_epoch save_first_step wandb_viz early_stopping_patience
        loss_watchdog_threshold loss_watchdog_patience eval_table_size eval_max_new_tokens
        use_wandb use_mlflow use_comet mlflow_tracking_uri mlflow_experiment_name
        comet_project_name profiler_steps auto_resume_from_checkpoints strict""".split(),
        "names, logging and saving allocate nothing on the GPU",
    ),
    **dict.fromkeys("model_type type_of_model is_llama_derived_model is_mistral_derived_model "
                    "is_falcon_derived_model is_qwen_derived_model trust_remote_code".split(),
                    "the model's own config says it"),
    **dict.fromkeys("gc_steps gc_collect_steps".split(), "Python's collector"),
    **dict.fromkeys("lora_fan_in_fan_out peft_init_lora_weights lora_alpha_pattern".split(),
                    "changes no size"),
    "lora_model_dir": "adapters that are there already have the sizes named here",
    "plugins": "those that matter have keys of their own",
    "tf32": "speed only",
    "merge_lora": "after training",
    "world_size": "the launch command says it",
    "ddp": "the launch command says it",
}  # fmt: skip
_MATTERS = {
    **MATTERS,
    "flash_attn_cross_entropy": "flash-attn's cross entropy",
    "flash_attn_fuse_mlp": "flash-attn's MLP",
    "chunked_cross_entropy": "logits come in chunks; priced is all at once",
    "cut_cross_entropy": "the loss never holds all logits; priced is all at once",
    "tiled_mlp": "the MLP works in tiles",
    "lora_mlp_kernel": "a fused kernel for LoRA",
    "lora_qkv_kernel": "a fused kernel for LoRA",
    "lora_o_kernel": "a fused kernel for LoRA",
    "lora_embedding_kernel": "a fused kernel for LoRA",
    "unfrozen_parameters": "only these parameters train; all are priced: --freeze names the others",
    "layer_offloading": "layers move to the host",
    "selective_checkpointing": "what is recomputed is chosen by operator",
    "lora_rank_pattern": "ranks by module",
    "peft_layers_to_transform": "adapters on some layers only; priced on all",
    "peft_layer_replication": "layers are repeated",
    "relora": "ReLoRA",
    "gptq": "GPTQ bases",
    "qat": "quantisation-aware training",
    "fp8": "fp8",
    "reward_model": "a reward model",
    "process_reward_model": "a reward model",
    "model_quantization_config": "a base quantised otherwise",
    "quantize_moe_experts": "experts are quantised",
    "batch_flattening": "batches are flattened",
    "flex_attention": "flex attention: priced as the default",
    "xformers_attention": "xformers: priced as the default",
    "sage_attention": "SageAttention: priced as the default",
    "resize_token_embeddings_to_32x": "a few rows of the embeddings",
    "eval_causal_lm_metrics": "the evaluation generates",
    "do_bench_eval": "the evaluation generates",
    "gpu_memory_limit": "a limit of the process",
    "max_memory": "weights are placed on several devices",
    "deepcompile": "compilation",
}
_OPTIMIZERS = {"adamw_hf": "adamw_torch"}


def read_axolotl(sheet: Sheet) -> None:
    """Fill in a sheet of axolotl's configuration.

    Raises:
        ConfigError: a value that axolotl would refuse too.
    """
    model = sheet.scalar("base_model")
    if model is not None:
        sheet.say("model", str(model), "base_model")
    sheet.default("loop", "trainer")
    sheet.default("max_grad_norm", 1.0, "of transformers, which it leaves alone")
    # set_pytorch_cuda_alloc_conf of its command line, for torch 2.9 and newer
    sheet.default("alloc_conf", "expandable_segments:True", "its command line sets it")
    _batch(sheet)
    dtype = _precision(sheet)
    _checkpointing(sheet)
    _adapter(sheet, dtype)
    _attention(sheet)
    _optimizer(sheet)
    _kernels(sheet)
    _spread(sheet)
    _evaluation(sheet)
    for key in ("rl",):
        value = sheet.take(key)
        if value:
            sheet.miss(key, f"{value}: its loss and reference model; priced is fine-tuning")
    _rest(sheet)


def _batch(sheet: Sheet) -> None:
    sheet.default("batch", 1)
    sheet.default("grad_accum", 1)
    sheet.default("seq_len", 512)
    micro, total = sheet.whole("micro_batch_size"), sheet.whole("batch_size")
    if micro is not None:
        sheet.say("batch", micro, "micro_batch_size")
    accumulated = sheet.whole("gradient_accumulation_steps")
    if accumulated is not None:
        sheet.say("grad_accum", accumulated, "gradient_accumulation_steps")
        if total is not None:
            sheet.ignore("batch_size", "gradient_accumulation_steps says it")
    elif total is not None:
        if "gradient_accumulation_steps" in sheet.document:
            sheet.say("grad_accum", max(1, total // max(1, micro or 1)), "batch_size")
        else:
            sheet.ignore("batch_size", "gradient_accumulation_steps is 1 where it is not named")
    length = sheet.whole("sequence_len")
    if length is not None:
        sheet.say("seq_len", length, "sequence_len")


def _precision(sheet: Sheet) -> str:
    """Autocast and the dtype of the weights (``resolve_dtype``); returns the latter."""
    bf16, fp16 = sheet.scalar("bf16"), sheet.switch("fp16")
    key, given = "bf16", "bf16" in sheet.document and bf16 is not None
    full = str(bf16).lower() == "full"
    auto = (bf16 is None and not given and "bf16" not in sheet.document) or bf16 == "auto"
    on = full or (auto and not fp16) or str(bf16).lower() == "true"
    pure_bf16, pure_fp16 = sheet.switch("bfloat16"), sheet.switch("float16")
    if on and given:
        sheet.say("precision", "bf16", key)
        sheet.say("dtype", "bfloat16", key)
        if full:
            sheet.miss(key, "full: weights are bfloat16 in evaluation too")
    elif on:
        sheet.default("precision", "bf16", "bf16 auto, on a GPU that has it")
        sheet.default("dtype", "bfloat16", "bf16 auto, on a GPU that has it")
    elif fp16:
        sheet.say("precision", "fp16", "fp16")
        sheet.say("dtype", "float16", "fp16")
    else:
        if given:
            sheet.say("precision", "fp32", key)
        else:
            sheet.default("precision", "fp32")
        for name, value in (("bfloat16", pure_bf16), ("float16", pure_fp16)):
            if value:
                sheet.say("dtype", name, name)
        if sheet.said("dtype") is None and sheet.document.get("load_in_8bit"):
            sheet.default("dtype", "float16", "of 8-bit bases")
        elif sheet.said("dtype") is None:
            sheet.default("dtype", "float32")
    if on and fp16 is False:
        sheet.ignore("fp16", "off")
    sheet.take("float32")
    return str(sheet.said("dtype"))


def _checkpointing(sheet: Sheet) -> None:
    value = sheet.document.get("gradient_checkpointing")
    if value in ("offload", "offload_disk"):
        sheet.take("gradient_checkpointing")
        sheet.say("checkpointing", "full", "gradient_checkpointing")
        sheet.miss("gradient_checkpointing", f"{value}: activations move to the host")
    elif value is None:
        sheet.take("gradient_checkpointing")
        sheet.default("checkpointing", "none")
    if value and not sheet.has("gradient_checkpointing_kwargs") and not sheet.has("rl"):
        sheet.default("use_reentrant", True)
    read_checkpointing(sheet)


def _adapter(sheet: Sheet, dtype: str) -> None:
    kind = sheet.scalar("adapter")
    four, eight = sheet.switch("load_in_4bit"), sheet.switch("load_in_8bit")
    names = {
        "lora_r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
        "lora_target_modules": "lora_target_modules", "lora_modules_to_save": "modules_to_save",
        "peft_use_dora": "use_dora", "peft_use_rslora": "use_rslora",
        "peft_autocast_adapter_dtype": "autocast_adapter_dtype",
    }  # fmt: skip
    linear = sheet.switch("lora_target_linear")
    if kind is None:
        for key in (*names, "lora_target_linear"):
            sheet.take(key)
            if key in sheet.document:
                sheet.ignore(key, "no adapter is named")
        for key, on in (("load_in_4bit", four), ("load_in_8bit", eight)):
            if on:
                raise ConfigError(
                    f"{sheet.place(key).origin}: a quantised base does not train without adapters; "
                    "axolotl wants adapter: qlora."
                )
        return
    kind = str(kind).lower()
    if kind not in ("lora", "qlora"):
        sheet.say("peft", kind, "adapter")
    else:
        sheet.say("peft", "lora", "adapter")
        sheet.default("lora_dropout", 0.0)
    for key, option in names.items():
        value = sheet.take(key)
        if value in (None, False) or value == []:
            continue
        listed = option in ("lora_target_modules", "modules_to_save")
        sheet.say(option, names_of(value, sheet.place(key).origin) if listed else value, key)
    if linear:
        sheet.say("lora_target_modules", ("all-linear",), "lora_target_linear")
        if sheet.has("lora_target_modules"):
            sheet.miss("lora_target_modules", "named besides lora_target_linear: all linear layers")
    if kind == "qlora" and eight:
        raise ConfigError(
            f"{sheet.place('adapter').origin} qlora is for 4-bit bases, and load_in_8bit is on."
        )
    if four or kind == "qlora":
        _four_bits(sheet, dtype, named=four)
    elif eight:
        sheet.say("load_in_8bit", True, "load_in_8bit")
    if four or eight or kind == "qlora":
        sheet.default("prepare_kbit", False, "norms and embeddings are converted back after it")
    kernels = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
    if not any(key in sheet.document for key in kernels) and not eight and not sheet.has("rl"):
        sheet.miss_default("fused LoRA kernels", "on wherever the model allows; priced without")


def _four_bits(sheet: Sheet, dtype: str, *, named: bool | None) -> None:
    if named:
        sheet.say("load_in_4bit", True, "load_in_4bit")
    else:
        sheet.say("load_in_4bit", True, "adapter")
    given = sheet.part("bnb_config_kwargs")
    for key, option, value in (
        ("bnb_4bit_quant_type", "bnb_4bit_quant_type", "nf4"),
        ("bnb_4bit_use_double_quant", "bnb_4bit_use_double_quant", True),
        ("bnb_4bit_compute_dtype", "bnb_4bit_compute_dtype", dtype),
        ("bnb_4bit_quant_storage", "bnb_4bit_quant_storage", "bfloat16"),
    ):
        asked = given.take(key)
        if asked is None:
            sheet.default(option, value)
        else:
            given.say(option, asked, key)
    given.ignore_rest({}, {})
    sheet.absorb(given)


def _attention(sheet: Sheet) -> None:
    for key, name in (
        ("flash_attention", "flash_attention_2"), ("sdp_attention", "sdpa"),
        ("eager_attention", "eager"),
    ):  # fmt: skip
        if sheet.switch(key):
            sheet.say("attn_implementation", name, key)
        elif key in sheet.document:
            sheet.ignore(key, "off")


def _optimizer(sheet: Sheet) -> None:
    sheet.default("optim", "adamw_torch_fused")
    sheet.default("weight_decay", 0.0)
    name = sheet.scalar("optimizer")
    if name is not None:
        sheet.say("optim", _OPTIMIZERS.get(str(name), str(name)), "optimizer")
    arguments = sheet.take("optim_args")
    if isinstance(arguments, dict):
        arguments = ",".join(f"{key}={value}" for key, value in arguments.items())
    if arguments:
        sheet.say("optim_args", str(arguments), "optim_args")
    targets = sheet.take("optim_target_modules")
    if targets is not None:
        targets = "all-linear" if targets == "all_linear" else targets
        sheet.say("optim_target_modules", targets, "optim_target_modules")


def _kernels(sheet: Sheet) -> None:
    """Liger's kernels have a key each; together they are what the Trainer's switch does."""
    keys = [key for key in sheet.document if key.startswith("liger_")]
    on = [key for key in keys if sheet.switch(key)]
    if not on:
        for key in keys:
            sheet.ignore(key, "off")
        return
    loss = "liger_fused_linear_cross_entropy" in on
    parts = ("liger_rope", "liger_rms_norm", "liger_glu_activation")
    if loss and all(key in on for key in parts):
        sheet.say("use_liger_kernel", True, "liger_fused_linear_cross_entropy")
        for key in keys:
            if key != "liger_fused_linear_cross_entropy":
                sheet.ignore(key, "part of Liger's kernels, which are priced together")
    else:
        for key in on:
            sheet.miss(key, "some of Liger's kernels: priced are all of them or none; here none")


def _spread(sheet: Sheet) -> None:
    read_deepspeed_value(sheet, "deepspeed", sheet.take("deepspeed"))
    asked = sheet.take("fsdp")
    version = sheet.whole("fsdp_version")
    part = sheet.part("fsdp_config")
    if asked or part.document:
        key = "fsdp" if asked else "fsdp_config"
        if version is not None:
            sheet.ignore("fsdp_version", "with fsdp_config")
        read_fsdp(sheet, part, asked or True, key, version=version or 1)
    for key in ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"):
        value = sheet.whole(key)
        if value is None:
            continue
        if value <= 1:
            sheet.ignore(key, "off")
        elif key == "tensor_parallel_size":
            sheet.offer("tp", value, key, f"{key} {value}: this parallelism")
        else:
            ring = "ring attention of ring-flash-attn, which is not torch's"
            sheet.miss(key, f"{key} {value}: {ring}")
    for key in ("dp_shard_size", "dp_replicate_size"):
        value = sheet.whole(key)
        if value is not None and value > 1:
            sheet.miss(key, "--num-gpus and --fsdp-shard-size say it")


def _evaluation(sheet: Sheet) -> None:
    """An evaluation runs where there is a set for it and a time."""
    share = sheet.scalar("val_set_size")
    tests = sheet.document.get("test_datasets")
    strategy, steps = sheet.scalar("eval_strategy"), sheet.document.get("eval_steps")
    batch = sheet.whole("eval_batch_size")
    when = steps or sheet.document.get("evals_per_epoch") or strategy
    runs = (share or tests) and when and str(strategy).lower() != "no"
    key = "val_set_size" if share else "test_datasets"
    if runs and batch is not None:
        sheet.say("eval_batch", batch, "eval_batch_size")
    elif runs:
        value = sheet.said("batch")
        sheet.say_at(
            "eval_batch",
            value,
            Place(f"default of {sheet.framework} (as in training)", Level.DEFAULT),
        )
        sheet.ignore(key, "an evaluation runs")
    for name in ("val_set_size", "eval_strategy", "eval_batch_size", "eval_accumulation_steps"):
        if not runs:
            sheet.take(name)
            if name in sheet.document:
                sheet.ignore(name, "no evaluation runs")


def _rest(sheet: Sheet) -> None:
    _packing(sheet)
    sheet.offer_rest()
    sheet.ignore_rest(_REASONS, _MATTERS)


def _packing(sheet: Sheet) -> None:
    """Packed samples: one row of the whole micro-batch, or rows of ``sequence_len``.

    Source: axolotl ``core/builders/base.py``: ``multipack_real_batches`` where it is not set is
    ``not (flash_attention or flex_attention or xformers_attention)``.
    """
    on = sheet.switch("sample_packing")
    rows, key = sheet.switch("multipack_real_batches"), "sample_packing"
    if not on:
        if key in sheet.document:
            sheet.ignore(key, "off")
        return
    named = str(sheet.document.get("attn_implementation") or sheet.said("attn_implementation"))
    flat = named.startswith(("flash_attention", "flex")) or any(
        sheet.document.get(each) is True for each in ("flex_attention", "xformers_attention")
    )
    flat = flat if rows is None else not rows
    sheet.say("packing", "bfd" if flat else "wrapped", key)
    if not flat:
        sheet.miss(key, "masks between the samples of a row: priced are full rows without")
