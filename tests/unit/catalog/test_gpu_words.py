"""What people type for a GPU beside its name: numbers, memory sizes, services."""

from __future__ import annotations

import pytest

from memest.catalog.capacity import usable_bytes
from memest.catalog.gpu_counts import split_gpu_count, split_gpu_counts
from memest.catalog.gpus import cards_of_word, find_gpu, list_gpus, plain_name
from memest.catalog.spec import policy
from memest.config.setup import Setup
from memest.errors import ConfigError, UnknownGpuError
from memest.units import GIB, MIB


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "memory"), [("a100 80", 80), ("A100-40", 40), ("v100 32", 32), ("3060 8", 8)]
    )
    def test_a_size_needs_no_unit_behind_a_card(self, text, memory):
        spec = find_gpu(text)

        assert spec.memory_marketing_gb == memory
        assert spec.match_note == ""

    def test_a_size_that_the_card_does_not_have_is_refused(self):
        with pytest.raises(UnknownGpuError, match=r"a100-40gb \(40 GB\), a100 \(80 GB\)"):
            find_gpu("a100 60")

    def test_a_family_names_every_size_it_has(self):
        note = find_gpu("a100").match_note

        assert "with 80 GB" in note
        assert "a100-40gb (40 GB)" in note


class TestMemoryAlone:
    @pytest.mark.parametrize("text", ["24GB", "24 GB", "24g", "24GiB", "24 gb vram", "24576MiB"])
    def test_a_size_is_a_card_of_that_memory(self, text):
        spec = find_gpu(text)

        assert spec.is_memory_alone
        assert usable_bytes(spec) == (24 * GIB, "memory as given")
        assert "--gpu-memory 24GiB" in spec.match_note

    def test_what_real_cards_of_that_size_leave_is_said(self):
        note = find_gpu("24GB").match_note
        sizes = {
            spec.slug: usable_bytes(spec)[0]
            for spec in list_gpus()
            if spec.memory_marketing_gb == 24 and spec.backend == "cuda"
        }
        named = [slug for slug in sizes if f"({slug})" in note]

        assert min(sizes.values()) == min(sizes[slug] for slug in named) < 24 * GIB
        assert max(sizes.values()) == max(sizes[slug] for slug in named)

    def test_a_size_that_no_card_has_compares_with_none(self):
        assert "cards of that size" not in find_gpu("37GB").match_note

    def test_fractions_are_sizes_too(self):
        assert usable_bytes(find_gpu("22.5GiB"))[0] == 22 * GIB + 512 * MIB

    @pytest.mark.parametrize("text", ["0GB", "0.0001 GB"])
    def test_no_memory_is_refused(self, text):
        with pytest.raises(UnknownGpuError, match="leaves no memory"):
            find_gpu(text)

    @pytest.mark.parametrize("text", ["24", "24TB", "-24GB"])
    def test_other_numbers_are_no_sizes(self, text):
        with pytest.raises(UnknownGpuError, match="--gpu-memory"):
            find_gpu(text)


class TestCounts:
    @pytest.mark.parametrize(
        ("text", "slug", "count"),
        [
            ("8xh100", "h100", 8),
            ("8 x H100", "h100", 8),
            ("8×H100", "h100", 8),
            ("8*h100", "h100", 8),
            ("h100:8", "h100", 8),
            ("H100 x8", "h100", 8),
            ("t4x2", "t4", 2),
            ("2x3090", "rtx-3090", 2),
            ("4x A100 40GB", "a100-40gb", 4),
            ("2xRTX 4090", "rtx-4090", 2),
            ("kaggle 2xT4", "t4", 2),
            ("Kaggle (T4 x2)", "t4", 2),
            ("8x24GB", "24GiB", 8),
            ("1xt4", "t4", 1),
        ],
    )
    def test_a_number_stands_with_the_card(self, text, slug, count):
        plain, number = plain_name(text)

        assert number == count
        assert find_gpu(plain) == find_gpu(text)
        assert find_gpu(text).slug == slug

    @pytest.mark.parametrize("spec", list_gpus(), ids=lambda spec: spec.slug)
    def test_no_name_of_the_catalogue_says_a_number(self, spec):
        for name in (spec.slug, *spec.aliases):
            assert plain_name(name) == (name, None)

    @pytest.mark.parametrize("text", ["rtx 6000", "8xzebra", "zebra:8", "8x", "rx 580"])
    def test_a_number_makes_no_card_known(self, text):
        with pytest.raises(UnknownGpuError, match="no GPU is called"):
            find_gpu(text)

    @pytest.mark.parametrize("text", ["0xh100", "h100:0", "99999xh100"])
    def test_impossible_numbers_are_refused(self, text):
        with pytest.raises(UnknownGpuError, match=r"a run has 1 to 65,536"):
            find_gpu(text)

    def test_two_numbers_are_refused(self):
        with pytest.raises(UnknownGpuError, match="two numbers"):
            find_gpu("2x4xh100")


class TestServices:
    def test_colab_alone_is_its_free_card(self):
        spec = find_gpu("colab")

        assert spec.slug == "t4"
        assert "Google Colab" in spec.match_note
        assert "Tesla T4 with 16 GB" in spec.match_note
        assert find_gpu("Google Colab (free)").slug == "t4"

    @pytest.mark.parametrize(
        ("text", "choices"),
        [
            ("kaggle", ("--gpu p100", "--gpu 2xt4")),
            ("kaggle t4", ("--gpu t4", "--gpu 2xt4")),
            ("colab a100", ("--gpu a100-40gb", "--gpu a100-80gb")),
        ],
    )
    def test_where_a_service_has_several_all_are_named(self, text, choices):
        with pytest.raises(UnknownGpuError) as caught:
            find_gpu(text)

        assert all(choice in str(caught.value) for choice in choices)

    @pytest.mark.parametrize(
        ("text", "slug"),
        [("kaggle p100", "p100-16gb"), ("colab l4", "l4"), ("colab-a100-40gb", "a100-40gb")],
    )
    def test_a_card_behind_it_is_that_card(self, text, slug):
        assert find_gpu(text) == find_gpu(slug)

    def test_every_card_of_a_service_is_in_the_catalogue(self):
        for service in policy()["services"].values():
            assert service["source"]
            for names in (service["alone"], *service["cards"].values()):
                assert all(find_gpu(name) for name in names)


class TestOptions:
    def test_the_number_becomes_an_option(self):
        assert split_gpu_counts({"gpu": ["8xh100"], "bf16": True}) == {
            "gpu": ("h100",),
            "bf16": True,
            "num_gpus": 8,
        }
        assert split_gpu_counts({"gpu": "h100:8", "num_processes": "8"}) == {
            "gpu": "h100",
            "num_processes": "8",
        }

    @pytest.mark.parametrize("gpu", ["h100", "local:1", "zebra", "24GB", None, ()])
    def test_other_names_stay_as_they_are(self, gpu):
        assert split_gpu_counts({"gpu": gpu}) == {"gpu": gpu}

    @pytest.mark.parametrize("name", ["num_gpus", "world_size"])
    def test_another_number_is_refused_with_both(self, name):
        with pytest.raises(ConfigError, match=r"--gpu 8xh100 says 8 GPUs and --num-gpus 4"):
            split_gpu_counts({"gpu": "8xh100", name: 4})

    @pytest.mark.parametrize("other", ["4xa100", "a100"])
    def test_one_run_has_one_number(self, other):
        with pytest.raises(ConfigError, match=r"8xh100 \(8\)"):
            split_gpu_counts({"gpu": ["8xh100", other]})

    def test_a_whole_setup_says_the_number_itself(self):
        assert split_gpu_count("8xh100", Setup(), {}) == ("8xh100", {})
        assert split_gpu_count("8xh100", None, {}) == ("h100", {"num_gpus": 8})


@pytest.mark.parametrize("text", ["4090x2", "4090 x 2", "2x4090", "rtx 4090 x2", "4090:2"])
def test_a_card_that_is_called_by_a_number_may_stand_first(text):
    spec, count = find_gpu(text), plain_name(text)[1]
    assert (spec.name, count) == ("NVIDIA GeForce RTX 4090", 2)


@pytest.mark.parametrize("text", ["a100:40", "v100:32"])
def test_a_number_that_may_be_the_cards_size_is_refused(text):
    with pytest.raises(UnknownGpuError, match=r"may be \d+ GPUs or a card of"):
        find_gpu(text)
    assert plain_name("a100:8") == ("a100", 8)


class TestSeveralInOneWord:
    @pytest.mark.parametrize(
        ("text", "cards"),
        [
            ("t4 a100", ("t4", "a100")),
            ("t4,a100-40gb; l4", ("t4", "a100-40gb", "l4")),
            ("rtx 4090 rtx 3090 ti", ("rtx 4090", "rtx 3090 ti")),
            ("a100 80gb h100", ("a100 80gb", "h100")),
            ("rtx 4090 or 3090", ("rtx 4090", "3090")),
            ("colab t4 vs. l4", ("colab t4", "l4")),
            ("2xt4 2xl4", ("2xt4", "2xl4")),
            ("24GB/48GB", ("24GB", "48GB")),
        ],
    )
    def test_each_is_a_card(self, text, cards):
        assert cards_of_word(text) == cards
        assert all(find_gpu(card) for card in cards)
        with pytest.raises(UnknownGpuError, match=f"names {len(cards)} cards"):
            find_gpu(text)

    @pytest.mark.parametrize(
        "text",
        ["24gb 4090", "l4 80gb", "colab a100", "t4 foo", "kaggle", "4090x2", "h100 nvl", ","],
    )
    def test_what_goes_with_one_card_makes_no_second(self, text):
        assert cards_of_word(text) == (text,)

    def test_every_name_of_the_list_is_one(self):
        names = {text for spec in list_gpus() for text in (spec.name, *spec.aliases)}
        assert [name for name in names if len(cards_of_word(name)) > 1] == []

    def test_a_question_has_them_as_several(self):
        assert split_gpu_counts({"gpu": "t4 a100"}) == {"gpu": ("t4", "a100")}
        assert split_gpu_counts({"gpu": ["2xt4, 2xl4"]}) == {"gpu": ("t4", "l4"), "num_gpus": 2}
        with pytest.raises(ConfigError, match="one run has one number of GPUs"):
            split_gpu_counts({"gpu": "2xt4 l4"})
