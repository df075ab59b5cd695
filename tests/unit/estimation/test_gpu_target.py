"""The GPUs of a question, by whatever people type for them."""

from __future__ import annotations

import pytest

import memest
from memest.config.parallelism import Distributed
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.estimation.gpu_target import target_gpus


def test_a_memory_size_is_what_gpu_memory_makes_of_it():
    named = target_gpus(Setup(), gpu="24GB").main
    given = target_gpus(Setup(), gpu_memory="24GiB").main

    for part in ("name", "traits", "context", "usable_bytes", "basis", "calibration"):
        assert getattr(named, part) == getattr(given, part), part


def test_several_sizes_go_by_their_size():
    targets = target_gpus(Setup(), gpu=["24GB", "8GB", "t4"]).named_gpus

    assert [each.name for each in targets] == ["your GPU (24GiB)", "your GPU (8GiB)", "Tesla T4"]


def test_a_setup_and_a_name_that_say_several_numbers_are_refused():
    eight = Setup(distributed=Distributed(num_gpus=8))

    assert target_gpus(eight, gpu="8xh100").main.spec.slug == "h100"
    with pytest.raises(ConfigError, match="8xh100 says 8 GPUs and the setup has 1"):
        target_gpus(Setup(), gpu="8xh100")


def test_every_way_to_ask_takes_the_number():
    model, options = "bert-large-uncased", {"batch": 2, "fp16": True}
    estimate = memest.estimate(model, gpu="2xt4", max_batch=False, **options)
    spot = memest.profile(model, **options).spot(gpu="2xt4")
    swept = memest.sweep(model, {"gpu": ["2xt4"]}, **options).points[0]
    largest = memest.max_batch(model, gpu="t4x2", **options)

    assert estimate.setup.distributed.num_gpus == 2
    assert largest.setup.distributed.num_gpus == 2
    assert spot.peak == estimate.peak
    assert swept.peak == estimate.peak


def test_what_every_named_gpu_was_taken_for_is_said():
    estimate = memest.estimate(
        "bert-large-uncased", batch=2, fp16=True, gpu=["t4", "a100", "colab"], max_batch=False
    )

    assert any("other sizes: a100-40gb" in note for note in estimate.notes)
    assert any("Google Colab" in note for note in estimate.notes)
