from __future__ import annotations

import dataclasses

from memest.workspaces.operator_call import TensorSpec

MIB = 1 << 20


class TestEmbedding:
    OP = "aten.embedding_dense_backward.default"

    def gradient(self, dense, count, rows, columns, dtype="float32"):
        return dense(count, columns, dtype=dtype), dense(count, dtype="int64"), rows, -1, False

    def test_few_indices_need_nothing(self, dense, sizes, h100):
        assert sizes(h100, self.OP, *self.gradient(dense, 3072, 32000, 4096)) == []

    def test_partial_sums_in_fp32(self, dense, allocate, h100):
        for dtype in ("float32", "bfloat16"):
            found = allocate(h100, self.OP, *self.gradient(dense, 8192, 32000, 4096, dtype))
            partials = 8192 // 10 + 8192
            assert found[-1].nbytes == partials * 4096 * 4
            assert found[-1].nbytes // MIB == 140

    def test_index_arrays(self, dense, sizes, h100):
        found = sizes(h100, self.OP, *self.gradient(dense, 8192, 32000, 4096))
        n, partials = 8192 * 8, (819 + 8192) * 8
        assert found[:4] == [n, n, n, 150_015]  # the sort's scratch, recorded
        assert found[4:-1] == [n, 8, n, 1279, n, n, 1279, 8, partials]

    def test_the_gradient_is_made_when_indices_are_sorted(self, dense, allocate, h100):
        found = allocate(h100, self.OP, *self.gradient(dense, 8192, 32000, 4096))
        assert [h.results_before for h in found[:5]] == [0] * 4 + [None]

    def test_few_segments_are_summed_with_atomics_since_2_11(self, dense, sizes, h100):
        args = self.gradient(dense, 100_000, 100, 64, "bfloat16")
        partials = (10_000 + 100) * 8
        assert sizes(h100, self.OP, *args)[-2:] == [partials, 100 * 64 * 4]
        old = dataclasses.replace(h100, torch=(2, 10))
        assert sizes(old, self.OP, *args)[-1] == 10_100 * 64 * 4
        exact = dataclasses.replace(h100, deterministic=True)
        assert sizes(exact, self.OP, *args)[-1] == 10_100 * 64 * 4

    def test_counting_frequencies_takes_the_long_way(self, dense, sizes, h100):
        grad, indices, *_ = self.gradient(dense, 16, 100, 8)
        assert sizes(h100, self.OP, grad, indices, 100, -1, True)


class TestIndexPut:
    OP = "aten._index_put_impl_.default"

    def test_backward_of_one_index(self, dense, allocate, h100):
        # gradient of weight[tokens]: 4 x 128 tokens, 2560 columns, gradient not contiguous
        values = TensorSpec((4, 128, 2560), (128, 1, 512), "float32")
        args = dense(10_000, 2560), (dense(4, 128, dtype="int64"),), values, True, True
        found = allocate(h100, self.OP, *args)
        assert [h.nbytes for h in found] == [4096, 4096, 5_242_880, 4096, 4096, 4096, 1]
        assert [h.freed_before for h in found][:2] == [2, None]

    def test_backward_of_two_indices(self, dense, allocate, h100):
        args = dense(512, 10_000), (dense(512, dtype="int64"),) * 2, dense(512), True, True
        found = allocate(h100, self.OP, *args)
        assert [h.nbytes for h in found] == [4096] * 7 + [1]
        assert [h.freed_before for h in found] == [2, None, 4, 4, None, None, None, None]

    def test_sort_of_more_than_one_tile(self, dense, sizes, h100):
        # recorded with torch 2.6: n = 2048 needs 1 byte, n = 4096 of 10 000 rows 72191
        old = dataclasses.replace(h100, torch=(2, 6))
        for batch, scratch in ((2, 1), (4, 72_191)):
            values = dense(batch, 1024, 1024)
            args = dense(10_000, 1024), (dense(batch, 1024, dtype="int64"),), values, True, True
            assert sizes(old, self.OP, *args)[-1] == scratch

    def test_index_on_the_host_is_scaled_there_and_copied(self, dense, allocate, h100):
        rows = dataclasses.replace(dense(512, dtype="int64"), on_host=True)
        args = dense(512, 10_000), (rows, dense(512, dtype="int64")), dense(512), True, True
        found = allocate(h100, self.OP, *args)
        assert [h.nbytes for h in found] == [4096] * 6 + [1]
        assert [h.freed_before for h in found] == [None, 3, 3, None, None, None, None]

    def test_look_up_with_an_index_on_the_host(self, dense, allocate, h100):
        rows = dataclasses.replace(dense(512, dtype="int64"), on_host=True)
        args = dense(512, 10_000), (rows, dense(512, dtype="int64"))
        (copy,) = allocate(h100, "aten.index.Tensor", *args, outputs=(dense(512),))
        assert (copy.nbytes, copy.results_before) == (4096, 0)

    def test_index_on_the_host_is_broadcast_before_it_is_copied(self, dense, sizes, h100):
        rows = dataclasses.replace(dense(8, 1, dtype="int64"), on_host=True)
        found = sizes(h100, "aten.index.Tensor", dense(8, 376), (rows, dense(376, dtype="int64")))
        assert found == [8 * 376 * 8] * 2

    def test_assignment_needs_nothing(self, dense, sizes, h100):
        args = dense(10, 4), (dense(3, dtype="int64"),), dense(3, 4)
        assert sizes(h100, "aten.index_put_.default", *args) == []
        exact = dataclasses.replace(h100, deterministic=True)
        assert sizes(exact, "aten.index_put_.default", *args)

    def test_mask_becomes_indices(self, dense, allocate, h100):
        mask = dense(4, 1000, dtype="bool")
        found = allocate(h100, "aten.index.Tensor", dense(4, 1000, 8), (mask,))
        assert [h.nbytes for h in found] == [4, 1, 767, 4000 * 2 * 8 // 2]
        assert found[-1].high_nbytes == 4000 * 2 * 8

    def test_integer_look_up_needs_nothing(self, dense, sizes, h100):
        args = dense(4, 8), (dense(3, dtype="int64"), None)
        assert sizes(h100, "aten.index.Tensor", *args) == []

    def test_int32_indices_are_cast(self, dense, sizes, h100):
        args = dense(4, 8), (dense(1578, dtype="int32"),)
        assert sizes(h100, "aten.index.Tensor", *args) == [12_624]

    def test_broadcast_indices_are_made_alike(self, dense, sizes, h100):
        # mask[batch[:, None], position], as attention masks are built
        batch, position = dense(8, 1, dtype="int64"), dense(376, dtype="int64")
        found = sizes(h100, "aten.index.Tensor", dense(8, 376, dtype="bool"), (batch, position))
        assert found == [8 * 376 * 8] * 2
        same = dense(8, 376), (dense(5, dtype="int64"),) * 2
        assert sizes(h100, "aten.index.Tensor", *same) == []


class TestSort:
    def test_short_slices_are_sorted_in_place(self, dense, sizes, h100):
        spec = dense(8, 4096)
        assert sizes(h100, "aten.sort.default", spec, outputs=(spec, spec)) == []

    def test_one_long_slice(self, dense, sizes, h100):
        spec = dense(32_000)
        positions, scratch = sizes(h100, "aten.sort.default", spec)
        assert positions == 32_000 * 8
        assert 32_000 * 12 < scratch < 32_000 * 14

    def test_some_long_slices(self, dense, sizes, h100):
        n = 8 * 32_000
        found = sizes(h100, "aten.sort.default", dense(8, 32_000), -1, True)
        assert found[:3] == [n * 8, n * 8, n * 4]

    def test_many_long_slices(self, dense, sizes, h100):
        n = 256 * 32_000
        assert sizes(h100, "aten.sort.default", dense(256, 32_000)) == [n * 8, n * 12]

    def test_sorting_along_another_dimension_copies(self, dense, sizes, h100):
        found = sizes(h100, "aten.sort.stable", dense(8000, 4), stable=True, dim=0)
        assert found[0] == 8000 * 4 * 4

    def test_topk_of_one_long_slice(self, dense, sizes, h100):
        outputs = dense(1, 50), dense(1, 50, dtype="int64")
        found = sizes(h100, "aten.topk.default", dense(1, 131_072), 50, outputs=outputs)
        assert found[4:] == [16_384, 128, 128, 1279]

    def test_scan_of_everything(self, dense, sizes, h100):
        out = dense(1000, dtype="int64")
        found = sizes(h100, "aten.cumsum.default", dense(1000, dtype="bool"), 0, outputs=(out,))
        assert found == [8000, 1279]

    def test_scan_of_rows_needs_nothing(self, dense, sizes, h100):
        assert sizes(h100, "aten.cumsum.default", dense(8, 9), 1, outputs=(dense(8, 9),)) == []


class TestMultinomial:
    OP = "aten.multinomial.default"

    def test_one_draw_keeps_a_number_for_each_probability(self, dense, sizes, h100):
        assert sizes(h100, self.OP, dense(8, 1000), 1) == [8 * 1000 * 4]

    def test_many_draws_with_replacement_work_otherwise(self, dense, sizes, h100):
        assert sizes(h100, self.OP, dense(8, 1000), 4, True) == []
