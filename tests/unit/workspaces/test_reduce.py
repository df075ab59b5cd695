from __future__ import annotations

import pytest

from memest.workspaces.operator_call import TensorSpec

MIB = 1 << 20


def bias_gradient(dense, rows, columns, dtype="float32"):
    return (dense(rows, columns, dtype=dtype), (0,)), dense(1, columns, dtype=dtype)


class TestBiasGradient:
    @pytest.mark.parametrize(
        ("rows", "columns", "gpu", "expected"),
        [
            (8192, 4096, "h100", 132),
            (8192, 4096, "a100", 108),
            (8192, 4096, "v100", 80),
            (8192, 4096, "rtx3090", 62),
            (8192, 4096, "t4", 20),
            (4096, 768, "h100", 24),
            (4096, 768, "rtx3090", 24),
            (4096, 768, "t4", 20.25),
            (32768, 4096, "t4", 64),
        ],
    )
    def test_scratch_by_gpu(self, request, dense, sizes, rows, columns, gpu, expected):
        args, out = bias_gradient(dense, rows, columns)
        traits = request.getfixturevalue(gpu)
        found = sizes(traits, "aten.sum.dim_IntList", *args, True, outputs=(out,))
        assert found[0] == expected * MIB
        assert found[1:] == [4 * columns // 128]

    def test_half_types_accumulate_in_fp32(self, dense, sizes, h100):
        args, out = bias_gradient(dense, 8192, 4096, "bfloat16")
        found = sizes(h100, "aten.sum.dim_IntList", *args, True, outputs=(out,))
        assert found == [132 * MIB, 128]

    def test_leading_dimensions_are_merged(self, dense, sizes, h100):
        flat = sizes(h100, "aten.sum.dim_IntList", dense(8192, 4096), (0,), outputs=(dense(4096),))
        split = dense(4, 2048, 4096), (0, 1)
        assert sizes(h100, "aten.sum.dim_IntList", *split, outputs=(dense(4096),)) == flat

    def test_short_dimensions_need_nothing(self, dense, sizes, h100):
        args, out = bias_gradient(dense, 512, 2560)
        assert sizes(h100, "aten.sum.dim_IntList", *args, True, outputs=(out,)) == []


class TestOtherReductions:
    @pytest.mark.parametrize(("columns", "expected"), [(2048, 553_648_128), (512, 164_626_432)])
    def test_max_with_index_holds_pairs(self, dense, sizes, h100, columns, expected):
        logits = TensorSpec((columns, 10_000), (1, columns), "float32")
        outputs = dense(columns), dense(columns, dtype="int64")
        found = sizes(h100, "aten.max.dim", logits, 1, outputs=outputs)
        assert found == [expected, columns // 128 * 4]

    def test_rows_of_a_contiguous_matrix_need_nothing(self, dense, sizes, h100):
        outputs = dense(2048), dense(2048, dtype="int64")
        assert sizes(h100, "aten.max.dim", dense(2048, 10_000), -1, outputs=outputs) == []

    def test_sum_over_everything(self, dense, sizes, h100):
        # 2**24 inputs, vectors of 4, 512 threads: 528 blocks of one accumulator each
        found = sizes(h100, "aten.sum.default", dense(4096, 4096), outputs=(dense(),))
        assert found == [528 * 4, 4]

    def test_fp32_result_of_half_input_needs_no_cast(self, dense, sizes, h100):
        args = dense(4, 4096, dtype="bfloat16"), (1,)
        assert sizes(h100, "aten.sum.dim_IntList", *args, outputs=(dense(4),)) == []

    def test_counting_a_mask_casts_it_to_int64(self, dense, sizes, h100):
        args = dense(4, 16, dtype="bool"), (1,)
        found = sizes(h100, "aten.sum.dim_IntList", *args, outputs=(dense(4, dtype="int64"),))
        assert found == [4 * 16 * 8]

    def test_count_nonzero_makes_a_mask_and_casts_it(self, dense, sizes, h100):
        out = dense(dtype="int64")
        found = sizes(h100, "aten.count_nonzero.default", dense(4, 16), outputs=(out,))
        assert found == [4 * 16, 4 * 16 * 8]

    def test_any_does_not_cast(self, dense, sizes, h100):
        out = dense(dtype="bool")
        assert sizes(h100, "aten.any.default", dense(4, 16, dtype="float16"), outputs=(out,)) == []

    def test_variance_keeps_four_fields(self, dense, sizes, h100):
        args = dense(8192, 4096), (0,)
        found = sizes(h100, "aten.var.correction", *args, outputs=(dense(4096),), correction=1)
        assert found == [4 * 132 * MIB, 128]

    def test_argmax_of_everything_flattens_first(self, dense, sizes, h100):
        transposed = TensorSpec((64, 32), (1, 64), "float32")
        out = dense(dtype="int64")
        assert sizes(h100, "aten.argmax.default", transposed, outputs=(out,)) == [64 * 32 * 4]

    def test_logsumexp_makes_maxima_and_a_full_copy(self, dense, sizes, h100):
        args = dense(64, 1000), (1,)
        found = sizes(h100, "aten.logsumexp.default", *args, outputs=(dense(64),))
        assert found == [64 * 4, 64 * 1000 * 4]


class TestLargeInputs:
    def test_half_results_get_an_accumulator(self, dense, allocate, h100):
        args = dense(1 << 16, 1 << 15, dtype="bfloat16"), (0,)
        out = dense(1 << 15, dtype="bfloat16")
        found = allocate(h100, "aten.sum.dim_IntList", *args, outputs=(out,))
        assert found[0].label == "reduction accumulator"
        assert found[0].nbytes == (1 << 15) * 4

    def test_fp32_results_accumulate_in_place(self, dense, allocate, h100):
        args = dense(1 << 15, 1 << 15), (0,)
        found = allocate(h100, "aten.sum.dim_IntList", *args, outputs=(dense(1 << 15),))
        assert [h.label for h in found] == ["reduction scratch", "reduction semaphores"]


def test_few_rows_along_memory_are_split_over_blocks(dense, sizes, h100):
    # 2048 values a thread, at least 16 each: 128 blocks for each row, fewer than the 132 that fit
    args = dense(4, 1 << 20, dtype="float16"), (1,)
    found = sizes(h100, "aten.sum.dim_IntList", *args, outputs=(dense(4, dtype="float16"),))
    assert found == [4 * 128 * 4, 16]
