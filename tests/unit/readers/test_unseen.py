"""Configurations, scripts and commands by people who had not read the readers: what of each must be
understood, what the verdict must rest on, and what may take less than is priced.

They wrote down first what a framework does, from its source; each line below is theirs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import memest

FOLDER = Path(__file__).parent / "examples" / "unseen"

FILES = {
    "accelerate_hybrid.yaml": (
        {"num_gpus": 16, "fsdp_version": 1}, ["hybrid", "gathered ahead in forward"], []),
    "axolotl_fsdp2_hybrid.yaml": (
        {"dtype": "bfloat16", "fsdp": "shard_grad_op", "fsdp_shard_size": 4, "num_gpus": 8,
         "fused_loss": "cce", "packing": "bfd", "cast_weights": None}, [], []),
    "axolotl_full.yaml": ({"dtype": "bfloat16", "use_reentrant": True}, [], []),
    "axolotl_gemma3_dora.yaml": ({"use_dora": True, "image_size": 896}, ["ranks by module"], []),
    "axolotl_kto.yaml": (
        {"load_in_8bit": True, "method": "kto", "log_probs": "logits"}, [], []),
    "axolotl_lora_4bit.yaml": ({"load_in_4bit": None, "peft": "lora"}, [], []),
    "axolotl_moe_experts.yaml": ({"load_in_4bit": True}, [], ["experts are quantised"]),
    "axolotl_unfrozen.yaml": (
        {"use_reentrant": False}, [], ["only these parameters train"]),
    "llama_factory_additional_target.yaml": (
        {"cast_weights": ("trainable=float32",), "modules_to_save": ("embed_tokens", "lm_head")}, [], []),
    "llama_factory_freeze.yaml": ({"dtype": "float32"}, [], ["name those that do not"]),
    "llama_factory_galore.yaml": (
        {"optim": "galore_adamw", "precision": "fp32", "dtype": "bfloat16"}, [], []),
    "llama_factory_v1_freeze.yaml": (
        {"fsdp": "shard_grad_op", "fsdp_offload": True}, ["liger_kernel", "muon", "logits"],
        ["cp_size", "freeze"]),
    "torchtitan_hybrid.toml": ({"fsdp": None}, ["4 copies"], ["all GPUs there are"]),
    "torchtitan_one_gpu.toml": (
        {"fsdp": None, "batch": 4}, ["all GPUs there are"], ["all GPUs there are"]),
    "torchtitan_pipeline.toml": (
        {"batch": 1, "pp_microbatches": 8, "fsdp": "shard_grad_op", "pp": 2},
        ["layers of each stage"], []),
    "torchtune_3b.yaml": (
        {"fsdp": "shard_grad_op", "fsdp_shard_size": 2, "num_gpus": 4, "torch_compile": None},
        ["masks between", "FSDP units of their own", "a validation of 16"], ["all logits at once"]),
    "torchtune_7b.yaml": (
        {"optim": "paged_adamw_8bit", "optim_in_backward": True, "packing": None}, [],
        ["activations move to the host"]),
    "torchtune_validation.yaml": ({"batch": 1}, ["a validation of 32 samples"], []),
    "handbook_sft.yaml": ({"packing": "wrapped", "neftune_noise_alpha": 5}, [], []),
    "handbook_orpo.yaml": (
        {"method": "orpo", "prepare_kbit": True, "lora_r": 64}, [], ["halved"]),
    "qlora_sft.py": ({"seq_len": 4096, "prepare_kbit": True}, [], []),
    "distill.py": (
        {"grad_accum": 4, "zero_grad": "zero"}, ["further model", "copies of the weights"], ["frozen"]),
    "trainer_cls.py": (
        {"num_labels": 28, "optim": "adafactor"}, [], ["frozen"]),
    "unsloth.ipynb": ({"seq_len": 2048}, ["dynamic 4-bit"], ["checkpoints move to the host"]),
    "whisper.ipynb": ({"generation_max_length": 225}, ["length of labels"], ["freeze_encoder"]),
    "dpo.sh": (
        {"num_gpus": 4, "use_dora": True, "method": "dpo", "precompute_ref_log_probs": True},
        [], ["activations move"]),
    "grpo.sh": (
        {"num_gpus": 2, "zero": None, "method": "grpo", "engine": "vllm", "engine_share": 0.3,
         "kl_beta": 0.04, "completion_len": 1024},
        ["reward model"], []),
    "summ.sh": (
        {"eval_batch": 4, "generation_max_length": 142, "target_len": 64},
        ["log-probabilities of every token"], ["records CUDA graphs"]),
    "glue_nt.sh": (
        {"loop": "accelerate", "max_grad_norm": 0.0, "seq_len": 256},
        ["evaluates with 128 samples"], ["torch-compile"]),
    "qlora.sh": (
        {"seq_len": 528, "bnb_4bit_compute_dtype": "bfloat16", "optim": "paged_adamw_32bit",
         "max_grad_norm": 0.3, "lora_target_modules": ("all-linear",)}, [], []),
    "fastchat.sh": ({"fsdp": "full_shard", "num_gpus": 4, "seq_len": 2048}, [], []),
    "axolotl_lora8bit.yaml": (
        {"batch": 2, "seq_len": 4096, "grad_accum": 4, "eval_batch": 1, "precision": "bf16", "dtype": "bfloat16", "optim": "adamw_bnb_8bit", "checkpointing": "full"},
        [], []),
    "axolotl_packed_full.yaml": (
        {"batch": 1, "seq_len": 8192, "grad_accum": 8, "eval_batch": 1, "precision": "bf16", "dtype": "bfloat16", "optim": "paged_adamw_8bit", "checkpointing": "full", "packing": "bfd"},
        [], ["only these parameters train;"]),
    "axolotl_qlora_fsdp.yaml": (
        {"batch": 1, "seq_len": 2048, "grad_accum": 4, "eval_batch": 1, "precision": "bf16", "dtype": "bfloat16", "optim": "adamw_torch_fused", "checkpointing": "full", "fsdp": "full_shard", "load_in_4bit": True, "packing": "bfd"},
        ["nothing names it: 1"], ["nothing names it: 1"]),
    "llama_factory_qlora.yaml": (
        {"batch": 2, "seq_len": 4096, "grad_accum": 8, "eval_batch": 1, "precision": "bf16", "dtype": "bfloat16", "optim": "paged_adamw_8bit", "checkpointing": "full", "load_in_4bit": True, "packing": "wrapped", "cast_weights": ("trainable=float32",)},
        [], []),
    "llama_factory_full.yaml": (
        {"batch": 2, "seq_len": 2048, "grad_accum": 4, "precision": "fp32", "dtype": "bfloat16", "optim": "auto", "checkpointing": "full"},
        [], []),
    "llama_factory_dpo.yaml": (
        {"batch": 1, "seq_len": 2048, "grad_accum": 8, "eval_batch": None, "precision": "bf16", "dtype": "bfloat16", "optim": "auto", "checkpointing": "full", "cast_weights": ("trainable=float32",), "method": "dpo", "log_probs": "float32"},
        ["an evaluation of 2 pairs at once"], []),
    "swift_vl.sh": (
        {"batch": 1, "seq_len": 4096, "grad_accum": 8, "precision": "bf16", "dtype": "bfloat16", "optim": "auto", "checkpointing": "full", "num_gpus": 2, "zero": 2},
        ["a tower that trains", "MAX_PIXELS: how large images"], []),
    "swift_full.sh": (
        {"batch": 1, "seq_len": 16384, "grad_accum": 2, "eval_batch": 1, "precision": "bf16", "dtype": "bfloat16", "optim": "auto", "checkpointing": "full", "num_gpus": 8, "zero": 3, "packing": "bfd"},
        [], ["sequences are split over"]),
    "torchtune_qlora.yaml": (
        {"batch": 4, "seq_len": 4096, "grad_accum": 4, "precision": "fp32", "dtype": "bfloat16", "optim": "adamw_torch_fused", "checkpointing": "full", "load_in_4bit": True, "packing": "wrapped"},
        ["masks between the samples"], ["activations move to the"]),
    "torchtune_full.yaml": (
        {"batch": 2, "seq_len": 8192, "grad_accum": 2, "precision": "fp32", "dtype": "bfloat16", "optim": "adamw_torch_fused", "checkpointing": "full", "packing": "wrapped"},
        ["masks between the samples", "a validation of 8", "these layers are FSDP"], []),
    "trl_sft.yaml": (
        {"batch": 4, "seq_len": 4096, "grad_accum": 4, "eval_batch": 8, "precision": "bf16", "dtype": "bfloat16", "optim": "adamw_torch_fused", "checkpointing": "full", "num_gpus": 2, "load_in_4bit": True, "packing": "bfd", "cast_weights": ("trainable=bfloat16",)},
        [], []),
    "cls.py": (
        {"batch": 16, "seq_len": 256, "grad_accum": 1, "eval_batch": 64, "precision": "fp32", "optim": "auto", "checkpointing": "none"},
        [], ["parameters are frozen: all"]),
    "clm.py": (
        {"batch": 8, "grad_accum": 8, "eval_batch": 4, "precision": "bf16", "dtype": "float32", "optim": "adafactor", "checkpointing": "full"},
        ["indices of predictions", "length of samples: nothing"], ["length of samples"]),
    "qlora_mistral.py": (
        {"batch": 4, "seq_len": 1024, "grad_accum": 1, "precision": "fp32", "dtype": "auto", "optim": "paged_adamw_32bit", "checkpointing": "full"},
        [], []),
    "lora_qwen.py": (
        {"batch": 2, "seq_len": 4096, "grad_accum": 8, "eval_batch": 2, "precision": "bf16", "dtype": "bfloat16", "optim": "adamw_torch_fused", "checkpointing": "full", "packing": "bfd"},
        [], []),
    "plain_qa.py": (
        {"batch": 12, "seq_len": 384, "grad_accum": 2, "precision": "fp16", "optim": "adamw_torch"},
        ["32 samples at once"], []),
    "accel_t5.py": (
        {"batch": 8, "seq_len": 1024, "grad_accum": 4, "precision": "bf16", "optim": "adamw_torch", "checkpointing": "full"},
        ["what an evaluation gathers", "generation besides; --generate says"], []),
    "whisper_peft.ipynb": (
        {"batch": 8, "grad_accum": 1, "eval_batch": 8, "precision": "fp16", "optim": "auto", "checkpointing": "full"},
        ["length of labels: nothing"], ["length of labels"]),
    "vit.ipynb": (
        {"batch": 32, "grad_accum": 4, "eval_batch": 64, "precision": "fp16", "optim": "auto", "checkpointing": "none"},
        [], ["parameters are frozen: all"]),
    "glue.slurm": (
        {"batch": 16, "seq_len": 256, "grad_accum": 2, "eval_batch": 64, "precision": "bf16", "optim": "auto", "checkpointing": "none", "num_gpus": 4},
        [], []),
    "ds.sh": (
        {"batch": 4, "seq_len": 1024, "grad_accum": 2, "eval_batch": 8, "precision": "fp16", "optim": "adamw_torch_fused", "checkpointing": "none", "num_gpus": 4, "zero": 2},
        ["run_clm.py: the longest sample"], []),
    "trl_dpo.sh": (
        {"batch": 2, "seq_len": 2048, "grad_accum": 8, "eval_batch": None, "method": "dpo", "precision": "bf16", "dtype": "bfloat16", "optim": "paged_adamw_8bit", "checkpointing": "full", "num_gpus": 2, "load_in_4bit": True, "cast_weights": ("trainable=bfloat16",)},
        ["an evaluation of 8 pairs at once"], []),
    "sft_qlora.py": (
        {"batch": 1, "seq_len": 1024, "grad_accum": 8, "precision": "bf16", "dtype": "bfloat16", "optim": "adamw_torch", "checkpointing": "full", "cast_weights": ["trainable=bfloat16"]},
        [], []),
}  # fmt: skip

COMMANDS = {
    "copies of torchtitan": (
        "NGPU=8 CONFIG_FILE=torchtitan_hybrid.toml ./run_train.sh",
        {"fsdp_shard_size": 2, "num_gpus": 8}, "", ""),
    "copies that leave nobody to share with are refused": (
        "NGPU=4 CONFIG_FILE=torchtitan_hybrid.toml ./run_train.sh", "no whole number of GPUs", "", ""),
    "torchtitan on one GPU shards nothing": (
        "NGPU=1 CONFIG_FILE=torchtitan_one_gpu.toml ./run_train.sh",
        {"fsdp": None, "num_gpus": 1}, "", ""),
    "torchtitan switches off by no-": (
        "NGPU=8 CONFIG_FILE=torchtitan_offload.toml ./run_train.sh --training.no-enable-cpu-offload",
        {"fsdp_offload": None, "fsdp": "full_shard"}, "", ""),
    "torchtitan recomputes nothing": (
        "NGPU=8 CONFIG_FILE=torchtitan_offload.toml ./run_train.sh --activation_checkpoint.mode none",
        {"checkpointing": "none"}, "", ""),
    "torchtitan, layers shared": (
        "NGPU=8 CONFIG_FILE=torchtitan_8b_tp.toml ./run_train.sh",
        {"fsdp_shard_size": 2, "tp": 2, "checkpointing": "selective"}, "float8", "compiled"),
    "copies of torchtune": (
        ("tune run --nproc_per_node 8 full_finetune_distributed --config torchtune_8b.yaml "
        "data_parallel_replicate_dim=4"), {"fsdp_shard_size": 2, "num_gpus": 8}, "", "all logits"),
    "torchtune, a component by its name and keys taken out": (
        ("tune run full_finetune_single_device --config torchtune_7b.yaml "
        "optimizer=bitsandbytes.optim.AdamW8bit optimizer_in_bwd=False ~clip_grad_norm"),
        {"optim": "adamw_8bit", "max_grad_norm": 0.0}, "", "activations"),
    "DeepSpeed counts micro-batches of a loop without a Trainer": (
        ("accelerate launch --config_file accelerate_zero3.yaml --num_processes 8 "
        "run_clm_no_trainer.py --model_name_or_path gpt2 --per_device_train_batch_size 4 "
        "--per_device_eval_batch_size 4 --block_size 512"),
        {"grad_accum": 4, "zero": 3, "loop": "accelerate"}, "dynamo", "dynamo"),
    "an evaluation behind the training": (
        ("python run_clm.py --model_name_or_path gpt2 --do_train --do_eval --block_size 512 "
        "--per_device_eval_batch_size 64"), {"eval_batch": 64, "seq_len": 512}, "", ""),
    "the tokenizer's longest": (
        "python run_clm.py --model_name_or_path gpt2 --do_train", {"seq_len": 1024},
        "--seq-len says it", ""),
    "lengths of the examples": (
        "python run_qa.py --model_name_or_path bert-base-uncased", {"seq_len": 384}, "", ""),
    "TRL hands its launcher a stage without DeepSpeed": (
        ("trl sft --model_name_or_path gpt2 --num_processes 8 --zero_stage 3 "
        "--per_device_train_batch_size 1"), {"zero": None, "num_gpus": 8}, "", ""),
    "alpaca-lora": (
        ("python finetune.py --base_model huggyllama/llama-7b --micro_batch_size 8 --batch_size 128 "
        "--cutoff_len 512 --lora_target_modules [q_proj,v_proj]"),
        {"batch": 8, "grad_accum": 16, "load_in_8bit": True, "precision": "fp16", "seq_len": 512,
         "lora_target_modules": ("q_proj", "v_proj")}, "", ""),
    "ms-swift freezes a share and trains parts": (
        ("swift sft --model Qwen/Qwen3-8B --train_type full --freeze_parameters_ratio 0.9 "
        "--trainable_parameters model.embed_tokens --max_length 512"),
        {}, "", "freeze_parameters_ratio"),
    "ms-swift makes what trains in float16 float32": (
        ("swift sft --model Qwen/Qwen3-8B --train_type lora --torch_dtype float16 "
        "--modules_to_save lm_head --max_length 512"), {"cast_weights": ("trainable=float32",)}, "", ""),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_its_folder(monkeypatch):
    monkeypatch.chdir(FOLDER)


def check(run, options, unpriced, overpriced):
    for name, value in options.items():
        assert run.options.get(name) == value, (name, run.options.get(name))
    for words, told in ((unpriced, run.setup.unpriced), (overpriced, run.setup.overpriced)):
        assert bool(words) == bool(told), told
        for word in words:
            assert any(word in each for each in told), (word, told)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_understood_or_named(name):
    check(memest.read_config(name), *FILES[name])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_understood_or_named(name):
    command, options, unpriced, overpriced = COMMANDS[name]
    if isinstance(options, str):
        with pytest.raises(memest.ConfigError, match=options):
            memest.read_command(command)
        return
    words = [[each] if each else [] for each in (unpriced, overpriced)]
    check(memest.read_command(command), options, *words)


def test_every_file_is_in_the_table():
    used = " ".join(["ds_zero2.json", *(command for command, *_ in COMMANDS.values())])
    files = {path.name for path in FOLDER.iterdir() if path.is_file()}
    assert {name for name in files if name not in FILES and name not in used} == set()
