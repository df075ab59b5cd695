from __future__ import annotations

import dataclasses

import pytest

from memest.workspaces.operator_call import GpuTraits, Lifetime, TensorSpec

MIB = 1 << 20


def product(dense, dtype="float32"):
    return (dense(64, 128, dtype=dtype), dense(128, 256, dtype=dtype)), dense(64, 256, dtype=dtype)


class TestCublasWorkspace:
    @pytest.mark.parametrize(
        ("capability", "torch", "expected"),
        [
            ((8, 0), (1, 12), []),
            ((8, 0), (1, 13), [4 * MIB]),
            ((8, 0), (2, 0), [8_519_680]),
            ((7, 5), (2, 13), [8_519_680]),
            ((9, 0), (2, 6), [33_554_432]),
            ((10, 0), (2, 11), [8_519_680]),
            ((12, 0), (2, 12), [33_554_432]),
        ],
    )
    def test_size_by_gpu_and_version(self, dense, sizes, capability, torch, expected):
        operands, out = product(dense)
        gpu = GpuTraits(capability, 100, 2048, torch)
        assert sizes(gpu, "aten.mm.default", *operands, outputs=(out,)) == expected

    def test_one_for_each_thread_and_never_freed(self, dense, allocate, h100):
        operands, out = product(dense)
        for thread in ("main", "autograd"):
            (hidden,) = allocate(h100, "aten.mm.default", *operands, outputs=(out,), thread=thread)
            assert hidden.lifetime is Lifetime.PERSISTENT
            assert hidden.key == ("cublas", thread)

    def test_freed_with_the_call_since_2_15(self, dense, allocate, h100):
        operands, out = product(dense)
        gpu = dataclasses.replace(h100, torch=(2, 15))
        (hidden,) = allocate(gpu, "aten.mm.default", *operands, outputs=(out,))
        assert (hidden.lifetime, hidden.key) == (Lifetime.OP, ())

    @pytest.mark.parametrize("dtype", ["int64", "bool"])
    def test_integers_do_not_reach_cublas(self, dense, sizes, h100, dtype):
        operands, out = product(dense, dtype)
        assert sizes(h100, "aten.mm.default", *operands, outputs=(out,)) == []

    def test_empty_products_do_not_reach_cublas(self, dense, sizes, h100):
        out = dense(4, 5)
        assert sizes(h100, "aten.mm.default", dense(4, 0), dense(0, 5), outputs=(out,)) == []


class TestCublasLt:
    def addmm(self, dense, bias=None):
        return (bias or dense(256), dense(64, 128), dense(128, 256)), dense(64, 256)

    @pytest.mark.parametrize(
        ("torch", "expected"),
        [
            ((2, 6), [MIB, 8_519_680]),
            ((2, 9), [8_519_680, MIB]),
            ((2, 14), [8_519_680]),
            ((2, 15), [MIB]),
        ],
    )
    def test_bias_is_fused(self, dense, sizes, a100, torch, expected):
        args, out = self.addmm(dense)
        gpu = dataclasses.replace(a100, torch=torch)
        assert sizes(gpu, "aten.addmm.default", *args, outputs=(out,)) == expected

    def test_before_2_9_it_is_freed_with_the_call(self, dense, allocate, a100):
        args, out = self.addmm(dense)
        gpu = dataclasses.replace(a100, torch=(2, 6))
        first, _ = allocate(gpu, "aten.addmm.default", *args, outputs=(out,))
        assert first.lifetime is Lifetime.OP

    def test_a_scaled_or_two_dimensional_bias_is_not_fused(self, dense, sizes, a100):
        gpu = dataclasses.replace(a100, torch=(2, 6))
        args, out = self.addmm(dense)
        assert sizes(gpu, "aten.addmm.default", *args, outputs=(out,), beta=0.5) == [8_519_680]
        args, out = self.addmm(dense, dense(64, 256))
        assert sizes(gpu, "aten.addmm.default", *args, outputs=(out,)) == [8_519_680]

    def test_one_column_is_not_fused(self, dense, sizes, a100):
        gpu = dataclasses.replace(a100, torch=(2, 6))
        args = dense(1), dense(64, 128), dense(128, 1)
        assert sizes(gpu, "aten.addmm.default", *args, outputs=(dense(64, 1),)) == [8_519_680]


class TestOperandCopies:
    def test_expanded_gradient_is_copied_before_the_workspace(self, dense, sizes, h100):
        expanded = TensorSpec((64, 128), (0, 0), "float32")
        args = expanded, dense(128, 256)
        found = sizes(h100, "aten.mm.default", *args, outputs=(dense(64, 256),))
        assert found == [64 * 128 * 4, 32 * MIB]

    def test_transposed_and_sliced_operands_are_not(self, dense, sizes, h100):
        transposed = TensorSpec((64, 128), (1, 64), "float32")
        sliced = TensorSpec((128, 256), (1024, 1), "float32")
        out = dense(64, 256)
        assert sizes(h100, "aten.mm.default", transposed, sliced, outputs=(out,)) == [32 * MIB]

    def test_batches_of_expanded_matrices_are_read_in_place(self, dense, sizes, h100):
        expanded = TensorSpec((8, 64, 128), (0, 128, 1), "bfloat16")
        second, out = dense(8, 128, 32, dtype="bfloat16"), dense(8, 64, 32, dtype="bfloat16")
        assert sizes(h100, "aten.bmm.default", expanded, second, outputs=(out,)) == [32 * MIB]

    def test_batches_without_unit_stride_are_copied(self, dense, sizes, h100):
        strided = TensorSpec((8, 64, 128), (64 * 256, 256, 2), "bfloat16")
        second, out = dense(8, 128, 32, dtype="bfloat16"), dense(8, 64, 32, dtype="bfloat16")
        found = sizes(h100, "aten.bmm.default", strided, second, outputs=(out,))
        assert found == [8 * 64 * 128 * 2, 32 * MIB]

    def test_vectors(self, dense, sizes, h100):
        matrix, expanded = dense(64, 128), TensorSpec((128,), (0,), "float32")
        found = sizes(h100, "aten.mv.default", matrix, expanded, outputs=(dense(64),))
        assert found == [128 * 4, 32 * MIB]
        dot = sizes(h100, "aten.dot.default", dense(9), dense(9), outputs=(dense(),))
        assert dot == [32 * MIB]
