"""Evaluations behind a training run: how predictions pile up, what the options mean."""

from __future__ import annotations

import pytest

import memest
from memest.config.options import setup_from_options
from memest.errors import ConfigError
from memest.events import Phase
from memest.profiles import evaluation as composed
from memest.trace import evaluation as traced

MODEL = "gpt2?n_layer=1&vocab_size=5000"


def _ask(model=MODEL, **options):
    return memest.estimate(model, **{"batch": 2, "seq_len": 64, **options})


def _phases(estimate):
    return [t for t in estimate.timeline if t.phase is Phase.EVALUATION]


@pytest.mark.slow
def test_an_evaluation_is_the_end_of_the_timeline():
    training = _ask()
    evaluated = _ask(eval_batch=4)

    assert evaluated.timeline[: len(training.timeline)] == training.timeline
    assert {t.phase for t in evaluated.timeline[len(training.timeline) :]} == {Phase.EVALUATION}
    assert evaluated.peak.allocated_bytes >= training.peak.allocated_bytes


@pytest.mark.slow
def test_without_gradients_a_batch_needs_less_than_in_training():
    estimate = _ask(eval_batch=2)
    forward = max(t.allocated_bytes for t in estimate.timeline if t.phase is Phase.BACKWARD)

    assert max(t.allocated_bytes for t in _phases(estimate)) < forward


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [MODEL, "t5-small?num_layers=1&num_decoder_layers=1", "bert-base-uncased?num_hidden_layers=1"],
)
@pytest.mark.parametrize("keeps", [True, False])
def test_batches_that_were_not_traced_are_as_if_they_had_been(model, keeps, monkeypatch, tmp_path):
    batches = 7
    options = {"eval_batch": 3, "eval_samples": 3 * batches if keeps else None}
    monkeypatch.setattr("memest.estimation.run.eval_batches", lambda _: batches)
    few = _ask(model, **options)
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path))  # where no trace of few batches lies
    monkeypatch.setattr(traced, "TRACED_BATCHES", batches)
    all_of_them = _ask(model, **options)

    assert len(_phases(few)) == batches
    assert few.timeline == all_of_them.timeline
    assert few.peak == all_of_them.peak


@pytest.mark.slow
def test_what_is_left_out_of_long_evaluations_changes_no_peak(monkeypatch):
    options = {"eval_batch": 2, "eval_samples": 80}
    short = _ask(**options)
    monkeypatch.setattr(composed, "_PLAYED", 1000)
    long = _ask(**options)

    assert short.peak.allocated_bytes == long.peak.allocated_bytes
    assert short.peak.reserved_bytes == pytest.approx(long.peak.reserved_bytes, rel=0.02)


@pytest.mark.slow
def test_predictions_pile_up_by_the_logits_of_a_batch():
    """The last concatenation: what was kept, and what is made of it and the new."""
    batch, length, vocabulary = 4, 64, 5000
    logits = 4 * batch * length * vocabulary
    peaks = {
        n: _ask(eval_batch=batch, eval_samples=batch * n).peak.allocated_bytes for n in (20, 21)
    }

    # one batch more in the old tensor and in the new one
    assert peaks[21] - peaks[20] == pytest.approx(2 * logits, rel=0.02)


@pytest.mark.slow
def test_moving_predictions_to_the_host_bounds_them():
    options = {"eval_batch": 4, "eval_samples": 400}
    few, more, all_of_them = (
        _ask(**options, eval_accumulation_steps=n).peak.allocated_bytes for n in (1, 8, None)
    )

    assert few < more < all_of_them
    assert few == _ask(eval_batch=4, eval_samples=4).peak.allocated_bytes


@pytest.mark.slow
def test_an_evaluation_takes_its_room_at_every_batch():
    """Not the largest batch: 503 does not fit the card and 554 does, and searches find either."""
    usual = {"gpu_memory": "6GiB", "seq_len": 64, "batch": 500}
    without = memest.estimate(MODEL, **usual)
    beside = memest.estimate(MODEL, **usual, eval_batch=32, eval_samples=600)

    assert beside.peak.allocated_bytes >= without.peak.allocated_bytes
    assert beside.peak.reserved_bytes > without.peak.reserved_bytes
    assert without.max_batch
    assert beside.max_batch


def test_other_loops_and_lonely_options_are_refused():
    for options, said in (
        ({"eval_batch": 4, "loop": "plain"}, "is the Trainer's"),
        ({"eval_samples": 4}, "add --eval-batch 8"),
        ({"eval_batch": 0}, "out of range"),
        ({"eval_strategy": "often"}, "Legal: no, steps, epoch"),
    ):
        with pytest.raises(memest.ConfigError, match=said):
            setup_from_options(**options)


def test_the_loss_alone_is_kept_where_the_arguments_say_so():
    options = {"eval_batch": 4, "eval_samples": 100}

    assert setup_from_options(**options, prediction_loss_only=True).eval_samples is None
    assert setup_from_options(**options, prediction_loss_only=False).eval_samples == 100


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({"eval_strategy": "no"}, None),
        ({"eval_strategy": "no", "per_device_eval_batch_size": 3}, None),
        ({"eval_strategy": "steps"}, 8),
        ({"evaluation_strategy": "epoch", "per_device_eval_batch_size": 3}, 3),
        ({"per_device_eval_batch_size": 5}, 5),
    ],
)
def test_training_arguments_say_whether_there_is_one(options, batch):
    assert setup_from_options(**options).eval_batch == batch


def _evaluated_bytes(**options):
    return max(t.allocated_bytes for t in _phases(_ask(**options)))


@pytest.mark.slow
def test_several_gpus_gather_what_they_predict():
    """Rows are shared: the predictions that pile up are the same, the last batch is gathered."""
    batch, length, vocabulary, rows = 4, 64, 5000, 160
    logits = 4 * batch * length * vocabulary
    kept = {"eval_batch": batch, "eval_samples": rows}
    one = _evaluated_bytes(**kept)
    four = _evaluated_bytes(**kept, num_gpus=4)

    # old and new tensor of all rows on both; beside them a batch, gathered from four
    assert four - one > 2 * logits
    assert four < 1.3 * one + _ask(num_gpus=4).peak.allocated_bytes


@pytest.mark.slow
def test_an_evaluation_under_ddp_copies_no_outputs():
    """The Trainer evaluates the model itself, whatever DDP does in training."""
    found = {
        asked: _evaluated_bytes(num_gpus=2, eval_batch=16, ddp_find_unused_parameters=asked)
        for asked in (True, False)
    }
    assert found[True] == pytest.approx(found[False], rel=0.01)


@pytest.mark.slow(but=("{'zero': 2}",))
@pytest.mark.parametrize(
    "spread", [{"fsdp": "full_shard"}, {"zero": 1}, {"zero": 2}, {"zero": 3}], ids=str
)
def test_an_evaluation_where_the_model_is_sharded(spread):
    options = {"num_gpus": 8, "eval_batch": 4, "eval_samples": 64, "loop": "trainer", **spread}
    phases = _phases(_ask(**options, max_batch=False))
    assert len(phases) == 2  # 64 rows, 32 of them in each batch of all GPUs


@pytest.mark.slow
@pytest.mark.parametrize("spread", [{}, {"fsdp": "full_shard"}, {"zero": 3}], ids=str)
def test_a_generation_on_several_gpus(spread):
    """The prompt and the tokens are steps behind the training, which is what it was."""
    options = {"num_gpus": 4, "max_batch": False, **spread}
    estimate, before = _ask(**options, generate=12), _ask(**options)
    assert estimate.timeline[: len(before.timeline)] == before.timeline
    steps = estimate.timeline[len(before.timeline) :]
    assert [t.phase for t in steps] == [Phase.GENERATION] * 13


def test_a_generation_under_fsdp1_is_refused():
    with pytest.raises(ConfigError, match="summon_full_params"):
        _ask(generate=4, num_gpus=2, fsdp="full_shard", fsdp_version=1)
