"""What is asked is what is priced, or is named: configurations and commands by hand, and what must
be understood of them.

Each case has what a reader must find (options), what the verdict must rest on (``unpriced``: more
memory than the figures have), and what must be named although it takes no more (``named``).
"""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import memest
from memest.errors import ConfigError
from memest.readers.formats import FORMATS
from memest.readers.values import UNKNOWN

LLAMA = "meta-llama/Llama-3.1-8B"

FILES = {
    "llama-factory sft": (
        {"model_name_or_path": LLAMA, "stage": "sft", "finetuning_type": "lora", "lora_rank": 16,
         "cutoff_len": 1024, "template": "llama3", "per_device_train_batch_size": 2,
         "logging_steps": 5, "learning_rate": 1e-4, "seed": 3},
        {"lora_r": 16, "seq_len": 1024, "batch": 2}, "", "",
    ),
    "llama-factory dpo": (
        {"model_name_or_path": LLAMA, "stage": "dpo", "finetuning_type": "lora",
         "template": "llama3", "pref_beta": 0.1},
        {"peft": "lora", "method": "dpo", "log_probs": "float32"}, "", "",
    ),
    "llama-factory dpo of all weights": (
        {"model_name_or_path": LLAMA, "stage": "dpo", "finetuning_type": "full", "bf16": True,
         "template": "llama3", "ref_model": LLAMA, "pref_bco_weight": 0.1},
        {"dtype": "float32", "ref_dtype": "bfloat16"}, "", "",
    ),
    "llama-factory dpo in bfloat16": (
        {"model_name_or_path": LLAMA, "stage": "dpo", "finetuning_type": "full", "bf16": True,
         "template": "llama3", "pure_bf16": True, "ref_model": "some/other"},
        {"dtype": "bfloat16", "ref_dtype": None}, "a second model in memory", "",
    ),
    "llama-factory dpo beside oft": (
        {"model_name_or_path": LLAMA, "stage": "dpo", "finetuning_type": "oft",
         "template": "llama3"},
        {"method": "dpo", "peft": "oft"}, "a reference model of its own", "",
    ),
    "llama-factory kto": (
        {"model_name_or_path": LLAMA, "stage": "kto", "finetuning_type": "lora",
         "template": "llama3", "kto_chosen_weight": 1.2, "pref_loss": "kto_pair"},
        {"method": "kto", "log_probs": "float32", "ref_dtype": None}, "", "",
    ),
    "llama-factory rewards": (
        {"model_name_or_path": LLAMA, "stage": "rm", "finetuning_type": "full", "bf16": True,
         "template": "llama3"},
        {"method": "reward", "log_probs": "float32", "ref_dtype": None}, "", "",
    ),
    "llama-factory ppo": (
        {"model_name_or_path": LLAMA, "stage": "ppo", "finetuning_type": "lora",
         "template": "llama3", "reward_model": "r"},
        {"method": None, "log_probs": None}, "further models in memory", "",
    ),
    "llama-factory packs with masks": (
        {"model_name_or_path": LLAMA, "stage": "sft", "finetuning_type": "full",
         "neat_packing": True, "template": "llama3"},
        {"packing": "wrapped"}, "mask of all pairs", "",
    ),
    "llama-factory packs with FlashAttention": (
        {"model_name_or_path": LLAMA, "stage": "sft", "finetuning_type": "lora",
         "neat_packing": True, "flash_attn": "fa2", "per_device_train_batch_size": 1,
         "val_size": 0.1},
        {"packing": "bfd", "eval_batch": None}, "", "",
    ),
    "llama-factory freezes a tower": (
        {"model_name_or_path": LLAMA, "stage": "sft", "finetuning_type": "full",
         "freeze_vision_tower": True, "template": "llama3"},
        {"frozen_parts": ("vision", "projector")}, "", "",
    ),
    "llama-factory trains a tower": (
        {"model_name_or_path": LLAMA, "stage": "sft", "finetuning_type": "full",
         "freeze_vision_tower": False, "freeze_language_model": True, "template": "llama3",
         "image_max_pixels": 262144},
        {"frozen_parts": ("projector", "language")}, "--image-size says it", "",
    ),
    "llama-factory gives projectors no adapters": (
        {"model_name_or_path": LLAMA, "stage": "sft", "finetuning_type": "lora",
         "freeze_vision_tower": False, "freeze_multi_modal_projector": False,
         "template": "llama3"},
        {"frozen_parts": ("projector",)}, "", "",
    ),
    "llama-factory v1 in full": (
        {"model": LLAMA, "model_class": "llm", "train_dataset": "d",
         "dist_config": {"name": "fsdp2", "dcp_path": None}, "micro_batch_size": 4,
         "enable_activation_checkpointing": False},
        {"batch": 4, "fsdp": "full_shard", "dtype": "float32", "precision": "bf16",
         "seq_len": 2048, "checkpointing": "none", "loop": "accelerate"},
        "a copy of all logits", "number of GPUs",
    ),
    "llama-factory v1 without FSDP casts nothing": (
        {"model": LLAMA, "batching_strategy": "padding_free", "flash_attn": "flash_attention_2",
         "train_dataset": "d", "kernel_config": {"name": "liger_kernel"}},
        {"precision": "fp32", "dtype": "float32", "padding_free": True}, "liger_kernel", "",
    ),
    "axolotl cuts the cross entropy by its plugin": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 1, "adapter": "lora",
         "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True, "bf16": True,
         "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]},
        {"fused_loss": "cce", "seq_len": 2048, "lora_r": 8}, "", "",
    ),
    "axolotl puts adapters on linear layers besides those that are named": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 1, "adapter": "lora",
         "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True, "bf16": True,
         "lora_target_modules": ["q_proj", "lm_head"]},
        {"lora_target_modules": ("and-all-linear", "q_proj", "lm_head")}, "", "",
    ),
    "axolotl cuts the cross entropy by its key": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 1, "bf16": True,
         "cut_cross_entropy": True},
        {"fused_loss": "cce"}, "", "",
    ),
    "axolotl leaves it": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 1,
         "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
         "cut_cross_entropy": False},
        {"fused_loss": None}, "", "",
    ),
    "axolotl prefers": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 1, "rl": "dpo"},
        {"method": "dpo", "log_probs": "logits"}, "", "",
    ),
    "trl grpo by its keys": (
        {"model_name_or_path": LLAMA, "num_generations": 8, "max_completion_length": 256,
         "use_vllm": True, "per_device_train_batch_size": 1, "bf16": True},
        {"method": "grpo", "completion_len": 256, "seq_len": 768, "engine": "vllm"}, "", "",
    ),
    "trl grpo with a server and a model that rewards": (
        {"model_name_or_path": LLAMA, "num_generations": 8, "max_prompt_length": 512, "beta": 0.04,
         "use_vllm": True, "vllm_mode": "server", "vllm_gpu_memory_utilization": 0.9,
         "reward_funcs": ["accuracy", "some/reward-model"]},
        {"method": "grpo", "engine": "server", "seq_len": 1024, "kl_beta": 0.04,
         "engine_share": None},
        "the reward model some/reward-model", "",
    ),
    "trl rloo by its own keys": (
        {"model_name_or_path": LLAMA, "num_generations": 4, "normalize_advantages": True},
        {"method": "rloo"}, "", "",
    ),
    "trl rloo by the name of the run": (
        {"model_name_or_path": LLAMA, "num_generations": 4, "output_dir": "llama-RLOO"},
        {"method": "rloo"}, "", "",
    ),
    "trl grpo by the completions of all processes": (
        {"model_name_or_path": LLAMA, "num_generations": 8, "per_device_train_batch_size": 4,
         "num_gpus": 2, "generation_batch_size": 64},
        {"method": "grpo", "steps_per_generation": 8}, "", "",
    ),
    "trl grpo by the completions of nobody knows how many processes": (
        {"model_name_or_path": LLAMA, "num_generations": 8, "per_device_train_batch_size": 4,
         "generation_batch_size": 64},
        {"method": "grpo", "steps_per_generation": 16}, "", "taken for those of one",
    ),
    "trl online dpo by its keys": (
        {"model_name_or_path": LLAMA, "beta": 0.1, "max_new_tokens": 53, "missing_eos_penalty": 1.0,
         "per_device_train_batch_size": 4, "reward_model_path": "some/reward-model"},
        {"method": "online-dpo", "batch": 4, "completion_len": 53, "seq_len": 512, "dtype": "auto",
         "kl_beta": None, "checkpointing": "full", "precision": "bf16"},
        "reward_model_path", "",
    ),
    "trl online dpo beside vLLM": (
        {"model_name_or_path": LLAMA, "max_new_tokens": 64, "max_length": 640, "use_vllm": True,
         "reward_weights": [1.0], "vllm_enable_sleep_mode": True},
        {"method": "online-dpo", "seq_len": 640, "engine": "vllm", "engine_share": 0.55,
         "engine_sleeps": True}, "", "",
    ),
    "trl online dpo under FSDP": (
        {"model_name_or_path": LLAMA, "beta": 0.1, "max_new_tokens": 64, "num_gpus": 4,
         "use_vllm": True, "fsdp": "full_shard"},
        {"method": None, "engine": None, "fsdp": "full_shard"},
        "two completions of each prompt; priced is supervised fine-tuning", "",
    ),
    "gkd writes tokens too": (
        {"model_name_or_path": LLAMA, "beta": 0.5, "max_new_tokens": 64, "lmbda": 0.5},
        {"method": None}, "priced is supervised fine-tuning", "",
    ),
    "trl grpo without an end": (
        {"model_name_or_path": LLAMA, "num_generations": 8, "max_completion_length": None},
        {"method": "grpo", "completion_len": 512}, "completions are not cut", "",
    ),
    "trl grpo by Liger": (
        {"model_name_or_path": LLAMA, "num_generations": 8, "use_liger_kernel": True},
        {"method": "grpo", "use_liger_kernel": None}, "priced is the run without them", "",
    ),
    "trl grpo by Liger, as it was called": (
        {"model_name_or_path": LLAMA, "num_generations": 8, "use_liger_loss": True},
        {"method": "grpo", "use_liger_kernel": None}, "priced is the run without them", "",
    ),
    "trl grpo without Liger, as it was called": (
        {"model_name_or_path": LLAMA, "num_generations": 8, "use_liger_loss": False},
        {"method": "grpo", "use_liger_kernel": None}, "", "",
    ),
    "trl grpo by the model itself, whose weights ZeRO-3 gathers token by token": (
        {"model_name_or_path": LLAMA, "num_generations": 8, "ds3_gather_for_generation": False},
        {"method": "grpo"}, "", "module by module for every token",
    ),
    "trl grpo under ZeRO-3": (
        {"model_name_or_path": LLAMA, "num_generations": 8, "num_gpus": 4,
         "deepspeed": {"zero_optimization": {"stage": 3}}},
        {"method": "grpo", "zero": 3}, "", "",
    ),
    "trl grpo under ZeRO-3, its adapters merged into 4 bits": (
        {"model_name_or_path": LLAMA, "num_generations": 8, "num_gpus": 4, "use_peft": True,
         "load_in_4bit": True, "use_vllm": True,
         "deepspeed": {"zero_optimization": {"stage": 3}}},
        {"method": None, "zero": 3}, "beside adapters on a quantised base", "",
    ),
    "trl grpo under FSDP": (
        {"model_name_or_path": LLAMA, "num_generations": 8, "use_vllm": True, "num_gpus": 4,
         "fsdp": "full_shard"},
        {"method": "grpo", "engine": "vllm", "fsdp": "full_shard"}, "", "",
    ),
    "trl dpo under FSDP": (
        {"model_name_or_path": LLAMA, "beta": 0.1, "max_length": 512, "output_dir": "a-dpo",
         "bf16": True, "num_gpus": 4, "fsdp": "full_shard"},
        {"method": "dpo", "fsdp": "full_shard"}, "", "",
    ),
    "trl dpo of adapters under FSDP": (
        {"model_name_or_path": LLAMA, "beta": 0.1, "max_length": 512, "output_dir": "a-dpo",
         "bf16": True, "num_gpus": 4, "fsdp": "full_shard", "use_peft": True},
        {"method": "dpo", "fsdp": "full_shard"}, "", "",
    ),
    "alignment-handbook dpo by its keys": (
        {"model_name_or_path": LLAMA, "beta": 0.1, "max_prompt_length": 512, "max_length": 1024,
         "per_device_train_batch_size": 2, "bf16": True, "use_peft": True, "lora_r": 128},
        {"lora_r": 128}, "DPO", "",
    ),
    "trl dpo by its loss alone": (
        {"model_name_or_path": LLAMA, "beta": 0.1, "loss_type": "sigmoid", "max_length": 1024,
         "per_device_train_batch_size": 2, "dataset_num_proc": 4},
        {"fused_loss": None}, "DPO", "",
    ),
    "open-r1 kto": (
        {"model_name_or_path": LLAMA, "desirable_weight": 1.0, "max_length": 512,
         "dataset_num_proc": 2},
        {"method": "kto"}, "", "",
    ),
    "trl has a rank and no switch": (
        {"model_name_or_path": LLAMA, "lora_r": 32, "max_length": 512, "dataset_text_field": "t"},
        {"lora_r": 32, "peft": "lora"}, "", "",
    ),
    "trl switches it off": (
        {"model_name_or_path": LLAMA, "lora_r": 32, "use_peft": False, "max_length": 512,
         "dataset_text_field": "t"},
        {"lora_r": None, "peft": None}, "", "",
    ),
    "training arguments name what nobody knows": (
        {"model_name_or_path": LLAMA, "per_device_train_batch_size": 2, "num_train_epochs": 1,
         "grpo_group": 4, "lora_plus_ratio": 16, "shiny": 3},
        {"batch": 2}, "grpo_group", "lora_plus_ratio",
    ),
    "training arguments with noise and a teacher": (
        {"model_name_or_path": LLAMA, "per_device_train_batch_size": 2, "num_train_epochs": 1,
         "neftune_noise_alpha": 5, "teacher_model_name_or_path": "x/y"},
        {"neftune_noise_alpha": 5}, "second model", "",
    ),
    "training arguments with noise that tensor parallelism excludes": (
        {"model_name_or_path": LLAMA, "per_device_train_batch_size": 2, "num_train_epochs": 1,
         "neftune_noise_alpha": 5, "tp": 2, "num_gpus": 2},
        {"neftune_noise_alpha": None}, "--neftune-noise-alpha is not priced together", "",
    ),
    "accelerate with fp8": (
        {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU",
         "num_processes": 4, "mixed_precision": "fp8", "num_machines": 1},
        {"num_gpus": 4, "precision": "bf16"}, "fp8", "",
    ),
    "grpo by its keys alone": (
        {"model_name_or_path": LLAMA, "num_generations": 8, "per_device_train_batch_size": 1},
        {"method": "grpo", "completion_len": 512}, "", "",
    ),
    "a preference by its beta alone": (
        {"model_name_or_path": LLAMA, "beta": 0.05, "per_device_train_batch_size": 1,
         "num_train_epochs": 1},
        {}, "pairs of answers", "",
    ),
    "alignment-handbook's orpo by the name of its run": (
        {"model_name_or_path": LLAMA, "beta": 0.05, "max_prompt_length": 1792, "max_length": 2048,
         "per_device_train_batch_size": 1, "output_dir": "data/zephyr-orpo-141b",
         "dataset_splits": ["train"]},
        {"method": "orpo"}, "", "",
    ),
    "axolotl's newer keys": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 1, "bf16": True,
         "attn_implementation": "kernels-community/flash-attn2", "sample_packing": True,
         "torch_compile": "auto", "lisa_n_layers": 4, "lisa_step_interval": 10},
        {"attn_implementation": "flash_attention_2", "packing": "bfd"}, "--torch-compile",
        "LISA trains a few layers",
    ),
    "axolotl compiles": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 1, "bf16": True,
         "torch_compile": "auto"},
        {"torch_compile": True}, "", "",
    ),
    "axolotl shares experts": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 1, "rl": "orpo",
         "expert_parallel_size": 4, "trl": {"beta": 0.1}},
        {"method": "orpo"}, "a plugin's own dispatch", "",
    ),
    "axolotl's kto of all weights": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 2, "rl": "kto",
         "bf16": True, "remove_unused_columns": False, "kto_desirable_weight": 1.3},
        {"method": "kto", "log_probs": "logits", "ref_dtype": "float32"}, "", "nobody asks",
    ),
    "axolotl's dpo whose padding stays": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 2, "rl": "dpo",
         "adapter": "lora", "lora_r": 8, "lora_target_linear": True, "dpo_padding_free": True},
        {"method": "dpo", "log_probs": "logits"}, "", "",
    ),
    "axolotl's simpo": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 2, "rl": "simpo"},
        {"method": "cpo", "log_probs": "logits"}, "", "nobody asks",
    ),
    "axolotl's simpo alone": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 2, "rl": "simpo",
         "cpo_alpha": 0.0},
        {"method": "simpo"}, "", "nobody asks",
    ),
    "axolotl's rewards": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 2, "reward_model": True,
         "num_labels": 1, "model_type": "AutoModelForSequenceClassification"},
        {"method": "reward", "log_probs": "logits"}, "", "",
    ),
    "axolotl's xformers": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 1,
         "xformers_attention": True, "flash_attention": True, "sample_packing": True},
        {"attn_implementation": None, "packing": "bfd"}, "xformers", "",
    ),
    "flex attention": (
        {"model_name_or_path": LLAMA, "per_device_train_batch_size": 1, "num_train_epochs": 1,
         "max_seq_length": 128, "attn_implementation": "flex_attention"},
        {"attn_implementation": None}, "flex_attention; taken is the model's own", "",
    ),
    "FlashAttention 3": (
        {"model_name_or_path": LLAMA, "per_device_train_batch_size": 1, "num_train_epochs": 1,
         "bf16": True, "max_seq_length": 128,
         "attn_implementation": "kernels-community/flash-attn3"},
        {"attn_implementation": "flash_attention_2"}, "flash-attn3; taken is", "",
    ),
    "alignment-handbook's switch": (
        {"model_name_or_path": LLAMA, "per_device_train_batch_size": 1, "num_train_epochs": 1,
         "bf16": True, "max_seq_length": 128, "use_flash_attention_2": True},
        {"attn_implementation": "flash_attention_2"}, "", "",
    ),
    "DeepSpeed by the names of its fields": (
        {"zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": True,
                               "max_live_parameters": 10**9, "made_up_threshold": 1},
         "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}},
        {"zero": 3}, "made_up_threshold", "",
    ),
    "torchtune prefers, by its loss alone": (
        {"model": {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b"},
         "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.1}, "batch_size": 4},
        {"batch": 4, "fsdp": None, "method": "dpo", "log_probs": "torchtune"}, "", "",
    ),
    "torchtune prefers, all weights": (
        {"model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"},
         "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}, "ref_checkpointer": {"a": 1}},
        {"method": None}, "reference model", "",
    ),
    "torchtune's DPO by another recipe": (
        {"model": {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b"},
         "loss": {"_component_": "torchtune.rlhf.loss.SimPOLoss"}},
        {"method": None}, "pairs", "",
    ),
    "GRPO with a head in float32": (
        {"model_name_or_path": "gpt2", "num_generations": 8, "use_vllm": True,
         "cast_lm_head_to_fp32": True}, {"method": "grpo"}, "float32", "",
    ),
    "GRPO with a head as it is": (
        {"model_name_or_path": "gpt2", "num_generations": 8, "use_vllm": True,
         "cast_lm_head_to_fp32": False}, {"method": "grpo"}, "", "",
    ),
    "torchtune has a teacher": (
        {"model": {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b"},
         "teacher_model": {"_component_": "torchtune.models.llama3_1.llama3_1_70b"},
         "teacher_checkpointer": {"a": 1}, "kd_loss": {"_component_": "x"}, "kd_ratio": 0.5},
        {}, "second model", "",
    ),
    "torchtune's PPO": (
        {"policy_model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"},
         "reward_and_value_model": {"_component_": "x"}, "ppo_epochs": 1, "num_steps": 9,
         "loss": {"_component_": "torchtune.rlhf.loss.PPOLoss", "epsilon": 0.1}},
        {}, "further models in memory", "",
    ),
    "torchtune checkpoints every second layer": (
        {"model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"},
         "enable_activation_checkpointing": False, "ac_mode": "selective", "ac_option": 2},
        {"checkpointing": "every_n:2"}, "", "",
    ),
    "torchtitan keeps every second matmul": (
        {"model": {"name": "llama3", "flavor": "8B"}, "training": {"seq_len": 4096},
         "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
         "quantize": {"linear": {"float8": {"filter_fqns": ["output"]}}}},
        {"checkpointing": "selective"}, "--num-gpus says it", "the model's code",
    ),
    "torchtitan computes in fp8, and compiles layers": (
        {"model": {"name": "llama3", "flavor": "8B", "converters": ["float8"]},
         "training": {"seq_len": 4096}, "compile": {"enable": True}},
        {"torch_compile": None, "checkpointing": "every_n:2"}, "linears are replaced",
        "each layer is compiled by itself",
    ),
    "torchtitan of 2024": (
        {"model": {"name": "llama3", "flavor": "8B", "norm_type": "rmsnorm"},
         "training": {"batch_size": 2, "seq_len": 8192, "data_parallel_degree": 4,
                      "tensor_parallel_degree": 1, "compile": False, "fp8_linear": "",
                      "warmup_steps": 200},
         "optimizer": {"name": "AdamW", "lr": 3e-4, "fused": False},
         "experimental": {"pipeline_parallel_degree": 1},
         "activation_checkpoint": {"mode": "full"}},
        {"num_gpus": 4, "batch": 2, "fsdp": "full_shard", "optim": "adamw_torch_foreach",
         "checkpointing": "full"}, "", "",
    ),
    "torchtitan in a pipeline": (
        {"model": {"name": "llama3", "flavor": "8B"},
         "training": {"local_batch_size": 8, "seq_len": 2048, "mixed_precision_param": "float32"},
         "parallelism": {"data_parallel_shard_degree": 1, "pipeline_parallel_degree": 4,
                         "pipeline_parallel_schedule": "GPipe",
                         "pipeline_parallel_microbatch_size": 2}},
        {"pp": 4, "num_gpus": 4, "batch": 2, "pp_microbatches": 4, "pp_schedule": "gpipe"},
        "--pp-split says it", "",
    ),
    "torchtitan validates and is deterministic": (
        {"model": {"name": "llama3", "flavor": "8B"}, "training": {"seq_len": 2048},
         "validation": {"enable": True, "local_batch_size": 8}, "debug": {"deterministic": True},
         "override": {"imports": ["a.b"]}},
        {}, "deterministic kernels", "a validation between the steps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_configuration_is_understood(tmp_path, name):
    document, options, unpriced, named = FILES[name]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    run = memest.read_config(path, model=LLAMA)

    for option, value in options.items():
        assert run.options.get(option) == value, option
    told = _but_length(run.setup.unpriced)
    assert bool(told) is bool(unpriced), told
    assert unpriced in " ".join(told)
    assert named in " ".join(map(str, run.not_modelled))


COMMANDS = {
    "glue without the Trainer": (
        ("accelerate launch --num_processes 1 run_glue_no_trainer.py --model_name_or_path "
        "bert-base-cased --task_name mrpc --max_length 128 --per_device_train_batch_size 32"),
        {"task": "sequence-classification", "loop": "accelerate", "seq_len": 128, "batch": 32,
         "optim": "adamw_torch"}, False,
    ),
    "masked language modelling": (
        ("python run_mlm.py --model_name_or_path roberta-base --max_seq_length 128 --fp16 "
        "--per_device_train_batch_size 8 --do_train"),
        {"task": "masked-lm", "loop": "trainer", "precision": "fp16"}, False,
    ),
    "a base_model is not axolotl": (
        f"python finetune.py --base_model {LLAMA} --micro_batch_size 4 --lora_r 8",
        {"lora_r": 8}, False,
    ),
    "peft's qlora script": (
        ("python train.py --model_name_or_path gpt2 --use_peft_lora True --lora_r 8 "
        "--lora_target_modules q_proj,k_proj --use_4bit_quantization True --use_nested_quant True "
        "--bnb_4bit_compute_dtype bfloat16 --bf16 True --use_flash_attn True"),
        {"peft": "lora", "lora_r": 8, "load_in_4bit": True, "bnb_4bit_use_double_quant": True,
         "lora_target_modules": ("q_proj", "k_proj"),
         "attn_implementation": "flash_attention_2"}, False,
    ),
    "qlora's own script": (
        ("python qlora.py --model_name_or_path gpt2 --bits 4 --double_quant --quant_type nf4 "
        "--lora_r 64 --bf16"),
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "lora_r": 64}, False,
    ),
    "fsdp_qlora's own script": (
        (f"python train.py --model_name {LLAMA} --batch_size 4 --context_length 2048 "
        "--world_size 2 --train_type qlora --reentrant_checkpointing True --use_cpu_offload False"),
        {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16", "prepare_kbit": False,
         "bnb_4bit_use_double_quant": True, "lora_r": 64, "batch": 4, "seq_len": 2048,
         "fsdp": "full_shard", "fsdp_version": 1, "num_gpus": 2, "loop": "plain",
         "use_reentrant": True, "max_grad_norm": 0.0, "del_outputs": True}, False,
    ),
    "fsdp_qlora without a quantised base": (
        (f"python train.py --model_name {LLAMA} --context_length 512 --train_type full "
        "--precision bf16_buffers_autocast --sharding_strategy ddp --apply_gradient_clipping True"),
        {"peft": None, "load_in_4bit": None, "dtype": "bfloat16", "precision": "bf16",
         "fsdp": "no_shard", "fsdp_offload": True, "max_grad_norm": 0.3}, False,
    ),
    "LLaVA's switch": (
        ("deepspeed --num_gpus 2 train_mem.py --lora_enable True --lora_r 128 "
        "--model_name_or_path gpt2 --bf16 True --per_device_train_batch_size 16"),
        {"peft": "lora", "lora_r": 128, "num_gpus": 2}, False,
    ),
    "preference by the script's name": (
        "python dpo.py --model_name_or_path gpt2 --per_device_train_batch_size 1", {}, True,
    ),
    "TRL's own script": (
        "python trl/scripts/kto.py --model_name_or_path gpt2 --max_length 512",
        {"method": "kto", "seq_len": 512}, False,
    ),
    "a reward model and a rank are not LLaMA-Factory": (
        "python train.py --model_name_or_path gpt2 --reward_model r --lora_rank 8 --val_size 0.1",
        {"lora_r": 8, "seq_len": None}, True,
    ),
    "llama-factory v1": (
        "USE_V1=1 llamafactory-cli train --model m --train_dataset d --micro_batch_size 2",
        {"batch": 2, "loop": "plain"}, True,
    ),
    "llama-factory v1 prefers": (
        "NPROC_PER_NODE=4 FORCE_TORCHRUN=1 llamafactory-cli dpo --model m --global_batch_size 16",
        {"num_gpus": 4, "grad_accum": 4}, True,
    ),
    "trl grpo": (
        "trl grpo --model_name_or_path gpt2 --dataset_name d", {"method": "grpo"}, True
    ),
    "trl rloo": (
        "trl rloo --model_name_or_path gpt2 --dataset_name d --steps_per_generation 4",
        {"method": "rloo", "steps_per_generation": 4}, True,
    ),
    "swift sft": (
        ("NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 swift sft --model Qwen/Qwen3-8B "
        "--train_type lora --lora_rank 16 --dataset a#500 b --torch_dtype bfloat16 "
        "--max_length 2048 --model_author swift --model_name robot --deepspeed zero2 "
        "--gradient_accumulation_steps 8"),
        {"peft": "lora", "lora_r": 16, "batch": 1, "grad_accum": 8,
         "num_gpus": 4, "zero": 2, "seq_len": 2048, "precision": "bf16", "dtype": "bfloat16",
         "use_reentrant": True, "lora_target_modules": ("all-linear",)}, False,
    ),
    "swift counts micro-batches to 16 samples": (
        "NPROC_PER_NODE=2 NNODES=2 swift sft --model m --per_device_train_batch_size 3",
        {"grad_accum": 2, "num_gpus": 4, "batch": 3, "use_reentrant": False}, False,
    ),
    "swift of one GPU counts them too": (
        "swift sft --model m --tuner_type full --freeze_vit false",
        {"grad_accum": 16, "peft": None, "frozen_parts": ("projector",), "use_reentrant": True},
        False,
    ),
    "swift spreads a model over visible GPUs": (
        "CUDA_VISIBLE_DEVICES=0,1 swift sft --model m --max_length 100", {"num_gpus": 1}, False,
    ),
    "swift 2": (
        ("swift sft --model_id_or_path m --sft_type lora --batch_size 2 --use_flash_attn true "
        "--freeze_vit true --dtype fp16"),
        {"batch": 2, "seq_len": 2048, "eval_batch": 1, "dtype": "fp16",
         "precision": "fp16", "frozen_parts": ("vision",),
         "attn_implementation": "flash_attention_2"}, False,
    ),
    "swift 2 quantises by a word of its own": (
        "swift sft --model_id_or_path m --quantization_bit 4",
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, False,
    ),
    "swift 3 needs the method": (
        "swift sft --model m --quant_bits 4", {"load_in_4bit": None}, False,
    ),
    "swift quantises by what memest has not": (
        "swift sft --model m --quant_bits 4 --quant_method hqq", {"load_in_4bit": None}, True,
    ),
    "swift's float32 weights compute in float16": (
        "swift sft --model m --torch_dtype float32", {"dtype": "float32", "precision": "fp16"},
        False,
    ),
    "swift without autocast": (
        "swift sft --model m --torch_dtype bfloat16 --bf16 false",
        {"dtype": "bfloat16", "precision": "fp32"}, False,
    ),
    "swift names modules": (
        "swift sft --model m --target_modules q_proj v_proj --modules_to_save embed_tokens",
        {"lora_target_modules": ("q_proj", "v_proj"), "modules_to_save": ("embed_tokens",),
         "frozen_parts": None}, False,
    ),
    "swift adalora": (
        "swift sft --model m --tuner_type adalora --adalora_init_r 16", {"peft": None}, False,
    ),
    "swift reft": ("swift sft --model m --tuner_type reft --reft_rank 8", {"peft": "lora"}, True),
    "swift longlora": ("swift sft --model m --train_type longlora", {"peft": "lora"}, True),
    "swift fsdp2": (
        "NPROC_PER_NODE=8 swift sft --model m --tuner_type full --fsdp fsdp2",
        {"fsdp": "full_shard", "checkpointing": "full", "num_gpus": 8}, False,
    ),
    "swift zero3 on the host": (
        "NPROC_PER_NODE=8 swift pt --model m --deepspeed zero3_offload --use_logits_to_keep false",
        {"zero": 3, "offload_optimizer": True, "offload_param": True}, False,
    ),
    "swift pt makes all logits behind a copy": ("swift pt --model m", {}, True),
    "swift muon": (
        "swift sft --model m --optimizer muon --optim_args ns_steps=5", {"optim_args": None}, True,
    ),
    "swift classifies": (
        "swift sft --model m --task_type seq_cls --num_labels 2",
        {"task": "sequence-classification", "num_labels": 2}, False,
    ),
    "swift embeds": ("swift sft --model m --task_type embedding", {}, True),
    "swift's images": ("MAX_PIXELS=1003520 swift sft --model m", {}, True),
    "swift rlhf": (
        "swift rlhf --rlhf_type grpo --model m --offload_optimizer true --deepspeed zero2",
        {"zero": 2, "offload_optimizer": None}, True,
    ),
    "swift rlhf prefers unasked": (
        "swift rlhf --model m", {"method": "dpo", "log_probs": "ms-swift", "peft": "lora"}, False,
    ),
    "swift rlhf averages": (
        "swift rlhf --model m --rlhf_type dpo --loss_type ipo", {"method": "ipo"}, False,
    ),
    "swift rlhf of rewards": (
        "swift rlhf --model m --rlhf_type rm --center_rewards_coefficient 0.01",
        {"method": "reward"}, False,
    ),
    "swift's SimPO has the loss of CPO": (
        "swift rlhf --model m --rlhf_type simpo --simpo_gamma 1", {"method": "cpo"}, False,
    ),
    "swift's SimPO without it": (
        "swift rlhf --model m --rlhf_type simpo --cpo_alpha 0", {"method": "simpo"}, False,
    ),
    "swift's GRPO by a server": (
        ("swift rlhf --model m --rlhf_type grpo --use_vllm true --vllm_mode server "
        "--max_length 300 --max_completion_length 200 --num_generations 8 --reward_funcs format"),
        {"method": "grpo", "log_probs": "ms-swift", "engine": "server", "completion_len": 200,
         "seq_len": 500, "kl_beta": 0.04, "grad_accum": 1}, False,
    ),
    "swift's GRPO beside vLLM": (
        ("swift rlhf --model m --rlhf_type grpo --use_vllm true --vllm_mode colocate --beta 0 "
        "--sleep_level 1 --max_new_tokens 100 --max_completion_length 200"),
        {"engine": "vllm", "engine_share": 0.9, "engine_sleeps": True, "completion_len": 100,
         "kl_beta": 0}, False,
    ),
    "swift's GRPO with a reward model": (
        ("swift rlhf --model m --rlhf_type grpo --use_vllm true --vllm_mode server "
        "--reward_model n"), {"method": "grpo"}, True,
    ),
    "swift's GRPO of entropies": (
        ("swift rlhf --model m --rlhf_type grpo --use_vllm true --vllm_mode server "
        "--log_entropy true"), {"method": None}, True,
    ),
    "swift rlhf without padding": (
        "swift rlhf --model m --rlhf_type dpo --padding_free true", {"method": None}, True,
    ),
    "swift rlhf with another reference": (
        "swift rlhf --model m --tuner_type full --ref_model n", {"method": None}, True,
    ),
    "swift's own script": (
        "torchrun --nproc_per_node 8 /home/me/ms-swift/swift/cli/rlhf.py --model m --rlhf_type kto",
        {"num_gpus": 8, "grad_accum": 2, "method": "kto", "log_probs": "ms-swift"}, False,
    ),
    "swift's KTO without a divergence": (
        "swift rlhf --model m --rlhf_type kto --loss_type apo_zero_unpaired",
        {"method": "kto"}, False,
    ),
    "swift's own module": (
        "python -m swift.cli.sft --model m --galore_rank 3", {"grad_accum": 16}, False,
    ),
    "DeepSpeed by a switch": (
        ("deepspeed --num_gpus 2 train.py --model_name_or_path gpt2 --deepspeed "
        "--per_device_train_batch_size 1"), {"num_gpus": 2, "zero": None}, True,
    ),
    "DeepSpeed's launcher alone": (
        ("deepspeed --num_gpus 2 train.py --model_name_or_path gpt2 "
        "--per_device_train_batch_size 1"), {"num_gpus": 2, "zero": None}, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_understood(name):
    command, options, unpriced = COMMANDS[name]
    run = memest.read_command(command)

    for option, value in options.items():
        assert run.options.get(option) == value, option
    told = _but_length(run.setup.unpriced)
    assert bool(told) is unpriced, told


def _but_length(remarks):
    """Remarks without that on lengths that nothing names, which has a test of its own."""
    return [remark for remark in remarks if "length of samples" not in remark]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"model_name_or_path": "m", "template": "t", "infer_backend": "vllm",
          "finetuning_type": "lora"}, "inference"),
        ({"model_name_or_path": "m", "template": "t", "export_dir": "out",
          "finetuning_type": "lora"}, "merging"),
        ({"model": {"_component_": "torchtune.models.llama2.llama2_7b"}, "prompt": "p",
          "max_new_tokens": 3}, "generation"),
    ],
)  # fmt: skip
def test_what_trains_nothing_is_told_so(tmp_path, document, words):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=f"trains nothing.*{words}"):
        memest.read_config(path, model="gpt2")


@pytest.mark.parametrize(
    "command",
    ["trl vllm-serve --model m", "tune run generate --config g", "python -m swift.cli.infer"]
    + [
        f"swift {name} --model m"
        for name in "infer export deploy eval merge-lora sample app web-ui rollout".split()
    ],
)
def test_a_command_that_trains_nothing_is_told_so(command):
    with pytest.raises(ConfigError, match="train"):
        memest.read_command(command)


@pytest.mark.parametrize("command", ["megatron sft --model m", "NPROC_PER_NODE=8 megatron pt"])
def test_a_command_that_trains_by_what_memest_has_not_is_told_so(command):
    with pytest.raises(ConfigError, match="Megatron-Core, which memest does not model"):
        memest.read_command(command)


@pytest.mark.parametrize("words", ["--context_length 512", "--train_type lora"])
def test_a_train_py_of_ones_own_is_not_taken_for_a_published_one(words):
    command = f"python train.py --model_name_or_path {LLAMA} {words}"
    run = memest.read_command(command.split())

    assert run.options["loop"] == "trainer"
    assert not {"load_in_4bit", "fsdp"} & set(run.options)


def test_a_precision_that_the_published_script_has_not_is_refused():
    command = "python train.py --train_type qlora --context_length 512 --precision fp8"
    with pytest.raises(ConfigError, match="--precision fp8 is not known"):
        memest.read_command(command.split())


def test_the_file_of_a_command_of_swift_sets_its_environment(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ntuner_type: full\nENV: {NPROC_PER_NODE: 8, OMP_NUM_THREADS: 1}\n")
    for command in (f"swift sft {path}", f"swift sft --config {path}"):
        options = memest.read_command(command).options
        assert (options["num_gpus"], options["grad_accum"]) == (8, 2)
    assert memest.read_command(f"NPROC_PER_NODE=4 swift sft {path}").options["num_gpus"] == 4


def test_torchtune_says_its_recipe_in_the_header(tmp_path):
    text = (
        "# To launch on 4 devices:\n#   tune run --nproc_per_node 4 full_finetune_distributed "
        "--config llama3/8B_full\n"
        "model:\n  _component_: torchtune.models.llama3.llama3_8b\nbatch_size: 2\n"
        "optimizer:\n  _component_: torch.optim.AdamW\ndtype: bf16\n"
    )
    path = tmp_path / "run.yaml"
    path.write_text(text)
    run = memest.read_config(path)
    assert run.options["num_gpus"] == 4
    assert run.options["fsdp"] == "full_shard"
    path.write_text(text.replace("4 full_finetune_distributed", "1 full_finetune_single_device"))
    assert "fsdp" not in memest.read_config(path).options


@pytest.mark.parametrize("command", ["finetune_lora gpt2 --config run.yaml", "pretrain gpt2"])
def test_litgpt_is_told_its_own_name(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    document = {
        "checkpoint_dir": "checkpoints/gpt2", "lora_r": 4, "precision": "bf16-true", "devices": 1,
        "train": {"micro_batch_size": 2, "max_seq_length": 64}, "optimizer": {"class_path": "x"},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    words = "memest estimate gpt2 --batch 2 --seq-len 64 --loop plain --dtype bfloat16 --peft lora"
    with pytest.raises(ConfigError, match=f"LitGPT.*{words}"):
        memest.read_config("run.yaml")
    with pytest.raises(ConfigError, match=r"LitGPT.*memest estimate gpt2"):
        memest.read_command(f"litgpt {command}")
    with pytest.raises(ConfigError, match="litgpt chat does not train"):
        memest.read_command("litgpt chat gpt2")


def test_torchtunes_recipes_for_several_gpus_shard(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {_component_: torchtune.models.llama3.qlora_llama3_8b}\nbatch_size: 2\n"
    )
    assert "fsdp" not in memest.read_config(path, num_gpus=1).options
    options = memest.read_config(path).with_options(num_gpus=4).options
    assert (options["fsdp"], options["bnb_4bit_quant_storage"]) == ("full_shard", "bfloat16")


def test_a_configuration_of_torchtune_by_name_is_read_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "tune run --nproc_per_node 2 lora_dpo_distributed --config llama3/8B_lora_dpo"
    with pytest.raises(
        ConfigError, match=r"tune cp llama3/8B_lora_dpo run.yaml.*--config run.yaml"
    ):
        memest.read_command(command)
    folder = tmp_path / "recipes/configs/llama3"
    folder.mkdir(parents=True)
    text = "model: {_component_: torchtune.models.llama3.lora_llama3_8b}\nbatch_size: 2\n"
    (folder / "8B_lora_dpo.yaml").write_text(text)
    run = memest.read_command(f"{command} batch_size=3")
    assert (run.options["batch"], run.options["fsdp"]) == (3, "full_shard")
    assert "lora_dpo_distributed" in " ".join(run.setup.unpriced)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [("a.yaml", "", "a.yaml holds nothing"), ("a.yaml", "- 1\n- 2\n", "holds a list"),
     ("a.json", "[]", "holds a list"), ("a.json", "null", "holds nothing"),
     ("a.toml", "", "holds nothing")],
)  # fmt: skip
def test_a_file_without_keys_is_said_to_be_that(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        memest.read_config(path)


TITAN = """
from x import y

def base():
    from z import other
    def inner(sample):
        return sample
    groups = 3
    compiled = CompileConfig(enable=True, components=["loss"])
    return FluxTrainer.Config(
        model_spec=model_registry("8B", attn_backend="sdpa"),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(), num_chunks=4),
        optimizer=muon(lr=1.0),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=4096, max_context_length=2048
        ),
        compile=compiled, override=OverrideConfig(imports=["a.b"]), surprise=made(),
    )

def plain():
    return Trainer.Config(
        model_spec=model_registry("8B"), optimizer=default_adamw(lr=1.0),
        activation_checkpoint=SelectiveAC.Config(),
    )

def elsewhere():
    config = other_base()
    config.training.seq_len = 4
    return config
"""


def test_every_field_of_a_function_is_used_or_named(tmp_path):
    folder = tmp_path / "llama3"
    folder.mkdir()
    path = folder / "config_registry.py"
    path.write_text(TITAN)

    run = memest.read_config(f"{path}:base")
    told = " ".join(map(str, (*run.not_modelled, *run.ignored)))
    assert (run.options["batch"], run.options["checkpointing"]) == (2, "selective")
    for words in (
        "class: a trainer of its own", "ChunkedLossWrapper takes logits in pieces",
        "no AdamW of torchtitan's own", "the loss is compiled", "code of one's own", "surprise",
    ):  # fmt: skip
        assert words in told, words
    assert "a statement that is not read" not in told
    assert "attn_backend: priced as it is" in told

    run = memest.read_config(f"{path}:plain")
    assert run.options["checkpointing"] == "selective"
    assert "flex or varlen" in " ".join(run.setup.unpriced)
    run = memest.read_config(f"{path}:elsewhere", model="gpt2")
    assert "elsewhere: no literal, so unknown: config" in " ".join(run.setup.unpriced)


def test_a_configuration_of_torchtitan_by_name_is_looked_for_where_it_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config plain"
    with pytest.raises(ConfigError, match="Run memest in torchtitan's folder"):
        memest.read_command(command)
    folder = tmp_path / "torchtitan/models/llama3"
    folder.mkdir(parents=True)
    (folder / "config_registry.py").write_text(TITAN)
    run = memest.read_command(f"{command} --training.seq_len 4096 activation-checkpoint:full")
    assert (run.options["seq_len"], run.options["checkpointing"]) == (4096, "full")


KEYS = st.dictionaries(
    st.sampled_from(sorted({mark for each in FORMATS for mark in each.marks})),
    st.sampled_from([True, False, None, 1, 4, 0.5, "no", "lora", "bf16"]),
    max_size=8,
)


@given(st.sampled_from([each.name for each in FORMATS if each.marks]), KEYS)
def test_every_key_is_used_or_named(tmp_path_factory, name, document):
    """A key becomes a value, is ignored with a reason, or is named as not priced."""
    path = tmp_path_factory.mktemp("keys") / "run.json"
    document = {**document, "made_up_dpo": True, "made_up": 3}
    path.write_text(json.dumps(document))
    try:
        run = memest.read_config(path, config_format=name, model="gpt2")
    except ConfigError:
        return
    if any("peft" in source for source in run.sources):
        return  # an adapter is taken as a whole
    origins = " ".join(value.origin for reading in run.readings for value in reading.values)
    remarks = [*run.ignored, *run.not_modelled]
    told = " ".join(remark.key for remark in remarks)
    for key, value in document.items():
        assert f":{key}" in origins + told or value in (None, False), key
    if any(remark.key.endswith(":made_up") and remark.why == UNKNOWN for remark in remarks):
        assert "made_up" in " ".join(run.notes)
    if any(remark.key.endswith("made_up_dpo") for remark in run.not_modelled):
        assert run.setup.unpriced


def test_what_nobody_named_is_settled_by_naming_it():
    command = "accelerate launch run_clm.py --model_name_or_path gpt2 --bf16 --block_size 8"
    assert "--num-gpus says it" in memest.read_command(command).setup.unpriced[0]
    run = memest.read_command(command, num_gpus=1)
    assert run.setup.unpriced == ()
    assert "says it" not in " ".join(memest.read_command(command, num_gpus=1, seq_len=8).notes)


def test_a_method_of_a_file_is_taken_back_with_what_belongs_to_it(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"base_model": LLAMA, "micro_batch_size": 1, "rl": "dpo"}))

    run = memest.read_config(path, method="supervised")

    assert (run.setup.method, run.setup.log_probs) == ("supervised", "fused")


@pytest.mark.parametrize("launched", [False, True])
def test_relatives_are_told_by_the_name_of_their_file_or_script(launched, tmp_path):
    """alignment-handbook: recipes/zephyr-7b-beta/dpo/config_qlora.yaml, scripts/dpo.py."""
    folder = tmp_path / ("recipes" if launched else "dpo")
    folder.mkdir()
    path = folder / "config_qlora.yaml"
    path.write_text("model_name_or_path: gpt2\nbeta: 0.01\nmax_prompt_length: 512\n")
    command = f"accelerate launch --num_processes 1 scripts/dpo.py --config {path}"
    run = memest.read_command(command) if launched else memest.read_config(path)

    assert run.setup.method == "dpo"
    assert run.setup.unpriced == ()


REFUSED = {
    "a stage that LLaMA-Factory has not": (
        {"model_name_or_path": LLAMA, "stage": "dop", "finetuning_type": "lora", "template": "t"},
        "Did you mean 'dpo'",
    ),
    "a loss that LLaMA-Factory has not": (
        {"model_name_or_path": LLAMA, "stage": "dpo", "pref_loss": "sigmod", "template": "t",
         "finetuning_type": "lora"},
        "Did you mean 'sigmoid'",
    ),
    "a method that axolotl has not": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 2, "rl": "dpoo"},
        "Did you mean 'dpo'",
    ),
    "axolotl packs no pairs": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 2, "rl": "kto",
         "sample_packing": True},
        "rl kto and sample_packing exclude each other",
    ),
    "axolotl trains rewards or pairs": (
        {"base_model": LLAMA, "sequence_len": 2048, "micro_batch_size": 2, "rl": "dpo",
         "reward_model": True},
        "rl dpo and reward_model exclude each other",
    ),
    "a loss that TRL has not": ("trl dpo --model_name_or_path m --loss_type sigmod", "'sigmoid'"),
    "completions for a part of a micro-batch": (
        "trl grpo --model_name_or_path m --generation_batch_size 12",
        "12 is no multiple of the 8 completions",
    ),
    "completions counted twice": (
        "trl grpo --model_name_or_path m --generation_batch_size 16 --steps_per_generation 4",
        "say the same in two ways",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_tool_of_preferences_stops_at_is_refused(case, tmp_path):
    asked, words = REFUSED[case]
    read, source = memest.read_command, asked
    if isinstance(asked, dict):
        read, source = memest.read_config, tmp_path / "run.yaml"
        source.write_text(yaml.safe_dump(asked))

    with pytest.raises(ConfigError, match=words):
        read(source)
