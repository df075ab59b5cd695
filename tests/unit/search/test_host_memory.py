"""Commands that go by GPUs alone say so where the memory of a host is named."""

from __future__ import annotations

import pytest

import memest

QUESTION = {"batch": 1, "seq_len": 32, "gpu": "t4", "host_memory": "1GiB"}


@pytest.mark.parametrize(
    "ask",
    [
        lambda: memest.max_batch("prajjwal1/bert-tiny", **QUESTION),
        lambda: memest.compare("prajjwal1/bert-tiny", {"fp16": {"fp16": True}}, **QUESTION),
        lambda: memest.advise(
            "prajjwal1/bert-tiny", effective_batch=8, seq_len=32, gpu="t4", host_memory="1GiB"
        ),
    ],
    ids=["max-batch", "compare", "advise"],
)
def test_the_memory_of_a_host_is_not_passed_over(ask):
    with pytest.raises(memest.ConfigError, match="--host-memory says nothing to memest"):
        ask()
