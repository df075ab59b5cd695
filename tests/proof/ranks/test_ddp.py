"""DDP: real ranks against predicted ones, event by event, and what an estimate says of them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import memest
from memest.calibration.case import case_from_dict
from memest.config.options import setup_from_options
from memest.config.parallelism import _TRACE_FIELDS, Distributed
from memest.errors import ConfigError
from memest.replay.replay import check_events
from memest.sharding.ddp import BUCKET_BYTES, FIRST_BUCKET_BYTES, assign_buckets
from memest.sharding.nccl import communicators
from support.ranks import as_run, of_steps, predicted_rank, real_rank
from support.real_memory import differences
from support.releases import as_heard

HOST = 4096
"""Step counters and numbers wrapped as tensors, which a CPU run cannot tell from the device's."""
RNG_STATES = 8 * 5056
"""Random states, which checkpointing keeps on the host."""

CASES = [
    ("llama", {}, {}),
    ("llama", {"grad_accum": 2}, {}),
    ("llama", {}, {"ddp_bucket_cap_mb": 0.5}),
    ("llama", {}, {"ddp_gradient_as_bucket_view": True}),
    ("llama", {"grad_accum": 2}, {"ddp_gradient_as_bucket_view": True}),
    ("llama", {"freeze": ["embed", "layers.0"]}, {}),
    ("bert", {}, {"ddp_find_unused_parameters": True}),
    ("gpt2", {"zero_grad": "zero"}, {"ddp_gradient_as_bucket_view": True}),
    ("t5", {"checkpointing": "full"}, {}),
    ("resnet", {}, {}),
    ("llama", {"fused_loss": "trl-chunked"}, {}),
    ("llama", {"fused_loss": "torchtune-chunked", "grad_accum": 2}, {}),
]


@pytest.mark.slow(
    but=(
        "llama-setup5-spread5",
        "resnet-setup9-spread9",
    )
)
@pytest.mark.parametrize(("model", "setup", "spread"), CASES)
def test_a_rank_allocates_what_a_real_one_does(model, setup, spread):
    """Buckets, their rebuild, copies of outputs, the broadcast of the constructor: in order."""
    case = {"model": model, "ranks": 2, "setup": {"loop": "plain", **setup}, "spread": spread}
    real, stream = real_rank(case), predicted_rank(case)
    predicted = as_run(stream)
    check_events(stream.events, stream.sizes)

    measured = {phase.name: phase for phase in real.phases}
    scratch = 0.005 * real.peak
    recomputes = "checkpointing" in setup or setup.get("fused_loss") == "trl-chunked"
    host = HOST + (RNG_STATES if recomputes else 0)
    predicted = as_heard(real, predicted, host)
    for phase in predicted.phases[1:]:
        same = measured[phase.name]
        assert abs(phase.alive - same.alive) <= host, f"alive when {phase.name} begins"
        assert abs(phase.peak - same.peak) <= host + scratch, f"peak in {phase.name}"
    if model == "llama":
        assert len(predicted.allocations(at_least=16384)) > 200
        assert differences(of_steps(real), of_steps(predicted), at_least=16384) == []


@settings(max_examples=200, deadline=None)
@given(
    kilobytes=st.lists(st.integers(1, 40_000), min_size=1, max_size=30),
    halves=st.lists(st.booleans(), min_size=30, max_size=30),
    first=st.integers(1, 40_000_000), cap=st.integers(1, 40_000_000),
)  # fmt: skip
def test_buckets_are_those_of_torch(kilobytes, halves, first, cap):
    """Against ``_compute_bucket_assignment_by_size`` itself."""
    dtypes = [torch.bfloat16 if half else torch.float32 for half in halves]
    tensors = [
        torch.empty(size * 256, dtype=dtype, device="meta").to(torch.device("meta"))
        for size, dtype in zip(kilobytes, dtypes, strict=False)
    ]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [first, cap])
    sizes = [(str(t.dtype), t.numel() * t.element_size()) for t in tensors]
    ours = assign_buckets(sizes, [first, cap])
    assert sorted(ours) == sorted(map(list, theirs))


def test_the_default_caps_are_those_of_torch():
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == FIRST_BUCKET_BYTES
    assert torch.nn.parallel.distributed._DEFAULT_BUCKET_CAP_MB * 2**20 == BUCKET_BYTES


TINY = {"batch": 2, "seq_len": 64, "gpu": "a100-80gb"}


def tiny(**options):
    return memest.estimate("prajjwal1/bert-tiny", **{**TINY, **options})


@pytest.mark.slow
def test_an_estimate_says_what_each_gpu_needs():
    one, two = tiny(loop="plain"), tiny(loop="plain", num_gpus=2)
    weights = one.model.parameter_bytes
    # at the end of the backward gradients and buckets are both there
    rows, before = (
        {row.category.value: row.bytes for row in estimate.breakdown} for estimate in (two, one)
    )
    more = sum(rows.values()) - rows["rounding"] - sum(before.values()) + before["rounding"]
    assert more == pytest.approx(weights, rel=0.01)
    assert rows["communication buffers"] == pytest.approx(weights, rel=0.01)
    assert sum(rows.values()) == two.peak.allocated_bytes
    assert "each of 2 GPUs" in str(two)
    assert "DDP" in str(two)
    assert two.to_dict()["setup"]["num_gpus"] == 2


@pytest.mark.slow
def test_the_communicator_widens_the_range():
    one, two, given = tiny(), tiny(num_gpus=4), tiny(num_gpus=4, nccl_memory="500MiB")
    wide = two.interval.high_bytes - two.interval.low_bytes
    assert wide > one.interval.high_bytes - one.interval.low_bytes
    assert "NCCL" in two.interval.basis
    beside = given.peak.device_bytes - given.peak.reserved_bytes
    assert beside == one.peak.device_bytes - one.peak.reserved_bytes + (500 << 20)


def test_one_gpu_has_no_communicator():
    assert communicators(Distributed(), (9, 0)) is None


def forward_bytes(estimate):
    return max(point.allocated_bytes for point in estimate.timeline if point.phase == "forward")


@pytest.mark.slow
def test_the_trainer_copies_outputs_unless_layers_are_recomputed():
    """``find_unused_parameters = not gradient_checkpointing`` of the Trainer."""
    trainer = {"num_gpus": 2, "loop": "trainer", "batch": 16, "task": "masked-lm"}
    logits = 16 * TINY["seq_len"] * 30_522 * 4
    copies = forward_bytes(tiny(**trainer))
    none = forward_bytes(tiny(**trainer, ddp_find_unused_parameters=False))
    assert copies - none == pytest.approx(logits, rel=0.02)
    recomputed = {**trainer, "checkpointing": True}
    usual = tiny(**recomputed)
    without = tiny(**recomputed, ddp_find_unused_parameters=False)
    assert usual.peak == without.peak


def test_a_profile_answers_other_sizes_from_the_family():
    run = memest.profile("prajjwal1/bert-tiny", num_gpus=2, loop="plain", seq_len=64)
    for batch in (3, 8, 21):
        asked = run.estimate(batch=batch, gpu="a100-80gb", max_batch=False)
        alone = memest.estimate(
            "prajjwal1/bert-tiny", num_gpus=2, loop="plain", seq_len=64, batch=batch,
            gpu="a100-80gb", max_batch=False,
        )  # fmt: skip
        assert asked.peak == alone.peak
    peaks = run.allocated([{"batch": 3}, {"batch": 8}], gpu="a100-80gb")
    assert peaks[0] < peaks[1]


def test_a_case_of_a_campaign_is_not_told_of_gpus_in_its_setup():
    with pytest.raises(ConfigError, match='"processes" beside it'):
        case_from_dict({"model": "gpt2", "setup": {"num_gpus": 2}})


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpus": 4, "nccl_memory": "1GiB", "ddp_bucket_cap_mb": 10.0},
        {"num_gpus": 8, "fsdp": "full_shard auto_wrap", "fsdp_wrap": ["A"], "fsdp_shard_size": 4},
        {"num_gpus": 2, "zero_settings": {"zero_optimization": {"stage": 2}}},
        {"num_gpus": 2, "zero": 1, "zero_settings": {"overlap_comm": True}},
    ],
)
def test_a_setup_can_be_written_down_and_read_again(options):
    setup = setup_from_options(**options)
    document = json.loads(json.dumps(setup.to_dict()))
    # what nobody asks for is no matter of a setup that somebody writes down
    names = {f.name for f in dataclasses.fields(Distributed)} - {*_TRACE_FIELDS}
    kept = {name: document[name] for name in names}
    assert setup_from_options(**kept).distributed == setup.distributed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_gpus": 0}, "--num-gpus 0 is out of range"),
        ({"num_gpus": 2, "ddp_bucket_cap_mb": -1}, "--ddp-bucket-cap-mb -1 is out of range"),
        ({"ddp_gradient_as_bucket_view": True}, "one GPU has no DDP"),
        ({"nccl_memory": "1GiB"}, "no effect on one GPU"),
        ({"num_gpus": 2, "nccl_memory": "much"}, "--nccl-memory"),
        ({"num_gpus": "many"}, "is not a whole number"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        tiny(**options)
