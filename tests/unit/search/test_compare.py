"""Side by side: differences add up exactly, and the reasons answer what users ask."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

import memest
from memest.config.spelling import read_scenario
from memest.errors import ConfigError
from memest.events import Category, Phase
from support.small_llama import LLAMA

WIDE = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 256,
    "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024, "vocab_size": 64,
    "max_position_embeddings": 64, "type_vocab_size": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose memory is in its layers: much width, hardly a vocabulary."""
    folder = tmp_path_factory.mktemp("wide")
    (folder / "config.json").write_text(json.dumps(WIDE))
    return str(folder)


@pytest.fixture(scope="module")
def many():
    changes = [
        "fp16", "grad-accum=4", "checkpointing", "batch=4 grad-accum=4", "optim=sgd",
        "optim=adafactor", "seq-len=32", "loop=plain",
    ]  # fmt: skip
    return memest.compare("prajjwal1/bert-tiny", changes, batch=16, seq_len=64)


def of(estimate, category):
    return sum(row.bytes for row in estimate.breakdown if row.category is category)


def text(scenario):
    return " ".join(scenario.reasons.sentences)


@pytest.mark.slow
def test_differences_add_up_to_that_of_the_peaks(many):
    first = many.scenarios[0].estimate
    assert many.scenarios[0].reasons is None
    for scenario in many.scenarios[1:]:
        reasons = scenario.reasons
        delta = scenario.estimate.peak.allocated_bytes - first.peak.allocated_bytes
        assert sum(row.delta_bytes for row in reasons.rows) == reasons.delta_bytes == delta
        for row in reasons.rows:
            assert row.after_bytes == of(scenario.estimate, row.category)
            assert row.before_bytes == of(first, row.category)


@pytest.mark.slow
def test_what_is_compared_is_what_estimate_says(many):
    direct = memest.estimate("prajjwal1/bert-tiny", batch=16, seq_len=64, optim="sgd")
    (scenario,) = (s for s in many.scenarios if s.name == "optim=sgd")
    assert scenario.estimate.peak == direct.peak
    assert scenario.changes == (("optim", "sgd"),)
    assert "sgd keeps 0 B of states, adamw_torch_fused 33 MiB" in text(scenario)


@pytest.mark.slow
def test_times_are_of_a_sample_and_relative_to_the_first(many):
    by_name = {scenario.name: scenario for scenario in many.scenarios}
    assert by_name["base"].relative_time == 1.0
    assert by_name["checkpointing"].relative_time > 1.05
    assert by_name["batch=4 grad-accum=4"].relative_time > by_name["grad-accum=4"].relative_time
    assert by_name["batch=4 grad-accum=4"].effective_batch == 16
    assert "without a measurement" in many.time_basis
    assert any("compared by sample" in note for note in many.notes)


def test_what_is_known_of_one_scenario_alone_is_told_with_its_name(many):
    named = {s.name: s.estimate.notes for s in many.scenarios}
    shared = set.intersection(*map(set, named.values()))
    assert shared
    assert shared <= set(many.notes)
    (free,) = (note for note in named["grad-accum=4"] if "accumulation keeps" in note)
    assert free not in named["base"]
    having = "; ".join(name for name, notes in named.items() if free in notes)
    assert f"{having}: {free}" in many.notes


def test_the_document_says_the_same(many):
    document = json.loads(many.to_json())
    assert document["schema_version"] == 1
    assert [s["name"] for s in document["scenarios"]][:2] == ["base", "fp16"]
    assert document["scenarios"][0]["against_first"] is None
    against = document["scenarios"][2]["against_first"]
    assert against["peak_moved"] is True
    assert against["allocated_delta_bytes"] == sum(r["delta_bytes"] for r in against["rows"])
    assert "fp16" in str(many)


class TestWhy:
    @pytest.mark.slow
    def test_fp16_needs_more_memory_at_a_small_batch(self, wide):
        shared = {"batch": 1, "seq_len": 32, "grad_accum": 4, "checkpointing": "full"}
        scenario = memest.compare(wide, ["fp16"], **shared).scenarios[1]
        rows = {row.category: row.delta_bytes for row in scenario.reasons.rows}
        assert scenario.reasons.delta_bytes > 0
        assert rows[Category.AUTOCAST_COPIES] > -rows[Category.ACTIVATIONS] > 0
        assert "autocast copies +9 MiB outweigh temporaries" in text(scenario)
        assert "whatever the batch; smaller activations save only" in text(scenario)

    @pytest.mark.slow
    def test_and_less_at_a_larger_one(self, wide):
        shared = {"batch": 32, "seq_len": 64, "grad_accum": 4}
        scenario = memest.compare(wide, ["fp16"], **shared).scenarios[1]
        assert scenario.reasons.delta_bytes < 0
        assert "outweigh workspaces" in text(scenario)
        assert "save only" not in text(scenario)

    @pytest.mark.slow
    def test_accumulation_costs_memory(self, wide):
        scenario = memest.compare(wide, ["grad-accum=4"], batch=8, seq_len=64).scenarios[1]
        reasons = scenario.reasons
        assert (reasons.before.phase, reasons.before.micro_step) == (Phase.BACKWARD, 1)
        assert (reasons.after.phase, reasons.after.micro_step) == (Phase.BACKWARD, 2)
        assert reasons.rows[0].category is Category.GRADIENTS
        assert "gradients +17 MiB" in text(scenario)
        assert (
            "In micro-step 2 the gradients of the micro-steps before are still alive (18 MiB"
            in (text(scenario))
        )

    @pytest.mark.slow
    def test_checkpointing_does_not_help_where_the_optimizer_decides(self, wide):
        shared = {"batch": 4, "seq_len": 64, "optim": "adamw_torch"}
        scenario = memest.compare(wide, ["checkpointing=full"], **shared).scenarios[1]
        assert scenario.reasons.delta_bytes == 0
        assert scenario.reasons.after.phase is Phase.OPTIMIZER
        forward = next(p for p in scenario.reasons.phases if p.phase is Phase.FORWARD)
        assert forward.delta_bytes < -(10 << 20)
        assert "in the forward pass" in text(scenario)
        assert "but the peak is in the optimizer step" in text(scenario)

    def test_nor_where_the_loss_does(self):
        shared = {"batch": 16, "seq_len": 128, "task": "masked-lm"}
        scenario = memest.compare("prajjwal1/bert-tiny", ["checkpointing"], **shared).scenarios[1]
        assert abs(scenario.reasons.delta_bytes) < 0.05 * scenario.estimate.peak.allocated_bytes
        assert "not touched by the change: temporaries" in text(scenario)
        assert "in the backward pass" in text(scenario)
        assert "activations are outside the layers" in text(scenario)

    @pytest.mark.slow
    def test_and_leaves_one_layer_where_it_helps(self, wide):
        scenario = memest.compare(wide, ["checkpointing"], batch=32, seq_len=64).scenarios[1]
        assert scenario.reasons.delta_bytes < 0
        assert "are left at the new peak" in text(scenario)
        assert "in bert.encoder.layer.5." in text(scenario)


def test_the_same_again_differs_in_nothing():
    same = memest.compare("prajjwal1/bert-tiny", ["batch=4"], batch=4, seq_len=32)
    assert same.scenarios[1].reasons.rows == ()
    assert "row by row" in text(same.scenarios[1])
    assert any("changes nothing" in note for note in same.notes)


@pytest.mark.slow
def test_several_models():
    models = ["prajjwal1/bert-tiny", "prajjwal1/bert-mini"]
    answer = memest.compare(models, batch=2, seq_len=32, gpu="t4", max_batch=False)
    assert [scenario.name for scenario in answer.scenarios] == models
    rows = {row.category: row.delta_bytes for row in answer.scenarios[1].reasons.rows}
    assert rows[Category.PARAMETERS] > 0
    assert answer.scenarios[1].flops > answer.scenarios[0].flops


def test_a_scenario_may_name_its_own_gpu():
    answer = memest.compare(
        "prajjwal1/bert-tiny", {"newer": {"gpu": "h100"}}, batch=2, seq_len=32, gpu="t4",
        max_batch=False,
    )  # fmt: skip
    assert answer.scenarios[1].name == "newer"
    assert answer.scenarios[1].estimate.gpu.name == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("fp16", {"fp16": True}),
        ("--bf16", {"bf16": True}),
        ("fp32", {"precision": "fp32"}),
        ("checkpointing", {"checkpointing": "full"}),
        ("gradient_checkpointing=every_n:2", {"checkpointing": "every_n:2"}),
        ("no-checkpointing", {"checkpointing": "none"}),
        ("no-use-cache", {"use_cache": False}),
        ("per-device-train-batch-size=4 optim=sgd", {"batch": "4", "optim": "sgd"}),
        ("gpu=h100", {"gpu": "h100"}),
    ],
)
def test_reading_a_scenario(words, options):
    assert read_scenario(words) == options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--vs is empty"),
        ("batch", "batch needs a value, for example batch=4"),
        ("chekpointing", "Did you mean checkpointing"),
        ("no-batch", "no negative form"),
        ("batch=1 batch=2", "names batch twice"),
        ("'fp16", "cannot be read"),
    ],
)
def test_what_is_no_scenario(words, message):
    with pytest.raises(ConfigError, match=message):
        read_scenario(words)


@pytest.mark.parametrize(
    ("models", "changes", "message"),
    [
        ("prajjwal1/bert-tiny", [], "nothing to compare with"),
        ([], ["fp16"], "needs a model"),
        (["prajjwal1/bert-tiny", "prajjwal1/bert-mini"], ["fp16"], "not both"),
        ("prajjwal1/bert-tiny", ["fp16", "fp16"], "is there twice"),
        ("prajjwal1/bert-tiny", {"x": {}}, "changes nothing"),
        ("prajjwal1/bert-tiny", {"fp16": True}, "the scenario 'fp16' is True: write a text or"),
        ("prajjwal1/bert-tiny", ["batch=0"], "out of range"),
    ],
)
def test_what_cannot_be_compared(models, changes, message):
    with pytest.raises(ConfigError, match=message):
        memest.compare(models, changes)


def test_pipelines_are_compared_without_their_time():
    compared = memest.compare("EleutherAI/pythia-14m", ["pp=2"], batch=4, num_gpus=2)
    assert [each.relative_time for each in compared.scenarios] == [None, None]
    assert compared.scenarios[1].reasons.delta_bytes != 0
    assert "pipelines" in compared.time_basis


def test_runs_that_write_completions_are_compared_without_their_time(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    compared = memest.compare(
        str(tmp_path), ["checkpointing=full"], method="grpo", engine="server", batch=8, seq_len=64
    )
    assert [each.relative_time for each in compared.scenarios] == [None, None]
    assert "the writing" in compared.time_basis
    assert "time of a sample" not in str(compared)
