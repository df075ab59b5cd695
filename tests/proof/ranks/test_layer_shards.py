"""FSDP2 over layers that tensor parallelism shares: real ranks against predicted ones, in order."""

from __future__ import annotations

import pytest

import memest
from memest.config.parallelism import Distributed
from memest.config.software import Software
from memest.errors import ConfigError
from support.layer_shard_ranks import real_rank
from support.phases import check_rank, check_talking_rank
from support.ranks import predicted_rank

HOST = 8192
"""Step counters, numbers wrapped as tensors, indices: host memory where there is a GPU."""
FOREACH = 512_000
"""What the CPU's foreach kernels copy of the largest shard; they are not CUDA's."""
LEAST = 8192

FULL = {"tp": 2, "fsdp": "full_shard"}
TITAN = {**FULL, "fsdp_mixed_precision": True, "fsdp_wrap_ends": True}
SCRIPT = {"optim": "adamw_torch", "loop": "plain"}
HALF = {"precision": "bf16", "batch": 2}
LOADED = {"optim": "adamw_torch", "loop": "accelerate"}
PLUGIN = {**LOADED, **HALF, "software": Software(transformers=(5, 14))}
LORA = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}
AGAIN = {"grad_accum": 2}

CASES = {
    "script": ("llama", FULL, SCRIPT, 4),
    "script accumulates": ("llama", FULL, {**SCRIPT, **AGAIN}, 8),
    "script, adapters": ("llama", FULL, {**SCRIPT, **AGAIN, "adapter": LORA}, 4),
    "script, autocast": ("llama", FULL, {**SCRIPT, **HALF}, 4),
    "units at the ends": ("llama", {**FULL, "fsdp_wrap_ends": True}, {**SCRIPT, **AGAIN}, 4),
    "policy": ("llama", TITAN, {**SCRIPT, **HALF}, 4),
    "policy, half weights": (
        "llama-gqa",
        TITAN,
        {**SCRIPT, **HALF, **AGAIN, "dtype": "bfloat16"},
        4,
    ),
    "policy without layers that are shared": ("llama", {**TITAN, "tp": 1}, {**SCRIPT, **HALF}, 2),
    "copies": ("llama", {**FULL, "fsdp_shard_size": 2}, {**SCRIPT, **AGAIN}, 8),
    "copies, policy": (
        "llama",
        {**TITAN, "fsdp_shard_size": 2},
        {**SCRIPT, **HALF, "dtype": "bfloat16"},
        8,
    ),
    "torchtitan": ("llama", {**TITAN, "tp_sequence_parallel": True}, {**SCRIPT, **HALF}, 4),
    "torchtitan, copies": (
        "llama",
        {**TITAN, "tp_sequence_parallel": True, "fsdp_shard_size": 2},
        {**SCRIPT, **HALF, **AGAIN},
        8,
    ),
    "at load": ("llama", FULL, {**LOADED, **AGAIN}, 4),
    "at load, recomputed": ("llama-gqa", FULL, {**LOADED, "checkpointing": "full"}, 4),
    "at load, policy": ("llama", {**FULL, "fsdp_mixed_precision": True}, {**LOADED, **HALF}, 8),
    "at load, copies": ("qwen3", {**FULL, "fsdp_shard_size": 2}, LOADED, 8),
    "accelerate's": ("llama", FULL, PLUGIN, 4),
    "accelerate's accumulates": ("llama-gqa", FULL, {**PLUGIN, **AGAIN}, 4),
}
RNG_STATES = 8 * 5056


def case_of(name):
    model, spread, setup, ranks = CASES[name]
    return {"model": model, "ranks": ranks, "spread": spread, "setup": setup}


def comparable(run):
    """On a CPU ``chunk_cat`` pads and joins with tensors of its own; CUDA has one kernel for it."""
    run.events = [event for event in run.events if "chunk_cat" not in event.op]
    return run


@pytest.mark.slow(but=("policy without layers that are shared",))
@pytest.mark.parametrize("name", CASES)
def test_a_rank_allocates_what_a_real_one_does(name):
    """Gathers and reductions of a rank's part of the layers: every allocation and free."""
    case = case_of(name)
    host = HOST + (RNG_STATES if "checkpointing" in case["setup"] else 0)
    check_rank(comparable(real_rank(case)), predicted_rank(case), host, FOREACH, at_least=LEAST)


@pytest.mark.slow
def test_the_trainer_accumulates_what_is_not_reduced():
    """``_defer_fsdp_gradient_reduction``: gradients stay whole until the last micro-batch."""
    case = {**case_of("at load"), "as_trainer": True}
    check_rank(comparable(real_rank(case)), predicted_rank(case), HOST, FOREACH, at_least=LEAST)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["script", "policy", "at load"])
def test_four_processes_that_talk(name):
    """Real processes allocate what is predicted, in order."""
    case = case_of(name)
    real = comparable(real_rank({**case, "gloo": True}))
    check_talking_rank(real, predicted_rank(case), at_least=16384, more_than=300)


def run(model, **options):
    options = {
        "batch": 1, "seq_len": 64, "max_batch": False, "num_gpus": 8, "tp": 2, "dtype": "float32",
        "fsdp": "full_shard", "optim": "adamw_torch", **options,
    }  # fmt: skip
    return memest.estimate(model, **options)


def rows(estimate):
    return {row.category.value: row.bytes for row in estimate.breakdown}


@pytest.mark.parametrize("loop", ["plain", "trainer"])
def test_parts_of_all_ranks_are_the_whole(folder, loop):
    """Every weight is cut in eight but the norms, which both GPUs of a group have whole."""
    whole = run(folder, num_gpus=1, tp=1, fsdp="none", loop=loop)
    parts = run(folder, loop=loop)
    one, eight = rows(whole), rows(parts)
    norms = (2 * 2 + 1) * 64 * 4
    for name, times in (("parameters", 1), ("optimizer states", 2)):
        assert 8 * eight[name] == pytest.approx(one[name] + times * norms, abs=2048), name
    assert parts.model.parameters == whole.model.parameters
    assert "FSDP2 full_shard" in str(parts)
    assert "tensor parallel over 2" in str(parts)


def test_experts_beside_as_many_shared_layers_have_units():
    """A trace has one rank of those that shard, and the units that any number of them make."""
    from memest.trace.parallel.tensor_parallel import config_of

    traced = Distributed(num_gpus=2, tp=2, ep=2, fsdp="full_shard")
    assert (config_of(traced).fsdp_size, config_of(traced).ep_size) == (2, 2)
    assert config_of(Distributed(num_gpus=2, tp=2)).fsdp_size == 1


def test_copies_of_what_is_sharded(folder):
    """The GPUs of one copy: those of --fsdp-shard-size, in each of which layers are shared."""
    eight, copies = run(folder, loop="plain"), run(folder, loop="plain", fsdp_shard_size=2)
    ratio = rows(copies)["parameters"] / rows(eight)["parameters"]
    assert ratio == pytest.approx(2, rel=0.02)
    assert "2 copies of 2 shards" in " ".join(str(copies).split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"software": "transformers=5.20"}, "ImportError: ReplicateParallel"),
        ({"software": "transformers=4.57"}, "transformers=5.23 or transformers=5.14"),
        ({"fsdp": "shard_grad_op"}, "--fsdp shard_grad_op"),
        ({"fsdp_wrap": ["LlamaDecoderLayer"]}, "--fsdp-wrap"),
        ({"fsdp_offload": True}, "--fsdp-offload"),
        ({"lora_r": 4}, "stays whole on every GPU"),
        ({"grad_accum": 2, "fsdp_shard_size": 2}, "set_requires_all_reduce"),
        ({"fsdp_mixed_precision": True}, "add --bf16"),
        ({"fsdp_mixed_precision": True, "bf16": True, "grad_accum": 2}, "whole and in float32"),
        ({"fsdp_mixed_precision": True, "bf16": True, "tp": 1}, "a policy of its own"),
        ({"fsdp_shard_size": 3}, "does not divide the 8 GPUs of --num-gpus over --tp 2"),
        ({"fsdp_version": 1}, "--fsdp-version 1"),
        (
            {"fsdp_mixed_precision": True, "bf16": True, "loop": "plain", "lora_r": 4},
            "an adapter is not priced together with --fsdp-mixed-precision",
        ),
        (
            {"fsdp_mixed_precision": True, "bf16": True, "loop": "plain", "tp": 1, "cp": 2},
            "--cp 2 is not priced together with --fsdp-mixed-precision",
        ),
        ({"fsdp": "none", "tp": 1, "fsdp_wrap_ends": True}, "no meaning without --fsdp"),
    ],
)
def test_what_cannot_be_is_refused(folder, options, words):
    with pytest.raises(ConfigError, match=words):
        run(folder, **options)


def test_tied_embeddings_are_refused_where_a_library_shards(tied_folder):
    with pytest.raises(ConfigError, match="ties them behind the sharding"):
        run(tied_folder)
    assert run(tied_folder, loop="plain").peak.allocated_bytes > 0
