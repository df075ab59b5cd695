"""Relative time: the rates it takes, what makes it longer, and published runs."""

from __future__ import annotations

import pytest

from memest.catalog.gpus import find_gpu
from memest.catalog.spec import list_gpus
from memest.profiles.work import StepWork, Work
from memest.search.cost import (
    LAUNCH_SECONDS,
    PLAIN_SHARE,
    TENSOR_CORE_SHARE,
    seconds,
    speed_of,
    step_seconds,
)
from memest.workspaces.flops import Arithmetic

TERA = 10**12


@pytest.mark.parametrize(
    ("gpu", "full", "half"),
    [
        ("v100", 15.7, 125), ("a100-80gb", 19.5, 312), ("h100", 67, 989), ("t4", 8.1, 65),
        ("l4", 30.3, 121), ("rtx-3090", 35.6, 71), ("rtx-2080-ti", 13.4, 53.8),
        ("rtx-a6000", 38.7, 154.8), ("p100", 9.3, 9.3), ("gtx-1080-ti", 11.3, 11.3),
        ("mi300x", 163.4, 1307), ("a10g", 31.5, 70),
    ],
)  # fmt: skip
def test_rates_are_those_of_the_datasheets(gpu, full, half):
    speed = speed_of(find_gpu(gpu))
    share = TENSOR_CORE_SHARE if half > full else PLAIN_SHARE
    assert speed.full == pytest.approx(PLAIN_SHARE * full * TERA, rel=0.12)
    assert speed.half == pytest.approx(share * half * TERA, rel=0.12)


def test_every_card_of_the_catalogue_has_a_speed():
    for spec in list_gpus():
        speed = speed_of(spec)
        assert speed.full > 0
        assert speed.half >= 0.7 * speed.full
        assert speed.tf32 >= speed.full
        assert speed.bandwidth > 0


def test_what_is_not_known_is_said():
    assert "not known" in speed_of(find_gpu("rtx-4090-laptop")).basis
    assert "not known" not in speed_of(find_gpu("rtx-4090")).basis


@pytest.mark.parametrize(
    ("gpu", "has_bf16"),
    [("t4", False), ("v100", False), ("p100", False), ("l4", True), ("mi300x", True)],
)
def test_bf16_is_as_fast_as_the_card_has_it(gpu, has_bf16):
    speed = speed_of(find_gpu(gpu))
    assert speed.rate(Arithmetic.BF16) == (speed.half if has_bf16 else speed.full)


def test_tf32_is_for_convolutions_unless_allowed():
    spec = find_gpu("a100-80gb")
    default, allowed = speed_of(spec), speed_of(spec, tf32=True)
    assert default.rate(Arithmetic.FULL) == default.full
    assert default.rate(Arithmetic.FULL_CONVOLUTION) == default.tf32 > 4 * default.full
    assert allowed.rate(Arithmetic.FULL) == allowed.tf32
    old = speed_of(find_gpu("v100"), tf32=True)
    assert old.rate(Arithmetic.FULL) == old.full


def test_the_terms_add_up():
    speed = speed_of(find_gpu("v100"))
    arithmetic = Work(flops_by={Arithmetic.HALF: 10**12})
    memory = Work(bytes_made=9 * 10**9)
    launches = Work(launches=1000)
    assert seconds(launches, speed) == pytest.approx(1000 * LAUNCH_SECONDS)
    assert seconds(memory, speed) == pytest.approx(3 * 9 / 900)
    assert seconds(arithmetic, speed) == pytest.approx(1 / 87.5)
    parts = sum(seconds(work, speed) for work in (arithmetic, memory, launches))
    assert seconds(arithmetic + memory + launches, speed) == pytest.approx(parts)
    assert step_seconds(StepWork({}), speed) == 0


PUBLISHED = {
    57.82: {"batch": 4},
    66.03: {"batch": 1, "grad_accum": 4},
    85.47: {"batch": 1, "grad_accum": 4, "checkpointing": "full"},
    27.46: {"batch": 4, "precision": "fp16"},
    50.76: {"batch": 1, "grad_accum": 4, "checkpointing": "full", "precision": "fp16"},
    64.31: {"batch": 4, "optim": "adafactor"},
    56.54: {
        "batch": 1, "grad_accum": 4, "checkpointing": "full", "precision": "fp16",
        "optim": "adafactor",
    },
}  # fmt: skip
"""Seconds for 512 samples of bert-large at 512 tokens on a V100: transformers 4.18,
docs/source/en/performance.mdx."""


@pytest.mark.slow
def test_ratios_of_published_runs():
    pytest.importorskip("torch")
    import memest
    from memest.search.cost import Probe

    own = memest.profile(
        "bert-large-uncased", seq_len=512, attn_implementation="eager", optim="adamw_hf",
        software="torch=1.10,transformers=4.18",
    )  # fmt: skip
    probe = Probe(own, {"gpu": "v100"})
    times = {took: probe.seconds_per_sample(**changes) for took, changes in PUBLISHED.items()}
    for took, predicted in times.items():
        ratio = predicted / times[57.82]
        assert ratio == pytest.approx(took / 57.82, rel=0.08), PUBLISHED[took]
