"""A rank's stream is rewritten once for all sizes that no wrapper asks for."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import ANY

import pytest

from memest.catalog.gpus import find_gpu, traits
from memest.config.options import setup_from_options
from memest.estimation.profiler import Profiler
from memest.sharding import rank

LLAMA = "meta-llama/Llama-3.2-1B?num_hidden_layers=2"


@pytest.mark.parametrize("options", [{"fsdp": "full_shard"}, {"zero": 3}, {}])
def test_other_sizes_are_filled_in(options, monkeypatch):
    profiler = Profiler.of(LLAMA)
    rewrites = []
    rewrite = rank.rewrite

    def counted(*args):
        rewrites.append(args)
        return rewrite(*args)

    monkeypatch.setattr(rank, "rewrite", counted)

    def stream(batch, gpu):
        setup = setup_from_options(batch=batch, seq_len=64, bf16=True, num_gpus=4, **options)
        return profiler.run(profiler.question(setup, traits(find_gpu(gpu)), ("batch",))).stream

    stream(2, "a100-80gb")
    asked = [(3, "a100-80gb"), (3, "rtx-3090"), (5, "l4")]
    filled_in = [stream(*size_and_gpu) for size_and_gpu in asked]
    assert len(rewrites) == 1
    for size_and_gpu, one in zip(asked, filled_in, strict=True):
        profiler = Profiler.of(LLAMA)
        assert stream(*size_and_gpu) == replace(one, chains=ANY)
    assert len(rewrites) == 4
