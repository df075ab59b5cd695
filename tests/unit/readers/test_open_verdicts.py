"""On which side what is not priced leaves the verdict open, and what is priced in its place."""

from __future__ import annotations

import json

import pytest
import yaml

import memest
from memest.readers.torchtune import named_recipe

TRAINER = {"model_name_or_path": "gpt2", "per_device_train_batch_size": 2, "max_seq_length": 64}
FACTORY = {"model_name_or_path": "gpt2", "finetuning_type": "full", "cutoff_len": 64}
AXOLOTL = {"base_model": "gpt2", "sequence_len": 64, "micro_batch_size": 1}
TITAN = {"model": {"name": "llama3", "flavor": "8B"}, "training": {"seq_len": 64},
         "parallelism": {"data_parallel_shard_degree": 1}}  # fmt: skip
TUNE = {"model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}, "batch_size": 1,
        "tokenizer": {"max_seq_len": 64}}  # fmt: skip


def deepspeed(stage=3, **zero):
    return {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **zero}}


CASES = {
    # document, what may take more, what may take less
    "samples of any length": (
        {"per_device_train_batch_size": 8, "logging_steps": 5}, "512", "512"),
    "parameters on disks": (deepspeed(offload_param={"device": "nvme"}), "", ""),
    "optimizer on disks": (deepspeed(offload_optimizer={"device": "nvme"}), "", ""),
    "a share of the optimizer": (
        deepspeed(offload_optimizer={"device": "cpu", "ratio": 0.4}), "0.4", ""),
    "the share at stage 2": (
        deepspeed(2, offload_optimizer={"device": "cpu", "ratio": 0.4}), "", ""),
    "a former switch": (deepspeed(2, cpu_offload=True), "", ""),
    "states in bfloat16": (
        {"zero_optimization": {"stage": 2},
         "bf16": {"enabled": True, "bf16_master_weights_and_grads": True,
                  "bf16_optimizer_states": True}}, "", "bf16_optimizer_states"),
    "DeepSpeed's tensor parallelism": (
        {**deepspeed(), "tensor_parallel": {"autotp_size": 4}}, "tensor", "tensor"),
    "the same, off": ({**deepspeed(), "tensor_parallel": {"autotp_size": 1}}, "", ""),
    "a second partition": (deepspeed(zero_hpz_partition_size=8), "second partition", ""),
    "another optimizer": (
        {**deepspeed(), "optimizer": {"type": "Lion"}, "gradient_clipping": 1.0}, "Lion", "Lion"),
    "Megatron-LM": (
        {"distributed_type": "MEGATRON_LM", "num_processes": 8,
         "megatron_lm_config": {"megatron_lm_tp_degree": 8}}, "MEGATRON", "MEGATRON"),
    "KTransformers": ({**FACTORY, "use_kt": True}, "KTrans", "KTrans"),
    "expanded blocks": ({**FACTORY, "use_llama_pro": True}, "", "expanded blocks"),
    "Megatron of LLaMA-Factory": ({**FACTORY, "use_mca": True}, "Megatron", "Megatron"),
    "GPTQ": ({**AXOLOTL, "gptq": True}, "GPTQ", "GPTQ"),
    "a base quantised otherwise": (
        {**AXOLOTL, "model_quantization_config": "Mxfp4Config"}, "quantised", "quantised"),
    "experts of a plugin": ({**AXOLOTL, "expert_parallel_size": 4}, "experts", "experts"),
    "an evaluation that generates": (
        {**AXOLOTL, "eval_table_size": 10, "val_set_size": 0.1, "evals_per_epoch": 1},
        "generates", ""),
    "Liger's loss alone": (
        {**AXOLOTL, "liger_fused_linear_cross_entropy": True}, "", "some of Liger"),
    "shared by the Trainer": (
        {**TRAINER, "parallelism_config": {"tp_size": 8}}, "tensor", "tensor"),
    "an unknown key that saves": ({**TRAINER, "my_offload": "all"}, "", "my_offload"),
    "another kernel of attention": (
        {**TRAINER, "attn_implementation": "xformers"}, "xformers", "xformers"),
    "logits in pieces": ({**TITAN, "loss": {"class": "ChunkedCELoss"}}, "", "in pieces"),
    "what a compiler recomputes": (
        {**TITAN, "activation_checkpoint": {"mode": "memory_budget"}}, "", "recomputes"),
    "fp8": ({**TUNE, "enable_fp8_training": True}, "fp8", "fp8"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_is_open_where_it_is_open(write, name):
    document, more, less = CASES[name]
    file = write("run.yaml", yaml.safe_dump(document))
    setup = memest.read_config(file, model="gpt2", num_gpus=8).setup

    for told, word in ((setup.unpriced, more), (setup.overpriced, less)):
        told = [each for each in told if "code" not in each]
        assert bool(told) is bool(word), told
        assert word in " ".join(told)


@pytest.mark.parametrize(
    ("document", "options"),
    [
        (deepspeed(offload_param={"device": "nvme"}), {"offload_param": True, "zero": 3}),
        (deepspeed(2, cpu_offload=True), {"offload_optimizer": True, "zero": 2}),
        (deepspeed(2, cpu_offload=False), {"offload_optimizer": None}),
        (deepspeed(cpu_offload_params=True), {"offload_param": True}),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
          "zero_optimization": {"stage": 1}}, {"precision": "bf16"}),
    ],
)  # fmt: skip
def test_what_a_gpu_does_not_tell_apart_is_priced(options, document, write):
    run = memest.read_config(write("ds.json", json.dumps(document)), num_gpus=8)
    for option, value in options.items():
        assert run.options.get(option) == value


@pytest.mark.parametrize(
    "document",
    [
        {"model_name_or_path": "gpt2", "per_device_train_batch_size": 2},
        {"model_name_or_path": "gpt2", "use_peft": True, "max_length": None},
        {"model": "gpt2", "tuner_type": "full"},
        {**TUNE, "tokenizer": {"max_seq_len": None}},
        {"model_name_or_path": "gpt2", "max_length": None, "packing": True},
    ],
)
def test_a_length_that_nothing_names_is_open(write, document):
    file = write("run.yaml", yaml.safe_dump(document))
    assert "--seq-len says it" in " ".join(memest.read_config(file).setup.unpriced)
    assert not memest.read_config(file, seq_len=64, lora_r=None).setup.unpriced


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt2", "512 tokens"),
        ("google/vit-base-patch16-224", ""),
        ("openai/whisper-small", "length of labels"),
    ],
)
def test_models_without_tokens_are_not_told_of_tokens(write, model, words):
    text = yaml.safe_dump({"per_device_train_batch_size": 2, "report_to": "none"})
    run = memest.read_config(write("run.yaml", text), model=model).with_model(None, {})
    told = " ".join(run.setup.unpriced)
    assert words in told
    assert bool(words) is bool(told)


@pytest.mark.parametrize(
    ("model", "length"), [("bert-base-uncased", 512), ("gpt2", 1024), ("roberta-base", 512)]
)
def test_a_guess_stays_within_the_positions_of_the_model(model, length):
    run = memest.read_command(f"python run_mlm.py --model_name_or_path {model} --do_train")
    assert run.with_model(None, {}).setup.seq_len == length


@pytest.mark.parametrize(
    ("document", "model"),
    [
        ({**TRAINER, "model_init_kwargs": {"n_layer": 6, "subfolder": "a"}}, "gpt2?n_layer=6"),
        ({**AXOLOTL, "overrides_of_model_config": {"n_layer": 6}}, "gpt2?n_layer=6"),
        ({**AXOLOTL, "overrides_of_model_kwargs": {"n_head": 4}}, "gpt2?n_head=4"),
        ({**TRAINER, "config_overrides": "n_embd=64,n_head=2"}, "gpt2?n_embd=64&n_head=2"),
        ({**AXOLOTL, "overrides_of_model_config": None}, "gpt2"),
    ],
)  # fmt: skip
def test_entries_of_the_configuration_go_with_the_model(write, document, model):
    file = write("run.yaml", yaml.safe_dump(document))
    assert memest.read_config(file).model == model
    # a model named besides takes them too, unless it says otherwise itself
    if model == "gpt2?n_layer=6":
        assert memest.read_config(file, model="gpt2-xl?n_layer=3").model == "gpt2-xl?n_layer=3"


@pytest.mark.parametrize(
    ("kernels", "liger", "more", "less"),
    [
        ({}, True, "", ""),
        ({"rope": True, "rms_norm": True}, True, "", ""),
        ({"rope": False}, True, "without rope", ""),
        ({"fused_linear_cross_entropy": False, "cross_entropy": True}, None, "", "Liger's loss"),
    ],
)
def test_ligers_kernels_are_chosen(write, kernels, liger, more, less):
    document = {**TRAINER, "use_liger_kernel": True, "liger_kernel_config": kernels}
    run = memest.read_config(write("run.yaml", yaml.safe_dump(document)))
    assert run.options.get("use_liger_kernel") is liger
    for told, word in ((run.setup.unpriced, more), (run.setup.overpriced, less)):
        assert bool(told) is bool(word)
        assert word in " ".join(told)


def test_two_kernels_of_one_loss_exclude_each_other(write):
    document = {
        **TRAINER, "use_liger_kernel": True, "liger_kernel_config": {"cross_entropy": True}
    }  # fmt: skip
    with pytest.raises(memest.ConfigError, match="exclude each other"):
        memest.read_config(write("run.yaml", yaml.safe_dump(document)))


@pytest.mark.parametrize(
    ("part", "wraps"),
    [
        ({}, False),
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, False),
        ({"fsdp_version": 2}, False),
        ({"fsdp_transformer_layer_cls_to_wrap": "GPT2Block"}, False),
        ({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
          "fsdp_transformer_layer_cls_to_wrap": "GPT2Block"}, True),
    ],
)  # fmt: skip
def test_accelerate_wraps_nothing_unasked(write, part, wraps):
    document = {
        "distributed_type": "FSDP",
        "num_processes": 2,
        "fsdp_config": part or {"fsdp_offload_params": False},
    }
    run = memest.read_config(write("run.yaml", yaml.safe_dump(document)), model="gpt2")
    assert ("NO_WRAP" in " ".join(run.setup.unpriced)) is not wraps
    assert (run.options.get("fsdp_wrap") == ("GPT2Block",)) is wraps


def test_the_trainer_wraps_layers_unasked(write):
    text = yaml.safe_dump({**TRAINER, "fsdp": "full_shard"})
    assert not memest.read_config(write("run.yaml", text), num_gpus=2).setup.unpriced


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ("--nnodes 2 --nproc_per_node 8 full_finetune_distributed", 16),
        ("--nproc-per-node=4 --nnodes 2 full_finetune_distributed", 8),
        ("--nnodes $N --nproc_per_node 8 full_finetune_distributed", None),
        ("--standalone full_finetune_single_device", None),
    ],
)  # fmt: skip
def test_the_header_of_a_recipe_counts_nodes(words, gpus):
    recipe = words.rpartition(" ")[2]
    assert named_recipe(f"# tune run {words} --config x") == (recipe, gpus)


@pytest.mark.parametrize(
    ("words", "length"),
    [
        ("--max_target_length 64", 64),
        ("", 128),
        ("--max_target_length 64 --val_max_target_length 142", 142),
        ("--max_target_length 64 --generation_max_length 30", 30),
    ],
)
def test_a_summary_is_as_long_as_its_target(words, length):
    run = memest.read_command(
        "python run_summarization.py --model_name_or_path t5-small --do_train --do_eval "
        f"--predict_with_generate {words}"
    )
    assert run.options["generation_max_length"] == length


@pytest.mark.parametrize(
    ("document", "keys"),
    [
        ({**FACTORY, "freeze_trainable_layers": 3, "freeze_extra_modules": "norm"},
         ["freeze_trainable_layers", "freeze_extra_modules"]),
        ({**FACTORY, "finetuning_type": "freeze", "freeze_trainable_layers": 3},
         ["freeze_trainable_layers"]),
        ({**AXOLOTL, "bfloat16": True}, ["bfloat16"]),
        ({**AXOLOTL, "bf16": True, "bfloat16": True, "float32": False}, ["bfloat16", "float32"]),
        ({**TRAINER, "optim_target_modules": ["attn"]}, ["optim_target_modules"]),
    ],
)  # fmt: skip
def test_no_key_vanishes(write, document, keys):
    run = memest.read_config(write("run.yaml", yaml.safe_dump(document)))
    ignored_keys = {remark.key.partition(":")[2] for remark in run.ignored}
    assert set(keys) <= ignored_keys


def test_nobody_is_blamed_for_a_section_that_flags_make():
    run = memest.read_command(
        "accelerate launch --multi_gpu --num_processes 2 --gradient_accumulation_steps 4 "
        "--fsdp_version 2 train.py --model_name_or_path gpt2 --max_seq_length 64"
    )
    keys = [remark.key for remark in (*run.ignored, *run.not_modelled)]
    assert not any("_config" in key for key in keys)
