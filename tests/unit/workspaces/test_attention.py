from __future__ import annotations

import dataclasses

import pytest

from memest.workspaces.attention import efficient_backward_tile
from memest.workspaces.operator_call import TensorSpec

MIB = 1 << 20


def qkv(batch, heads, length, dim, *, key_heads=None, dtype="bfloat16"):
    """Query, key, value as [B, H, S, D] views of [B, S, H, D] memory, and gradient and output."""

    def view(num):
        stride = (length * num * dim, dim, num * dim, 1)
        return TensorSpec((batch, num, length, dim), stride, dtype)

    q, kv = view(heads), view(key_heads or heads)
    return q, kv, kv


FLASH = "aten._scaled_dot_product_flash_attention_backward.default"
EFFICIENT = "aten._scaled_dot_product_efficient_attention_backward.default"


class TestFlash:
    def backward(self, q, k, v, grad=None):
        return (grad or q, q, k, v, q, None, None, None, q.shape[2], k.shape[2], 0.0, True)

    def test_backward_accumulates_dq_in_fp32(self, sizes, h100):
        args = self.backward(*qkv(4, 32, 2048, 128))
        assert sizes(h100, FLASH, *args) == [4 * 32 * 2048 * 4, 128 * MIB]

    def test_fewer_key_heads_expand_dk_and_dv(self, sizes, h100):
        args = self.backward(*qkv(4, 32, 2048, 128, key_heads=8))
        assert sizes(h100, FLASH, *args)[2:] == [64 * MIB, 64 * MIB]

    def test_lengths_and_head_dimensions_are_rounded(self, sizes, h100):
        args = self.backward(*qkv(1, 2, 130, 72))
        assert sizes(h100, FLASH, *args) == [2 * 256 * 4, 2 * 256 * 96 * 4]
        args = self.backward(*qkv(1, 2, 130, 136))
        assert sizes(h100, FLASH, *args)[1] == 2 * 256 * 192 * 4

    def test_deterministic_mode_splits_dq(self, sizes, h100):
        args = self.backward(*qkv(1, 16, 128, 64))
        gpu = dataclasses.replace(h100, deterministic=True)
        assert sizes(gpu, FLASH, *args)[1] == 9 * sizes(h100, FLASH, *args)[1]

    def test_gradient_of_another_layout_is_copied(self, dense, sizes, h100):
        q, k, v = qkv(2, 4, 128, 64)
        args = self.backward(q, k, v, grad=dense(2, 4, 128, 64, dtype="bfloat16"))
        assert sizes(h100, FLASH, *args)[0] == 2 * 4 * 128 * 64 * 2

    def test_packed_sequences(self, dense, sizes, h100):
        t = dense(1000, 8, 64, dtype="bfloat16")
        offsets = dense(5, dtype="int32")
        args = t, t, t, t, t, None, offsets, offsets, 400, 400, 0.0, True
        rows = 8 * (1000 + 128 * 4)
        found = sizes(h100, "aten._flash_attention_backward.default", *args)
        assert found == [rows * 4, rows * 64 * 4]

    def test_forward_needs_nothing_when_it_fills_the_gpu(self, sizes, h100):
        op = "aten._scaled_dot_product_flash_attention.default"
        assert sizes(h100, op, *qkv(4, 32, 2048, 128), 0.0, True) == []

    def test_forward_splits_long_keys_of_few_heads(self, sizes, h100):
        op = "aten._scaled_dot_product_flash_attention.default"
        # 4 blocks of 64 queries and 64 blocks of 128 keys on 264 slots: 64 splits
        found = sizes(h100, op, *qkv(1, 1, 256, 128)[:1], *qkv(1, 1, 8192, 128)[1:])
        assert found == [64 * 256 * 4, 64 * 256 * 128 * 4]


class TestEfficient:
    def backward(self, q, k, v, dropout=0.0):
        return (q, q, k, v, None, q, None, None, None, dropout, (True,) * 4, True)

    def test_half_backward_of_small_heads(self, sizes, t4):
        # 64x64 blocks: 8 x 1 tiles of 4 + 4096 floats for each of 2 x 4 heads
        args = self.backward(*qkv(2, 4, 512, 64, dtype="float16"))
        assert sizes(t4, EFFICIENT, *args) == [2 * 4 * 512 * 4, 2 * 4 * 8 * 4100 * 4]

    def test_large_heads_keep_dk_and_dv_in_memory(self, sizes, a100):
        # 128x64: 4 x 4 tiles of dq; 8 blocks of keys, of 64 x (256 + 256) floats
        args = self.backward(*qkv(2, 4, 512, 256, dtype="float16"))
        floats = 16 * (4 + 8192) + 8 * 64 * 512
        assert sizes(a100, EFFICIENT, *args) == [2 * 4 * 512 * 4, 2 * 4 * floats * 4]

    def test_fewer_key_heads_expand_dk_and_dv(self, allocate, sizes, t4):
        whole, grouped = (
            self.backward(*qkv(2, 4, 512, 64, key_heads=heads, dtype="float16"))
            for heads in (None, 2)
        )
        full = 2 * 4 * 512 * 64 * 2
        assert sizes(t4, EFFICIENT, *grouped) == [full, full, *sizes(t4, EFFICIENT, *whole)]
        # beside the delta and the workspace, until they are added up
        found = allocate(t4, EFFICIENT, *grouped)
        assert [each.freed_before for each in found[:2]] == [None, None]

    def test_fp32_computes_delta_outside(self, allocate, a100):
        args = self.backward(*qkv(2, 4, 512, 64, dtype="float32"))
        found = allocate(a100, EFFICIENT, *args)
        rows = 2 * 4 * 512
        assert [h.nbytes for h in found[:3]] == [rows * 64 * 4, rows * 4, rows * 4]
        # recorded: the product and its sums are freed first, then delta, then the workspace
        assert [h.freed_before for h in found] == [3, 3, 4, None]
        assert found[3].nbytes == 2 * 4 * 8 * 4100 * 4

    @pytest.mark.parametrize(
        ("half", "dim", "capability", "expected"),
        [
            (True, 64, (8, 0), (64, 64, 64)),
            (True, 128, (8, 0), (128, 128, 128)),
            (True, 128, (8, 6), (64, 64, 128)),
            (True, 96, (8, 9), (128, 64, 96)),
            (True, 128, (7, 0), (128, 64, 128)),
            (False, 128, (9, 0), (128, 64, 128)),
            (False, 128, (7, 5), (64, 64, 128)),
            (True, 256, (9, 0), (128, 64, 65536)),
        ],
    )
    def test_kernel_of_a_gpu(self, half, dim, capability, expected):
        assert efficient_backward_tile(half, dim, capability, dropout=False) == expected

    def test_forward_accumulates_only_large_heads_of_half_types(self, sizes, a100):
        op = "aten._scaled_dot_product_efficient_attention.default"
        assert sizes(a100, op, *qkv(2, 4, 512, 128, dtype="float16"), None, True) == []
        found = sizes(a100, op, *qkv(2, 4, 512, 256, dtype="float16"), None, True)
        assert found == [2 * 4 * 512 * 256 * 4]
        assert sizes(a100, op, *qkv(2, 4, 512, 256, dtype="float32"), None, True) == []


class TestCudnn:
    def test_forward_is_a_range_from_256_bytes(self, allocate, h100):
        op = "aten._scaled_dot_product_cudnn_attention.default"
        (hidden,) = allocate(h100, op, *qkv(4, 32, 2048, 128), None, True)
        assert (hidden.nbytes, hidden.high_nbytes) == (256, 128 * MIB)

    def test_backward_expects_fp32_dq(self, allocate, h100):
        op = "aten._scaled_dot_product_cudnn_attention_backward.default"
        q, k, v = qkv(4, 32, 2048, 128)
        (hidden,) = allocate(h100, op, q, q, k, v, q)
        assert hidden.nbytes == 128 * MIB + 4 * 32 * 2048 * 4 + 256
        assert hidden.high_nbytes > hidden.nbytes

    @pytest.mark.parametrize(
        ("shape", "recorded"),
        [((8, 16, 512, 64), 17_039_616), ((32, 12, 197, 64), 19_668_736)],
    )
    def test_backward_as_recorded(self, allocate, h100, shape, recorded):
        op = "aten._scaled_dot_product_cudnn_attention_backward.default"
        q, k, v = qkv(*shape)
        assert [h.nbytes for h in allocate(h100, op, q, q, k, v, q)] == [recorded]


def test_meta_shaped_calls_without_operands_are_ignored(sizes, h100):
    assert sizes(h100, FLASH, None, None, None, None) == []
    assert sizes(h100, EFFICIENT, None) == []
