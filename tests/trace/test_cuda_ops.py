"""CUDA's operators on meta: what they save and make, byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from memest.hidden.call import GpuTraits
from memest.setup import SdpaBackend
from memest.trace.cuda_ops import cuda_handlers, cuda_operators
from memest.trace.kernels import kernel_handlers
from memest.trace.recorder import Recorder

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
        assert seen.made == [N * size, N]


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
