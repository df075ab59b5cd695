"""CUDA context and loaded kernels: figures and their sources."""

from __future__ import annotations

import pytest

from memest.catalog.cuda_context import context_estimate, loaded_kernels_later, loads_lazily
from memest.catalog.gpus import find_gpu, list_gpus
from memest.units import MIB

VERSIONS = [(1, 1), (1, 7), (1, 10), (1, 12), (1, 13), (2, 0), (2, 1), (2, 6), (2, 13), (3, 0)]


class TestLoading:
    @pytest.mark.parametrize(
        ("torch", "cuda", "expected"),
        [
            ((1, 12), (11, 6), False),
            ((1, 12), None, False),
            ((1, 13), (11, 6), False),
            ((1, 13), (11, 7), True),
            ((1, 13), None, True),
            ((2, 13), (13, 0), True),
        ],
    )
    def test_lazy_from_torch_1_13_and_cuda_11_7(self, torch, cuda, expected):
        assert expected is loads_lazily(torch, cuda)


class TestContext:
    def test_modern_default(self):
        estimate = context_estimate(find_gpu("a100"), (2, 13), (13, 0))

        assert (
            estimate.low_bytes // MIB,
            estimate.expected_bytes // MIB,
            estimate.high_bytes // MIB,
        ) == (350, 575, 800)
        assert "no clean public reading" in estimate.basis

    def test_published_v100(self):
        estimate = context_estimate(find_gpu("v100"), (1, 10), (11, 2))

        assert estimate.expected_bytes == 1343 * MIB
        assert "transformers v4.18" in estimate.basis

    def test_published_3090_after_training(self):
        estimate = context_estimate(find_gpu("rtx 3090"), (2, 0), (11, 7))

        assert estimate.expected_bytes == (665 + 452) * MIB

    def test_eager_readings_of_one_card_are_averaged(self):
        estimate = context_estimate(find_gpu("rtx 3090"), (1, 7), (11, 0))

        assert estimate.low_bytes < 999 * MIB < estimate.expected_bytes < 1486 * MIB
        assert estimate.high_bytes > 1486 * MIB
        assert "49877" in estimate.basis
        assert "54564" in estimate.basis

    def test_eager_without_a_reading_says_so(self):
        assert "no reading for Pascal" in context_estimate(find_gpu("p100"), (1, 10)).basis

    def test_rocm_says_that_it_is_taken_over(self):
        assert "rocm" in context_estimate(find_gpu("mi300x"), (2, 6)).basis

    @pytest.mark.parametrize("version", VERSIONS)
    def test_always_a_range_with_a_basis(self, version):
        for spec in list_gpus():
            estimate = context_estimate(spec, version)
            assert 0 < estimate.low_bytes <= estimate.expected_bytes <= estimate.high_bytes
            assert estimate.basis


class TestLater:
    def test_zero_when_eager(self):
        later = loaded_kernels_later((1, 10), (11, 2))

        assert (later.low_bytes, later.expected_bytes, later.high_bytes) == (0, 0, 0)

    def test_one_constant_for_the_first_lazy_era(self):
        later = loaded_kernels_later((1, 13))

        assert later.expected_bytes == 452 * MIB
        assert (later.low_bytes // MIB, later.high_bytes // MIB) == (413, 491)
        assert "RTX 3090" in later.basis

    def test_newer_torch_grows_less(self):
        later = loaded_kernels_later((2, 13))

        assert (
            later.low_bytes // MIB,
            later.expected_bytes // MIB,
            later.high_bytes // MIB,
        ) == (50, 125, 200)
