"""PPO by verl: a critic and an actor that train in turn, each beside what the other keeps."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

import memest
from memest.config.options import merge_options
from memest.estimation.gpu_target import target_gpus
from memest.estimation.profiler import Profiler
from memest.estimation.turns import critic_setup
from memest.estimation.whole_run import resolve_run
from memest.events import Category
from memest.profiles.document import _landmarks, _read_landmarks
from memest.profiles.transient import with_resident
from memest.sharding.fsdp_units import _verl_units
from memest.trace.cues import landmarks_of
from support.small_llama import LLAMA

VERL = {
    "method": "grpo", "log_probs": "verl", "loop": "plain", "fsdp": "full_shard",
    "fsdp_mixed_precision": True, "bf16": True, "dtype": "float32", "optim": "adamw_torch",
    "max_grad_norm": 1.0, "num_gpus": 2, "batch": 4, "seq_len": 64, "gpu": "rtx-4090",
    "max_batch": False, "engine": "server",
}  # fmt: skip
SLEEPS = {"engine": "vllm", "engine_share": 0.3, "engine_sleeps": True}
FULL = {"batch": 64, "critic": "actor", "critic_batch": 1}
"""The actor's turn is the fuller one whatever the critic keeps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def write(**changes):
        path = tmp_path_factory.mktemp("model")
        (path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 4} | changes))
        return str(path)

    return write


@pytest.fixture(scope="module")
def actor(folder):
    return folder()


@pytest.fixture(scope="module")
def ask(actor):
    return lambda **options: memest.estimate(actor, **{**VERL, **options})


def _parts(result):
    return {row.category: row.bytes for row in result.breakdown}


def _weights(result):
    """Bytes of a model's shard on each of two GPUs, in float32."""
    return result.model.parameters * 4 // 2


def test_what_the_critic_keeps_lies_beside_the_actor(ask):
    """Weights and two states of Adam, sharded: the head of words is one of a value there."""
    alone, beside = ask(batch=64), ask(**FULL)
    parts, one = _parts(beside), LLAMA["hidden_size"]
    fewer = (LLAMA["vocab_size"] - 1) * one - 1  # the head of a value has a bias

    assert "fuller turn is the actor's" in " ".join(str(beside).split())
    resting = parts.pop(Category.RESTING)
    assert resting == pytest.approx(3 * (_weights(alone) - fewer * 4 // 2), rel=0.01)
    for category in (Category.PARAMETERS, Category.OPTIMIZER_STATES, Category.ACTIVATIONS):
        assert parts[category] == _parts(alone)[category]
    assert beside.model == alone.model


@pytest.mark.slow
def test_a_critic_of_more_completions_at_once_has_the_peak(ask):
    alone, beside = ask(), ask(critic="actor", critic_batch=64)
    text = " ".join(str(beside).split())

    assert "fuller turn is the critic's" in text
    assert "in critic.model.layers" in text
    assert "PPO by verl" in text
    assert beside.peak.allocated_bytes > alone.peak.allocated_bytes + 2 * _weights(alone)
    # what the actor keeps is a whole model of words
    assert _parts(beside)[Category.RESTING] >= 3 * _weights(alone)


@pytest.mark.parametrize(("moves", "left"), [("model", 2), ("optimizer", 1), ("both", 0)])
def test_what_the_critic_has_on_the_host_between_turns_is_not_beside_the_actor(ask, moves, left):
    stays, moved = (ask(**FULL, critic_moves=what) for what in ("nothing", moves))
    whole = _parts(stays)[Category.RESTING]

    assert _parts(moved).get(Category.RESTING, 0) == pytest.approx(
        whole * left / 3, rel=0.01, abs=128
    )  # buffers stay


@pytest.mark.slow
def test_an_engine_writes_beside_both_models(ask):
    """Asleep in the steps of either, its share is beside what both keep, unless it is moved."""
    alone, kept = ask(**SLEEPS, batch=1), _parts(ask(**FULL))[Category.RESTING]
    for turn in ({"batch": 64, "critic_batch": 1}, {"batch": 1, "critic_batch": 64}):
        both = ask(**{**SLEEPS, **turn}, critic="actor")
        moved = ask(**{**SLEEPS, **turn}, critic="actor", critic_moves="both")

        assert any("peak is that of generation" in note for note in both.notes)
        assert both.peak.device_bytes - alone.peak.device_bytes == pytest.approx(kept, rel=0.01)
        # buffers stay
        assert 0 <= moved.peak.device_bytes - alone.peak.device_bytes < 1 << 17


@pytest.mark.slow
def test_a_critic_that_is_another_model(ask, folder):
    large = folder(num_hidden_layers=12)
    same, other = (
        _parts(ask(**{**FULL, "critic": name}))[Category.RESTING] for name in ("actor", large)
    )
    one_more = memest.estimate(large, **VERL).model.parameters - ask().model.parameters

    assert other - same == pytest.approx(3 * one_more * 4 // 2, rel=0.01)


@pytest.mark.slow
def test_adapters_are_the_actor_s_alone(ask):
    setup = ask(lora_r=8, critic="actor").setup

    assert critic_setup(setup).adapter is None
    resting = [_parts(ask(**FULL, **more))[Category.RESTING] for more in ({}, {"lora_r": 8})]
    assert resting[0] == resting[1]


@pytest.mark.parametrize(("own", "expected"), [(None, (4, 8)), (32, (32, 1)), (12, (12, 3))])
def test_the_critic_s_micro_batches_have_the_answers_of_the_step(own, expected):
    setup = critic_setup(_setup(grad_accum=8, critic="actor", critic_batch=own))

    assert (setup.batch, setup.grad_accum) == expected


def _setup(**options):
    given = {**VERL, **options}
    return merge_options(None, {k: v for k, v in given.items() if k not in ("gpu", "max_batch")})


@pytest.mark.slow
def test_residents_change_nothing_but_what_is_there(actor):
    """Births in front, in the phase that begins there; everything else moves behind them."""
    profiler = Profiler.of(actor)
    traits = target_gpus(_setup(), gpu="rtx-4090").main.traits
    stream = resolve_run(profiler, _setup(grad_accum=6), traits).stream
    sizes = [1000, 4 << 20, 77]
    more = with_resident(stream, sizes, "beside", Category.RESTING)
    assert list(more.events[3:]) == list(stream.events)
    assert [more.sizes[event] for event in more.events[:3]] == sizes
    assert more.marks == stream.marks
    assert more.mark_positions[1] == stream.mark_positions[1] + 3


@pytest.mark.parametrize("tied", [False, True])
def test_units_of_a_critic_go_by_its_configuration(tied):
    """verl reads ``tie_word_embeddings``, whether there is a head of words or not."""
    with torch.device("meta"):
        model = LlamaForTokenClassification(
            LlamaConfig(**{**LLAMA, "tie_word_embeddings": tied, "num_labels": 1})
        )

    landmarks = landmarks_of(model)
    assert _verl_units(landmarks) == (set() if tied else {"model.embed_tokens"})
    assert _read_landmarks(json.loads(json.dumps(_landmarks(landmarks)))) == landmarks


@pytest.mark.slow
def test_values_are_not_dropped(ask):
    """``classifier_dropout`` is 0 there: no mask of what the head reads, nor a copy of it."""
    at = [
        ask(critic="actor", critic_batch=batch, checkpointing="full").peak.allocated_bytes
        for batch in (64, 128)
    ]
    hidden = LLAMA["hidden_size"]
    assert at[1] > at[0] > 64 * 64 * hidden


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"critic_batch": 4}, "--critic-batch says nothing without a critic: add --critic actor"),
        ({"critic_moves": "both"}, "--critic-moves says nothing without a critic"),
        ({"critic": "actor", "critic_moves": "all"}, "--critic-moves 'all'"),
        ({"critic": "actor", "with_": "save"}, "told of one model.*without --critic"),
        (
            {
                "critic": "actor", "log_probs": "fused", "loop": "trainer", "engine": "vllm",
                "fsdp_mixed_precision": False, "optim": "auto", "max_grad_norm": None,
            },
            "verl's PPO is priced",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_to_type(ask, options, words):
    with pytest.raises(memest.ConfigError, match=words):
        ask(**options)


def test_a_module_of_ones_own_has_no_critic():
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))

    with pytest.raises(memest.ConfigError, match="verl loads actors and critics by name"):
        memest.estimate(model, **VERL, critic="actor")
