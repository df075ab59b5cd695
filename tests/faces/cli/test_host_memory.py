"""``--with`` and ``--host-memory`` on the command line: verdict, exit code, JSON."""

import json

import pytest

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
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Fits: ")
    assert second.startswith(words)


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
