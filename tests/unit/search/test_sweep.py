"""Sweeps against the engine itself: same answers, same order, failures that stay where they are."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

import memest
from memest.errors import ConfigError, MissingDependencyError, UnknownGpuError, UnknownModelError
from memest.search import answer as answer_module
from memest.search.answer import WorkUnit, answer, in_order, units_of
from memest.search.grid import GridPoint
from memest.search.points import SweepPoint
from memest.search.sweep import plan

TINY, MINI = "prajjwal1/bert-tiny", "prajjwal1/bert-mini"
GRID = {"batch": [1, 2], "seq_len": [32, 1024, 64]}


@pytest.fixture(scope="module")
def serial():
    return memest.sweep([TINY, MINI], GRID, gpu="t4", fp16=True)


@pytest.mark.slow
def test_points_are_what_estimate_answers(serial):
    asked = [(m, b, s) for m in (TINY, MINI) for b in (1, 2) for s in (32, 1024, 64)]
    assert [(p.model, *(v for _, v in p.options[:2])) for p in serial.points] == asked
    assert [p.index for p in serial.points] == list(range(12))
    for point in serial.points:
        options = dict(point.options)
        if options["seq_len"] == 1024:
            continue
        direct = memest.estimate(point.model, max_batch=False, **options)
        assert point.peak == direct.peak
        assert point.verdict == direct.verdict
        assert point.headroom_bytes == direct.gpu.headroom_bytes
        assert point.usable_bytes == direct.gpu.usable_bytes
        assert point.gpu_name == direct.gpu.name == "Tesla T4"
        assert (point.low_bytes, point.high_bytes) == (
            direct.interval.low_bytes, direct.interval.high_bytes
        )  # fmt: skip


@pytest.mark.slow
def test_a_size_beyond_the_model_is_a_point_with_a_reason(serial):
    assert [point.index for point in serial.failures] == [1, 4, 7, 10]
    for point in serial.failures:
        assert "1024 is longer than the 512 positions" in point.error
        assert point.peak is point.verdict is point.headroom_bytes is None


@pytest.mark.slow
def test_two_processes_give_the_same_bytes(serial):
    assert memest.sweep([TINY, MINI], GRID, gpu="t4", fp16=True, jobs=2) == serial


@pytest.mark.slow
def test_more_processes_than_models_share_its_points(serial):
    alone = memest.sweep(TINY, GRID, gpu="t4", fp16=True, jobs=2)
    assert alone.points == serial.points[:6]


@pytest.mark.slow
def test_every_spelling_and_every_kind_of_axis():
    answers = memest.sweep(
        TINY,
        {"per_device_train_batch_size": "1,2", "precision": ["fp32", "bf16"],
         "gradient_checkpointing": [False, True], "gpu": ["t4", None]},
        max_length=32, optimizer="sgd",
    )  # fmt: skip
    assert [axis.name for axis in answers.axes] == ["batch", "precision", "checkpointing", "gpu"]
    assert not answers.failures
    for point in answers.points[::5]:
        options = {name: value for name, value in point.options if value is not None}
        assert point.peak == memest.estimate(TINY, max_batch=False, **options).peak
        assert (point.gpu_name is None) == ("gpu" not in options)


def test_memory_of_the_gpu_as_an_axis():
    answers = memest.sweep(TINY, {"gpu_memory": ["8GiB", "600MiB", "100MiB"]}, batch=1, seq_len=32)
    assert [p.verdict.value for p in answers.points] == ["fits", "tight", "does not fit"]


def test_a_live_module_stays_in_this_process():
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
    inputs = {"input": torch.zeros(2, 8, device="meta")}
    answers = memest.sweep(
        module, {"optim": ["sgd", "adamw_torch"]}, inputs=inputs, loop="plain",
        loss=lambda outputs, batch: outputs.sum(),
    )  # fmt: skip
    assert answers.models == ("Sequential",)
    assert not answers.failures, answers.failures
    assert answers.points[0].peak.allocated_bytes < answers.points[1].peak.allocated_bytes
    with pytest.raises(ConfigError, match="stay in this process"):
        memest.sweep(module, {"batch": [1]}, jobs=2)


def test_a_model_is_taken_once():
    assert plan([TINY, MINI, TINY], {"batch": [1]}).labels == (TINY, MINI)


@pytest.mark.parametrize(
    ("models", "grid", "options", "error", "words"),
    [
        ("no-such-model-anywhere", {"batch": [1]}, {}, UnknownModelError, "memest models"),
        ([TINY, "no-such-model-anywhere"], {"batch": [1]}, {}, UnknownModelError, "memest models"),
        (TINY, {"gpu": ["t4", "zzzz"]}, {}, UnknownGpuError, "zzzz"),
        (TINY, {"batch": [1]}, {"gpu": "zzzz"}, UnknownGpuError, "zzzz"),
        (TINY, {"bach": [1]}, {}, ConfigError, "Did you mean batch"),
        (TINY, {"batch": [1]}, {"jobs": 0}, ConfigError, "--jobs 0 is out of range"),
        (TINY, {"batch": [1]}, {"jobs": "x"}, ConfigError, "not a whole number"),
        ([], {"batch": [1]}, {}, ConfigError, "no model was named"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_point(
    models, grid, options, error, words, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(answer_module, "answer", None)
    with pytest.raises(error, match=words):
        memest.sweep(models, grid, **options)


def test_a_broken_model_does_not_take_the_others_with_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 30}')
    answers = memest.sweep([str(tmp_path), TINY], {"batch": [1, 2]}, seq_len=32)
    assert [point.error is None for point in answers.points] == [False, False, True, True]


class TestAnswer:
    UNIT = WorkUnit(
        model=TINY, label=TINY, trust_remote_code=False,
        questions=tuple(
            GridPoint(index=i, model=0, options=(("batch", i + 1),)) for i in range(7)
        ),
    )  # fmt: skip

    def fake(self, monkeypatch, fail):
        """An engine that fails at a batch size."""
        import memest.search.profile

        class Profile:
            def spot(self, setup, **more):
                if setup.batch == 3:
                    raise fail

            def with_own_parts(self, setup, options):
                return setup

        monkeypatch.setattr(memest.search.profile, "Profile", lambda *a, **m: Profile())
        monkeypatch.setattr(
            SweepPoint, "of", classmethod(lambda cls, i, m, o, _: cls(index=i, model=m, options=o))
        )

    def test_an_unexpected_error_is_a_point_too(self, monkeypatch):
        self.fake(monkeypatch, RuntimeError("two\n lines"))
        points = list(answer(self.UNIT))
        assert [p.error for p in points] == [
            None, None, "unexpected RuntimeError: two lines", None, None, None, None
        ]  # fmt: skip

    def test_a_missing_package_ends_the_sweep(self, monkeypatch):
        self.fake(monkeypatch, MissingDependencyError("no torch"))
        with pytest.raises(MissingDependencyError, match="no torch"):
            list(answer(self.UNIT))

    @pytest.mark.parametrize("pieces", [0, 1, 2, 3, 7, 20])
    def test_units_keep_every_question_in_order(self, pieces):
        units = units_of([self.UNIT], pieces)
        assert len(units) <= max(1, pieces)
        assert [q for unit in units for q in unit.questions] == list(self.UNIT.questions)

    def test_in_order(self):
        points = [SweepPoint(index=i, model="m", options=()) for i in (2, 0, 1, 4, 3)]
        seen = []

        def source():
            for point in points:
                yield point
                seen.append(len(done))

        done = []
        for point in in_order(source(), range(5)):
            done += [point.index]
        assert done == [0, 1, 2, 3, 4]
        assert seen == [0, 1, 3, 3, 5], "each as soon as it can be"


SCRIPT = """
import os, memest, memest.search.profile

class Dies:
    def __init__(self, *given): pass
    def with_own_parts(self, setup, options): return setup
    def spot(self, setup, **more):
        if setup.batch == 2:
            os.kill(os.getpid(), 9)
        return memest.estimate(MODEL, setup, max_batch=False)

MODEL = {model!r}
memest.search.profile.Profile = Dies
if __name__ == "__main__":
    answers = memest.sweep(
        [MODEL, {other!r}], {{"batch": [1, 2, 3]}}, seq_len=32, jobs=2
    )
    print(answers.to_json())
"""


def script(tmp_path, text):
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_a_process_that_dies_costs_the_rest_of_its_unit(tmp_path):
    # a spawned process reads the script again, and with it the engine that kills
    done = script(tmp_path, SCRIPT.format(model=TINY, other=MINI))
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)["points"]
    assert [point["error"] is None for point in points] == [True, False, False] * 2
    assert "SIGKILL" in points[1]["error"]
    assert "fewer --jobs" in points[1]["error"]


def test_a_script_without_a_guard_is_told_so(tmp_path):
    done = script(
        tmp_path,
        f"""
        import memest
        try:
            memest.sweep([{TINY!r}, {MINI!r}], {{"batch": [1]}}, jobs=2)
        except memest.MemestError as error:
            print("TOLD", error)
    """,
    )
    assert "TOLD" in done.stdout
    assert "__name__ == '__main__'" in done.stdout
