"""What an evaluation keeps on the GPU, as a script says it."""

import pytest

import memest

EVALUATES = {"before": "from datasets import load_dataset\nraw = load_dataset('imdb')['test']",
             "arguments": "eval_strategy='epoch'"}  # fmt: skip

PICKS = """
def pick(logits, labels):
    return logits.argmax(-1)

def pick_first(logits, labels):
    if isinstance(logits, tuple):
        logits = logits[0]
    return torch.argmax(logits, dim=-1)
"""


@pytest.mark.parametrize(
    ("dataset", "samples"),
    [
        ("raw.shuffle(seed=1).select(range(300)).map(print)", 300),
        ("load_dataset('imdb', split='test[:200]').select(range(99))", 99),
        ("raw.select([4, 5])", 2),
        ("raw", None),
        ("raw.select(range(300)).map(print, batched=True)", None),  # may make other rows
        ("raw.select(range(300)).filter(print)", None),
        ("load_dataset('imdb', split='test[:10%]')", None),
        ("load_dataset('imdb', split='test[:1000000]')", None),  # as many as there are
        ("load_dataset('imdb', split='test[100:300]').shuffle()", None),
    ],
)
def test_predictions_that_metrics_have_the_trainer_keep(script, dataset, samples):
    """Of as many samples as the script cuts its evaluation to; else the verdict stays open."""
    run = script(trainer=f", eval_dataset={dataset}, compute_metrics=print", **EVALUATES)
    assert run.setup.eval_samples == samples
    assert ("predictions of the evaluation" in " ".join(run.setup.unpriced)) is (samples is None)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"trainer": ", compute_metrics=None"}, None),
        ({"trainer": ", compute_metrics=print",
          "arguments": "eval_strategy='epoch', prediction_loss_only=True"}, None),
        ({"trainer": ", compute_metrics=print, preprocess_logits_for_metrics=print"},
         "what it makes of predictions and labels"),
        ({"between": PICKS,
          "trainer": ", compute_metrics=print, preprocess_logits_for_metrics=pick"},
         "indices of predictions (8 bytes each) and labels"),
    ],
)  # fmt: skip
def test_what_is_kept_in_place_of_predictions(script, parts, words):
    """Nothing where the loss alone is kept; what is made of predictions is named as that."""
    run = script(**{**EVALUATES, **parts})
    assert run.setup.eval_samples is None
    said = " ".join(run.setup.unpriced)
    assert words in said if words else "evaluation" not in said
    assert not run.setup.overpriced


@pytest.mark.parametrize(
    ("made", "kept"),
    [
        ("print", "what it makes of predictions"),
        ("pick", "indices of predictions (8 bytes each)"),
        ("pick_first", "indices of predictions (8 bytes each)"),
    ],
)
def test_whole_predictions_are_the_most_that_is_kept_of_them(script, made, kept):
    """Told how many, an estimate has all logits: the run takes less, and no more."""
    trainer = f", compute_metrics=print, preprocess_logits_for_metrics={made}"
    run = script(**{**EVALUATES, "between": PICKS, "trainer": trainer})
    words = f"whole predictions are priced: the run keeps {kept}"
    assert not any(words in each for each in run.setup.overpriced)
    told = run.with_options(eval_samples=200)
    assert told.setup.eval_samples == 200
    assert told.setup.unpriced == ()
    assert [
        each.partition(" preprocess_logits_for_metrics: ")[2] for each in told.setup.overpriced
    ] == [words]
    assert told.options["overpriced"] == told.setup.overpriced


def test_what_is_generated_is_kept_in_place_of_logits(script):
    """Tokens of 8 bytes, which leave the verdict as it is; rows of logits are not asked for."""
    run = script(
        before="from datasets import load_dataset\nraw = load_dataset('imdb')['test']",
        arguments="eval_strategy='epoch', predict_with_generate=True",
        trainer=", eval_dataset=raw.select(range(300)), compute_metrics=print",
    )
    assert run.setup.eval_samples is None
    assert not run.setup.unpriced
    assert any("tokens that are generated" in each.why for each in run.not_modelled)
    with pytest.raises(memest.ConfigError, match="drop --eval-samples"):
        memest.estimate("gpt2", predict_with_generate=True, eval_samples=300)
