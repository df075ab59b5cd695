"""Estimates as files: JSON, CSV, a page, a picture; and the rows of every phase."""

import csv
import io
import json
import struct
from pathlib import Path

import pytest

import memest
from memest.cli.main import run
from memest.errors import ConfigError
from memest.report.layers import phase_rows
from memest.report.parts import PART_COLOURS, parts_of
from memest.report.result import Estimate

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def answer() -> Estimate:
    return memest.estimate(
        "prajjwal1/bert-tiny", batch=4, seq_len=64, grad_accum=3, precision="fp16",
        gpu=["t4", "rtx-4090"],
    )  # fmt: skip


@pytest.mark.slow
def test_parts_add_up_to_the_device_peak(answer: Estimate) -> None:
    rows = list(csv.DictReader(io.StringIO(answer.to_csv())))
    assert [row["part"] for row in rows] == [part.name for part in parts_of(answer)]
    assert sum(int(row["bytes"]) for row in rows) == answer.peak.device_bytes
    assert len({PART_COLOURS[row["part"]] for row in rows}) == len(rows)


@pytest.mark.slow
def test_every_phase_says_what_was_alive(answer: Estimate) -> None:
    at = answer.peak_at
    for point in answer.timeline:
        assert sum(row.bytes for row in point.breakdown) == point.allocated_bytes
        assert all(row.bytes > 0 for row in point.breakdown)
        if (point.step, point.micro_step, point.phase) == (at.step, at.micro_step, at.phase):
            assert point.breakdown == answer.breakdown
    names = [{row.category.value for row in point.breakdown} for point in answer.timeline]
    assert "optimizer states" not in names[0]
    assert "optimizer states" in names[-1]
    assert "breakdown" not in answer.to_dict()["timeline"][0]


def test_phases_have_names_of_their_own(answer: Estimate) -> None:
    labels = [row.label for row in phase_rows(answer.timeline, answer.peak_at)]
    assert len(set(labels)) == len(labels)
    assert labels[0] == "load"
    assert "2 optimizer" in labels


def test_the_suffix_decides_what_is_written(answer: Estimate, tmp_path: Path) -> None:
    for suffix in ("json", "csv", "html"):
        answer.save(tmp_path / f"run.{suffix}")
    assert json.loads((tmp_path / "run.json").read_text()) == answer.to_dict()
    assert (tmp_path / "run.csv").read_text() == answer.to_csv()
    page = (tmp_path / "run.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "<script" not in page
    with pytest.raises(ConfigError, match=r"run\.png"):
        answer.save(tmp_path / "run.pgn")


@pytest.mark.slow
def test_a_picture_is_the_same_every_time(answer: Estimate, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = answer.to_png()
    width, height = struct.unpack(">II", picture[16:24])
    assert picture.startswith(b"\x89PNG")
    assert width == 1210
    assert height > 600
    answer.save(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes() == picture
    bare = memest.estimate("prajjwal1/bert-tiny", batch=4, seq_len=64, max_batch=False)
    assert bare.to_png() != picture


@pytest.mark.slow
def test_out_writes_beside_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Estimate
) -> None:
    words = ["estimate", "prajjwal1/bert-tiny", "--batch", "4", "--seq-len", "64", "--grad-accum",
             "3", "--fp16", "--gpu", "t4", "--gpu", "rtx-4090", "--quiet", "--out"]  # fmt: skip
    assert run([*words, str(tmp_path / "run.json")]) == 0
    assert capsys.readouterr().out.startswith("Fits: ")
    assert (tmp_path / "run.json").read_text() == f"{answer.to_json()}\n"
    for name, said in (("run.docx", "Legal: .json"), ("none/run.csv", "needs the folder")):
        assert run([*words, str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_process_of_one_of_several_gpus_is_said_to_hold_nccl():
    alone = memest.estimate("prajjwal1/bert-tiny", batch=2, seq_len=16)
    several = memest.estimate("prajjwal1/bert-tiny", batch=2, seq_len=16, num_gpus=2)
    assert parts_of(alone)[-1].name == "context and kernels"
    assert parts_of(several)[-1].name == "context and kernels with NCCL"
    assert "\ncontext and kernels with NCCL," in several.to_csv()
