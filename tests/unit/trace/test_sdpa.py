"""Which attention kernel runs where, and what the math path makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from memest.config.installed import installed_version
from memest.config.setup import SdpaBackend
from memest.errors import ConfigError
from memest.trace.cuda.cuda_ops import cuda_handlers, cuda_operators, kernel_handlers
from memest.trace.recorder import Recorder
from memest.workspaces.attention_choice import SdpaCall, choose_backend
from memest.workspaces.operator_call import GpuTraits

FLASH, EFFICIENT, CUDNN, MATH = (
    SdpaBackend.FLASH, SdpaBackend.EFFICIENT, SdpaBackend.CUDNN, SdpaBackend.MATH,
)  # fmt: skip
CALL = SdpaCall(
    dtype="bfloat16", head_dim=64, value_dim=64, query_len=512, key_len=512, has_mask=False,
    dropout=0.0, is_causal=True, grouped=False, needs_grad=True,
)  # fmt: skip


def gpu(capability, version=(2, 10)) -> GpuTraits:
    return GpuTraits(capability=capability, sm_count=80, max_threads_per_sm=2048, torch=version)


@pytest.mark.parametrize(
    ("changes", "capability", "version", "expected"),
    [
        # by GPU: V100 and T4 never run flash; bf16 not even efficient
        ({}, (8, 0), (2, 10), FLASH),
        ({}, (9, 0), (2, 10), FLASH),
        ({}, (7, 0), (2, 10), MATH),
        ({"dtype": "float16"}, (7, 0), (2, 10), EFFICIENT),
        ({"dtype": "float16"}, (7, 5), (2, 10), EFFICIENT),
        # by dtype
        ({"dtype": "float32"}, (8, 0), (2, 10), EFFICIENT),
        ({"dtype": "float32"}, (7, 0), (2, 10), EFFICIENT),
        ({"dtype": "float32", "head_dim": 6, "value_dim": 6}, (8, 0), (2, 10), MATH),
        ({"dtype": "float32", "head_dim": 6, "value_dim": 6}, (7, 0), (2, 10), EFFICIENT),
        ({"dtype": "float64"}, (9, 0), (2, 13), MATH),
        # masks, head sizes, lengths
        ({"has_mask": True}, (8, 0), (2, 10), EFFICIENT),
        ({"has_mask": True}, (8, 0), (2, 0), MATH),
        ({"head_dim": 256, "value_dim": 256}, (8, 0), (2, 10), FLASH),
        ({"head_dim": 264, "value_dim": 264}, (8, 0), (2, 10), EFFICIENT),
        ({"head_dim": 192, "value_dim": 128}, (8, 0), (2, 10), EFFICIENT),
        ({"query_len": 1}, (8, 0), (2, 10), EFFICIENT),
        ({"query_len": 1, "is_causal": False}, (8, 0), (2, 10), FLASH),
        # small shared memory: large heads cannot train
        ({"head_dim": 224, "value_dim": 224}, (8, 6), (2, 10), EFFICIENT),
        ({"head_dim": 256, "value_dim": 256}, (8, 9), (2, 10), FLASH),
        ({"head_dim": 256, "value_dim": 256, "dropout": 0.1}, (8, 9), (2, 10), EFFICIENT),
        ({"head_dim": 224, "value_dim": 224, "needs_grad": False}, (8, 6), (2, 10), FLASH),
        # grouped heads: flash only, until the efficient kernel took them
        ({"grouped": True}, (8, 0), (2, 10), FLASH),
        ({"grouped": True, "has_mask": True}, (8, 0), (2, 10), MATH),
        ({"grouped": True, "dtype": "float32"}, (8, 0), (2, 10), MATH),
        ({"grouped": True, "dtype": "float32"}, (8, 0), (2, 13), MATH),
        ({"grouped": True, "dtype": "float32"}, (8, 0), (2, 14), EFFICIENT),
        ({"grouped": True, "dtype": "float16"}, (7, 5), (2, 14), EFFICIENT),
        # cuDNN first on 9.x and 10.x with the wheels of torch 2.11 on
        ({}, (9, 0), (2, 11), CUDNN),
        ({}, (10, 0), (2, 13), CUDNN),
        ({}, (8, 0), (2, 13), FLASH),
        ({"dropout": 0.1}, (9, 0), (2, 13), FLASH),
        ({"dropout": 0.125}, (9, 0), (2, 13), CUDNN),
        ({"has_mask": True}, (9, 0), (2, 13), CUDNN),
        ({"head_dim": 160, "value_dim": 160}, (9, 0), (2, 13), FLASH),
        ({"dtype": "float32"}, (9, 0), (2, 13), EFFICIENT),
        # before 2.0 there is only math
        ({}, (8, 0), (1, 13), MATH),
    ],
)
def test_the_kernel_pytorch_picks(changes, capability, version, expected):
    chosen = choose_backend(replace(CALL, **changes), gpu(capability, version), SdpaBackend.AUTO)
    assert chosen is expected


def test_a_forced_kernel_that_cannot_run_falls_back_to_math():
    assert choose_backend(CALL, gpu((8, 0)), EFFICIENT) is EFFICIENT
    assert choose_backend(replace(CALL, has_mask=True), gpu((8, 0)), FLASH) is MATH


def _forward(backend, dtype=torch.float16, *, mask=None, heads=8, key_heads=8, length=100):
    recorder = Recorder({**cuda_handlers(), **kernel_handlers()})
    make = {"device": "meta", "dtype": dtype, "requires_grad": True}
    query = torch.empty(2, heads, length, 64, **make)
    key, value = (torch.empty(2, key_heads, length, 64, **make) for _ in range(2))
    if mask == "bool":
        mask = torch.empty(2, 1, length, length, dtype=torch.bool, device="meta")
    with cuda_operators(gpu((9, 0)), backend), recorder:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, enable_gqa=heads != key_heads
        )
    made = [
        (recorder.trace.op_names[o], s)
        for o, s in zip(recorder.trace.ops, recorder.trace.sizes, strict=True)
    ]
    alive = [s for i, s in enumerate(recorder.trace.sizes) if i in recorder._live.values()]
    assert out.shape == query.shape
    return made, alive


ROWS = 2 * 8 * 100


def test_flash_keeps_output_and_logsumexp():
    _, alive = _forward(FLASH)
    assert sorted(alive)[-2:] == sorted([ROWS * 64 * 2, ROWS * 4])


def test_efficient_rounds_logsumexp_up_and_keeps_its_own_additive_mask():
    _, alive = _forward(EFFICIENT, mask="bool")
    assert 2 * 8 * 128 * 4 in alive
    # 100 columns are padded to 104, once for both heads and batches of this mask
    assert 2 * 100 * 104 * 2 in alive


def test_math_computes_half_inputs_in_fp32_and_returns_half_probabilities_too():
    made, alive = _forward(MATH)
    scores = ROWS * 100
    assert ("aten._safe_softmax.default", scores * 4) in made
    assert ("aten.isneginf.default", scores) in made
    assert ("aten._to_copy.default", scores * 2) in made
    assert scores * 2 not in alive
    # fp32 probabilities, scaled query and key, value; the result in half
    assert sorted(alive) == sorted([scores * 4, *[ROWS * 64 * 4] * 3, ROWS * 64 * 2])


def test_math_repeats_grouped_heads():
    made, _ = _forward(MATH, torch.float32, heads=8, key_heads=2)
    assert ("aten.clone.default", ROWS * 64 * 4) in made


def _attend(version, *shapes):
    """The operators of an attention of fp32, forward and backward, on a GPU that has no flash."""
    recorder = Recorder({**cuda_handlers(), **kernel_handlers()})
    operands = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
    grouped = len({shape[-3] for shape in shapes}) > 1
    with cuda_operators(gpu((7, 5), version), SdpaBackend.AUTO), recorder:
        out = torch.nn.functional.scaled_dot_product_attention(*operands, enable_gqa=grouped)
        out.sum().backward()
    assert [each.grad.shape for each in operands] == list(map(torch.Size, shapes))
    return set(recorder.trace.op_names)


def test_the_efficient_kernel_takes_grouped_heads_where_the_installed_torch_has_it():
    shapes = (2, 8, 64, 32), (2, 2, 64, 32), (2, 2, 64, 32)
    assert "aten._safe_softmax.default" in _attend((2, 13), *shapes)
    if installed_version("torch") < (2, 14):
        with pytest.raises(ConfigError, match=r"Install torch 2\.14"):
            _attend((2, 14), *shapes)
    else:
        names = _attend((2, 14), *shapes)
        assert "aten._scaled_dot_product_efficient_attention_backward.default" in names


@pytest.mark.parametrize(("version", "fused"), [((2, 13), False), ((2, 14), True)])
def test_operands_without_a_batch_take_a_kernel_since_2_14(version, fused):
    names = _attend(version, *[(8, 64, 32)] * 3)
    assert ("aten._scaled_dot_product_efficient_attention.default" in names) is fused
