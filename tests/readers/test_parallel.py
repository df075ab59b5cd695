"""Degrees of parallelism: what a file names is an option's value, and nothing is counted twice."""

import pytest

import memest
from memest.errors import ConfigError

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


def options(write, name, text):
    run = memest.read_config(write(name, text))
    missed = {remark.key.rpartition(":")[2].strip() for remark in run.not_modelled}
    return run.options, missed


def test_experts_are_shared_by_ranks_that_are_counted_already(write):
    """torchtitan's world is shards, replicas, tensor, context and pipeline ranks: no experts."""
    text = TITAN + "expert_parallel_degree = 2\ntensor_parallel_degree = 2\n"
    found, _ = options(write, "run.toml", text)
    assert (found["num_gpus"], found["ep"], found["tp"]) == (8, 2, 2)


def test_experts_beside_mixed_precision_of_fsdp_are_reported(write):
    """It is not modelled with shared experts: the file is priced with whole ones, and says so."""
    text = TITAN.replace('mixed_precision_param = "float32"\n', "")
    found, missed = options(write, "run.toml", text + "expert_parallel_degree = 2\n")
    assert "ep" not in found
    assert any("expert_parallel_degree" in key for key in missed)


@pytest.mark.parametrize(("degree", "missed"), [(1, False), (2, True)])
def test_experts_that_are_sharded_inside_are_reported(write, degree, missed):
    text = TITAN + f"expert_parallel_degree = 2\nexpert_tensor_parallel_degree = {degree}\n"
    _, found = options(write, "run.toml", text)
    assert any("expert_tensor_parallel_degree" in key for key in found) is missed


SHARED = TITAN.replace("shard_degree = 4", "shard_degree = 2") + "tensor_parallel_degree = 2\n"


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        (SHARED, {"tp_sequence_parallel": True}),
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
def test_torchtitan_shares_sequences_where_it_shares_layers(write, text, shared):
    """Unasked, with the loss; what is not modelled beside it is reported, not refused."""
    found, missed = options(write, "run.toml", text)
    assert {name: found[name] for name in found if name.startswith("tp_")} == shared
    told = {key.rpartition("parallelism.")[2] for key in missed}
    if "tp" in found and not shared:
        assert told & {"sequence parallelism", "enable_sequence_parallel"}


@pytest.mark.parametrize("key", ["enable_sequence_parallel", "disable_loss_parallel"])
def test_no_key_of_it_is_read_over_beside_experts(write, key):
    """What was asked for and is not priced stands in the reading by its own name."""
    text = SHARED + f"expert_parallel_degree = 2\n{key} = true\n"
    reading = memest.read_config(write("run.toml", text))
    told = [remark.key for remark in (*reading.not_modelled, *reading.ignored)]
    assert any(place.endswith(key) for place in told)


def test_torchtitans_mixed_precision_beside_it_takes_a_word(write):
    """FSDP2's own is refused beside shared layers; with autocast of a script it is priced."""
    name = write("run.toml", SHARED.replace('mixed_precision_param = "float32"\n', ""))
    with pytest.raises(ConfigError, match="--fsdp under --loop accelerate"):
        memest.read_config(name)
    setup = memest.read_config(name, loop="plain").setup
    assert (setup.precision, setup.distributed.tp_sequence_parallel) == ("bf16", True)


def test_torchtitans_asynchronous_collectives_are_reported(write):
    _, missed = options(write, "run.toml", SHARED + "enable_async_tensor_parallel = true\n")
    assert any("enable_async_tensor_parallel" in key for key in missed)


def test_accelerates_parallelism_is_read(write):
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\n"
        "parallelism_config:\n  parallelism_config_tp_size: 2\n"
    )
    found, _ = options(write, "run.yaml", text)
    assert (found["num_gpus"], found["tp"]) == (2, 2)
