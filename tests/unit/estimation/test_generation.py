"""A generation behind a training run: the library's own loop and caches, step by step."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

import memest
from memest.config.generation import Generation
from memest.config.options import setup_from_options
from memest.errors import ConfigError
from memest.estimation.whole_run import generation_notes
from memest.events import Phase
from memest.trace import generation as traced

LAYERS, HEADS, SIZE = 2, 2, 16
QWEN = {
    "model_type": "qwen2", "num_hidden_layers": LAYERS, "hidden_size": 64, "vocab_size": 300,
    "num_attention_heads": 4, "num_key_value_heads": HEADS, "intermediate_size": 128,
    "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 512,
}  # fmt: skip
ALONE = {"max_batch": False}
"""The question alone: a search for the largest batch traces a generation at every batch."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen")
    (path / "config.json").write_text(json.dumps(QWEN))
    return str(path)


def steps(estimate):
    return [t for t in estimate.timeline if t.phase is Phase.GENERATION]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen", {"generate": 14}),
        ("qwen", {"generate": 14, "num_beams": 3}),
        ("qwen", {"generate": 14, "cache_implementation": "static"}),
        ("t5-small?num_layers=1&num_decoder_layers=1", {"generate": 14, "num_beams": 2}),
    ],
)
def test_steps_that_were_not_traced_are_as_if_they_had_been(
    folder, model, options, monkeypatch, tmp_path
):
    asked = {"batch": 3, "seq_len": 32, "optim": "none", "dtype": "float32", **ALONE, **options}
    model = folder if model == "qwen" else model
    few = memest.estimate(model, **asked)
    monkeypatch.setattr(traced, "TRACED_STEPS", 15)
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path))  # where no trace of few steps lies
    every = memest.estimate(model, **asked)
    assert len(steps(few)) == 15  # the prompt, and a step for each token
    assert few.timeline == every.timeline
    assert few.peak == every.peak


@pytest.mark.slow
def test_a_dynamic_cache_grows_by_one_token_of_every_layer(folder):
    batch = 8
    options = {"batch": batch, "seq_len": 128, "optim": "none", "dtype": "float32", **ALONE}
    short, long = (
        memest.estimate(folder, generate=n, **options) for n in (100, 300)
    )  # fmt: skip
    token = 2 * LAYERS * batch * HEADS * SIZE * 4
    grown = steps(long)[-1].allocated_bytes - steps(short)[-1].allocated_bytes
    # the cache of all layers, and once more that of the layer that is being concatenated
    least = 200 * token
    assert least <= grown <= least * (1 + 1 / LAYERS) + (1 << 20)


@pytest.mark.slow
def test_a_static_cache_is_there_from_the_first_step(folder):
    options = {"batch": 64, "seq_len": 32, "generate": 400, "optim": "none", "dtype": "float32"}
    options |= ALONE
    static = memest.estimate(folder, cache_implementation="static", **options)
    first, last = steps(static)[2], steps(static)[-1]
    # token ids and the mask are concatenated all the same, the cache is not
    assert last.allocated_bytes - first.allocated_bytes <= 400 * 2 * 64 * 8
    assert first.allocated_bytes >= 2 * LAYERS * 64 * HEADS * SIZE * 4 * 432
    dynamic = memest.estimate(folder, **options)
    assert steps(dynamic)[-1].reserved_bytes > steps(static)[-1].reserved_bytes


@pytest.mark.slow
def test_beams_multiply_the_cache(folder):
    options = {"batch": 16, "seq_len": 64, "generate": 300, "optim": "none", "dtype": "float32"}
    options |= ALONE
    one, four = (
        steps(memest.estimate(folder, num_beams=n, **options))[-1].allocated_bytes for n in (1, 4)
    )
    cache = 2 * LAYERS * 16 * HEADS * SIZE * 4 * 364
    assert four - one >= 3 * cache


@pytest.mark.slow
def test_generation_takes_the_evaluation_s_batch_and_limits_the_largest(folder):
    options = {"seq_len": 64, "generate": 400, "optim": "none", "dtype": "float32", **ALONE}
    few = memest.estimate(folder, batch=1, **options)
    many = memest.estimate(folder, batch=1, eval_batch=32, **options)
    assert steps(many)[-1].allocated_bytes > steps(few)[-1].allocated_bytes
    card = {"gpu_memory": "2GiB", "batch": 8, "seq_len": 64, "dtype": "float32"}
    alone = memest.estimate(folder, **card).max_batch
    with_it = memest.estimate(folder, generate=400, **card).max_batch
    assert 0 < with_it <= alone


def test_what_trainers_call_it():
    setup = setup_from_options(
        predict_with_generate=True, generation_max_length=65, generation_num_beams=4
    )
    assert setup.eval_batch == 8
    assert (setup.generation.max_length, setup.generation.num_beams) == (65, 4)
    assert setup.generation.behind(1, None).new_tokens == 64
    assert setup_from_options(setup, predict_with_generate=False).generation is None


def test_prompts_of_decoders_count():
    """``generate`` of transformers counts them in ``max_length``, and their positions are read."""
    longest = Generation(max_length=20)
    assert longest.behind(12, None).new_tokens == 8
    with pytest.raises(ConfigError, match="Write --generation-max-length 148, or --generate 128"):
        longest.behind(20, None)
    # the last token is not read
    assert Generation(new_tokens=13).behind(500, 512).new_tokens == 13
    with pytest.raises(ConfigError, match=r"more than the 512 pos.*Use --generate 13 or less"):
        Generation(new_tokens=14).behind(500, 512)


def test_a_generation_stops_where_positions_end(folder):
    options = {"generate": 100, "optim": "none", **ALONE}
    with pytest.raises(ConfigError, match="100 tokens generated behind 500 are more than the 512"):
        memest.estimate(folder, seq_len=500, **options)


@pytest.mark.slow
def test_the_longest_prompt_leaves_room_for_what_is_generated(folder):
    answer = memest.max_batch(folder, of="seq-len", generate=100, gpu="t4", optim="none")
    assert 256 <= answer.largest <= 413


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 2}, "add --generate"),
        ({"generate": 4, "cache_implementation": "statik"}, "Did you mean 'static'"),
        ({"generate": 0}, "out of range"),
        ({"generation_max_length": 20}, "add --generate|belongs to"),
    ],
)
def test_what_says_nothing_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        setup_from_options(**options)


def test_models_that_do_not_generate_are_refused():
    with pytest.raises(ConfigError, match="does not generate text"):
        memest.estimate("bert-base-uncased?num_hidden_layers=1", generate=4, seq_len=16)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"seq_len": 2048}, "8 prompts of 2,048 tokens (dense"),
        ({"audio_seconds": 30}, "8 clips of 30 seconds, 16 tokens"),
        ({"image_size": 224}, "8 samples, 16 tokens"),
    ],
    ids=str,
)
def test_what_is_begun_with_is_called_by_its_own_size(sizes, words):
    setup = setup_from_options(eval_batch=8, generate=16, **sizes)
    assert words in next(generation_notes(setup))
