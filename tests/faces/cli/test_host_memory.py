"""``--with`` and ``--host-memory`` on the command line: verdict, exit code, JSON."""

import json
from html import escape

import pytest

import memest
from memest.cli.main import run

MODEL = "gpt2?n_layer=2&n_embd=64&n_head=4&vocab_size=1000"
SIZES = ["--batch", "1", "--seq-len", "32", "--with", "resume"]


def fits(*arguments):
    return run(["fits", MODEL, *SIZES, *arguments])


@pytest.mark.parametrize(
    ("memory", "words", "code"),
    [("64GiB", "Host: fits", 0), ("1GiB", "Host: tight", 0), ("1MiB", "Host: does not fit", 4)],
)
def test_the_exit_code_is_the_gpus_unless_the_host_does_not_fit(memory, words, code, capsys):
    assert fits("--gpu", "t4", "--host-memory", memory) == code
    lines = capsys.readouterr().out.splitlines()
    of_gpu, of_host = lines if words == "Host: fits" else lines[::-1]  # the worst comes first
    assert of_gpu.startswith("Fits: ")
    assert of_host.startswith(words)


def test_what_is_asked_of_a_run_is_answered_without_a_limit(capsys):
    """Saving and resuming, and what they take of the GPU; the verdict is the GPU's."""
    assert run(["fits", MODEL, *SIZES, "--with", "saving", "--gpu", "t4"]) == 0
    out, err = capsys.readouterr()
    of_gpu, of_host = out.splitlines()
    assert of_gpu.startswith("Fits: ")
    assert of_host.startswith("Host: needs ")
    assert "GPU: saving takes " in err


def test_an_evaluation_asks_nothing_of_the_host(capsys):
    assert run(["fits", MODEL, "--batch", "1", "--with", "eval", "--gpu", "t4", "--quiet"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_without_a_gpu_the_host_decides(capsys):
    assert fits("--host-memory", "1GiB") == 3
    assert capsys.readouterr().out.startswith("Host: tight")


def test_the_document_has_both_limits(capsys):
    code = fits("--gpu", "t4", "--host-memory", "1MiB", "--json")
    document = json.loads(capsys.readouterr().out)

    assert code == document["exit_code"] == 4
    assert [limit["of"] for limit in document["limits"]] == ["Tesla T4", "host memory"]
    assert document["life"]["verdict"] == document["limits"][1]["verdict"] == "does not fit"
    assert document["setup"]["life"]["with"] == ["resume"]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--with", "sav"], "Did you mean 'save'?"),
        (["--host-memory", "0"], "leaves no memory"),
    ],
)
def test_a_wrong_word_is_one_sentence_and_code_2(option, words, capsys):
    assert run(["estimate", MODEL, *option]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


def test_the_short_answer_names_the_host_where_its_memory_is_named(capsys):
    assert run(["estimate", MODEL, *SIZES, "--host-memory", "64GiB", "--quiet"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Host: fits")


@pytest.mark.parametrize("gpus", ["1", "2"])
def test_the_page_says_of_the_host_what_the_report_says(gpus, tmp_path, capsys):
    page = tmp_path / "run.html"
    options = ["--host-memory", "1GiB", "--num-gpus", gpus, "--gpu", "t4", "--out", str(page)]
    assert run(["estimate", MODEL, *SIZES, *options, "--json"]) == 0
    life = memest.estimate(
        MODEL, batch=1, seq_len=32, with_="resume", host_memory="1GiB", num_gpus=int(gpus), gpu="t4"
    ).life
    text = page.read_text()

    assert life.sentence in text
    assert ">tight</span>" in text
    for word in (*life.head, *life.remarks, *(cell for row in life.rows for cell in row)):
        assert escape(word) in text
    assert ("a node" in life.head) is (gpus == "2")


def test_a_page_without_the_question_says_nothing_of_the_host(tmp_path, capsys):
    page = tmp_path / "run.html"
    assert run(["estimate", MODEL, *SIZES[:4], "--out", str(page), "--json"]) == 0
    assert "Host" not in page.read_text()
