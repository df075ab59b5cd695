"""Sequences that are shared by Ulysses in accelerate's configurations and launch commands."""

import memest

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
deepspeed_config:
  zero_stage: 3
parallelism_config:
"""


def accelerate(write, text=ACCELERATE, **parallel):
    lines = "".join(f"  parallelism_config_{key}: {value}\n" for key, value in parallel.items())
    return memest.read_config(write("accelerate.yaml", text + lines), seq_len=512)


def test_accelerate_names_the_gpus_of_a_sequence(write):
    run = accelerate(
        write, sp_size=4, sp_backend="deepspeed", sp_seq_length=512,
        sp_seq_length_is_variable=True, sp_attn_implementation="flash_attention_2", dp_shard_size=1,
    )  # fmt: skip
    spread = run.setup.distributed
    assert (spread.num_gpus, spread.sp, spread.zero, spread.data_ranks) == (8, 4, 3, 2)
    assert run.setup.attn_implementation == "flash_attention_2"
    assert not run.not_modelled


def test_what_belongs_to_no_sequence_changes_nothing(write):
    run = accelerate(write, sp_size=1, sp_backend="deepspeed", sp_attn_implementation="sdpa")
    assert run.setup.distributed.sp == 1
    assert run.setup.attn_implementation == "auto"
    assert not run.not_modelled


def test_without_deepspeed_it_is_not_modelled(write):
    other = ACCELERATE.replace("DEEPSPEED", "MULTI_GPU")
    run = accelerate(write, other, sp_size=4)
    assert run.setup.distributed.sp == 1
    assert any("sp_size 4: DeepSpeed's" in remark.why for remark in run.not_modelled)


def test_a_launch_command_names_them_too():
    run = memest.read_command(
        "accelerate launch --num_processes 8 --use_deepspeed --zero_stage 3 --mixed_precision bf16 "
        "--parallelism_config_sp_size 2 --parallelism_config_sp_backend deepspeed "
        "run_clm.py --model_name_or_path gpt2 --block_size 512"
    )
    assert (run.setup.distributed.sp, run.setup.distributed.zero) == (2, 3)
