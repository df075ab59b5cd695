import struct

import pytest

import memest
from memest.report.memory_bar import OTHER, memory_bar

BERT = memest.profile("bert-large-uncased")


@pytest.mark.parametrize("options", [{"gpu": "t4"}, {"gpu": "t4", "batch": 64}, {}])
def test_segments_are_the_device_peak_and_what_is_free_the_rest(options: dict[str, object]) -> None:
    answer = BERT.estimate(common=False, **options)
    bar = memory_bar(answer)
    assert bar.taken_bytes == answer.peak.device_bytes
    assert sum(size for s in bar.segments for _, size in s.parts) == answer.peak.device_bytes
    assert all(s.bytes > 0 for s in bar.segments)
    if answer.gpu is None:
        assert bar.free_bytes is None
    else:
        assert bar.free_bytes == answer.gpu.headroom_bytes
    assert bar.share(bar.high_bytes) <= 1
    assert bar.share(bar.usable_bytes or 0) <= 1


def test_parts_too_small_to_see_are_together_and_named() -> None:
    bar = memory_bar(BERT.estimate(gpu="h200"))
    assert bar.segments[-1].name == OTHER
    assert "buffers 8 KiB" in bar.segments[-1].words
    assert len(bar.segments) < 4


def test_bars_to_compare_have_one_scale() -> None:
    answer = BERT.estimate(gpu="t4")
    whole = 100 << 30
    assert memory_bar(answer, whole).share(whole) == 1


def test_text_on_a_segment_is_readable() -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for segment in memory_bar(BERT.estimate(gpu="t4", batch=64, fp16=True)).segments:
        dark, light = sorted((luminance(segment.ink), luminance(segment.colour)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, segment.name


def test_the_picture_to_post_has_the_size_of_previews() -> None:
    pytest.importorskip("matplotlib")
    for options in ({"gpu": "t4"}, {"gpu": "t4", "batch": 64}, {}):
        picture = BERT.estimate(common=False, **options).to_share_png()
        assert picture.startswith(b"\x89PNG")
        assert struct.unpack(">II", picture[16:24]) == (1200, 630)
