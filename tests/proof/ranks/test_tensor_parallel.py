"""Tensor parallelism: a real rank, sharded by transformers, against the predicted one, in order."""

from __future__ import annotations

import pytest

import memest
from memest.errors import ConfigError
from memest.replay.replay import check_events
from support.evaluation_ranks import check_evaluation
from support.phases import check_rank
from support.ranks import as_run
from support.real_memory import differences
from support.tensor_ranks import predicted, real_rank

HOST = 8192
"""Step counters, numbers wrapped as tensors, indices: host memory where there is a GPU."""
RNG_STATES = 8 * 5056
FOREACH = 512_000
"""What the CPU's foreach kernels copy of the largest shard; they are not CUDA's."""

LORA = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}
CASES = [
    ("llama", {"loop": "plain"}, 2),
    ("llama", {"loop": "plain", "grad_accum": 2}, 4),
    ("llama-gqa", {"loop": "plain", "checkpointing": "full"}, 2),
    ("llama-tied", {"loop": "accelerate"}, 2),
    ("qwen3", {"loop": "plain"}, 2),
    ("gpt_neox", {"loop": "plain"}, 2),
    ("llama", {"loop": "plain", "adapter": LORA}, 2),
    ("llama-gqa", {"loop": "plain", "grad_accum": 2, "adapter": LORA}, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "setup", "ranks"), CASES)
def test_a_rank_allocates_what_a_real_one_does(model, setup, ranks):
    """Shards, copies for collectives, gathered logits: every allocation and free, in order."""
    case = {"model": model, "ranks": ranks, "setup": {"optim": "adamw_torch", **setup}}
    host = HOST + (RNG_STATES if "checkpointing" in setup else 0)
    check_rank(real_rank(case), predicted(case), host, FOREACH, at_least=16384)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "setup", "ranks", "keeps"),
    [("llama-gqa", {}, 2, True), ("llama-tied", {"adapter": LORA}, 4, True)],
)
def test_ranks_that_share_layers_evaluate_one_batch(model, setup, ranks, keeps):
    """The Trainer's own evaluation: each rank keeps the predictions of all, which are the same."""
    setup = {"optim": "adamw_torch", "loop": "accelerate", **setup}
    case = {"model": model, "ranks": ranks, "setup": setup, "evaluation": [6, keeps]}
    stream, real = predicted(case), real_rank(case)
    check_events(stream.events, stream.sizes)
    check_evaluation(real, as_run(stream))


@pytest.mark.slow
@pytest.mark.parametrize("generation", [{"num_beams": 2}, {"cache": "static"}])
def test_ranks_that_share_layers_generate(generation):
    """Caches have the heads of a rank: every step of ``generate``, the prompt first."""
    setup = {"optim": "adamw_torch", "loop": "accelerate"}
    case = {"model": "llama-gqa", "ranks": 2, "setup": setup, "generation": generation}
    stream, real = predicted(case), real_rank(case)
    check_events(stream.events, stream.sizes)
    run = as_run(stream)
    measured = {phase.name: phase for phase in real.phases}
    steps = [phase for phase in run.phases if phase.name.startswith("generation")]
    assert len(steps) == 6
    for phase in steps:
        same = measured[phase.name]
        assert abs(phase.alive - same.alive) <= 1024, f"alive when {phase.name} begins"
        assert abs(phase.peak - same.peak) <= 1024, f"peak in {phase.name}"
    for one in (real, run):
        one.events = [event for event in one.events if event.phase.startswith("generation")]
    assert len(run.allocations(at_least=2048)) > 100
    assert differences(real, run, at_least=2048) == []


def run(model, **options):
    options = {"batch": 2, "seq_len": 64, "max_batch": False, **options}
    return memest.estimate(model, **options)


def test_weights_and_states_are_shared_and_residuals_are_not(folder):
    one, four = run(folder), run(folder, num_gpus=4, tp=4)
    rows = [{r.category.value: r.bytes for r in e.breakdown} for e in (one, four)]
    for name in ("parameters", "optimizer states"):
        assert rows[1][name] == pytest.approx(rows[0][name] / 4, rel=0.05)
    assert rows[1]["activations"] > rows[0]["activations"] / 4
    assert "tensor parallel over 4" in str(four)
    assert four.model.parameters == one.model.parameters


@pytest.mark.slow
def test_each_rank_keeps_the_predictions_of_all(folder):
    """The GPUs of a group evaluate one batch, and gather it from each other all the same."""
    from memest.config.options import merge_options
    from memest.profiles.axes import eval_batches, gathering_ranks

    asked = {"batch": 1, "eval_batch": 32, "eval_samples": 64, "num_gpus": 2, "tp": 2}
    setup = merge_options(None, {**asked, "seq_len": 64})
    assert (gathering_ranks(setup.distributed), eval_batches(setup)) == (2, 2)
    peak = run(folder, **asked).peak.allocated_bytes
    # in the last batch the old predictions, the new ones, and those that were gathered
    assert peak > 2 * (32 + 64 + 32) * 64 * 512 * 4


@pytest.mark.slow
def test_caches_of_a_generation_are_shared(folder):
    """A rank has half of the heads, in every layer and at every step."""
    asked = {"batch": 1, "eval_batch": 64, "generate": 64, "cache_implementation": "static"}
    one, two = (
        sum(
            size for size, label in zip(stream.sizes, stream.labels, strict=True)
            if stream.label_names[label] == "aten.zeros.default" and size >= 4096
        )
        for stream in (found(folder, **asked), found(folder, num_gpus=2, tp=2, **asked))
    )  # fmt: skip
    assert two == one / 2 > 0


def found(folder, **options):
    """The stream of a whole run."""
    from memest.config.options import merge_options
    from memest.estimation.gpu_target import target_gpus
    from memest.estimation.profiler import Profiler
    from memest.estimation.whole_run import resolve_run

    setup = merge_options(None, {"seq_len": 64, **options})
    traits = target_gpus(setup).main.traits
    return resolve_run(Profiler.of(folder), setup, traits).stream


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_gpus": 3, "tp": 2}, "write --num-gpus 2"),
        ({"num_gpus": 3, "tp": 3}, "does not divide the 4 heads of this model"),
        (
            {"num_gpus": 2, "tp": 2, "lora_r": 4, "lora_target_modules": ["q_proj", "down_proj"]},
            "adapters on down_proj stop in the first forward",
        ),
        ({"num_gpus": 4, "tp": 2}, "2 copies of a model that --tp 2 shards are refused by"),
        (
            {"num_gpus": 4, "tp": 2, "fsdp": "full_shard", "fsdp_version": 1, "loop": "plain"},
            "--fsdp-version 1 is not priced",
        ),
        ({"num_gpus": 4, "tp": 2, "zero": 1}, "--zero"),
        ({"num_gpus": 2, "tp": 2, "optim": "muon"}, "--optim muon"),
        (
            {"num_gpus": 4, "tp": 2, "fsdp": "full_shard", "loop": "plain", "generate": 8},
            "together with --fsdp full_shard and --tp",
        ),
        ({"num_gpus": 2, "pp": 2, "eval_batch": 8}, "neither the Trainer nor accelerate has"),
        ({"num_gpus": 2, "pp": 2, "generate": 8}, "generate calls a whole model"),
        ({"num_gpus": 2, "tp": 2, "zero_grad": "zero"}, "--zero-grad zero"),
    ],
)
def test_what_cannot_be_is_refused(folder, options, words):
    with pytest.raises(ConfigError, match=words):
        run(folder, **options)


def test_models_without_a_plan_are_refused():
    with pytest.raises(ConfigError, match="has no plan for it"):
        run("prajjwal1/bert-tiny", num_gpus=2, tp=2)


def test_a_process_of_a_distributed_run_is_told_to_ask_elsewhere(folder):
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ConfigError, match="ask in another process"):
            run(folder, num_gpus=2, tp=2, seq_len=40)  # no family answers for it
    finally:
        dist.destroy_process_group()
