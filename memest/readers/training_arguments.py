"""``TrainingArguments`` of transformers, in JSON, YAML or on a command line.

Defaults are those of transformers 5.23. The Trainer's JSON (``to_json_string``) names every field;
hand-written files name a few. Keys are also those of ``SFTConfig`` and ``ModelConfig`` of TRL, and
of the example scripts of both; what frameworks on top of the Trainer share is here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memest.config.kinds import Method
from memest.errors import ConfigError
from memest.readers.documents import find_file, plain_value, read_document
from memest.readers.mapping import DocumentKeys, Key, KeyTable, by_key, read_table
from memest.readers.sharding import is_on, read_deepspeed_value, read_fsdp
from memest.readers.values import (
    CHANGES,
    LENGTH,
    PIXELS,
    Bounded,
    Either,
    KeyOrigin,
    Level,
    Saving,
    Spread,
    names_of,
    option_called,
)

__all__ = [
    "ADAPTER_SWITCHES",
    "IGNORED_KEYS",
    "METHODS",
    "MODELS",
    "NO_LENGTH",
    "PRICED_METHODS",
    "SCRIPT_KEYS",
    "SIZES",
    "TRAINER",
    "UNMODELLED_KEYS",
    "WITHOUT_LIGER",
    "change_model",
    "is_of_model",
    "note_length",
    "read_adapters",
    "read_checkpointing",
    "read_device_map",
    "read_evaluation",
    "read_liger",
    "read_load",
    "read_loading",
    "read_packing",
    "read_peft_adapter",
    "read_precision",
    "read_script_spellings",
    "read_sharding",
    "read_training_arguments",
    "set_adapter_value",
]

TRAINER = {
    "loop": "trainer",
    "batch": 8,
    "grad_accum": 1,
    "max_grad_norm": 1.0,
    "optim": "auto",
}
"""What transformers' Trainer does unasked, whatever is built on it."""

MODELS = {
    key: Key("model", "text")
    for key in ("model_name_or_path", "model_name", "model_id", "pretrained_model_name_or_path")
}
"""The model, under the names that scripts give it."""

SIZES = {
    "max_pixels": Key(PIXELS, "whole"),
    "block_size": Key("seq_len"),
    "max_source_length": Key("seq_len"),
    "model_max_length": Key("seq_len"),
    "max_position_length": Key("seq_len"),
    "max_duration_in_seconds": Key("audio_seconds"),
    "max_target_length": Key("target_len"),
    "val_max_target_length": Key("generation_max_length"),
}
"""Sizes of samples as the example scripts of transformers call them, and Qwen's own."""

IGNORED_KEYS = by_key(
    {
        "names, logging and saving allocate nothing on the GPU": """output_dir overwrite_output_dir
        logging_dir logging_strategy logging_steps logging_first_step logging_nan_inf_filter
        log_level log_level_replica log_on_each_node report_to run_name project disable_tqdm
        trackio_space_id trackio_bucket_id trackio_static_space_id save_strategy save_steps
        save_total_limit save_on_each_node save_only_model save_safetensors hub_model_id
        hub_strategy hub_token hub_private_repo hub_always_push hub_revision push_to_hub
        push_to_hub_model_id push_to_hub_organization push_to_hub_token resume_from_checkpoint
        load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
        restore_callback_states_from_checkpoint enable_jit_checkpoint skip_memory_metrics debug
        include_tokens_per_second include_num_input_tokens_seen mp_parameters
        use_mps_device no_cuda use_cpu plot_loss log_completions wandb_project wandb_entity
        wandb_name wandb_watch wandb_run_id wandb_log_model wandb_mode swanlab_project
        include_inputs_for_metrics include_for_metrics
        use_tensorboard logging""",
        "rates and schedules are numbers of the host": """learning_rate lr lr_scheduler_type
        lr_scheduler lr_scheduler_kwargs warmup_steps warmup_ratio adam_beta1 adam_beta2
        adam_epsilon num_train_epochs num_epochs max_steps epochs
        cosine_min_lr_ratio embedding_lr embedding_lr_scale loraplus_lr_ratio
        loraplus_lr_embedding average_tokens_across_devices beta label_smoothing loss_weights
        early_stopping_patience early_stopping_steps""",
        "data is prepared on the host": """dataloader_drop_last
        dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
        group_by_length length_column_name train_sampling_strategy sortish_sampler dataset_name
        dataset_config dataset_config_name dataset dataset_path datasets dataset_text_field
        dataset_num_proc dataset_kwargs dataset_train_split dataset_test_split dataset_streaming
        dataset_batch_size dataset_column tokenizer padding dataset_dir dataset_mixer
        dataset_split train_file validation_file
        test_file task_name max_train_samples max_eval_samples max_predict_samples
        preprocessing_num_workers overwrite_cache streaming buffer_size chat_template
        chat_template_path tokenizer_name tokenizer_name_or_path use_fast_tokenizer cache_dir
        validation_split_percentage text_column summary_column source_lang target_lang
        source_prefix truncation_mode shuffle_dataset completion_only_loss assistant_only_loss
        eos_token pad_token packing_strategy pad_to_max_length data_path train_on_inputs
        val_set_size add_eos_token line_by_line keep_linebreaks mlm_probability
        mix_strategy interleave_probs template num_proc image_column_name label_column_name
        ignore_pad_token_for_loss forced_bos_token image_processor_name feature_extractor_name
        accelerator_config data_seed""",
        "seeds change no size": "seed full_determinism",
        "a cap is what counts": "min_pixels",
        "which stages run is the script's matter: the estimate is of training": """do_train do_eval
        do_predict eval_steps eval_delay eval_on_start eval_do_concat_batches
        eval_use_gather_object batch_eval_metrics""",
        "processes find each other by it": """local_rank ddp_timeout ddp_backend main_process_port
        master_addr master_port log_on_each_node tpu_num_cores past_index""",
        "where weights come from changes no size": """model_revision revision token use_auth_token
        model_type_hint config_name low_cpu_mem_usage""",
        "speed only": "tf32 torch_compile_backend torch_compile_mode",
    }
)
"""Why a key does not matter for memory."""

UNMODELLED_KEYS = {
    "auto_find_batch_size": Saving(
        "the batch is halved where memory runs out; the one named is priced"
    ),
    "torch_empty_cache_steps": Bounded("empty_cache gives reserved blocks back between steps"),
    "activation_offloading": Saving("activations move to the host between forward and backward"),
    **dict.fromkeys(
        ("tune_mm_vision", "tune_mm_mlp", "tune_mm_llm"),
        Saving("parts of Qwen's script train or do not: all are priced; --freeze says it"),
    ),
    "bf16_full_eval": Bounded("weights are bfloat16 in evaluation"),
    "fp16_full_eval": Bounded("weights are float16 in evaluation"),
    "parallelism_config": Either("tensor, context and sequence parallelism"),
    "generation_config": "of generation in evaluation",
    "ddp_static_graph": Either("DDP's static graph"),
    "ddp_broadcast_buffers": "DDP sends buffers before each forward",
    "lora_target_parameters": "LoRA on parameters that are not modules",
    "router_aux_loss_coef": "the loss of a mixture's router",
    "use_unsloth": Saving("Unsloth replaces kernels and checkpointing by its own"),
    "xla_fsdp_config": Either("FSDP on TPUs"),
    "reward_model_path": "a second model in memory",
    "ref_model": "a second model in memory",
    "label_smoothing_factor": "log-probabilities of every token beside the loss, and all logits",
    "teacher_model_name_or_path": "a second model in memory",
    "use_vllm": "a generation engine in the same memory",
}
"""What of a key is not modelled."""

PRICED_METHODS = frozenset(method.value for method in Method if not method.is_supervised)
"""Ways of training that ``--method`` prices."""

METHODS = {
    "dpo": "the DPO loss: pairs of answers, and a reference model",
    "orpo": "the ORPO loss over pairs of answers",
    "simpo": "the SimPO loss over pairs of answers",
    "cpo": "the CPO loss over pairs of answers",
    "kto": "the KTO loss, and a reference model",
    "preference": "pairs of answers, as DPO and its relatives have them, most a reference model",
    "grpo": "generation, rewards, a reference model where beta is not 0, and the GRPO loss",
    "rloo": "generation and the RLOO loss",
    "online-dpo": "generation, a reference model, and the loss over two completions of each prompt",
    "ppo": "generation, and further models in memory",
    "reward": "a reward model with its pairs",
    "gkd": "a teacher in memory",
}
"""What else a way of training has that supervised fine-tuning has not."""

WITHOUT_LIGER = "Liger's kernels and its loss of this method; priced is the run without them"
"""What is said where a method is kept, and Liger is not."""

NO_LENGTH = Either("nothing names it: 512 tokens are taken; --seq-len says it")
"""What is said where nothing names how long samples are."""

_EVAL_BATCH = 8
_EVALUATION_KEYS = """eval_strategy evaluation_strategy per_device_eval_batch_size
    eval_accumulation_steps prediction_loss_only""".split()
_TARGETS = ("lora_target_modules", "lora_target", "target_modules", "lora_modules")
_LORA = {
    "lora_r": "lora_r",
    "lora_rank": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    **dict.fromkeys(_TARGETS, "lora_target_modules"),
    "lora_modules_to_save": "modules_to_save",
    "modules_to_save": "modules_to_save",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
    "lora_task_type": "",
    "lora_target_parameters": "",
}


ADAPTER_SWITCHES = ("use_peft", "use_lora", "use_peft_lora", "lora_enable")
"""Switches of adapters, as scripts call them."""
SCRIPT_KEYS = {
    "use_4bit_quantization": Key("load_in_4bit", "enabled"),
    "use_8bit_quantization": Key("load_in_8bit", "enabled"),
    "use_nested_quant": Key("bnb_4bit_use_double_quant", "enabled"),
    "double_quant": Key("bnb_4bit_use_double_quant", "enabled"),
    "quant_type": Key("bnb_4bit_quant_type", "scalar"),
    "bnb_4bit_quant_storage_dtype": Key("bnb_4bit_quant_storage", "scalar"),
    "quantize": Key("load_in_4bit", "enabled"),
    **dict.fromkeys(
        ("use_flash_attn", "use_flash_attention", "use_flash_attention_2"),
        Key("attn_implementation", "enabled", words={True: "flash_attention_2"}),
    ),
}
"""Options under the names that QLoRA's and peft's example scripts, and many after them, have."""


def is_of_model(key: str) -> bool:
    """Whether a key says how a model is loaded or adapted, and is no training argument."""
    if key in (*SCRIPT_KEYS, *ADAPTER_SWITCHES, *_LORA, "bits"):
        return True
    option = option_called(key)
    return option is not None and option.field in ("adapter", "quantization", "dtype")


def read_script_spellings(keys: DocumentKeys) -> None:
    """Options of models as scripts spell them, beside the training arguments."""
    for name, row in SCRIPT_KEYS.items():
        if keys.set_from(name, row) is None and name in keys.document:
            keys.ignore(name, "off")
    parts = [keys.whole(name) for name in ("source_max_len", "target_max_len")]
    if any(parts):
        # laid one behind the other (qlora.py, DataCollatorForCausalLM)
        key = "source_max_len" if parts[0] else "target_max_len"
        keys.set("seq_len", sum(part or 0 for part in parts), key)
    bits = keys.whole("bits")
    if bits in (4, 8):
        keys.set(f"load_in_{bits}bit", True, "bits")
        half = {"bf16": "bfloat16", "fp16": "float16"}.get(str(keys.value_of("precision")))
        if bits == 4 and half is not None:
            keys.default("bnb_4bit_compute_dtype", half, "as the run computes")
    elif bits is not None:
        keys.ignore("bits", "no quantised base")


def read_device_map(keys: DocumentKeys) -> None:
    """A ``device_map`` by name lays layers on all GPUs of a process, which the Trainer keeps to.

    Source: ``PreTrainedModel.from_pretrained``; ``is_model_parallel`` of ``trainer.py``.
    """
    if keys.document.get("device_map") in _SPREADS:
        why = "layers are laid on the GPUs that the process sees: each is priced with all of them"
        keys.miss("device_map", Spread(f"{keys.take('device_map')}: {why}"))


def read_training_arguments(keys: DocumentKeys) -> None:
    """Read training arguments.

    Raises:
        ConfigError: a value that cannot be.
    """
    read_table(keys, _TABLE)
    note_length(keys)


def read_peft_adapter(keys: DocumentKeys) -> None:
    """Read peft's ``adapter_config.json``; ``config/adapter.py`` judges the values."""
    base = keys.take("base_model_name_or_path")
    if base:
        keys.set("model", str(base), "base_model_name_or_path")
    for key in keys.remaining:
        keys.take(key)
    keys.set("adapter", dict(keys.document), "peft_type")


def read_loading(keys: DocumentKeys) -> None:
    """What ``from_pretrained`` is size."""
    for key in ("model_init_kwargs", "model_kwargs"):
        read_load(keys, key)
    changes = keys.take("config_overrides")
    if isinstance(changes, str):  # update_from_string of transformers' configurations
        pairs = (item.partition("=") for item in changes.split(",") if item.strip())
        changes = {name.strip(): plain_value(text) for name, _, text in pairs}
    change_model(keys, "config_overrides", changes)
    for key in ("dtype", "torch_dtype"):
        keys.set_from(key, Key("dtype"))


def read_load(keys: DocumentKeys, key: str) -> None:
    """A mapping that ``from_pretrained`` is given: what is no argument of it changes the model."""
    entries, arguments = {}, keys.mapping(key)
    for name, value in arguments.items():
        full = f"{key}.{name}"
        option = "quantization" if name == "quantization_config" else _option_of_load(name)
        if value is None or name in _LOADING:
            keys.ignore(full, "how the model is loaded")
        elif name in _LOADING_ELSEWHERE:
            keys.miss(full, _LOADING_ELSEWHERE[name])
        elif option and value is False:
            keys.ignore(full, "off")
        elif option:
            keys.set(option, value, full)
        else:
            entries[name] = value
    if entries or not arguments:
        change_model(keys, key, entries, prefix=f"{key}.")


def _option_of_load(name: str) -> str:
    option = option_called({"torch_dtype": "dtype"}.get(name, name))
    return "" if option is None else option.name


def change_model(keys: DocumentKeys, key: str, changes: Any, *, prefix: str = "") -> None:
    """Entries of the model's configuration that a run has otherwise, which go with its name.

    Args:
        keys: of the document.
        key: that holds them.
        changes: by name; nothing where there are none.
        prefix: of their names, where each is said to count.

    Raises:
        ConfigError: they are no mapping.
    """
    if not changes:
        keys.pass_over([key] if key in keys.document else [], "off")
        return
    if not isinstance(changes, Mapping):
        raise ConfigError(f"{keys.where(key)} {changes!r} is no mapping of names to values.")
    keys.set(CHANGES, dict(changes), key)
    for name in [f"{prefix}{each}" for each in changes] if prefix else [key]:
        keys.ignore(name, "counted with the model, MODEL?name=value")


_SPREADS = ("auto", "balanced", "balanced_low_0", "sequential")
_LOADING = frozenset(
    """device_map trust_remote_code revision token use_auth_token cache_dir low_cpu_mem_usage
    use_safetensors local_files_only force_download subfolder variant id2label label2id
    ignore_mismatched_sizes problem_type code_revision return_dict use_cache proxies weights_only
    resume_download output_loading_info""".split()
)
_LOADING_ELSEWHERE = {
    "max_memory": Saving("weights are placed on several devices"),
    "offload_folder": Saving("weights are placed on several devices"),
    "tp_plan": Saving("weights are shared between GPUs; --tp says it"),
    "config": Either("a model with another configuration"),
    "state_dict": Either("weights from elsewhere"),
}
"""Arguments of ``from_pretrained`` that change no size, and those that are not priced."""


def read_liger(keys: DocumentKeys) -> None:
    """Which of Liger's kernels are applied, where not all are.

    Source: ``apply_liger_kernel`` of transformers 5.23, which hands ``liger_kernel_config`` on to
    Liger's functions: all but ``cross_entropy`` are on unless they are switched off.

    Raises:
        ConfigError: two kernels of one loss.
    """
    key = "liger_kernel_config"
    kernels = keys.mapping(key)
    if not is_on(keys.document.get("use_liger_kernel")):
        keys.pass_over((key,), "use_liger_kernel is off")
        return
    off = [name for name, on in kernels.items() if on is False and name != "cross_entropy"]
    if _LIGER_LOSS in off:
        keys.replace("use_liger_kernel", False)
        why = "without Liger's loss of no logits: priced is the run without its other kernels, too"
        keys.miss(key, Saving(why))
    elif is_on(kernels.get("cross_entropy")):
        raise ConfigError(
            f"{keys.where(key)}: cross_entropy and {_LIGER_LOSS} (on unless it is switched off) "
            f"exclude each other, Liger stops there. Write {_LIGER_LOSS}: false beside it."
        )
    elif off:
        keys.miss(key, f"without {', '.join(off)}: priced are all of Liger's kernels")
    elif key in keys.document:
        keys.ignore(key, "all of Liger's kernels, as it has them unasked")


_LIGER_LOSS = "fused_linear_cross_entropy"


def _adapters(keys: DocumentKeys) -> None:
    """Adapters are trained where a script's own switch, or a rank, says so."""
    on = any(keys.has(key) for key in ("lora_r", "lora_rank", "lora_target_modules"))
    for key in ADAPTER_SWITCHES:
        value = keys.switch(key)
        if value is not None:
            on = value
            if value:
                keys.set("peft", "lora", key)
            else:
                keys.ignore(key, "off")
    read_adapters(keys, on=on)


def read_precision(keys: DocumentKeys) -> None:
    """``bf16`` and ``fp16``; off is not an order: accelerate's setting counts then.

    Source: ``TrainingArguments.__post_init__``: ``ACCELERATE_MIXED_PRECISION`` is kept unless one
    of them is on.

    Raises:
        ConfigError: both are on.
    """
    bf16, fp16 = keys.switch("bf16"), keys.switch("fp16")
    if bf16 and fp16:
        raise ConfigError(
            f"{keys.where('bf16')} and {keys.where('fp16')} exclude each other: "
            "autocast has one dtype."
        )
    for key, on in (("bf16", bf16), ("fp16", fp16)):
        if on:
            keys.set("precision", key, key)
        elif on is False:
            keys.ignore(key, "off")
    if (bf16 is False or fp16 is False) and not (bf16 or fp16):
        place = keys.origin("bf16" if bf16 is False else "fp16")
        keys.set_at("precision", "fp32", KeyOrigin(place.origin, Level.DEFAULT))


def read_checkpointing(keys: DocumentKeys) -> None:
    """Activation checkpointing, under its old and its new name."""
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        value = keys.scalar(key)
        if value is None:
            continue
        if isinstance(value, bool) or str(value).lower() in ("true", "false"):
            value = "full" if str(value).lower() == "true" else "none"
        keys.set("checkpointing", value, key)
    for key in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        for name, setting in keys.mapping(key).items():
            full = f"{key}.{name}"
            if name == "use_reentrant" and setting is not None:
                keys.set("use_reentrant", setting, full)
            elif name == "every_n_layers" and setting:
                if keys.value_of("checkpointing") not in (None, "none"):
                    keys.set("checkpointing", f"every_n:{setting}", full)
            else:
                keys.miss(full, "of checkpointing")


def read_evaluation(keys: DocumentKeys, *, batch: int = _EVAL_BATCH) -> None:
    """Whether the Trainer evaluates, and with which batch.

    Args:
        keys: of the arguments.
        batch: unless they name another.

    Raises:
        ConfigError: a strategy that is none.
    """
    strategy, older = keys.scalar("eval_strategy"), keys.scalar("evaluation_strategy")
    strategy = older if strategy is None else strategy
    key = "eval_strategy" if keys.has("eval_strategy") else "evaluation_strategy"
    size = keys.whole("per_device_eval_batch_size")
    text = str(strategy).lower().rpartition(".")[2]
    runs = strategy is not None and text not in ("no", "false", "none")
    generates = keys.switch("predict_with_generate")
    # the script's own calls behind the training
    evaluates = is_on(keys.document.get("do_eval"))
    after = evaluates or is_on(keys.document.get("do_predict"))
    if generates and (runs or after):
        keys.set("predict_with_generate", True, "predict_with_generate")
    elif generates is not None:
        keys.ignore("predict_with_generate", "no evaluation runs" if generates else "off")
    if runs and text not in ("steps", "epoch"):
        raise ConfigError(
            f"{keys.where(key)} {strategy!r} is no strategy. Legal: no, steps, epoch."
        )
    if evaluates and not runs:
        keys.take("do_eval")
        keys.ignore("do_eval", "the script's evaluation follows the training")
    if not runs and not evaluates and not (generates and after):
        keys.pass_over(_EVALUATION_KEYS, "no evaluation runs")
        return
    if size is None:
        keys.default("eval_batch", batch)
    else:
        keys.set("eval_batch", size, "per_device_eval_batch_size")
    if runs:
        keys.ignore(key, f"{text}: an evaluation follows the last step")
        keys.take("prediction_loss_only")


def read_packing(keys: DocumentKeys) -> None:
    """TRL's ``packing`` is the switch, ``packing_strategy`` says how where it is on.

    Source: ``SFTConfig`` of TRL at July 2026: ``packing_strategy`` is "bfd" unless named.
    """
    on, strategy = keys.switch("packing"), keys.scalar("packing_strategy")
    if on:
        key = "packing" if strategy is None else "packing_strategy"
        keys.set("packing", "bfd" if strategy is None else strategy, key)
        return
    keys.pass_over(("packing", "packing_strategy"), "samples are not packed")


def read_adapters(keys: DocumentKeys, *, on: bool) -> None:
    """LoRA as TRL's ``ModelConfig`` and scripts spell it, where it is on."""
    for key, option in _LORA.items():
        value = keys.take(key)
        if key not in keys.document:
            continue
        if not on:
            keys.ignore(key, "no adapters are trained")
        elif key == "lora_task_type":
            keys.ignore(key, "changes no size")
        elif key == "lora_target_parameters":
            if value:
                keys.miss(key, UNMODELLED_KEYS[key])
        elif value is not None and value != [] and value is not False:
            set_adapter_value(keys, option, value, key)


def set_adapter_value(keys: DocumentKeys, option: str, value: Any, key: str) -> None:
    """A value of an option of adapters, some of which are names.

    Raises:
        ConfigError: names that are none.
    """
    if option in ("lora_target_modules", "modules_to_save"):
        # peft's example scripts split at commas; a regular expression is one word
        plain = isinstance(value, str) and not set(value) & set("()[]{}|\\^$*")
        value = names_of(value, keys.where(key), split=plain)
        if key in ("lora_modules", "lora_target_modules") and value == ("all",):
            value = ("all-linear",)
    keys.set(option, value, key)


def read_sharding(keys: DocumentKeys, *, fsdp_version: int = 2) -> None:
    """DeepSpeed and FSDP of training arguments."""
    read_deepspeed_value(keys, "deepspeed", keys.take("deepspeed"))
    value = keys.take("fsdp")
    config = keys.document.get("fsdp_config")
    if isinstance(config, str):
        keys.take("fsdp_config")
        place = keys.origin("fsdp_config")
        path = find_file(config, folder=keys.folder, origin=place.origin)
        part = DocumentKeys(read_document(path, config), source=config, framework=keys.framework)
    else:
        part = keys.part("fsdp_config")
    off = value in (None, "", False, []) or str(value).lower() in ("false", "no", "none")
    if off:
        if "fsdp" in keys.document:
            keys.ignore("fsdp", "off")
        if part.document:
            keys.ignore("fsdp_config", "fsdp is off")
        return
    read_fsdp(keys, part, value, "fsdp", version=fsdp_version)


def note_length(keys: DocumentKeys) -> None:
    """Training arguments do not say themselves how long samples are."""
    if keys.value_of("seq_len") is None and keys.value_of("loop") == "trainer":
        keys.miss_default(LENGTH, NO_LENGTH)


_TABLE = KeyTable(
    defaults={**TRAINER, "precision": "fp32", "checkpointing": "none"},
    options={**MODELS, **SIZES},
    readers=(
        read_loading,
        read_liger,
        read_precision,
        read_checkpointing,
        read_evaluation,
        _adapters,
        read_script_spellings,
        read_sharding,
        read_packing,
    ),
    own_names=True,
    ignored_keys=IGNORED_KEYS,
    unmodelled_keys=UNMODELLED_KEYS,
)
