"""Expert parallelism: real ranks, sharded by transformers, against the predicted one, in order."""

from __future__ import annotations

import pytest

import memest
from memest.config.parallelism import Distributed
from memest.errors import ConfigError
from memest.replay.replay import check_events
from memest.sharding.nccl import CONNECTION_BYTES, MOST_CHANNELS, communicators
from support.expert_ranks import real_rank
from support.phases import check_phases, check_sums
from support.ranks import as_run, of_steps
from support.real_memory import differences
from support.tensor_ranks import predicted

HOST = 8192
"""Step counters, numbers wrapped as tensors, indices: host memory where there is a GPU."""
RNG_STATES = 8 * 5056
FOREACH = 1 << 20
"""What the CPU's foreach kernels copy of the largest shards; they are not CUDA's."""
LEAST = 16384
"""Bytes of the smallest events that are compared."""
HALF = {"optim": "adamw_torch", "loop": "plain", "dtype": "bfloat16", "batch": 2}

CASES = [
    ("mixtral", {}, 2),
    ("mixtral", {"grad_accum": 2}, 2),
    ("mixtral", {"checkpointing": "full"}, 2),
    ("mixtral", {"checkpointing": "full", "use_reentrant": True}, 2),
    ("mixtral", {"precision": "bf16", "dtype": "float32"}, 2),
    ("qwen3_moe", {}, 2),
    ("gpt_oss", {}, 2),
]


def of_host(event):
    """What only the CPU's kernels take: indices laid out for ``scatter_``, gloo's staging."""
    return "aten::scatter_" in event.op or "gloo:" in event.op


def comparable(run):
    """Without the optimizer's own; gradients are dropped in the order of its groups."""
    run.events = [
        e for e in run.events if not e.phase.startswith(("load", "optimizer")) and not of_host(e)
    ]
    dropped = sorted(
        (e for e in run.events if e.phase.startswith("zero_grad")),
        key=lambda e: (e.phase, e.nbytes),
    )
    waiting = iter(dropped)
    run.events = [next(waiting) if e.phase.startswith("zero_grad") else e for e in run.events]
    return run


def case_of(model, setup, ranks):
    spread = {"num_gpus": ranks, "tp": ranks, "ep": ranks}
    return {"model": model, "spread": spread, "setup": {**HALF, **setup}}


@pytest.mark.slow(but=("mixtral-setup4-2",))
@pytest.mark.parametrize(("model", "setup", "ranks"), CASES)
def test_a_rank_allocates_what_a_real_one_does(model, setup, ranks):
    """Local experts, exchanged tokens, what is gathered again: every event, in order."""
    case = case_of(model, setup, ranks)
    stream, real = predicted(case), real_rank(case, "fake")
    check_events(stream.events, stream.sizes)
    run = as_run(stream)
    host = HOST + (RNG_STATES if "checkpointing" in setup else 0)
    check_phases(real, run, host, FOREACH)
    assert differences(comparable(real), comparable(run), at_least=LEAST) == []


SHARDED = [
    ({"num_gpus": 4, "ep": 2}, {}),
    ({"num_gpus": 4, "ep": 2}, {"grad_accum": 2, "checkpointing": "full"}),
    ({"num_gpus": 2, "ep": 2}, {}),
    ({"num_gpus": 4, "tp": 2, "ep": 2}, {}),
    ({"num_gpus": 4, "tp": 2, "ep": 4}, {}),
]


@pytest.mark.slow(but=("spread4-setup4",))
@pytest.mark.parametrize(("spread", "setup"), SHARDED)
def test_fsdp_shards_experts_over_those_who_have_them(spread, setup):
    """transformers' units: experts over ``efsdp``, the rest over ``fsdp``, also of one rank.

    Under --tp a sharded embedding's gradient is laid out anew in the root's last step; the
    prediction lacks that copy, so events are compared without --tp.
    """
    setup = {**HALF, **setup}
    case = {"model": "mixtral", "spread": {**spread, "fsdp": "full_shard"}, "setup": setup}
    stream, real = predicted(case), real_rank(case, "fake")
    check_events(stream.events, stream.sizes)
    run = as_run(stream)
    host = HOST + (RNG_STATES if "checkpointing" in setup else 0)
    check_phases(real, run, host, FOREACH)
    if "tp" not in spread:
        real, run = comparable(of_steps(real)), comparable(of_steps(run))
        assert differences(real, run, at_least=LEAST) == []


def taken(run):
    """Allocations outside the optimizer, without what gloo stages."""
    run.events = [e for e in comparable(run).events if e.nbytes > 0]
    return run


@pytest.mark.slow(but=("gpt_oss-setup2",))
@pytest.mark.parametrize(
    ("model", "setup"), [("mixtral", {}), ("qwen3_moe", {"grad_accum": 2}), ("gpt_oss", {})]
)
def test_two_processes_that_exchange_tokens_allocate_the_same(model, setup):
    """With gloo, both ranks there: frees have no order, gloo's threads make some of them."""
    case = case_of(model, setup, 2)
    run, real = taken(as_run(predicted(case))), taken(real_rank(case, "gloo"))
    assert len(run.events) > 500
    check_sums(real, run, LEAST)
    assert differences(real, run, at_least=LEAST) == []


def run(model, **options):
    options = {"batch": 2, "seq_len": 64, "max_batch": False, **options}
    return memest.estimate(model, **options)


def rows(estimate):
    return {row.category.value: row.bytes for row in estimate.breakdown}


@pytest.mark.slow
def test_experts_are_whole_on_one_rank_and_counted_once(mixture):
    """Weights are shared as under --tp, and what moves is tokens instead of sums."""
    one, tp = run(mixture), run(mixture, num_gpus=4, tp=4)
    ep = run(mixture, num_gpus=4, tp=4, ep=4)
    assert rows(ep)["parameters"] == rows(tp)["parameters"] < rows(one)["parameters"] / 2
    assert rows(ep)["optimizer states"] == rows(tp)["optimizer states"]
    assert ep.model.parameters == one.model.parameters
    # a rank computes a quarter of the routed tokens whole, not a part of all of them
    assert rows(ep)["activations"] != rows(tp)["activations"]
    assert "experts shared by 4" in str(ep)
    assert any("as many routed tokens as it sends" in note for note in ep.notes)
    assert ep.to_dict()["setup"]["ep"] == 4


def test_beside_fsdp_every_gpu_has_its_batch(mixture):
    """Half the experts of half the layers' shards; what is asked for is what is told."""
    one = run(mixture, loop="plain")
    two = run(mixture, loop="plain", num_gpus=4, ep=2, fsdp="full_shard")
    assert rows(two)["parameters"] == pytest.approx(rows(one)["parameters"] / 4, rel=0.05)
    assert rows(two)["optimizer states"] == pytest.approx(
        rows(one)["optimizer states"] / 4, rel=0.05
    )
    assert rows(two)["activations"] > rows(one)["activations"] * 0.9
    assert "experts shared by 2" in str(two)
    assert "FSDP2 full_shard" in str(two)


def test_units_of_the_library_survive_the_store(mixture, tmp_path, monkeypatch):
    """What a stored profile answers is what the trace did."""
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path))
    given = {"loop": "plain", "num_gpus": 4, "ep": 2, "fsdp": "full_shard", "seq_len": 48}
    first = run(mixture, **given)
    again = run(mixture, **given)
    assert again.peak == first.peak
    assert again.breakdown == first.breakdown


def test_an_all_to_all_connects_every_gpu_with_every_other():
    """NCCL's links of seven others, beside those of the group; the least is not more than one."""
    layers = communicators(Distributed(num_gpus=8, tp=8), (8, 0))
    experts = communicators(Distributed(num_gpus=8, tp=8, ep=8), (8, 0))
    more = experts.high_bytes - layers.high_bytes
    assert more == 7 * MOST_CHANNELS * CONNECTION_BYTES
    assert experts.low_bytes > layers.low_bytes


def test_indivisible_shares_of_tokens_are_traced_too(mixture):
    """65 tokens of one sample, which four ranks cannot cut evenly."""
    estimate = run(mixture, num_gpus=4, tp=4, ep=4, batch=1, seq_len=65)
    assert estimate.peak.allocated_bytes > 0


FSDP = {"num_gpus": 4, "ep": 2, "fsdp": "full_shard", "loop": "plain"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_gpus": 4, "ep": 4}, "add --tp 4"),
        ({"num_gpus": 4, "ep": 2, "fsdp": "full_shard"}, "--fsdp under --loop trainer"),
        ({**FSDP, "fsdp": "shard_grad_op"}, "--fsdp shard_grad_op is not priced together"),
        ({**FSDP, "fsdp_version": 1}, "--fsdp-version 1"),
        ({**FSDP, "fsdp_wrap": ["MixtralDecoderLayer"]}, "--fsdp-wrap"),
        ({**FSDP, "fsdp_offload": True}, "--fsdp-offload"),
        ({**FSDP, "num_gpus": 6, "ep": 4}, "write --num-gpus 4"),
        ({**FSDP, "num_gpus": 6, "ep": 3}, "does not divide the 8 experts"),
        ({"num_gpus": 4, "tp": 2, "ep": 4}, "Write --ep 2"),
        ({"num_gpus": 6, "tp": 6, "ep": 6}, "does not divide"),
        ({"num_gpus": 4, "tp": 4, "ep": 3}, "a multiple of --tp"),
        ({"num_gpus": 4, "tp": 4, "ep": 0}, "--ep 0 is out of range"),
        ({"num_gpus": 4, "ep": True}, "is not a whole number"),
    ],
)
def test_what_cannot_be_is_refused(mixture, options, words):
    with pytest.raises(ConfigError, match=words):
        run(mixture, **options)


def test_counts_that_do_not_divide_are_named(tmp_path):
    """Six experts, four ranks: what would do is said, the closest first."""
    from transformers import MixtralConfig

    config = MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=6, vocab_size=512, max_position_embeddings=256,
        architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"divide the 6 experts of this model. Legal: 3, 2, 6, 1"):
        run(str(tmp_path), num_gpus=4, tp=4, ep=4)


def test_models_without_experts_are_refused(tmp_path):
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=512, max_position_embeddings=256, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="--ep cannot share the experts of LlamaForCausalLM"):
        run(str(tmp_path), num_gpus=2, tp=2, ep=2)


def test_a_mesh_of_experts_needs_one_of_layers():
    with pytest.raises(ConfigError, match=r"add --tp 2 \(all GPUs see one batch\) or --fsdp"):
        Distributed(num_gpus=2, ep=2)
