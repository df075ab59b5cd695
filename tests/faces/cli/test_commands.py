"""The real command line in processes of its own: exit codes, streams, errors."""

import json
import os
import subprocess
import sys

import pytest

from support.commands import check_refused as check
from support.paths import TESTS

TINY = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model folder that traces in no time."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


@pytest.mark.slow
def test_broken_files(cli, tmp_path):
    (tmp_path / "broken.json").write_text('{"model_type": "bert",')
    check(cli("estimate", str(tmp_path / "broken.json")), 2, "not valid JSON", "line 1")
    (tmp_path / "list.json").write_text("[1, 2]")
    check(cli("estimate", str(tmp_path / "list.json")), 2, "array")
    (tmp_path / "none.json").write_text("{}")
    check(cli("estimate", str(tmp_path / "none.json")), 2, "model_type")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00\x80")
    check(cli("estimate", str(tmp_path / "bytes.json")), 2)
    check(cli("estimate", str(tmp_path)), 2, "config.json")


def test_unreachable_hub(process):
    env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    check(process("estimate", "someone/some-model", env=env), 5, "cannot be reached")


def test_no_driver(cli, tiny):
    if os.path.exists("/dev/nvidia0"):  # noqa: PTH110
        pytest.skip("this machine has a GPU")
    check(cli("estimate", tiny, "--gpu", "local"), 1, "driver", "--gpu")


def test_missing_torch(process, tiny, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    env = {"PYTHONPATH": str(tmp_path), "MEMEST_CACHE": str(tmp_path / "cache")}
    check(process("estimate", tiny, env=env), 6, "torch", "pip install 'memest-gpu[")


def test_a_mirror_is_said_to_be_one(here):
    line = ("--bf16", "--lora-r", "16", "--checkpointing", "--gpu", "a100")
    done = here("fits", "unsloth/Llama-3.2-1B", *line)
    assert (done.returncode, done.stdout[:5]) == (0, "Fits:")
    said = "memest: unsloth/Llama-3.2-1B is answered as meta-llama/Llama-3.2-1B: mirror"
    assert said in done.stderr
    assert "answered as" not in here("fits", "meta-llama/Llama-3.2-1B", *line).stderr


def test_sequence_longer_than_the_model(here, tiny):
    check(here("estimate", tiny, "--seq-len", "65"), 2, "--seq-len 65", "64")


def test_debug_shows_the_traceback(cli):
    done = cli("estimate", "x", "--fp16", "--bf16", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("memest: --fp16 and --bf16")


def test_a_full_disk(process):
    if not os.path.exists("/dev/full"):  # noqa: PTH110
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = process("models", stdout=full)
    assert done.returncode == 1
    assert done.stderr.startswith("memest: no space left")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow(but=("line1",))
@pytest.mark.parametrize("line", [["models"], ["gpus", "--json"], ["env"]])
def test_a_closed_pipe_is_quiet(line):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "memest", *line], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert done.returncode == 141
    assert done.stderr == b""


@pytest.mark.slow
def test_estimate_writes_one_document(cli, tiny):
    done = cli("estimate", tiny, "--batch", "2", "--json", "--gpu", "rtx-3090")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    document = json.loads(done.stdout)
    rows = sum(row["bytes"] for row in document["breakdown"])
    assert rows == document["peak"]["allocated_bytes"]
    assert document["setup"]["batch"] == 2
    assert document["verdict"] == "fits"
    assert document["max_batch"] >= document["safe_batch"] > 0


@pytest.mark.slow
def test_the_same_question_gets_the_same_bytes(cli, tiny):
    line = ["estimate", tiny, "--batch", "2", "--seq-len", "32", "--bf16"]
    first, second = cli(*line), cli(*line)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert first.stderr == second.stderr == ""


@pytest.mark.parametrize(("memory", "code"), [("80GiB", 0), ("100MiB", 4)])
def test_fits(cli, tiny, memory, code):
    done = cli("fits", tiny, "--batch", "2", "--gpu-memory", memory)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith("Does not fit: " if code else "Fits: ")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_fits_says_what_a_name_was_taken_for(cli, tiny):
    done = cli("fits", tiny, "--batch", "2", "--gpu", "24GB")
    given = cli("fits", tiny, "--batch", "2", "--gpu-memory", "24GiB")
    assert done.stdout == given.stdout
    assert "as --gpu-memory 24GiB does" in done.stderr
    assert cli("fits", tiny, "--batch", "2", "--gpu", "24GB", "--quiet").stderr == ""


def test_fits_says_what_has_no_effect(cli, tiny):
    done = cli("fits", tiny, "--batch", "2", "--gpu", "t4", "--image-size", "512")
    assert done.stdout.startswith("Fits: ")
    assert "--image-size 512 has no effect" in done.stderr


def test_fits_says_that_a_script_was_not_read(cli, tiny):
    command = ["python", "no_such.py", "--model_name_or_path", tiny, "--max_seq_length", "16"]
    done = cli("fits", "--gpu-memory", "24GiB", "--", *command)
    assert done.returncode == 0
    assert "no_such.py: the script is not read (it is not here)" in done.stderr


def test_a_number_of_gpus_stands_with_their_name(cli, tiny):
    typed = cli("estimate", tiny, "--batch", "2", "--gpu", "2xt4", "--json")
    spelled = cli("estimate", tiny, "--batch", "2", "--gpu", "t4", "--num-gpus", "2", "--json")
    assert json.loads(typed.stdout) == json.loads(spelled.stdout)
    assert json.loads(typed.stdout)["setup"]["num_gpus"] == 2


SAMPLE = """
import sys
import memest.estimation.estimate
from support.sample_estimates import SAMPLES
memest.estimation.estimate.estimate = lambda *args, **more: SAMPLES["accum"]
from memest.cli.main import run
sys.exit(run(["estimate", "m", *sys.argv[1:]]))
"""


def sample(*options, **env):
    """Show an estimate built by hand in a process of its own."""
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    done = subprocess.run(
        [sys.executable, "-c", SAMPLE, *options],
        capture_output=True, env=plain | {"PYTHONPATH": str(TESTS)} | env, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ascii_terminals_get_ascii():
    assert sample(PYTHONIOENCODING="ascii").isascii()
    assert not sample(PYTHONIOENCODING="utf-8").isascii()
    assert sample("--ascii", PYTHONIOENCODING="utf-8").isascii()


@pytest.mark.slow
def test_escape_codes_are_for_terminals():
    assert b"\x1b[" not in sample()
    assert b"\x1b[" in sample(FORCE_COLOR="1")
    assert b"\x1b[" not in sample(FORCE_COLOR="1", NO_COLOR="1")
    assert b"\x1b[" not in sample("--no-color", FORCE_COLOR="1")


@pytest.mark.parametrize("columns", [60, 100])
def test_columns(columns):
    text = sample(COLUMNS=str(columns), PYTHONIOENCODING="utf-8").decode()
    assert columns - 12 < max(map(len, text.splitlines())) <= columns


@pytest.mark.slow
def test_version_and_help(cli):
    import memest

    assert cli("--version").stdout == f"memest {memest.__version__}\n"
    for line in ([], ["--help"], ["estimate", "-h"], ["fits", "--help"], ["models", "--help"],
                 ["gpus", "--help"], ["env", "--help"]):  # fmt: skip
        done = cli(*line)
        assert done.returncode == 0
        assert "Usage" in done.stdout
        assert done.stderr == ""


@pytest.mark.slow
def test_python_gives_the_same_answer(cli, tiny):
    import memest

    answer = memest.estimate(tiny, batch=2, seq_len=32, fp16=True)
    done = cli("estimate", tiny, "--batch", "2", "--seq-len", "32", "--fp16", "--json")
    assert json.loads(done.stdout) == answer.to_dict()
