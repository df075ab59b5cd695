"""A message beside a command: messages are made by a replay under a limit, as torch would."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import memest
from memest.errors import ConfigError
from memest.replay.conf import parse_alloc_conf
from memest.replay.replay import replay
from memest.replay.sizes import alloc_size, round_size
from memest.report.oom_result import Match
from memest.search.profile import profile
from memest.units import GIB, MIB

MODEL = "gpt2?n_layer=2&n_embd=64&n_head=2&vocab_size=8000"
OPTIONS = {"batch": 16, "seq_len": 256, "optim": "adamw_torch_foreach"}


def size(num_bytes):
    """As torch writes it."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.2f} MiB"


def message(share=0.7, conf="", **options):
    """What torch would say if the allocator had only a share of what the run needs."""
    pytest.importorskip("transformers")
    run = profile(MODEL, **(OPTIONS | options)).run(gpu="t4")
    stream, settings = run.stream, parse_alloc_conf(conf)
    peak = replay(stream.events, stream.sizes, settings).peak_allocated_bytes
    limit = int(share * peak)
    result = replay(stream.events, stream.sizes, settings, limit_bytes=limit, curve=True)
    at = result.oom_index
    assert at is not None
    allocated, reserved = result.allocated_curve[at - 1], result.reserved_curve[at]
    tried = alloc_size(round_size(stream.sizes[stream.events[at]]))
    return (
        f"[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size(tried)}. GPU"
        f" 0 has a total capacity of 14.56 GiB of which {size(limit - reserved)} is free. Including"
        f" non-PyTorch memory, this process has {size(reserved + 450 * MIB)} memory in use. Of the "
        f"allocated memory {size(allocated)} is allocated by PyTorch, and "
        f"{size(reserved - allocated)} is reserved by PyTorch but unallocated. If reserved"
    )


@pytest.mark.slow
def test_the_place_is_found_and_a_change_that_fits():
    relation = memest.explain_oom(message(), MODEL, **OPTIONS).relation

    assert relation.belongs is Match.YES
    assert relation.gpu == "t4"
    assert relation.stopped_at == relation.out_at
    assert relation.stopped_at.phase == "forward"
    assert "that is where the run stopped" in relation.sentences[0]
    fitting = [change for change in relation.changes if change.fits]
    assert fitting
    assert relation.changes[: len(fitting)] == tuple(fitting)
    by_words = {change.words: change for change in relation.changes}
    half = by_words["--batch 8 --grad-accum 2"]
    assert half.fits
    assert half.changes_training == ""
    # figures are those of an estimate with the change
    estimate = memest.estimate(MODEL, gpu="t4", max_batch=False,
                           **(OPTIONS | {"batch": 8, "grad_accum": 2}))  # fmt: skip
    assert half.allocated_bytes == estimate.peak.allocated_bytes
    assert half.reserved_bytes == estimate.peak.reserved_bytes


@pytest.mark.slow
def test_a_message_of_a_larger_run_is_not_of_this_command():
    relation = memest.explain_oom(message(), MODEL, **(OPTIONS | {"batch": 2})).relation

    assert relation.belongs is Match.NO
    assert "does not look like that command" in relation.sentences[0]
    assert relation.changes == ()
    assert relation.reached_at is None


@pytest.mark.slow
def test_a_message_of_another_length_is_not_of_this_command():
    other = message(seq_len=192)
    relation = memest.explain_oom(other, MODEL, **(OPTIONS | {"seq_len": 320})).relation

    assert relation.belongs is Match.NO
    assert "nothing in it asks the driver for" in relation.sentences[-1]


def test_a_message_without_figures_is_unclear():
    text = "CUDA out of memory. Tried to allocate 20.00 MiB"
    relation = memest.explain_oom(text, MODEL, **OPTIONS).relation

    assert relation.belongs is Match.UNCLEAR
    assert relation.limit_bytes is None


def test_options_without_a_model_and_texts_without_a_message_are_refused():
    with pytest.raises(ConfigError, match="without a model"):
        memest.explain_oom("CUDA out of memory. Tried to allocate 2.00 MiB", batch=8)
    with pytest.raises(ConfigError, match="no message of PyTorch's GPU allocator"):
        memest.explain_oom("Killed")


def test_of_several_cards_the_one_of_the_message_is_asked_for():
    with pytest.raises(ConfigError, match="names 2 cards"):
        memest.explain_oom(
            "CUDA out of memory. Tried to allocate 2.00 MiB", MODEL, gpu=["t4", "l4"]
        )


@pytest.mark.parametrize(
    ("total", "backend", "known"),
    [
        ("14.56 GiB", "CUDA", True),
        ("8.00 GiB", "CUDA", False),
        ("79.15 GiB", "CUDA", False),
        ("23.98 GiB", "HIP", False),
    ],
)
def test_a_card_that_the_message_does_not_tell_is_said(total, backend, known):
    text = f"{backend} out of memory. Tried to allocate 2.00 MiB (GPU 0; {total} total capacity; "
    text += "1.00 GiB already allocated; 8.00 MiB free; 1.01 GiB reserved in total by PyTorch)"
    relation = memest.explain_oom(text, MODEL, **OPTIONS).relation

    several = relation.gpu == "a100"  # of five with as much, the nearest of those that are common
    assert several is (total == "79.15 GiB")
    assert any("which of 5 cards" in note for note in relation.notes) is several
    assert any("the message does not tell" in note for note in relation.notes) is not known


def _run(*words, stdin=None):
    return subprocess.run(
        [sys.executable, "-m", "memest", "explain-oom", *words], input=stdin, capture_output=True,
        text=True, check=False, timeout=300,
        env=os.environ | {"COLUMNS": "100", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_the_command_takes_a_log_a_pipe_or_the_message(tmp_path):
    text = message()
    log = tmp_path / "slurm-1.out"
    # logs hold bytes of progress bars and other programs
    log.write_bytes(b"epoch 1 \xff\xfe 3%|\n" + text.encode() + b"\nsrun: error\n")
    words = [MODEL, "--batch", "16", "--seq-len", "256", "--optim", "adamw_torch_foreach"]

    shown = _run(str(log), *words, "--ascii")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.isascii()
    assert "--batch 8 --grad-accum 2" in shown.stdout
    document = json.loads(_run("-", *words, "--json", stdin=text).stdout)
    assert document["run"]["belongs"] == "yes"
    assert document["messages"][0]["gpus"] == ["Tesla T4"]
    alone = json.loads(_run(text, "--json").stdout)
    assert alone["run"] is None
    assert alone["messages"] == document["messages"]


def test_a_log_is_read_whatever_it_is_called_and_however_powershell_wrote_it(tmp_path):
    log = tmp_path / "out of memory.log"
    log.write_text("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0", encoding="utf-16")
    done = _run(str(log))

    assert done.returncode == 0, done.stderr
    assert "2 MiB asked of the driver" in done.stdout


@pytest.mark.slow("words0-None-cannot read the log missing.log")
@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        (["missing.log"], None, "cannot read the log missing.log"),
        (["-"], "all went well", "no out-of-memory message"),
        (["-", "gpt2", "--gpu-memory", "8GiB"], "", "--gpu-memory has no place here"),
        (["-", "--batch", "8"], "CUDA out of memory. Tried to allocate 2.00 MiB", "batch without"),
    ],
)
def test_wrong_usage_is_said_in_one_line(words, stdin, message):
    done = _run(*words, stdin=stdin)

    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
