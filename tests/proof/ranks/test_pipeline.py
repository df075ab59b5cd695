"""Pipelines: real ``PipelineStage`` processes against predicted ranks, in order."""

from __future__ import annotations

import pytest

import memest
from memest.errors import ConfigError
from memest.estimation.whole_run import steps_run
from memest.events import CATEGORY_ORDER, Category
from memest.replay.replay import check_events
from support.pipeline_ranks import predicted_ranks, real_ranks
from support.ranks import as_run, of_steps, without_updates
from support.real_memory import differences
from support.releases import as_heard

HOST = 8192
"""Step counters, numbers wrapped as tensors, indices: host memory where there is a GPU."""
RNG_STATES = 8 * 5056
FOREACH = 512_000
"""What the CPU's foreach kernels copy of the largest shard; they are not CUDA's."""

LORA = {"peft_type": "LORA", "r": 8, "target_modules": "all-linear"}
CASES = [
    ("llama", {}, {"pp": 2, "pp_schedule": "gpipe", "pp_microbatches": 4}),
    ("llama", {}, {"pp": 3, "pp_schedule": "gpipe", "pp_microbatches": 2}),
    ("llama", {}, {"pp": 2, "pp_microbatches": 4}),
    ("llama", {}, {"pp": 3, "pp_microbatches": 5, "pp_return_outputs": False}),
    ("llama", {"grad_accum": 2}, {"pp": 2, "pp_microbatches": 3}),
    ("llama", {"checkpointing": "full"}, {"pp": 2, "pp_microbatches": 3}),
    ("llama-tied", {"zero_grad": "zero"}, {"pp": 2, "pp_split": [1, 2]}),
    ("gpt_neox", {}, {"pp": 2, "pp_microbatches": 3, "pp_return_outputs": False}),
    ("llama6", {}, {"pp": 2, "pp_schedule": "interleaved", "pp_microbatches": 4}),
    ("llama6", {}, {"pp": 2, "pp_schedule": "looped-bfs", "pp_microbatches": 3}),
    ("llama", {"adapter": LORA}, {"pp": 2, "pp_microbatches": 3}),
]


def check_ranks(model, setup, spread, *, fewest=0):
    """Phase by phase, and every allocation and free of every rank's steps, in order.

    Stages whose layers are shared have their optimizers apart, whose foreach kernels are a CPU's.
    """
    case = {"model": model, "setup": {"optim": "adamw_torch", **setup}, "spread": spread}
    real, streams = real_ranks(case), predicted_ranks(case)
    assert len(real) == len(streams) == spread["pp"]
    host = HOST + (RNG_STATES if "checkpointing" in setup else 0)
    shares = "tp" in spread
    for rank, (measured, stream) in enumerate(zip(real, streams, strict=True)):
        check_events(stream.events, stream.sizes)
        predicted = as_run(stream)
        if spread.get("num_gpus") and "fsdp" not in spread and not shares:
            predicted = as_heard(measured, predicted, host)
        steps, same_steps = (
            [phase for phase in one.phases if not phase.name.startswith("load")]
            for one in (predicted, measured)
        )
        # gradients that are kept make no event behind the last mark
        assert [p.name for p in same_steps][: len(steps)] == [p.name for p in steps]
        if "num_gpus" not in spread:
            assert len(same_steps) - len(steps) <= (setup.get("zero_grad") == "zero")
        for same, phase in zip(same_steps, steps, strict=False):
            copies = FOREACH if shares and phase.name.startswith("optimizer") else 0
            assert abs(phase.alive - same.alive) <= host, f"rank {rank}: alive at {phase.name}"
            assert abs(phase.peak - same.peak) <= host + copies, f"rank {rank}: in {phase.name}"
        assert len(predicted.allocations(at_least=16384)) > fewest
        steps_of = without_updates if shares else of_steps
        assert differences(steps_of(measured), steps_of(predicted), at_least=16384) == []


@pytest.mark.slow(
    but=(
        "llama-tied-setup6-spread6",
        "llama6-setup8-spread8",
    )
)
@pytest.mark.parametrize(("model", "setup", "spread"), CASES)
def test_every_rank_allocates_what_a_real_one_does(model, setup, spread):
    """Buffers, pieces in the schedule's order, what is held until it is sent: phase by phase."""
    check_ranks(model, setup, spread)


SHARDED = {"num_gpus": 4, "pp": 2, "fsdp": "shard_grad_op"}
WRAPPED = [
    ("llama", {}, {"num_gpus": 4, "pp": 2, "pp_microbatches": 3}),
    ("llama", {"grad_accum": 2}, {"num_gpus": 4, "pp": 2, "pp_schedule": "gpipe"}),
    (
        "llama", {},
        {"num_gpus": 4, "pp": 2, "pp_microbatches": 3, "ddp_gradient_as_bucket_view": True},
    ),
    ("llama6", {}, {"num_gpus": 4, "pp": 2, "pp_schedule": "interleaved", "pp_microbatches": 4}),
    (
        "llama6", {"checkpointing": "full"},
        {
            "num_gpus": 4, "pp": 2, "pp_schedule": "looped-bfs", "pp_microbatches": 3,
            "ddp_bucket_cap_mb": 0.5,
        },
    ),
    ("llama", {}, {**SHARDED, "pp_microbatches": 3}),
    (
        "llama", {"grad_accum": 2},
        {**SHARDED, "pp_schedule": "gpipe", "fsdp": "full_shard", "pp_return_outputs": False},
    ),
    ("llama", {"checkpointing": "full"}, {**SHARDED, "fsdp": "full_shard"}),
    ("llama", {"adapter": LORA}, {**SHARDED, "pp_microbatches": 3}),
    ("llama", {"adapter": LORA}, {"num_gpus": 4, "pp": 2, "pp_microbatches": 3}),
    ("llama6", {}, {**SHARDED, "pp_schedule": "interleaved", "pp_microbatches": 4}),
    ("llama6", {}, {**SHARDED, "pp_schedule": "looped-bfs", "fsdp": "full_shard"}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("model", "setup", "spread"), WRAPPED)
def test_every_rank_of_wrapped_stages_allocates_what_a_real_one_does(model, setup, spread):
    """Buckets and shards of each stage, gathered and reduced when the schedule says so."""
    check_ranks(model, setup, spread)


LORA_SHARED = {**LORA, "target_modules": ["q_proj", "v_proj", "up_proj"]}
THREE = {"num_gpus": 8, "fsdp": "shard_grad_op"}
SHARED = [
    ("llama", {}, {"pp_microbatches": 3}),
    ("llama-gqa", {"checkpointing": "full"}, {"pp_schedule": "gpipe"}),
    ("llama6", {"grad_accum": 2}, {"pp_schedule": "interleaved", "pp_microbatches": 2}),
    ("llama", {}, {**THREE, "pp_microbatches": 3}),
    ("llama", {"grad_accum": 2}, {**THREE, "pp_schedule": "gpipe", "fsdp": "full_shard"}),
    ("llama-gqa", {"checkpointing": "full"}, {**THREE, "fsdp": "full_shard"}),
    ("llama6", {}, {**THREE, "pp_schedule": "interleaved", "pp_microbatches": 4}),
    ("llama6", {}, {**THREE, "pp_schedule": "looped-bfs", "fsdp": "full_shard"}),
    ("llama", {"adapter": LORA_SHARED}, {"pp_microbatches": 3}),
    ("llama", {"adapter": LORA_SHARED}, {**THREE, "pp_microbatches": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "setup", "spread"), SHARED)
def test_every_rank_of_stages_whose_layers_are_shared_allocates_what_a_real_one_does(
    model, setup, spread
):
    """Stages sharded by transformers' plan, and by FSDP2 again."""
    check_ranks(model, setup, {"num_gpus": 4, "pp": 2, "tp": 2, **spread}, fewest=500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small decoder."""
    from transformers import LlamaConfig

    path = tmp_path_factory.mktemp("decoder")
    config = LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
        vocab_size=512, max_position_embeddings=256, architectures=["LlamaForCausalLM"],
        tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(path)
    return str(path)


def run(model, **options):
    options = {"batch": 2, "seq_len": 64, "max_batch": False, **options}
    return memest.estimate(model, **options)


def test_all_gpus_are_reported_the_fullest_first(folder):
    found = run(folder, num_gpus=4, pp=4, pp_microbatches=8, gpu="a100-80gb")
    ranks = found.to_dict()["ranks"]
    assert sorted(rank["rank"] for rank in ranks) == [0, 1, 2, 3]
    assert ranks[0]["reserved_bytes"] == found.peak.reserved_bytes
    assert ranks[0]["reserved_bytes"] == max(rank["reserved_bytes"] for rank in ranks)
    parts = {rank["rank"]: rank["parts"] for rank in ranks}
    assert parts[0] == "embeddings, layer 0"
    assert parts[3] == "layer 3, head"
    assert "layer 3, head" in str(found)
    assert "layer 3, head" in found.to_html()


def test_copies_of_a_pipeline_add_buckets_to_every_stage(folder):
    alone, copied = (run(folder, num_gpus=n, pp=2, gpu="a100-80gb") for n in (2, 8))
    ranks = {rank["rank"]: rank for rank in copied.to_dict()["ranks"]}
    assert sorted(ranks) == [0, 1]
    for rank in alone.to_dict()["ranks"]:
        assert ranks[rank["rank"]]["allocated_bytes"] > rank["allocated_bytes"]
        assert ranks[rank["rank"]]["parts"] == rank["parts"]
    assert "DDP" in str(copied)
    assert "the fullest of 8 GPUs" in str(copied)


@pytest.mark.slow
def test_stages_whose_layers_are_shared_are_smaller(folder):
    alone, shared = (run(folder, num_gpus=2 * tp, pp=2, tp=tp, gpu="a100-80gb") for tp in (1, 2))
    rows, less = (
        {row.category.value: row.bytes for row in found.breakdown} for found in (alone, shared)
    )
    for name in ("parameters", "gradients", "optimizer states"):
        assert 0.45 * rows[name] < less[name] < 0.6 * rows[name]
    peaks, lower = (
        {rank["rank"]: rank["allocated_bytes"] for rank in found.to_dict()["ranks"]}
        for found in (alone, shared)
    )
    assert all(lower[rank] < peaks[rank] for rank in (0, 1))
    assert "tensor parallel over 2" in str(shared)
    with pytest.raises(ConfigError, match="--tp 3 does not divide the 4 heads"):
        run(folder, num_gpus=6, pp=2, tp=3)


def test_shards_of_stages_are_smaller_with_more_copies_and_gradients_stay_whole(folder):
    few, many = (
        run(folder, num_gpus=n, pp=2, fsdp="shard_grad_op", gpu="a100-80gb") for n in (4, 16)
    )
    rows, more = (
        {row.category.value: row.bytes for row in found.breakdown} for found in (few, many)
    )
    assert more["parameters"] < 0.3 * rows["parameters"]
    # gathered parameters and whole gradients are those of the stage, however many share it
    assert more["communication buffers"] > 0.9 * rows["communication buffers"]
    assert any("perform_reduce_grad" in note for note in few.notes)


def found_by(tracer, *vary, **options):
    from memest.config.options import merge_options
    from memest.estimation.gpu_target import target_gpus

    setup = merge_options(None, {"batch": 2, "seq_len": 64, "num_gpus": 2, "pp": 2, **options})
    return steps_run(tracer, setup, target_gpus(setup).main.traits, vary)


def weights_of(stream):
    """Bytes of parameters that are loaded, by module."""
    loaded = (e for e in stream.events[: stream.mark_positions[1]] if e >= 0)
    return {
        stream.module_names[stream.modules[number]]
        for number in loaded
        if CATEGORY_ORDER[stream.categories[number]] is Category.PARAMETERS
    }


def test_each_stage_has_its_own_weights(folder):
    from memest.estimation.profiler import Profiler

    first, last = (
        weights_of(ran.stream) for ran in found_by(Profiler.of(folder), pp_split="1,3").ranks
    )
    assert {"model.embed_tokens", "model.layers.0.mlp.up_proj"} <= first
    assert {"lm_head", "model.norm", "model.layers.1.mlp.up_proj"} <= last
    assert not first & last


def test_families_of_stages_answer_other_batches(folder):
    from memest.estimation.profiler import Profiler

    tracer = Profiler.of(folder)
    for batch in (4, 6):
        found_by(tracer, "batch", batch=batch)
    made = tracer.traces_made
    grown = found_by(tracer, "batch", batch=9)
    assert tracer.traces_made == made
    fresh = found_by(Profiler.of(folder), batch=9)
    for one, other in zip(grown.ranks, fresh.ranks, strict=True):
        assert one.stream.events == other.stream.events
        assert one.stream.sizes == other.stream.sizes


@pytest.mark.slow
def test_more_micro_batches_cost_gpipe_activations_and_1f1b_buffers(folder):
    def peak(schedule, count):
        found = run(
            folder, num_gpus=2, pp=2, pp_schedule=schedule, pp_microbatches=count, batch=8,
            seq_len=128, pp_return_outputs=False,
        )  # fmt: skip
        return found.peak.allocated_bytes

    buffers = 8 * (8 * 128 * 64 * 4)  # of eight micro-batches more
    assert peak("1f1b", 12) - peak("1f1b", 4) <= 3 * buffers
    assert peak("gpipe", 12) - peak("gpipe", 4) > 20 * buffers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_gpus": 3, "pp": 2}, "write --num-gpus 2"),
        ({"num_gpus": 2, "pp_schedule": "gpipe"}, "no meaning without a pipeline"),
        ({"num_gpus": 2, "pp": 2, "peft": "vera"}, "an adapter other than LoRA is not priced"),
        ({"num_gpus": 8, "pp": 2, "tp": 2}, "2 copies of the model, without --fsdp"),
        ({"num_gpus": 4, "pp": 2, "zero": 1}, "--zero is not priced together with --pp"),
        ({"num_gpus": 4, "pp": 2, "pp_schedule": "zbv"}, "computes gradients of weights apart"),
        (
            {"num_gpus": 4, "pp": 2, "ddp_find_unused_parameters": True},
            "--ddp-find-unused-parameters is not priced",
        ),
        (
            {"num_gpus": 4, "pp": 2, "fsdp": "full_shard", "fsdp_version": 1},
            "Use --fsdp-version 2",
        ),
        (
            {"num_gpus": 4, "pp": 2, "fsdp": "full_shard", "fsdp_offload": True},
            "--fsdp-offload is not priced",
        ),
        ({"num_gpus": 8, "pp": 8}, "the model has 4 layers"),
        ({"num_gpus": 2, "pp": 2, "pp_split": "1,2"}, "is 3 layers, and the model has 4"),
        ({"num_gpus": 2, "pp": 2, "pp_split": "1,x"}, "is no list of layers"),
        ({"num_gpus": 2, "pp": 2, "pp_split": "4"}, "names 1 stages, and there are 2"),
        ({"num_gpus": 4, "pp": 4, "pp_microbatches": 3}, "too few for 1f1b"),
        ({"num_gpus": 2, "pp": 2, "pp_schedule": "1f1b", "pp_stages_per_gpu": 2}, "one stage"),
        ({"num_gpus": 2, "pp": 2, "pp_schedule": "DualPipeV"}, "is not modelled"),
        (
            {"num_gpus": 4, "pp": 4, "pp_schedule": "interleaved", "pp_microbatches": 9},
            "as 8 does",
        ),
        ({"num_gpus": 2, "pp": 2, "fp16": True}, "--fp16"),
        ({"num_gpus": 2, "pp": 2, "optim": "muon"}, "--optim muon"),
    ],
)
def test_what_cannot_be_is_refused(folder, options, words):
    with pytest.raises(ConfigError, match=words):
        run(folder, **options)


def test_models_without_a_plan_are_refused():
    with pytest.raises(ConfigError, match="has no plan for it"):
        run("gpt2", num_gpus=2, pp=2)
    with pytest.raises(ConfigError, match="language models alone"):
        run("prajjwal1/bert-tiny", num_gpus=2, pp=2)
