"""Options of the allocator and the reader of PYTORCH_CUDA_ALLOC_CONF."""

from __future__ import annotations

import pytest

from memest.errors import ConfigError
from memest.replay import AllocatorConf, parse_alloc_conf, round_size

MIB = 1 << 20


class TestParser:
    @pytest.mark.parametrize("text", ["", " ", "backend:native", "pinned_num_register_threads:8"])
    def test_nothing_that_matters(self, text):
        """Defaults, and options that move no block."""
        assert parse_alloc_conf(text) == AllocatorConf()

    @pytest.mark.parametrize(
        ("text", "conf"),
        [
            ("expandable_segments:True", AllocatorConf(expandable_segments=True)),
            ("expandable_segments:False,", AllocatorConf()),
            ("max_split_size_mb:128", AllocatorConf(max_split_size=128 * MIB)),
            ("max_split_size_mb:20", AllocatorConf(max_split_size=20 * MIB)),
            ("max_non_split_rounding_mb:64", AllocatorConf(max_non_split_rounding=64 * MIB)),
            ("large_segment_size_mb:32", AllocatorConf(large_segment_size=32 * MIB)),
            ("per_process_memory_fraction:0.5", AllocatorConf(per_process_memory_fraction=0.5)),
            (
                " garbage_collection_threshold : 0.8 , max_split_size_mb : 200 ",
                AllocatorConf(garbage_collection_threshold=0.8, max_split_size=200 * MIB),
            ),
            ("roundup_power2_divisions:4", AllocatorConf(roundup_power2_divisions=(4,) * 16)),
        ],
    )
    def test_options(self, text, conf):
        """Each option, alone and with others."""
        assert parse_alloc_conf(text) == conf

    @pytest.mark.parametrize(
        ("text", "places"),
        [
            # From the parser in the shipped libc10 of torch 2.13.
            (
                "[128:8,256:16,512:1,2048:8,>:2]",
                (8, 8, 8, 8, 8, 8, 8, 8, 16, 1, 0, 8, 2, 2, 2, 2),
            ),
            ("[256:1,512:2,1024:4,>:8]", (1,) * 9 + (2, 4) + (8,) * 5),
            ("[64:8]", (8,) * 7 + (0,) * 9),
            ("[1:2]", (2,) + (0,) * 15),
            ("[65536:4]", (4,) * 16),
        ],
    )
    def test_divisions(self, text, places):
        """The first entry fills what is below it, '>' what is above the last one."""
        found = parse_alloc_conf(f"roundup_power2_divisions:{text},expandable_segments:True")
        assert found.roundup_power2_divisions == places
        assert found.expandable_segments

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("expandable_segment:True", "'expandable_segment' is not an option .*: expandable_seg"),
            ("expandable_segments:true", "'true' is not allowed; it must be True or False"),
            ("expandable_segments:flase", "must be False or True"),
            ("expandable_segments", "has no value"),
            ("expandable_segments:", "must be True or False"),
            ("expandable_segments:True;max_split_size_mb:64", "expected a comma|not allowed"),
            ("max_split_size_mb:10", "20 MiB"),
            ("max_split_size_mb:1.5", "whole number of MiB"),
            ("max_split_size_mb:[64]", "whole number of MiB"),
            ("max_non_split_rounding_mb:10", "20 MiB"),
            ("large_segment_size_mb:10", "more than 10 MiB"),
            ("large_segment_size_mb:21", "multiple of 2 MiB"),
            ("garbage_collection_threshold:1.0", "both excluded"),
            ("garbage_collection_threshold:0", "both excluded"),
            ("garbage_collection_threshold:high", "between 0 and 1"),
            ("per_process_memory_fraction:0", "above 0"),
            ("per_process_memory_fraction:nan", "between 0 and 1"),
            ("per_process_memory_fraction:1.5", "at most 1"),
            ("roundup_power2_divisions:3", "power of two"),
            ("roundup_power2_divisions:[3:4]", "power of two"),
            ("roundup_power2_divisions:[0:4]", "power of two"),
            ("roundup_power2_divisions:[4]", "power of two"),
            ("roundup_power2_divisions:[>:4]", "as its last entry"),
            ("roundup_power2_divisions:[>:4,1:2]", "as its last entry"),
            ("roundup_power2_divisions:[1:4", "no ']'"),
            ("backend:cudaMallocAsync", "does not model"),
            ("backend:nativ", "closest: native"),
        ],
    )
    def test_refusals(self, text, words):
        """What was wrong, the value received, and what is legal."""
        with pytest.raises(ConfigError, match=words):
            parse_alloc_conf(text)


class TestConf:
    @pytest.mark.parametrize(
        "options",
        [{"garbage_collection_threshold": -0.1}, {"roundup_power2_divisions": (4,) * 15}],
    )
    def test_refuses_what_no_text_can_say(self, options):
        """All other limits are those of the parser, which makes its options here."""
        with pytest.raises(ConfigError):
            AllocatorConf(**options)

    def test_rounding_follows_the_segment(self):
        """Unless it is given."""
        assert AllocatorConf(large_segment_size=32 * MIB).non_split_rounding == 32 * MIB
        assert AllocatorConf(max_non_split_rounding=64 * MIB).non_split_rounding == 64 * MIB


class TestSizes:
    def test_rounding_twice_changes_nothing(self):
        """So a recorded block size can be asked for again."""
        for parts in (0, 1, 2, 8, 64):
            for requested in (1, 513, 5000, 70_000, 3 * MIB + 7, 1500 * MIB - 1, 40_000 * MIB + 1):
                size = round_size(requested, (parts,) * 16)
                assert size >= requested
                assert size % 512 == 0
                assert round_size(size, (parts,) * 16) == size
