"""Whatever is asked, the same run is priced: other lengths, evaluation and generation included."""

import pytest

import memest
from memest.errors import ConfigError
from memest.search.profile import profile

MODEL = "HuggingFaceTB/SmolLM2-135M?num_hidden_layers=2&vocab_size=1000"


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    file = tmp_path_factory.mktemp("lengths") / "lengths.txt"
    file.write_text("\n".join(str(64 * (1 + number % 7)) for number in range(100)))
    return str(file)


@pytest.fixture(params=["generation", "lengths", "evaluation"])
def options(request, lengths):
    return {
        "generation": {"generate": 40, "optim": "none", "batch": 2, "seq_len": 64},
        "lengths": {"lengths": lengths, "length_steps": 4, "batch": 2},
        "evaluation": {"eval_batch": 64, "eval_samples": 128, "batch": 2, "seq_len": 64},
    }[request.param]


@pytest.mark.slow(but=("evaluation",))
def test_every_question_prices_the_run_that_estimate_prices(options):
    answer = memest.estimate(MODEL, gpu="t4", max_batch=False, **options)
    others = {name: value for name, value in options.items() if name != "batch"}
    (point,) = memest.sweep(MODEL, {"batch": [2]}, gpu="t4", **others).points
    asked = profile(MODEL, **options)
    plain = {name: options[name] for name in ("batch", "seq_len") if name in options}
    without = memest.estimate(MODEL, gpu="t4", max_batch=False, **plain)
    assert answer.peak.reserved_bytes != without.peak.reserved_bytes
    assert point.peak == answer.peak
    assert (point.low_bytes, point.high_bytes) == (
        answer.interval.low_bytes,
        answer.interval.high_bytes,
    )
    assert asked.spot(gpu="t4").peak == answer.peak
    assert asked.estimate(gpu="t4", max_batch=False).peak == answer.peak


@pytest.mark.slow(but=("evaluation",))
def test_allocated_peaks_of_many_points_have_everything_around_the_steps(options):
    asked = profile(MODEL, alloc_conf="expandable_segments:True", **options)
    points = [{"batch": 2}, {"batch": 3}]
    each = [asked.spot(gpu="t4", **point).peak.allocated_bytes for point in points]
    assert asked.allocated(points, gpu="t4") == each


def test_lengths_of_text_are_refused_where_none_is_read(lengths):
    with pytest.raises(ConfigError, match="for image-classification reads none"):
        memest.estimate("google/vit-base-patch16-224?num_hidden_layers=1", lengths=lengths)
