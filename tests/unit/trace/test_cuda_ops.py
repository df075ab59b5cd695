"""CUDA's operators on meta: what they save and make, byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from memest.config.setup import SdpaBackend
from memest.trace.cuda.cuda_ops import (
    _like_batch,
    cuda_handlers,
    cuda_operators,
    kernel_handlers,
)
from memest.trace.recorder import Recorder
from memest.workspaces.operator_call import GpuTraits

aten = torch.ops.aten
N = 64 * 64


class Seen:
    """One forward (and backward) on meta with CUDA's operators of one torch version."""

    def __init__(self, function, *shapes, dtype=torch.float32, version=(2, 13), backward=True):
        gpu = GpuTraits(capability=(8, 0), sm_count=108, max_threads_per_sm=2048, torch=version)
        recorder = Recorder({**cuda_handlers(), **kernel_handlers()})
        inputs = [torch.empty(s, device="meta", dtype=dtype, requires_grad=True) for s in shapes]
        with cuda_operators(gpu, SdpaBackend.AUTO), recorder:
            self.out = function(*inputs)
            trace = recorder.trace
            self.alive = sorted(
                (s for i, s in enumerate(trace.sizes) if i in recorder._live.values()),
                reverse=True,
            )
            self.made = list(trace.sizes)
            if backward:
                self.out.backward(torch.empty_like(self.out))
        self.all = list(trace.sizes)
        recorder.forget()


def test_dropout_saves_one_byte_an_element():
    for dtype, size in ((torch.float32, 4), (torch.float16, 2)):
        seen = Seen(lambda x: functional.dropout(x, 0.1), (64, 64), dtype=dtype)
        assert seen.alive == [N * size, N]
        assert seen.made == [N, N * size], "the mask comes first"


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.1, False)])
def test_dropout_that_drops_nothing_is_no_operator(p, training):
    assert Seen(lambda x: functional.dropout(x * 1, p, training), (64, 64)).made == [4 * N]


def test_rms_norm_is_fused_since_2_9():
    norm = lambda x, w: functional.rms_norm(x, (64,), w)  # noqa: E731
    fused = Seen(norm, (64, 64), (64,), dtype=torch.bfloat16)
    assert sorted(fused.made) == [64 * 4, N * 2]
    parts = Seen(norm, (64, 64), (64,), dtype=torch.bfloat16, version=(2, 8))
    assert len(parts.made) > 4
    assert max(parts.made) == N * 4


def test_the_upcast_of_a_softmax_is_fused_for_fp16_only():
    upcast = lambda x: x.softmax(-1, dtype=torch.float32)  # noqa: E731
    half = Seen(upcast, (64, 64), dtype=torch.float16)
    assert half.made == [N * 4]
    assert half.out.dtype == torch.float32
    assert Seen(upcast, (64, 64), dtype=torch.bfloat16).made == [N * 4, N * 4]


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_kept_its_input_until_torch_1_10(name):
    function = lambda x: getattr(x * 2, name)(-1)  # noqa: E731
    assert Seen(function, (64, 64), version=(1, 11)).alive == [4 * N]
    old = Seen(function, (64, 64), version=(1, 10))
    assert old.alive == [4 * N, 4 * N]
    # and the gradient is the same one
    assert len(old.all) == len(Seen(function, (64, 64), version=(1, 11)).all)


@pytest.mark.parametrize(
    ("version", "of_rows", "of_all"),
    [((1, 12), 0, 0), ((1, 13), 1, 0), ((2, 0), 1, 1), ((2, 1), 1, 1), ((2, 2), 0, 0)],
)
def test_a_mean_kept_its_input_from_torch_1_13_to_2_1(version, of_rows, of_all):
    rows = Seen(lambda x: (x + 1).mean(-1, keepdim=True), (64, 64), version=version)
    assert rows.alive == [4 * N] * of_rows + [4 * 64]
    whole = Seen(lambda x: (x + 1).mean(), (64, 64), version=version)
    assert sorted(whole.alive) == [4] + [4 * N] * of_all


@pytest.mark.parametrize("dim", [-1, 0, (0, 2), None])
@pytest.mark.parametrize("keepdim", [False, True])
def test_a_mean_of_then_makes_what_a_mean_of_now_makes(dim, keepdim):
    def mean(x):
        return (x + 1).mean(dim, keepdim) if dim is not None or keepdim else (x + 1).mean()

    if dim is None and keepdim:
        pytest.skip("mean of all elements has no keepdim")
    old = Seen(mean, (4, 8, 16), version=(2, 1))
    new = Seen(mean, (4, 8, 16), version=(2, 2))
    assert old.out.shape == new.out.shape
    assert old.all == new.all, "the same tensors are made, forward and backward"


BATCH, HEADS, TOKENS, SIZE = 2, 4, 64, 16
HIDDEN = BATCH * HEADS * TOKENS * SIZE * 2


def sequence_first(*operands):
    """Attention as ``nn.MultiheadAttention`` calls it, and what it makes of the output."""
    heads = [x.view(TOKENS, BATCH * HEADS, SIZE).transpose(0, 1) for x in operands]
    out = functional.scaled_dot_product_attention(
        *(x.view(BATCH, HEADS, TOKENS, SIZE) for x in heads)
    )
    return out.permute(2, 0, 1, 3).contiguous()


def batch_first(*operands):
    """Attention as transformers calls it."""
    heads = [x.view(BATCH, TOKENS, HEADS, SIZE).transpose(1, 2) for x in operands]
    out = functional.scaled_dot_product_attention(*heads)
    return out.transpose(1, 2).contiguous()


@pytest.mark.parametrize(("version", "copies"), [((2, 0), True), ((2, 1), True), ((2, 2), False)])
def test_flash_attention_took_packed_tokens_until_torch_2_1(version, copies):
    """Operands with the sequence first were copied; the output had the batch first."""
    shapes = [(TOKENS, BATCH, HEADS * SIZE)] * 3
    seen = Seen(sequence_first, *shapes, dtype=torch.bfloat16, version=version)
    # the output, and its contiguous copy where it does not lie as the queries do
    assert seen.alive.count(HIDDEN) == (2 if copies else 1)
    assert seen.made.count(HIDDEN) == (3 + 2 if copies else 1)
    # in the backward those of the operands and of the output's gradient again, and two of each
    # gradient on its way back through the views of the heads
    given, gradients = 1, 3
    backward = seen.all.count(HIDDEN) - seen.made.count(HIDDEN)
    assert backward == given + gradients + (3 + 1 + 2 * gradients if copies else 0)


def test_operands_that_lie_packed_are_no_copies():
    shapes = [(BATCH, TOKENS, HEADS * SIZE)] * 3
    old = Seen(batch_first, *shapes, dtype=torch.bfloat16, version=(2, 1))
    new = Seen(batch_first, *shapes, dtype=torch.bfloat16, version=(2, 2))
    assert old.out.shape == new.out.shape
    assert old.alive == new.alive
    assert old.all == new.all, "the same tensors are made, forward and backward"


def test_the_squares_of_an_rms_norm_stayed_alive():
    def norm(x, w):
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    shapes = (64, 64), (64,)
    old = Seen(norm, *shapes, dtype=torch.bfloat16, version=(2, 1)).alive
    new = Seen(norm, *shapes, dtype=torch.bfloat16, version=(2, 2)).alive
    assert sum(old) - sum(new) == 4 * N


def test_outside_the_context_meta_behaves_as_before():
    x = torch.empty(4, 4, device="meta", requires_grad=True)
    before = type(functional.rms_norm(x, (4,)).grad_fn)
    with cuda_operators(
        GpuTraits(capability=(8, 0), sm_count=1, max_threads_per_sm=1), SdpaBackend.AUTO
    ):
        assert type(functional.rms_norm(x, (4,)).grad_fn) is not before
    assert type(functional.rms_norm(x, (4,)).grad_fn) is before


def test_a_convolution_returns_the_layout_of_its_operands():
    def conv(x, w):
        return functional.conv2d(x.permute(0, 3, 1, 2) * 1, w, padding=1)

    seen = Seen(conv, (2, 8, 8, 4), (4, 4, 3, 3))
    assert seen.out.is_contiguous(memory_format=torch.channels_last)
    plain = Seen(lambda x, w: functional.conv2d(x, w), (2, 4, 8, 8), (4, 4, 3, 3))
    assert plain.out.is_contiguous()


def test_roll_makes_a_contiguous_tensor_for_each_dimension():
    seen = Seen(lambda x: x.roll((1, 1), (0, 1)), (64, 64))
    assert seen.made == [4 * N, 4 * N]
    assert seen.alive == [4 * N]
    turned = Seen(lambda x: x.t().roll(1, 0), (64, 64))
    assert turned.made == [4 * N, 4 * N]
    assert turned.out.is_contiguous()


def test_a_reduced_loss_keeps_the_storage_of_the_unreduced_one():
    loss = functional.mse_loss
    seen = Seen(lambda x: loss(x, x.detach()), (64, 64), backward=False)
    assert seen.alive == [4 * N]
    real = torch.rand(64, 64)
    assert loss(real, real).untyped_storage().nbytes() == 4 * N


def test_layer_norm_s_gradient_is_contiguous_whatever_arrives():
    x = torch.empty(4, 8, 16, device="meta")
    arrives = torch.empty(4, 16, 8, device="meta").transpose(1, 2)
    with Recorder(kernel_handlers()):
        _, mean, rstd = torch.native_layer_norm(x, [16], None, None, 1e-5)
        gradient, *_ = torch.ops.aten.native_layer_norm_backward(
            arrives, x, [16], mean, rstd, None, None, [True, False, False]
        )
    assert gradient.is_contiguous()


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("shape", [(4, 8, 5, 5), (4, 8, 7), (4, 8)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "of_weight"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_batch_norms_return_what_their_decomposition_does(dtype, of_weight, shape, last):
    x = torch.empty(shape, dtype=dtype, device="meta")
    if last and len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.empty(8, dtype=of_weight, device="meta")
    forward = (x, weight, weight, weight, weight, True, 0.1, 1e-5)
    norm, backward = aten.native_batch_norm.default, aten.native_batch_norm_backward.default
    handlers, recorder = kernel_handlers(), Recorder()

    found = handlers[norm](recorder, norm, forward, {})
    assert layouts(found) == layouts(_like_batch(0)(recorder, norm, forward, {}))

    for mask in ([True, True, True], [False, True, False]):
        arguments = (x, x, weight, weight, weight, found[1], found[1], True, 1e-5, mask)
        gradients = handlers[backward](recorder, backward, arguments, {})
        expected = _like_batch(1)(recorder, backward, arguments, {})
        assert layouts(gradients) == layouts(expected)


def layouts(tensors):
    return [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors]
