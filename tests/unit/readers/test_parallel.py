"""Degrees of parallelism: what a file names is an option's value, and nothing is counted twice."""

import pytest

import memest

TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 256
mixed_precision_param = "float32"
[parallelism]
data_parallel_shard_degree = 4
"""


@pytest.mark.parametrize(("degree", "told"), [(1, False), (2, True)])
def test_experts_are_shared_by_ranks_that_are_counted_already(options, degree, told):
    """torchtitan's world is shards, replicas, tensor, context and pipeline ranks: no experts.

    What is not modelled, experts that are sharded inside or beside FSDP's mixed precision, is
    priced without, and the reading says so.
    """
    text = TITAN + "expert_parallel_degree = 2\ntensor_parallel_degree = 2\n"
    found, missed = options(text + f"expert_tensor_parallel_degree = {degree}\n", "run.toml")
    assert (found["num_gpus"], found["ep"], found["tp"]) == (8, 2, 2)
    assert any("expert_tensor_parallel_degree" in key for key in missed) is told

    mixed = TITAN.replace('mixed_precision_param = "float32"\n', "")
    found, missed = options(mixed + "expert_parallel_degree = 2\n", "run.toml")
    assert "ep" not in found
    assert any("expert_parallel_degree" in key for key in missed)


SHARED = TITAN.replace("shard_degree = 4", "shard_degree = 2") + "tensor_parallel_degree = 2\n"


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        (SHARED + "enable_async_tensor_parallel = true\n", {"tp_sequence_parallel": True}),
        (SHARED + "enable_sequence_parallel = true\n", {"tp_sequence_parallel": True}),
        (
            SHARED + "disable_loss_parallel = true\n",
            {"tp_sequence_parallel": True, "tp_loss_parallel": False},
        ),
        (SHARED + "enable_sequence_parallel = false\n", {}),
        (SHARED + "expert_parallel_degree = 2\n", {}),
        (TITAN, {}),
    ],
)
def test_torchtitan_shares_sequences_where_it_shares_layers(options, text, shared):
    """Unasked, with the loss; what is not modelled beside it is reported, not refused."""
    found, missed = options(text, "run.toml")
    assert {name: found[name] for name in found if name.startswith("tp_")} == shared
    told = {key.rpartition("parallelism.")[2] for key in missed}
    assert ("enable_async_tensor_parallel" in text) == ("enable_async_tensor_parallel" in told)
    if "tp" in found and not shared:
        assert told & {"sequence parallelism", "enable_sequence_parallel"}


@pytest.mark.parametrize("key", ["enable_sequence_parallel", "disable_loss_parallel"])
def test_no_key_of_it_is_read_over_beside_experts(write, key):
    """What was asked for and is not priced stands in the reading by its own name."""
    text = SHARED + f"expert_parallel_degree = 2\n{key} = true\n"
    reading = memest.read_config(write("run.toml", text))
    told = [remark.key for remark in (*reading.not_modelled, *reading.ignored)]
    assert any(place.endswith(key) for place in told)


def test_torchtitan_shards_layers_that_are_shared(write):
    """Its own units and its own policy, over the GPUs of a copy; sequences are shared unasked."""
    text = SHARED.replace('mixed_precision_param = "float32"\n', "")
    text += "data_parallel_replicate_degree = 2\n"
    setup = memest.read_config(write("run.toml", text)).setup
    distributed = setup.distributed
    assert (distributed.num_gpus, distributed.tp, distributed.num_copies) == (8, 2, 2)
    assert (setup.loop, setup.precision, setup.computes_in_half) == ("plain", "bf16", True)
    assert distributed.fsdp_mixed_precision
    assert distributed.fsdp_wrap_ends
    assert distributed.tp_sequence_parallel
    whole = memest.read_config(write("full.toml", SHARED)).setup.distributed
    assert (whole.fsdp_mixed_precision, whole.fsdp_wrap_ends) == (False, True)


AXOLOTL = """
base_model: meta-llama/Llama-3.1-8B
micro_batch_size: 1
sequence_len: 256
bf16: true
fsdp_version: 2
fsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP, reshard_after_forward: true}
tensor_parallel_size: 2
"""


@pytest.mark.parametrize(
    ("sizes", "gpus", "shards", "copies"),
    [
        ("dp_shard_size: 4", None, 4, 1),
        ("dp_shard_size: 2\ndp_replicate_size: 2", None, 2, 2),
        ("dp_shard_size: 2", 8, 2, 2),
        ("", 8, 4, 1),
    ],
)
def test_axolotl_names_who_shares_and_who_shards(write, sizes, gpus, shards, copies):
    options = {"num_gpus": gpus} if gpus else {}
    run = memest.read_config(write("axolotl.yaml", AXOLOTL + sizes), **options)
    distributed = run.setup.distributed
    assert (distributed.num_gpus, distributed.tp, distributed.fsdp) == (8, 2, "full_shard")
    assert (distributed.shard_ranks, distributed.num_copies) == (shards, copies)
    assert run.setup.software.transformers == (5, 14)
    (told,) = [each for each in run.not_modelled if "ReplicateParallel" in each.why]
    assert told.key.endswith("tensor_parallel_size")


def test_copies_without_a_number_of_shards_take_a_word(write):
    run = memest.read_config(write("a.yaml", AXOLOTL + "dp_replicate_size: 2\n"), num_gpus=8)
    assert any("--fsdp-shard-size say it" in each.why for each in run.not_modelled)
    assert run.setup.unpriced


def test_torchtitan_shards_over_those_of_a_sequence(write):
    text = TITAN.replace("shard_degree = 4", "shard_degree = 1")
    text += 'context_parallel_degree = 8\ncontext_parallel_rotate_method = "alltoall"\n'
    distributed = memest.read_config(write("titan.toml", text)).setup.distributed
    assert (distributed.num_gpus, distributed.cp, distributed.cp_rotate) == (8, 8, "alltoall")
    assert (distributed.fsdp, distributed.shard_ranks) == ("full_shard", 8)


ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: bf16
num_processes: {processes}
{settings}
parallelism_config:
"""
SETTINGS = {
    "FSDP": "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}",
    "DEEPSPEED": "deepspeed_config: {zero_stage: 3}",
    "MULTI_GPU": "",
}


def accelerate(write, kind="FSDP", processes=16, **parallel):
    lines = "".join(f"  parallelism_config_{key}: {value}\n" for key, value in parallel.items())
    text = ACCELERATE.format(kind=kind, processes=processes, settings=SETTINGS[kind]) + lines
    return memest.read_config(write("accelerate.yaml", text), seq_len=512)


def test_accelerate_names_the_gpus_of_a_ring(write):
    parallel = {"cp_comm_strategy": "alltoall", "cp_size": 4, "dp_shard_size": 4, "sp_size": 1}
    run = accelerate(write, **parallel)
    assert accelerate(write, "MULTI_GPU", processes=2, tp_size=2).setup.distributed.tp == 2
    distributed = run.setup.distributed
    assert (distributed.num_gpus, distributed.cp, distributed.cp_rotate) == (16, 4, "alltoall")
    assert (distributed.data_ranks, distributed.shard_ranks, distributed.num_copies) == (4, 16, 1)
    assert not run.not_modelled


def test_accelerate_names_the_gpus_of_ulysses(write):
    run = accelerate(
        write,
        "DEEPSPEED",
        sp_size=4,
        sp_backend="deepspeed",
        sp_seq_length=512,
        sp_seq_length_is_variable=True,
        sp_attn_implementation="flash_attention_2",
        dp_shard_size=1,
    )
    distributed = run.setup.distributed
    assert (distributed.num_gpus, distributed.sp, distributed.zero) == (16, 4, 3)
    assert distributed.data_ranks == 4
    assert run.setup.attn_implementation == "flash_attention_2"
    assert not run.not_modelled


def test_a_launch_command_names_them_too():
    run = memest.read_command(
        "accelerate launch --num_processes 8 --use_deepspeed --zero_stage 3 --mixed_precision bf16 "
        "--parallelism_config_sp_size 2 --parallelism_config_sp_backend deepspeed "
        "run_clm.py --model_name_or_path gpt2 --block_size 512"
    )
    assert (run.setup.distributed.sp, run.setup.distributed.zero) == (2, 3)


def test_copies_are_of_what_shards_and_sequences_share(write):
    run = accelerate(write, dp_replicate_size=2, dp_shard_size=4, cp_size=2)
    distributed = run.setup.distributed
    assert (distributed.fsdp_shard_size, distributed.num_copies) == (8, 2)
    assert distributed.data_ranks == 8


def test_accelerate_names_who_shares_layers_and_who_shards(write):
    """Its plugin shards them under a release; without it they were sharded at load."""
    run = accelerate(write, processes=8, tp_size=2, dp_shard_size=4)
    distributed = run.setup.distributed
    assert (distributed.tp, distributed.fsdp, distributed.shard_ranks) == (2, "full_shard", 4)
    assert run.setup.software.transformers == (5, 14)
    assert run.setup.computes_in_half
    assert not run.setup.is_sharded_at_load
    assert [each.key.rpartition(".")[2] for each in run.not_modelled] == [
        "parallelism_config_tp_size"
    ]
    assert not run.setup.unpriced  # the run is priced, or stops

    loaded = accelerate(write, "MULTI_GPU", processes=8, tp_size=2, dp_shard_size=4)
    assert loaded.setup.distributed.shard_ranks == 4
    assert loaded.setup.is_sharded_at_load
    assert not loaded.setup.computes_in_half
    assert not loaded.not_modelled

    copies = accelerate(write, tp_size=2, dp_shard_size=4, dp_replicate_size=2)
    distributed = copies.setup.distributed
    assert (distributed.shard_ranks, distributed.num_copies) == (4, 2)


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("FSDP", {"cp_size": 1, "cp_comm_strategy": "alltoall", "dp_shard_size": 16}),
        ("DEEPSPEED", {"sp_size": 1, "sp_backend": "deepspeed", "sp_attn_implementation": "sdpa"}),
    ],
)
def test_what_belongs_to_no_sequence_changes_nothing(write, kind, parallel):
    run = accelerate(write, kind, **parallel)
    distributed = run.setup.distributed
    assert (distributed.cp, distributed.cp_rotate, distributed.sp) == (1, "allgather", 1)
    assert run.setup.attn_implementation == "auto"
    assert not run.not_modelled


@pytest.mark.parametrize("kind", ["FSDP", "MULTI_GPU"])
def test_ulysses_is_deepspeeds(write, kind):
    run = accelerate(write, kind, sp_size=4, dp_shard_size=4)
    assert (run.setup.distributed.cp, run.setup.distributed.sp) == (1, 1)
    assert any("sp_size 4: DeepSpeed's" in remark.why for remark in run.not_modelled)


@pytest.mark.parametrize("key", ["context_parallel_size", "sequence_parallel_degree"])
def test_the_ring_of_another_library_is_not_torchs(write, key):
    text = f"base_model: gpt2\nmicro_batch_size: 2\nsequence_len: 256\n{key}: 2\n"
    run = memest.read_config(write("axolotl.yaml", text))
    assert run.setup.distributed.cp == 1
    assert any("ring-flash-attn" in remark.why for remark in run.not_modelled)
