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


def mib(estimate):
    sizes = (estimate.low_bytes, estimate.expected_bytes, estimate.high_bytes)
    return tuple(size // MIB for size in sizes)


class TestContext:
    @pytest.mark.parametrize(
        ("gpu", "torch", "cuda", "expected", "words"),
        [
            ("a100", (2, 13), (13, 0), 492, "221,184 resident threads, by 8 readings"),
            ("v100", (1, 10), (11, 2), 1343, "transformers v4.18"),
            ("rtx 3090", (1, 12), (11, 3), 1687, "55277"),
            ("rtx 3090", (2, 0), (11, 7), 665 + 452, ""),
        ],
    )
    def test_published_readings(self, gpu, torch, cuda, expected, words):
        estimate = context_estimate(find_gpu(gpu), torch, cuda)

        assert mib(estimate)[1] == expected
        assert gpu != "a100" or mib(estimate) == (419, 492, 703)
        assert words in estimate.basis

    def test_eager_readings_of_one_card_are_averaged(self):
        estimate = context_estimate(find_gpu("rtx 3090"), (1, 7), (11, 0))

        assert estimate.low_bytes < 999 * MIB < estimate.expected_bytes < 1486 * MIB
        assert estimate.high_bytes > 1486 * MIB
        assert "49877" in estimate.basis
        assert "54564" in estimate.basis

    def test_what_has_no_reading_says_so(self):
        assert "no reading for Pascal" in context_estimate(find_gpu("p100"), (1, 10)).basis
        assert "rocm" in context_estimate(find_gpu("mi300x"), (2, 6)).basis

    @pytest.mark.parametrize(
        ("gpu", "measured"), [("rtx 3060", (138, 194)), ("rtx 4060", (124, 180)), ("h200", (762,))]
    )
    def test_what_was_read_after_training_lies_in_the_range(self, gpu, measured):
        estimate = context_estimate(find_gpu(gpu), (2, 6), (12, 4))

        assert estimate.low_bytes < min(measured) * MIB
        assert estimate.high_bytes > max(measured) * MIB

    def test_a_larger_card_of_a_kind_has_a_larger_context(self):
        small, large = (context_estimate(find_gpu(name), (2, 13)) for name in ("4060", "4090"))

        assert small.high_bytes < large.expected_bytes + 100 * MIB
        assert small.expected_bytes < large.low_bytes

    @pytest.mark.parametrize("gpu", ["24GB", "mi300x"])
    def test_a_card_without_a_number_of_threads_may_be_any(self, gpu):
        estimate, t4, h100 = (
            context_estimate(find_gpu(name), (2, 13)) for name in (gpu, "t4", "h100")
        )

        assert estimate.low_bytes < t4.expected_bytes
        assert estimate.high_bytes > h100.expected_bytes

    @pytest.mark.parametrize("version", VERSIONS)
    def test_always_a_range_with_a_basis(self, version):
        for spec in list_gpus():
            estimate = context_estimate(spec, version)
            assert 0 < estimate.low_bytes <= estimate.expected_bytes <= estimate.high_bytes
            assert estimate.basis


@pytest.mark.parametrize(
    ("torch", "cuda", "sizes"),
    [
        ((1, 10), (11, 2), (0, 0, 0)),
        ((1, 13), None, (413, 452, 491)),
        ((2, 13), None, (14, 83, 152)),
    ],
)
def test_kernels_that_load_later(torch, cuda, sizes):
    later = loaded_kernels_later(torch, cuda)
    assert mib(later) == sizes
    assert "RTX 3090" in later.basis or torch != (1, 13)
