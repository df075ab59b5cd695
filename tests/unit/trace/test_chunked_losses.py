"""Losses in pieces: what of the vocabulary is left in the peak, and what they do not go with."""

from __future__ import annotations

import pytest

import memest
from memest.config.compilation import FUSED_LOSSES, fused_loss_words, loss_and_chunks
from memest.config.options import setup_from_options
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.events import ALLOC, FREE, Phase
from memest.profiles.work import step_work
from memest.replay.replay import replay
from memest.trace.losses import fused_head
from support.small_llama import kept_between, peak_of, trace_small

HIDDEN, LENGTH = 64, 129
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 8000, "max_position_embeddings": 256,
    "pad_token_id": 0, "tie_word_embeddings": True,
}  # fmt: skip
PHASES = Phase.FORWARD, Phase.BACKWARD
TRL = ("trl-fused", "trl-chunked")
TORCHTUNE = ("torchtune-linear", "torchtune-chunked")


def _trace(loss, config=(), **options):
    return trace_small({**LLAMA, **dict(config)}, fused_loss=loss, **{"seq_len": LENGTH, **options})


def _beyond_weights(loss, vocabulary, **options):
    """The peak without the frozen matrix of words that embedding and head share."""
    options = {"freeze": ("embed",), **options}
    trace = _trace(loss, {"vocab_size": vocabulary}, **options)
    return peak_of(trace) - 2 * vocabulary * HIDDEN


def test_the_peak_under_the_fused_head_does_not_know_the_vocabulary():
    peaks = {_beyond_weights("trl-fused", words) for words in (8_000, 40_000, 120_000)}

    assert len(peaks) == 1


@pytest.mark.slow
def test_the_peak_under_the_chunked_loss_knows_one_chunk_of_it():
    """What a word adds to the peak does not grow with the tokens."""

    def a_word(batch):
        low, high = (_beyond_weights("trl-chunked", n, batch=batch) for n in (40_000, 80_000))
        return (high - low) / 40_000

    assert a_word(4) == a_word(16)
    assert a_word(4) % 256 == 0
    usual = [_beyond_weights("", words) for words in (40_000, 80_000)]
    assert (usual[1] - usual[0]) / 40_000 > a_word(4)


@pytest.mark.parametrize("loss", TRL)
def test_nothing_of_the_vocabulary_is_kept_for_the_backward(loss):
    small, large = (kept_between(_trace(loss, {"vocab_size": n}), *PHASES) for n in (8_000, 40_000))

    assert sorted(small) == sorted(large)


@pytest.mark.parametrize("batch", [9, 10])
@pytest.mark.parametrize("options", [{}, {"dtype": "float32", "precision": "bf16"}])
def test_tiles_that_are_traced_as_one_do_what_each_does(options, batch, monkeypatch):
    """Peaks, what is alive after each phase, and arithmetic: as tile by tile."""
    monkeypatch.setattr(fused_head, "_TILE_TOKENS", 100)
    monkeypatch.setattr(fused_head, "_TILE_WORDS", 3_000)
    few = _trace("trl-fused", batch=batch, **options)
    monkeypatch.setattr(
        fused_head,
        "_token_tiles",
        lambda rows, casts: ((tile, False) for tile in fused_head._slices(rows, 100)),
    )
    each = _trace("trl-fused", batch=batch, **options)

    assert len(few.events) < len(each.events)
    for reads in (peak_of, _reserved, lambda trace: step_work(trace, 1).total.flops_by):
        assert reads(few) == reads(each)
    assert sorted(kept_between(few, *PHASES)) == sorted(kept_between(each, *PHASES))


def _reserved(trace):
    events = [n if kind == ALLOC else ~n for kind, n in trace.decode() if kind in (ALLOC, FREE)]
    return replay(events, trace.sizes).peak_reserved_bytes


@pytest.mark.parametrize("loss", TORCHTUNE)
def test_torchtune_keeps_log_probabilities_of_all_tokens(loss):
    """Its pieces are not checkpointed: the largest moment is smaller, what is kept is not."""
    tokens = 4 * (LENGTH - 1 if loss == "torchtune-linear" else LENGTH)
    kept = kept_between(_trace(loss), *PHASES)

    assert sum(n for n in kept if n > 500_000) == 4 * tokens * LLAMA["vocab_size"]
    assert peak_of(_trace(loss)) < peak_of(_trace(""))


def test_more_pieces_are_smaller():
    def logits(loss):
        return max(_trace(loss, {"vocab_size": 40_000}, freeze=("embed",)).sizes)

    assert logits("torchtune-linear") == 4 * 64 * 40_000
    assert logits("torchtune-linear:16") == 4 * 32 * 40_000


def test_gradients_of_the_head_are_summed_in_fp32_by_the_fused_head():
    trace = _trace("trl-fused", {"vocab_size": 40_000})
    assert trace.sizes.count(4 * 40_000 * HIDDEN) == 1
    frozen = _trace("trl-fused", {"vocab_size": 40_000}, freeze=("embed",))
    assert frozen.sizes.count(4 * 40_000 * HIDDEN) == 0


@pytest.mark.parametrize("loss", [*TRL, *TORCHTUNE])
@pytest.mark.parametrize(
    "options",
    [
        {"adapter": {"peft_type": "LORA", "r": 8}}, {"checkpointing": "full"},
        {"loop": "plain"}, {"grad_accum": 2}, {"precision": "bf16", "dtype": "float32"},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_they_go_with(loss, options):
    # so that logits are what the peak is made of
    config = {"vocab_size": 40_000}
    assert peak_of(_trace(loss, config, batch=8, **options)) < peak_of(
        _trace("", config, batch=8, **options)
    )


def test_a_loss_of_routers_is_added_as_sfttrainer_does():
    mixtral = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    with_it, without = (
        _trace("trl-fused", {**mixtral, "router_aux_loss_coef": share}) for share in (0.01, 0.0)
    )
    assert len(with_it.sizes) > len(without.sizes)


HEAD = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "lm_head"]}


@pytest.mark.parametrize(
    ("loss", "config", "options", "said"),
    [
        ("trl-fused", {"model_type": "bert", "architectures": ["BertForMaskedLM"]}, {}, "causal"),
        ("torchtune-linear", {"model_type": "t5", "num_layers": 1, "architectures": None,
                              "decoder_start_token_id": 0}, {}, "causal"),
        ("trl-fused", {"tie_word_embeddings": False}, {"adapter": HEAD}, "adapter on the head"),
        ("trl-chunked", {"tie_word_embeddings": False}, {"adapter": HEAD}, "adapter on the head"),
        ("torchtune-chunked", {"model_type": "cohere", "architectures": ["CohereForCausalLM"]}, {},
         "scaled"),
    ],
)  # fmt: skip
def test_models_that_they_do_not_go_with(loss, config, options, said):
    with pytest.raises(ConfigError, match=said):
        _trace(loss, config, **options)


def test_torchtune_applies_a_head_with_an_adapter():
    plain = {"tie_word_embeddings": False}
    assert _trace("torchtune-linear", plain, adapter=HEAD).sizes


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("trl", "Legal: none, cce"),
        ("torchtune-liner", "Did you mean 'torchtune-linear'"),
        ("trl-fused:4", "torchtune-linear:N"),
        ("cce:4", "torchtune-linear:N"),
        ("none:4", "torchtune-linear:N"),
        ("torchtune-linear:0", "from 1 to 4096"),
        ("torchtune-linear:", "from 1 to 4096"),
        ("torchtune-linear:-3", "from 1 to 4096"),
        ("torchtune-linear:2.5", "from 1 to 4096"),
        ("torchtune-linear:99999999999", "from 1 to 4096"),
    ],
)
def test_names_that_are_none(value, said):
    with pytest.raises(ConfigError, match=said):
        setup_from_options(fused_loss=value)


@pytest.mark.parametrize(
    ("value", "kept"),
    [("Torchtune_Linear:8", "torchtune-linear"), ("torchtune-chunked:016", "torchtune-chunked:16")],
)
def test_names_are_kept_in_one_way(value, kept):
    assert Setup(fused_loss=value).fused_loss == kept
    assert Setup(fused_loss=kept).fused_loss == kept


def test_every_name_has_words():
    for name in FUSED_LOSSES:
        assert Setup(fused_loss=name).fused_loss == name
        assert fused_loss_words(name) == FUSED_LOSSES[name]
        assert loss_and_chunks(name) == (name, 8)


@pytest.mark.parametrize("loss", FUSED_LOSSES)
def test_what_excludes_them_is_told(loss):
    with pytest.raises(ConfigError, match="exclude each other"):
        Setup(fused_loss=loss, use_liger_kernel=True)
    with pytest.raises(ConfigError, match="exclude each other"):
        Setup(fused_loss=loss, torch_compile=True)


SMALL = "meta-llama/Llama-3.2-1B?num_hidden_layers=1&hidden_size=64&intermediate_size=128"


@pytest.mark.slow
def test_batches_of_torchtunes_chunked_loss_are_a_family(tmp_path, monkeypatch):
    """Its pieces of each sample are the same for all batches, so few traces answer them."""
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path))
    asked = {
        "seq_len": 64, "gpu": "A100", "max_batch": False, "fused_loss": "torchtune-chunked",
    }  # fmt: skip
    answers, said = {}, []
    for batch in (3, 5, 8, 19, 40):
        found = memest.estimate(SMALL, batch=batch, **asked, progress=said.append)
        answers[batch] = found.peak
    assert sum(": trace " in line for line in said) == 4
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path / "other"))
    for batch in (8, 40):
        assert memest.estimate(SMALL, batch=batch, **asked).peak == answers[batch]


@pytest.mark.slow(but=("trl-chunked",))
@pytest.mark.parametrize("loss", ["torchtune-linear", "trl-fused", "trl-chunked"])
def test_other_losses_are_traced_at_every_size_once(loss, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path))
    asked = {"seq_len": 64, "gpu": "A100", "max_batch": False, "fused_loss": loss}
    said: list[str] = []
    for batch in (3, 5, 3, 5):
        memest.estimate(SMALL, batch=batch, **asked, progress=said.append)
    assert sum(": trace " in line for line in said) == 2


@pytest.mark.slow("trl-chunked")
@pytest.mark.parametrize("loss", TRL)
def test_an_evaluation_makes_no_logits_either(loss):
    asked = {"seq_len": 64, "batch": 1, "eval_batch": 128, "gpu": "A100", "max_batch": False}
    usual = memest.estimate(SMALL, **asked)
    found = memest.estimate(SMALL, **asked, fused_loss=loss)
    assert found.peak.allocated_bytes < usual.peak.allocated_bytes
