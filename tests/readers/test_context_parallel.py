"""Shared sequences in other tools' configurations."""

import pytest

import memest

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
parallelism_config:
"""


def accelerate(write, **parallel):
    lines = "".join(f"  parallelism_config_{key}: {value}\n" for key, value in parallel.items())
    return memest.read_config(write("accelerate.yaml", ACCELERATE + lines), seq_len=512)


def test_accelerate_names_the_gpus_of_a_sequence(write):
    parallel = {"cp_comm_strategy": "alltoall", "cp_size": 4, "dp_shard_size": 4, "sp_size": 1}
    run = accelerate(write, **parallel)
    spread = run.setup.distributed
    assert (spread.num_gpus, spread.cp, spread.cp_rotate) == (16, 4, "alltoall")
    assert (spread.data_ranks, spread.shard_ranks, spread.num_copies) == (4, 16, 1)
    assert not run.not_modelled


def test_copies_are_of_what_shards_and_sequences_share(write):
    run = accelerate(write, dp_replicate_size=2, dp_shard_size=4, cp_size=2)
    spread = run.setup.distributed
    assert (spread.fsdp_shard_size, spread.num_copies, spread.data_ranks) == (8, 2, 8)


def test_what_belongs_to_no_sequence_changes_nothing(write):
    run = accelerate(write, cp_size=1, cp_comm_strategy="alltoall", dp_shard_size=16)
    assert run.setup.distributed.cp == 1
    assert run.setup.distributed.cp_rotate == "allgather"
    assert not run.not_modelled


def test_ulysses_is_not_taken_for_a_ring(write):
    run = accelerate(write, sp_size=4, dp_shard_size=4)
    assert run.setup.distributed.cp == 1
    assert any("sp_size" in remark.key for remark in run.not_modelled)


@pytest.mark.parametrize("key", ["context_parallel_size", "sequence_parallel_degree"])
def test_the_ring_of_another_library_is_not_torchs(write, key):
    text = f"base_model: gpt2\nmicro_batch_size: 2\nsequence_len: 256\n{key}: 2\n"
    run = memest.read_config(write("axolotl.yaml", text))
    assert run.setup.distributed.cp == 1
    assert any("ring-flash-attn" in remark.why for remark in run.not_modelled)


def test_torchtitan_shards_over_those_of_a_sequence(write):
    text = (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n'
        "seq_len = 8192\n[parallelism]\ndata_parallel_shard_degree = 1\n"
        'context_parallel_degree = 8\ncontext_parallel_rotate_method = "alltoall"\n'
    )
    spread = memest.read_config(write("titan.toml", text)).setup.distributed
    assert (spread.num_gpus, spread.cp, spread.cp_rotate) == (8, 8, "alltoall")
    assert (spread.fsdp, spread.shard_ranks) == ("full_shard", 8)
