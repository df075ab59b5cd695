"""What other ways to the number are asked about published runs, and what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from peers import formulas, libraries
from peers.question import NotForThisError, Question

from memest.calibration.validation.predict import Predictor
from memest.calibration.validation.records import read_records
from memest.config.parallelism import Distributed
from support.paths import ROOT

REFERENCE = ROOT / "data" / "reference"
PARAMETERS = 1_000_000
QLORA = "fsdpqlora-nb-llama1b-qlora-gc-peak-s512"


def question(name):
    found = read_records(sorted(REFERENCE.glob("*.jsonl")), only=name).complete
    record = next(record for record in found if record.id == name)
    return Question.of(record, Predictor(trust_code=True).setup_of(record), PARAMETERS)


def qlora(**changes):
    """A published run of adapters on a 4-bit base, with an optimizer."""
    asked = question(QLORA)
    return replace(asked, setup=replace(asked.setup, optim="adamw_torch"), **changes)


@pytest.fixture(scope="module")
def full():
    """distilgpt2 in fp32 on one GPU."""
    return question("xmem-034")


def test_a_run_of_adapters_is_asked_of_those_who_know_adapters():
    asked = qlora()
    deaf = [
        formulas.deepspeed_zero2, formulas.eleuther, formulas.megatron,
        libraries.accelerate_estimate, libraries.mem_tracker,
    ]  # fmt: skip
    for peer in deaf:
        with pytest.raises(NotForThisError, match="full fine-tuning only"):
            peer(asked)


def test_fitcheck_is_told_rank_layers_and_quantisation(monkeypatch):
    fitcheck = pytest.importorskip("fitcheck")
    heard = []
    monkeypatch.setattr(
        fitcheck, "estimate", lambda config, training, gpu: heard.append(training) or _Total
    )
    asked = qlora(parameters=1_137_805_312)
    libraries.fitcheck(asked)
    (training,) = heard
    assert (training.quantization, training.lora_rank, training.precision) == ("nf4", 8, "bf16")
    assert training.grad_checkpoint
    sixteen = replace(asked.setup.adapter, config='{"r": 16, "target_modules": ["q_proj"]}')
    libraries.fitcheck(replace(asked, setup=replace(asked.setup, adapter=sixteen)))
    assert (heard[1].lora_rank, heard[1].lora_targets) == (16, ["q_proj"])


class _Total:
    total_mib = 1.0


def test_what_is_divided_is_asked_of_those_who_know_division(full):
    spread = replace(full, setup=replace(full.setup, distributed=Distributed(num_gpus=4)))
    for peer in (formulas.eleuther, libraries.accelerate_estimate, libraries.fitcheck):
        with pytest.raises(NotForThisError, match=r"one GPU only|not installed"):
            peer(spread)
    assert formulas.deepspeed_zero2(full) == 20 * PARAMETERS
    assert formulas.deepspeed_zero2(spread) == (2 + 18 / 4) * PARAMETERS


def test_weights_in_half_precision_are_a_run_in_half_precision(full):
    assert (full.half, full.mixed) == ("", False)
    cast = replace(full, setup=replace(full.setup, dtype="bfloat16"))
    assert (cast.half, cast.mixed) == ("bf16", True)
    # accelerate counts from float32, and its largest stage is the two moments then
    assert libraries.accelerate_estimate(cast) * 2 == libraries.accelerate_estimate(full)


def test_a_step_without_an_optimizer_is_asked_of_nobody():
    for peer in (formulas.deepspeed_zero2, libraries.mem_tracker, libraries.accelerate_estimate):
        with pytest.raises(NotForThisError, match="an optimizer only"):
            peer(question(QLORA))
