"""Records of models that a script wrote itself, and figures that were rounded when printed."""

from __future__ import annotations

import pytest

import memest
from memest.calibration.validation import read_records
from memest.calibration.validation.predict import Predictor, RecordOutcome
from support.case_records import record

CODE = """
import torch


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = torch.nn.Linear(8, width), torch.nn.Linear(width, 3)

    def forward(self, x):
        return [self.two(torch.relu(self.one(x)))]


def build(width=16):
    return Net(width)


def loss(boxed, batch):
    return torch.nn.functional.cross_entropy(boxed.pop(), batch["y"])


def step(model, batch):
    return loss(model(batch["x"]), batch)
"""
INPUTS = ["x:float32[B,8]", "y:int64[B]"]


def _own(name, **more):
    """A record of the code above, which lies beside it."""
    setup = {"seq_len": None, "batch": 64, "optim": "sgd"}
    return record(
        id=name, model="models/net_of_a_record.py:build", task=None, setup_=setup,
        software_={"transformers": None}, inputs=INPUTS, **more,
    )  # fmt: skip


@pytest.fixture
def beside(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "net_of_a_record.py").write_text(CODE, encoding="utf-8")


@pytest.mark.usefixtures("beside")
def test_code_beside_the_file_is_run_with_its_arguments(written):
    small = _own("small", loss="net_of_a_record:loss", metric="allocated")
    large = {**small, "id": "large", "model_args": {"width": 4096}}
    path = written(small, large)
    found = memest.validate(path, trust_code=True)
    one, two = found.outcomes
    assert not one.failure
    assert not two.failure
    # weights, gradients, inputs and hidden values of 4080 more columns
    columns = 4080 * 4
    assert two.predicted_bytes - one.predicted_bytes >= columns * (2 * 12 + 64)


@pytest.mark.usefixtures("beside")
def test_a_step_of_the_script_takes_the_place_of_forward_and_loss(written):
    stepped = _own("stepped", step="net_of_a_record:step", metric="allocated")
    whole = _own("whole", loss="net_of_a_record:loss", metric="allocated")
    one, two = memest.validate(written(stepped, whole), trust_code=True).outcomes
    assert one.predicted_bytes
    assert one.predicted_bytes == two.predicted_bytes, "a loss that empties the box keeps no more"


@pytest.mark.usefixtures("beside")
def test_the_code_of_a_factory_is_its_own_library(written):
    found = read_records([written(_own("one"))])
    assert [r.id for r in found.complete] == ["one"]
    lacking = _own("two")
    lacking["software"] = {}
    (one,) = read_records([written(lacking)]).incomplete
    assert one.missing == ("software.torch",)


def test_a_script_that_feeds_a_length_must_say_it(written):
    texts = {**_own("texts"), "inputs": ["x:float32[B,S,8]", "y:int64[B]"]}
    (one,) = read_records([written(texts)]).incomplete
    assert one.missing == ("setup.seq_len",)


@pytest.mark.parametrize("model", ["models/../net.py:build", "models/absent.py:build"])
def test_code_elsewhere_is_told_and_not_run(written, tmp_path, model):
    (tmp_path / "models").mkdir()
    (tmp_path / "net.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    (outcome,) = memest.validate(written({**_own("one"), "model": model}), trust_code=True).outcomes
    assert outcome.predicted_bytes is None
    assert outcome.failure
    assert "ran" not in outcome.failure.split()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model": "net_of_a_record:build"},
        {"model": "os:abort"},
        {"model": "prajjwal1/bert-tiny", "step": "net_of_a_record:step", "inputs": ["x:int64[B]"]},
        {"model": "prajjwal1/bert-tiny", "loss": "net_of_a_record:loss"},
    ],
)
def test_code_that_a_record_names_is_not_run_unasked(written, tmp_path, change):
    ran = tmp_path / "ran"
    (tmp_path / "models").mkdir()
    text = f"open({str(ran)!r}, 'w').close()\n{CODE}"
    (tmp_path / "models" / "net_of_a_record.py").write_text(text, encoding="utf-8")
    one = _own("one") | {"software": {"torch": "2.6", "transformers": "4.40"}} | change
    one["setup"] |= {"seq_len": 16}
    (outcome,) = memest.validate(written(one)).outcomes
    assert "--trust-code" in outcome.failure
    assert outcome.predicted_bytes is None
    assert not ran.exists()


def test_a_record_cannot_name_a_folder_of_the_machine(written, tmp_path):
    hidden = tmp_path / "elsewhere"
    hidden.mkdir()
    (hidden / "hidden_net.py").write_text(CODE, encoding="utf-8")
    one = {**_own("one"), "model": "hidden_net:build", "code": str(hidden)}
    (read,) = read_records([written(one)]).complete
    assert read.code == ""
    assert "hidden_net" in Predictor(trust_code=True).predict(read).failure


@pytest.mark.parametrize(
    ("measured", "rounding", "predicted", "error"),
    [
        (1000, 100, 1050, 0.0),
        (1000, 100, 950, 0.0),
        (1000, 100, 1051, 0.051),
        (1000, 0, 1001, 0.001),
    ],
)
def test_what_the_printed_figure_was_rounded_from_is_no_error(
    written, measured, rounding, predicted, error
):
    path = written(record(measured_bytes=measured, rounding_bytes=rounding))
    (one,) = read_records([path]).complete
    assert RecordOutcome(record=one, predicted_bytes=predicted).error == pytest.approx(error)


def test_a_rounding_that_is_none_is_told(written):
    (problem,) = read_records([written(record(rounding_bytes=-5))]).problems
    assert "rounding_bytes is -5" in problem
