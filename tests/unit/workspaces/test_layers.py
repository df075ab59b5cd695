from __future__ import annotations

import dataclasses

import pytest

from memest.workspaces.operator_call import TensorSpec

KIB, MIB = 1 << 10, 1 << 20


def channels_last(dense, *shape, dtype="float16"):
    _, c, h, w = shape
    return TensorSpec(shape, (c * h * w, 1, w * c, c), dtype)


class TestLayerNorm:
    def backward(self, dense, rows, columns, dtype="float32"):
        x, weight = dense(rows, columns, dtype=dtype), dense(columns, dtype=dtype)
        stats = dense(rows, 1)
        args = x, x, (columns,), stats, stats, weight, weight, (True,) * 3
        return args, (x, weight, weight)

    def test_usual_row_counts_need_nothing(self, dense, sizes, h100):
        args, outputs = self.backward(dense, 65_536, 768)
        op = "aten.native_layer_norm_backward.default"
        assert sizes(h100, op, *args, outputs=outputs) == []

    def test_many_rows_make_partial_sums(self, dense, sizes, h100):
        args, outputs = self.backward(dense, 131_072, 768)
        op = "aten.native_layer_norm_backward.default"
        found = sizes(h100, op, *args, outputs=outputs)
        parts = 32_768 // 24
        assert found[:3] == [parts * 768 * 4, parts * 768 * 4, 768 * 4]
        old = dataclasses.replace(h100, torch=(2, 7))
        assert sizes(old, op, *args, outputs=outputs) == []

    def test_wide_rows_never_do(self, dense, sizes, h100):
        args, outputs = self.backward(dense, 131_072, 4096)
        op = "aten.native_layer_norm_backward.default"
        assert sizes(h100, op, *args, outputs=outputs) == []

    def test_rms_norm_has_one_parameter(self, dense, sizes, h100):
        x, weight = dense(131_072, 768), dense(768)
        args = x, x, (768,), dense(131_072, 1), weight, (True, True)
        op = "aten._fused_rms_norm_backward.default"
        found = sizes(h100, op, *args, outputs=(x, weight))
        assert found[:2] == [1365 * 768 * 4, 768 * 4]

    def test_strided_input_is_copied(self, dense, sizes, h100):
        strided = TensorSpec((4, 8, 16), (128, 1, 8), "float16")
        args = strided, (16,), None, None, 1e-5
        assert sizes(h100, "aten.native_layer_norm.default", *args) == [4 * 8 * 16 * 2]


class TestGroupAndBatchNorm:
    def test_group_norm_scales_and_shifts(self, dense, sizes, h100):
        args = dense(2, 64, 8, 8, dtype="float16"), dense(64), dense(64), 2, 64, 64, 32, 1e-5
        assert sizes(h100, "aten.native_group_norm.default", *args) == [2 * 64 * 4] * 2

    def test_group_norm_channels_last_keeps_statistics(self, dense, sizes, h100):
        x = channels_last(dense, 2, 64, 8, 8)
        args = x, dense(64), dense(64), 2, 64, 64, 32, 1e-5
        assert sizes(h100, "aten.native_group_norm.default", *args)[0] == 2 * 32 * 8 * 24

    def test_group_norm_backward(self, dense, sizes, h100):
        x, stats = dense(2, 64, 8, 8), dense(2, 32)
        args = x, x, stats, stats, dense(64), 2, 64, 64, 32, (True,) * 3
        op = "aten.native_group_norm_backward.default"
        channel, group = 2 * 64 * 4, 2 * 32 * 4
        assert sizes(h100, op, *args, outputs=(x,)) == [channel, channel, group, group, channel]

    def test_batch_norm_is_at_most_a_range(self, dense, allocate, h100):
        op = "aten.native_batch_norm.default"
        assert allocate(h100, op, dense(2, 64, 8, 8)) == ()
        (hidden,) = allocate(h100, op, channels_last(dense, 2, 64, 8, 8))
        assert (hidden.nbytes, hidden.high_nbytes) == (0, 128 * KIB)


class TestConvolution:
    def forward(self, make, groups=1):
        x, weight = make(8, 64, 32, 32), make(64, 64 // groups, 3, 3)
        return (x, weight, None, (1, 1), (1, 1), (1, 1), False, (0, 0), groups), make(8, 64, 32, 32)

    def test_tensor_cores_transpose_channels_first(self, dense, allocate, a100):
        args, out = self.forward(dense)
        (hidden,) = allocate(a100, "aten.convolution.default", *args, outputs=(out,))
        expected = 2 * 8 * 64 * 32 * 32 * 4 + 64 * 64 * 9 * 4
        assert (hidden.nbytes, hidden.high_nbytes) == (expected, 4 * expected)

    def test_channels_last_and_old_fp32_expect_nothing(self, dense, allocate, a100, t4):
        args, out = self.forward(lambda *shape: channels_last(dense, *shape))
        (hidden,) = allocate(a100, "aten.convolution.default", *args, outputs=(out,))
        assert hidden.nbytes == 0
        assert hidden.high_nbytes > 0
        args, out = self.forward(dense)
        (hidden,) = allocate(t4, "aten.convolution.default", *args, outputs=(out,))
        assert hidden.nbytes == 0

    def test_bf16_without_cudnn_lays_one_sample_out_as_columns(self, dense, allocate, a100, t4):
        x, weight = (dense(*s, dtype="bfloat16") for s in ((8, 64, 56, 56), (128, 64, 3, 3)))
        out = dense(8, 128, 56, 56, dtype="bfloat16")
        args = (x, weight, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
        (hidden,) = allocate(t4, "aten.convolution.default", *args, outputs=(out,))
        assert (hidden.label, hidden.nbytes) == ("columns of one sample", 64 * 9 * 56 * 56 * 2)
        (hidden,) = allocate(a100, "aten.convolution.default", *args, outputs=(out,))
        assert hidden.label == "cuDNN convolution workspace"

    def test_weight_of_the_other_layout_is_copied(self, dense, sizes, a100):
        x, out = channels_last(dense, 8, 64, 32, 32), channels_last(dense, 8, 64, 32, 32)
        weight = dense(64, 64, 3, 3, dtype="float16")
        found = sizes(a100, "aten.convolution.default", x, weight, outputs=(out,))
        assert found == [64 * 64 * 9 * 2, 0]

    def test_backward_frees_one_workspace_before_the_next(self, dense, allocate, a100):
        (x, weight, *rest), out = self.forward(dense)
        args = out, x, weight, (64,), *rest[1:], (True, True, True)
        found = allocate(a100, "aten.convolution_backward.default", *args)
        labels = [h.label for h in found]
        assert labels[:2] == ["cuDNN convolution workspace"] * 2
        assert [h.freed_before for h in found[:2]] == [1, 2]


class TestLosses:
    @pytest.mark.parametrize("op", ["mse_loss", "smooth_l1_loss", "huber_loss"])
    def test_reduced_losses_exist_in_full_first(self, dense, sizes, h100, op):
        x = dense(64, 100)
        assert sizes(h100, f"aten.{op}.default", x, x) == [64 * 100 * 4]
        assert sizes(h100, f"aten.{op}.default", x, x, 0) == []

    def test_logits_loss(self, dense, sizes, h100):
        x = dense(64, 100)
        op = "aten.binary_cross_entropy_with_logits.default"
        assert sizes(h100, op, x, x, None, None, 1) == [2 * 64 * 100 * 4]

    def test_softmax_backward_multiplies(self, dense, sizes, h100):
        x = dense(64, 100, dtype="bfloat16")
        args = x, x, -1, "torch.bfloat16"
        assert sizes(h100, "aten._softmax_backward_data.default", *args) == [64 * 100 * 2]
        assert sizes(h100, "aten._log_softmax_backward_data.default", *args) == []

    def test_safe_softmax_masked_in_a_second_tensor_before_2_11(self, dense, sizes, h100):
        x = dense(2, 4, 100, dtype="float32")
        old = dataclasses.replace(h100, torch=(2, 10))
        assert sizes(old, "aten._safe_softmax.default", x, -1, outputs=(x,)) == [2 * 4 * 100 * 4]
        assert sizes(h100, "aten._safe_softmax.default", x, -1, outputs=(x,)) == []

    def test_softmax_copies_strided_input(self, dense, sizes, h100):
        x = TensorSpec((4, 8), (1, 4), "float32")
        assert sizes(h100, "aten._softmax.default", x, -1, False) == [128]


class TestOptimizer:
    def test_partial_norms(self, dense, sizes, h100):
        gradients = dense(32_000, 4096), dense(4096), dense(0)
        norms = (dense(),) * 3
        found = sizes(h100, "aten._foreach_norm.Scalar", gradients, 2, outputs=norms)
        assert found == [3 * 2000 * 4]

    def test_other_orders_go_one_by_one(self, dense, sizes, h100):
        op = "aten._foreach_norm.Scalar"
        assert sizes(h100, op, (dense(9),), 3, outputs=(dense(),)) == []
        assert sizes(h100, op, (), 2) == []


class TestPooling:
    def test_what_lies_in_rows_or_channels_last_needs_nothing(self, dense, sizes, h100):
        for image in (dense(2, 8, 16, 16), channels_last(dense, 2, 8, 16, 16)):
            assert sizes(h100, "aten.avg_pool2d.default", image, (2, 2)) == []

    def test_a_gradient_follows_its_image(self, dense, sizes, h100):
        small, last = dense(2, 8, 8, 8, dtype="float16"), channels_last(dense, 2, 8, 8, 8)
        rows, image = dense(2, 8, 16, 16, dtype="float16"), channels_last(dense, 2, 8, 16, 16)
        op = "aten.avg_pool2d_backward.default"
        assert sizes(h100, op, last, image, (2, 2)) == []
        assert sizes(h100, op, small, image, (2, 2)) == [2 * 8 * 8 * 8 * 2]
        assert sizes(h100, op, last, rows, (2, 2)) == [2 * 8 * 8 * 8 * 2]

    def test_indices_too(self, dense, sizes, h100):
        small, image = channels_last(dense, 2, 8, 8, 8), dense(2, 8, 16, 16, dtype="float16")
        indices = channels_last(dense, 2, 8, 8, 8, dtype="int64")
        args = small, image, (2, 2), (2, 2), (0, 0), (1, 1), False, indices
        found = sizes(h100, "aten.max_pool2d_with_indices_backward.default", *args)
        assert found == [2 * 8 * 8 * 8 * 2, 2 * 8 * 8 * 8 * 8]

    def test_an_image_with_holes_is_copied(self, dense, sizes, h100):
        holes = TensorSpec((2, 8, 16, 16), (4096, 512, 32, 2), "float32")
        assert sizes(h100, "aten.avg_pool2d.default", holes, (2, 2)) == [2 * 8 * 16 * 16 * 4]


class TestUpsampling:
    OP = "aten.upsample_nearest2d.default"

    def test_rows_and_channels_last_need_nothing(self, dense, sizes, h100):
        for shaped in (dense, lambda *shape: channels_last(dense, *shape)):
            out = shaped(2, 8, 16, 16)
            assert sizes(h100, self.OP, shaped(2, 8, 8, 8), (16, 16), outputs=(out,)) == []

    def test_three_channels_last_go_through_rows(self, dense, sizes, h100):
        image, out = (channels_last(dense, 2, 3, n, n) for n in (8, 16))
        found = sizes(h100, self.OP, image, (16, 16), outputs=(out,))
        assert found == [2 * 3 * 16 * 16 * 2, 2 * 3 * 8 * 8 * 2]

    def test_a_gradient_with_holes_is_copied(self, dense, sizes, h100):
        holes = TensorSpec((2, 8, 16, 16), (4096, 512, 32, 2), "float32")
        for kind in ("nearest2d", "bilinear2d"):
            op = f"aten.upsample_{kind}_backward.default"
            found = sizes(h100, op, holes, outputs=(dense(2, 8, 8, 8),))
            assert found == [2 * 8 * 16 * 16 * 4]

    def test_the_same_size_is_a_plain_copy(self, dense, sizes, h100):
        image = channels_last(dense, 2, 3, 8, 8)
        assert sizes(h100, self.OP, image, (8, 8), outputs=(image,)) == []
