"""Reports and tables that have no other golden, and errors: on screens of three widths."""

import pytest

import memest
from memest.cli.main import run
from memest.readers.memory_log import read_memory_log
from memest.report.life_result import HostVerdict, LifePhase, RunLife
from memest.report.result import Verdict
from memest.report.stages_result import OfficialRow, StageRow, StageTable
from memest.report.suggestions import Suggestion, Suggestions
from memest.report.terminal import Grid, render
from memest.search.explain_growth import explanation_of
from memest.sharding.deepspeed_estimator import ModelStates
from memest.units import GIB, MIB
from support.paths import ROOT

WIDTHS = (40, 80, 120)
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total "
    "capacity of 14.74 GiB of which 1.42 GiB is free. Process 12345 has 13.32 GiB memory in use. "
    "Of the allocated memory 12.50 GiB is allocated by PyTorch, and 700.00 MiB is reserved by "
    "PyTorch but unallocated."
)
ERRORS = (
    "estimate gpt2 --bacth-size 8", "fits gpt2", "fits gpt2 --gpu t5",
    "estimate gpt2 --seq-len 4096", "fits gpt2 --gpu kaggle", "estimat gpt2",
    "estimate gpt2 --help atention", "help tihgt", "advise gpt2 --gpu t4",
)  # fmt: skip


def _host(nbytes):
    phases = (
        LifePhase(phase="loading", not_priced="its script loads it"),
        LifePhase(phase="training", process_bytes=nbytes, node_bytes=8 * nbytes),
    )
    return RunLife(
        phases=phases, processes=8, budget_bytes=None, verdict=HostVerdict.UNKNOWN, reason="",
        gpu=(), not_counted=(),
    )  # fmt: skip


def _stages(samples):
    fits = samples["fits"]
    rows = [
        StageRow(name="DDP", options=(), estimate=fits, host=_host(0)),
        StageRow(name="ZeRO-2, optim. off", options=(), estimate=fits, host=_host(GIB)),
        StageRow(name="FSDP1 full", options=(), estimate=None, refused="it cannot be."),
    ]
    states = ModelStates(gpu_bytes=GIB, host_bytes=2 * GIB)
    official = OfficialRow(name="ZeRO-2", states=states, difference="1 GiB less than its 2 GiB")
    return StageTable(
        model="bert-large-uncased", num_gpus=8, parameters=335_000_000, rows=tuple(rows),
        official=(official,), notes=("a note of some length, of more than forty columns.",),
    )  # fmt: skip


def _suggestions(samples):
    change = Suggestion(
        words="micro-batches of 12, 2 a step", options=(("batch", 12),),
        arguments="--batch 12 --grad-accum 2", verdict=Verdict.FITS, device_bytes=GIB,
        gain_bytes=300 * MIB, relative_time=1.05, changes_training="states of 8 bits",
    )  # fmt: skip
    return Suggestions(
        model="m", gpu="Tesla T4", usable_bytes=15 * GIB, verdict=Verdict.DOES_NOT_FIT,
        device_bytes=16 * GIB, changes=(change, change), closest=None, time_basis="an estimate",
    )  # fmt: skip


ANSWERS = {
    "stages": _stages,
    "stages_deepspeed": _stages,
    "suggestions": _suggestions,
    "oom": lambda _: memest.explain_oom(MESSAGE),
    "growth": lambda _: explanation_of(
        read_memory_log(ROOT / "tests/support/memory.csv").points, source="memory.csv"
    ),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ANSWERS)
def test_golden_answers(samples, golden, name, width):
    options = {"deepspeed": True} if name == "stages_deepspeed" else {}
    text = render(ANSWERS[name](samples), width=width, **options)
    assert max(map(len, text.splitlines())) <= width
    golden(f"{name}_{width}.txt", text)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("name", "line"), [("models", "models qwen3-0.6b"), ("gpus", "gpus t4"), ("list", "gpus"),
                       ("names", "models smollm")]
)  # fmt: skip
def test_golden_tables(capsys, monkeypatch, golden, name, line, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(line.split()) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    golden(f"table_{name}_{width}.txt", text)


def test_golden_errors(capsys, golden):
    """Each is one paragraph on one line, which the terminal breaks: what is to be typed in one."""
    said = []
    for line in ERRORS:
        assert run(line.split()) not in (0, 1)
        (paragraph,) = capsys.readouterr().err.splitlines()
        said.append(f"$ memest {line}\n{paragraph}\n")
    golden("errors.txt", "\n".join(said))


def test_a_grid_is_blocks_where_its_columns_have_no_room():
    grid = Grid("left", "right", "left", head=("model", "size", "what"))
    grid.add_row("a-name", "1,234 MiB", "words that say what it is of")
    grid.add_row("----", "---", "")

    wide, narrow = _lines(grid, 60), _lines(grid, 30)

    assert wide[:2] == [
        "model        size  what", "a-name  1,234 MiB  words that say what it is of",
    ]  # fmt: skip
    assert narrow == ["a-name", "  size 1,234 MiB,", "  what words that say what it", "  is of"]


def test_a_number_in_front_of_a_block_has_its_name():
    grid = Grid("right", "right", "right", head=("batch", "allocated", "reserved"))
    grid.add_row("16", "12.34 GiB", "")

    assert _lines(grid, 20) == ["batch 16", "  allocated 12.34", "  GiB"]


def _lines(table, width):
    import io

    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_grid_without_rows_is_nothing():
    assert not any(_lines(Grid("left", "right", "left"), 40))


def test_a_message_that_says_little_is_read(capsys):
    assert run(["explain-oom", "CUDA out of memory. Tried to allocate 2.00 MiB"]) == 0
    assert "2 MiB" in capsys.readouterr().out
