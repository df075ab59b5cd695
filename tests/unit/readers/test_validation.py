"""Evaluations of a loop of the script's own: none beyond a step goes unsaid."""

import pytest

import memest

SCRIPT = """
import torch
from torch.utils.data import DataLoader
from transformers import {head}
from evaluation import evaluate_all
model = {head}.from_pretrained("{model}").cuda()
model.train()
loader = DataLoader(rows, batch_size=8, shuffle=True)
validation = DataLoader(others, batch_size={size})
optimizer = torch.optim.AdamW(model.parameters())

{decorator}
def evaluate(model, batches):
    kept = []
    for batch in batches:
        outputs = model(**batch)
        {body}

for epoch in range(3):
    for batch in loader:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    {call}
"""

PARTS = {"head": "AutoModelForCausalLM", "model": "gpt2", "size": 16, "body": "pass",
         "decorator": "@torch.no_grad()", "call": "evaluate(model, validation)"}  # fmt: skip


def read(write, **parts):
    text = SCRIPT.format(**{**PARTS, **parts})
    return memest.read_config(write("train.py", text), seq_len=8)


def test_one_that_takes_no_more_than_a_step_leaves_the_verdict(write):
    run = read(write)
    assert not run.setup.unpriced
    assert any("16 samples without gradients" in each.why for each in run.ignored)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"size": 17}, "17 samples at once besides the training"),
        ({"size": "len(others)"}, "as many as cannot be told"),
        ({"decorator": ""}, "nothing switches gradients off"),
        ({"body": "kept.append(outputs.logits)"}, "predictions: of all batches"),
        ({"body": "kept.append(accelerator.gather_for_metrics(outputs.logits))"}, "predictions:"),
        ({"body": "kept = torch.cat((kept, outputs.logits))"}, "predictions: of all batches"),
        ({"call": "evaluate(model, make(others))"}, "whose batches cannot be told"),
        ({"call": "evaluate_all(model, validation)"}, "evaluation.evaluate_all: an evaluation"),
    ],
)
def test_what_takes_more_is_named(write, parts, words):
    assert any(words in each for each in read(write, **parts).setup.unpriced)


@pytest.mark.parametrize(
    "parts",
    [
        {"body": "kept.append(outputs.loss.item())"},
        {"body": "kept.append(outputs.loss.detach())"},
        {"body": "kept.append(accelerator.gather_for_metrics(outputs.loss.repeat(16)))"},
        # two numbers a sample are no memory
        {"body": "kept.append(outputs.logits)", "head": "AutoModelForSequenceClassification",
         "model": "bert-base-uncased"},
        {"call": "pass"},
    ],
)  # fmt: skip
def test_what_takes_nothing_is_not(write, parts):
    assert not read(write, **parts).setup.unpriced
