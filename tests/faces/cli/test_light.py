"""Importing memest, its help and its catalogues load nothing heavy."""

import subprocess
import sys

import pytest

import memest

HEAVY = ("torch", "transformers", "sklearn", "pandas", "streamlit", "numpy", "accelerate",
         "huggingface_hub", "matplotlib", "ray")  # fmt: skip


def loaded_after(code):
    probe = (
        f"{code}\nimport sys\n"
        f"sys.stderr.write('LOADED ' + ' '.join(n for n in {HEAVY!r} if n in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stderr.partition("LOADED ")[2].split()


@pytest.mark.slow(
    "from memest.cli.main import run\\nassert run(['estimate', '--help']) == 0",
    "from memest.cli.main import run\\nassert run(['fits', '--help', 'all']) == 0",
    "from memest.cli.main import run\\nassert run(['max-batch', 'gpt2']) == 2",
)
@pytest.mark.parametrize(
    "code",
    [
        "import memest",
        "import memest\nfor name in memest.__all__: getattr(memest, name)",
        "from memest.cli.main import run\nassert run(['--help']) == 0",
        "from memest.cli.main import run\nassert run(['estimate', '--help']) == 0",
        "from memest.cli.main import run\nassert run(['fits', '--help', 'all']) == 0",
        "from memest.cli.main import run\nassert run(['estimate', '--help', 'peft']) == 0",
        "from memest.cli.main import run\nassert run(['help', 'tight']) == 0",
        "from memest.cli.main import run\nassert run(['sweep', '--help']) == 0",
        "from memest.cli.main import run\nassert run(['sweep', 'gpt2', '--over', 'batch=0']) == 2",
        "from memest.cli.main import run\nassert run(['--version']) == 0",
        "from memest.cli.main import run\nassert run(['gpus', '--json']) == 0",
        "from memest.cli.main import run\nassert run(['models', 'bert']) == 0",
        "from memest.cli.main import run\nassert run(['env', '--json']) == 0",
        "from memest.cli.main import run\nassert run(['cache']) == 0",
        "from memest.cli.main import run\nassert run(['cache', '--json']) == 0",
        "from memest.cli.main import run\nassert run(['max-batch', '--help']) == 0",
        "from memest.cli.main import run\nassert run(['max-batch', 'gpt2']) == 2",
        "from memest.cli.main import run\nassert run(['estimate', 'x', '--fp16', '--bf16']) == 2",
    ],
)
def test_nothing_heavy_is_loaded(code):
    assert loaded_after(code) == []


def test_public_names():
    for name in memest.__all__:
        assert getattr(memest, name) is not None
    assert set(memest.__all__) <= set(dir(memest))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        memest.nothing  # noqa: B018


def test_the_end_of_a_process_looks_for_no_cycles():
    code = (
        "from memest.cli.main import run\n"
        "class Found:\n"
        "    def __del__(self):\n"
        "        print('looked through')\n"
        "run(['--version'])\n"
        "one = Found()\n"
        "one.itself = one\n"
        "del one\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "looked through" not in done.stdout
