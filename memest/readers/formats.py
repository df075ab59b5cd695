"""Which format a document has, told from its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from memest.errors import ConfigError, closest
from memest.readers.accelerate import ACCELERATE
from memest.readers.axolotl import AXOLOTL
from memest.readers.litgpt import refuse_litgpt
from memest.readers.llama_factory import LLAMA_FACTORY
from memest.readers.llama_factory_v1 import read_llama_factory_v1
from memest.readers.mapping import DocumentKeys, read_table
from memest.readers.ms_swift import read_ms_swift
from memest.readers.sharding import read_deepspeed_document
from memest.readers.torchtitan import TORCHTITAN
from memest.readers.torchtune import read_torchtune
from memest.readers.training_arguments import (
    IGNORED_KEYS,
    UNMODELLED_KEYS,
    read_peft_adapter,
    read_training_arguments,
)
from memest.readers.trl import read_trl
from memest.readers.values import option_called
from memest.readers.verl import read_verl

__all__ = [
    "FORMATS",
    "TRAINER_FRAMEWORKS",
    "FileFormat",
    "check_training",
    "find_format",
    "is_model_config",
    "recognise",
]


@dataclass(frozen=True, slots=True)
class FileFormat:
    """One format.

    Attributes:
        name: for ``--config-format``.
        title: the framework.
        marks: keys that no other format here has.
        read: takes the keys of a document.
    """

    name: str
    title: str
    marks: frozenset[str]
    read: Callable[[DocumentKeys], None]


def _format(name: str, title: str, marks: str, read: Callable[[DocumentKeys], None]) -> FileFormat:
    return FileFormat(name, title, frozenset(marks.split()), read)


FORMATS: tuple[FileFormat, ...] = (
    _format(
        "transformers",
        "transformers",
        """per_device_train_batch_size per_gpu_train_batch_size per_device_eval_batch_size
        num_train_epochs lr_scheduler_type warmup_ratio do_train save_strategy logging_strategy
        gradient_checkpointing_kwargs activation_checkpointing_kwargs dataloader_num_workers
        report_to remove_unused_columns ddp_find_unused_parameters""",
        read_training_arguments,
    ),
    _format(
        "trl",
        "TRL",
        """max_length packing packing_strategy padding_free dataset_text_field use_peft
        completion_only_loss assistant_only_loss model_init_kwargs dataset_num_proc
        chat_template_path lora_task_type lora_modules_to_save max_prompt_length
        max_completion_length use_bnb_nested_quant dataset_train_split truncation_mode beta
        num_generations reward_funcs reward_weights vllm_mode desirable_weight undesirable_weight
        center_rewards_coefficient precompute_ref_log_probs rpo_alpha ref_model_init_kwargs
        sync_ref_model""",
        read_trl,
    ),
    _format(
        "accelerate",
        "accelerate",
        """compute_environment distributed_type main_training_function downcast_bf16 machine_rank
        num_machines num_processes rdzv_backend same_network tpu_use_cluster tpu_use_sudo tpu_env
        deepspeed_config enable_cpu_affinity dynamo_config main_process_port
        mixed_precision gpu_ids""",
        partial(read_table, table=ACCELERATE),
    ),
    _format(
        "deepspeed",
        "DeepSpeed",
        """zero_optimization train_micro_batch_size_per_gpu zero_allow_untested_optimizer
        steps_per_print wall_clock_breakdown gradient_clipping zero_force_ds_cpu_optimizer
        prescale_gradients communication_data_type train_batch_size""",
        read_deepspeed_document,
    ),
    _format(
        "axolotl",
        "axolotl",
        """base_model micro_batch_size sequence_len sample_packing val_set_size num_epochs
        flash_attention sdp_attention eager_attention lora_target_linear dataset_prepared_path
        pad_to_sequence_len evals_per_epoch saves_per_epoch adapter special_tokens optimizer
        lora_model_dir train_on_inputs plugins wandb_entity""",
        partial(read_table, table=AXOLOTL),
    ),
    _format(
        "llama-factory",
        "LLaMA-Factory",
        """finetuning_type cutoff_len quantization_bit template stage val_size flash_attn
        enable_liger_kernel disable_gradient_checkpointing additional_target pure_bf16
        preprocessing_num_workers max_samples lora_rank lora_target neat_packing
        adapter_name_or_path plot_loss dataset_dir double_quantization""",
        partial(read_table, table=LLAMA_FACTORY),
    ),
    _format(
        "llama-factory-v1",
        "LLaMA-Factory v1",
        """model_class peft_config kernel_config quant_config dist_config init_config optim_config
        lr_scheduler_config batching_strategy batching_workers train_dataset sample_backend
        enable_activation_checkpointing mp_replicate_size mp_shard_size cp_mode
        custom_chat_template""",
        read_llama_factory_v1,
    ),
    _format(
        "ms-swift",
        "ms-swift",
        """tuner_type train_type sft_type rlhf_type split_dataset_ratio attn_impl freeze_vit
        freeze_llm freeze_aligner freeze_parameters_ratio vit_gradient_checkpointing lazy_tokenize
        packing_length use_logits_to_keep tuner_backend custom_register_path external_plugins
        use_swift_lora swift_version agent_template load_args use_hf model_author lorap_lr_ratio
        model_id_or_path""",
        read_ms_swift,
    ),
    _format(
        "litgpt",
        "LitGPT",
        """checkpoint_dir out_dir initial_checkpoint_dir tokenizer_dir logger_name lora_query
        lora_key lora_value lora_projection lora_mlp lora_head devices num_nodes model_config""",
        refuse_litgpt,
    ),
    _format("verl", "verl", "actor_rollout_ref custom_reward_function", read_verl),
    _format("torchtune", "torchtune", "", read_torchtune),
    _format("torchtitan", "torchtitan", "", partial(read_table, table=TORCHTITAN)),
    _format("peft", "peft", "peft_type base_model_name_or_path inference_mode", read_peft_adapter),
)
"""Every format, by the names of ``--config-format``."""

TRAINER_FRAMEWORKS = frozenset({"transformers", "TRL", "axolotl", "LLaMA-Factory", "ms-swift"})
"""Frameworks whose loop is the Trainer's, with its checks."""

_MODEL_MARKS = frozenset(
    "architectures hidden_size num_hidden_layers num_attention_heads vocab_size "
    "transformers_version n_layer d_model".split()
)
_TITAN_SECTIONS = ("training", "parallelism", "activation_checkpoint", "job", "checkpoint", "model")


def is_model_config(document: Mapping[str, Any]) -> bool:
    """Whether a document is a model's ``config.json``, which is no configuration of a run."""
    return "model_type" in document and bool(_MODEL_MARKS & set(document))


def find_format(name: str) -> FileFormat:
    """A format by its name.

    Raises:
        ConfigError: there is none.
    """
    text = name.strip().lower().replace("_", "-")
    for file_format in FORMATS:
        if text in (file_format.name, file_format.title.lower(), file_format.name.replace("-", "")):
            return file_format
    names = [file_format.name for file_format in FORMATS]
    matches = closest(text, names)
    hint = f" Did you mean {matches[0]}?" if matches else ""
    raise ConfigError(f"--config-format {name!r} is not known.{hint} Legal: {', '.join(names)}.")


def recognise(document: Mapping[str, Any], label: str) -> FileFormat:
    """The format of a document.

    What sits on transformers' training arguments (TRL, LLaMA-Factory) has their keys too, so with
    one mark of its own it counts theirs besides.

    Raises:
        ConfigError: none, or several; the message names the closest and how to say which.
    """
    keys = set(document)
    if is_model_config(document):
        raise ConfigError(
            f"{label} is a model's config.json, no configuration of a run: give it in place of the "
            f"model, memest estimate {label}."
        )
    if any(marks <= keys for marks in _OF_JOBS):
        raise ConfigError(
            f"{label} describes a job, no configuration of a run: give the command that it starts, "
            "memest read -- torchrun --nproc_per_node 4 train.py ..."
        )
    if "actor_rollout_ref" in keys:
        return find_format("verl")
    if isinstance(document.get("trainer"), Mapping) and {"model", "data"} & keys:
        raise ConfigError(
            f"{label} is a configuration of Lightning's command line, which memest does not read: "
            "give the script that makes the Trainer, or write the run itself, memest estimate "
            "MODEL --loop lightning --batch 8 --seq-len 512."
        )
    general = FORMATS[0]
    scores = {each: len(each.marks & keys) for each in FORMATS}
    for each in (find_format("trl"), find_format("llama-factory")):
        scores[each] += scores[general] if scores[each] else 0
    # their other keys are those of the frameworks above
    for name in ("ms-swift", "llama-factory-v1"):
        scores[find_format(name)] *= 10
    scores[find_format("torchtune")] = 100 * _has_components(document)
    scores[find_format("torchtitan")] = 10 * _sections(document)
    best = max(scores.values())
    file_formats = [each for each, score in scores.items() if score == best]
    if best and len(file_formats) == 1:
        return file_formats[0]
    if best == 0:
        option_keys = [
            key
            for key in keys
            if key in IGNORED_KEYS or key in UNMODELLED_KEYS or option_called(key)
        ]
        suggestion = (
            f" Closest: {general.title} ({', '.join(sorted(option_keys)[:5])})."
            if option_keys
            else ""
        )
        raise _unclear(
            f"{label} has the marks of no format that memest knows.{suggestion}", general
        )
    names = " or ".join(
        f"{each.title} ({', '.join(sorted(each.marks & keys)[:3])})" for each in file_formats
    )
    raise _unclear(f"{label} may be {names}.", file_formats[0])


def check_training(document: Mapping[str, Any], file_format: FileFormat, shown: str) -> None:
    """Refuse a configuration that trains nothing.

    Raises:
        ConfigError: it generates, evaluates, converts or merges.
    """
    for name, marks, purpose in _NO_TRAINING:
        keys = marks & set(document)
        if file_format.name == name and keys and not _TRAINING_KEYS & set(document):
            raise ConfigError(
                f"{shown} trains nothing: {', '.join(sorted(keys))} are of {purpose}. memest "
                "prices training; give the configuration of a training."
            )


_TRAINING_KEYS = frozenset(
    "do_train dataset per_device_train_batch_size optimizer loss num_train_epochs epochs".split()
)
_NO_TRAINING = (
    ("llama-factory", frozenset(("export_dir", "export_size")), "merging and exporting"),
    ("llama-factory", frozenset(("infer_backend", "infer_dtype")), "inference"),
    ("torchtune", frozenset(("prompt", "max_new_tokens")), "generation"),
    ("torchtune", frozenset(("tasks", "limit")), "evaluation"),
    ("torchtune", frozenset(("quantizer",)), "quantising a checkpoint"),
)
"""By format: keys, and what a configuration is for that has them and none of a training."""


_OF_JOBS = (frozenset(("apiVersion", "kind")), frozenset(("services",)), frozenset(("jobs",)))
"""Files of Kubernetes, of Compose, and of CI."""


def _unclear(problem: str, nearest: FileFormat) -> ConfigError:
    names = ", ".join(each.name for each in FORMATS)
    return ConfigError(f"{problem} Say which: --config-format {nearest.name}. Legal: {names}.")


def _has_components(document: Mapping[str, Any]) -> bool:
    return any(isinstance(v, Mapping) and "_component_" in v for v in document.values())


def _sections(document: Mapping[str, Any]) -> bool:
    return sum(isinstance(document.get(key), Mapping) for key in _TITAN_SECTIONS) >= 2
