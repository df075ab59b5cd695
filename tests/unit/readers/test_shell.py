"""Shell scripts: the launch command in them, with what the script sets, and nothing run."""

from __future__ import annotations

import contextlib
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memest
from memest.readers.shell_words import commands_of


def run_of(tmp_path, text, prefix="", suffix="", name="run.sh"):
    path = tmp_path / name
    path.write_text(text)
    if not (prefix or suffix):
        return memest.read_config(path)
    return memest.read_command(f"{prefix} bash {path} {suffix}".strip())


ARRAYS = """#!/bin/bash
#SBATCH --gpus-per-node=8
set -euo pipefail
MODEL=${MODEL:-gpt2}
NUM=4   # of this node
DISTRIBUTED="--nproc_per_node $NUM \\
    --nnodes ${NODES}"
ARGS=(
  --model_name_or_path "$MODEL"   # the model
  --bf16 True
)
ARGS+=(--per_device_train_batch_size 2)
cat <<EOF > notes.txt
python wrong.py --bf16 False
EOF
pip install deepspeed
python -m pip install peft
echo "python no.py"
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True torchrun $DISTRIBUTED \\
  --master_addr $MASTER_ADDR train.py "${ARGS[@]}" --output_dir out/$NAME 2>&1 | tee log
"""


def test_a_default_may_hold_another_variable(tmp_path):
    text = (
        'HOME_OF=${HOME_OF:-"${ROOT}/verl"}\n'
        'MODEL=${MODEL:-"${HOME_OF}/models/${NAME:-small}"}\n'
        'python train.py --model_name_or_path "${MODEL}" --block_size ${SIZE:-${OTHER:-64}}\n'
    )
    run = run_of(tmp_path, text, "ROOT=/data")
    assert (run.model, run.options["seq_len"]) == ("/data/verl/models/small", 64)


def test_variables_arrays_and_comments(tmp_path):
    run = run_of(tmp_path, ARRAYS, "NODES=2")
    expected = {"model": "gpt2", "num_gpus": 8, "precision": "bf16", "batch": 2}
    values = {"model": run.model, **run.options}
    assert {name: values[name] for name in expected} == expected
    assert run.options["alloc_conf"] == "expandable_segments:True"
    assert run.sources[0].endswith("run.sh (shell script)")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ARRAYS, r"NODES=... bash run.sh"),
        ("python train.py --max_steps 3 --block_size $1\n", "Write it behind"),
        ("accelerate launch --num_processes $(nproc) train.py\n", "another command prints"),
        (
            "if [ x ]; then B=2; fi\npython train.py --per_device_train_batch_size $B\n",
            "for certain",
        ),
        ("for B in 1 2; do python train.py --per_device_train_batch_size $B; done", "for certain"),
        ("python train.py --output_dir out $MORE\n", "MORE"),
        ("echo done\n", "starts no training"),
        ("python a.py --batch_size 2\npython b.py\n", r"lines 1, 2"),
        ('python train.py "--x\n', "a quote does not end"),
        ("trl vllm-serve --model gpt2\n", "does not train"),
        ("bash run.sh\n", "starts itself again"),
    ],
)
def test_what_cannot_be_told_is_refused_with_what_to_write(tmp_path, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(memest.ConfigError, match=words):
        memest.read_config("run.sh")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ('srun bash -c "torchrun --nproc_per_node 2 train.py --bf16"\n', {"num_gpus": 2}),
        ('CMD="torchrun --nproc_per_node 2 train.py --bf16"\neval $CMD\n', {"num_gpus": 2}),
        ("export CUDA_VISIBLE_DEVICES=0,1,2\naccelerate launch train.py --bf16\n", {"num_gpus": 3}),
        ("VISIBLE=0,1\nX=$VISIBLE nohup python train.py --bf16 &\n", {"num_gpus": 1}),
        ("python train.py --bf16 --block_size $1\n", {"seq_len": 64}),
        ("[ -z $B ] && B=4\npython train.py --bf16 --batch_size $B\n", {"batch": 2}),
        ("N=2\ntorchrun --nproc_per_node $((N * 2)) train.py --bf16\n", {"num_gpus": 4}),
        (
            "N=2\ntrain=1\npython train.py --bf16 --gradient_accumulation_steps $(expr 16 / $N)\n",
            {"grad_accum": 8},
        ),
        ("S=(16 32 64)\nI=1\npython train.py --bf16 --block_size ${S[$I]}\n", {"seq_len": 32}),
        (
            "#SBATCH --gres=gpu:a100:4\ntorchrun --nproc_per_node=$SLURM_GPUS_ON_NODE a.py --bf16",
            {"num_gpus": 4},
        ),
        ("python prepare.py\ntorchrun --nproc_per_node 2 train.py --bf16\n", {"num_gpus": 2}),
    ],
)
def test_how_commands_are_started(tmp_path, text, options):
    run = run_of(tmp_path, text, "B=2", "64")
    assert {name: run.options.get(name) for name in options} == options
    assert run.options["precision"] == "bf16"


def test_a_script_starts_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner.sh").write_text("torchrun --nproc_per_node $2 train.py --block_size $1\n")
    (tmp_path / "job.slurm").write_text("SIZE=32\nsrun bash inner.sh $SIZE 4\n")
    run = memest.read_config("job.slurm")
    assert (run.options["seq_len"], run.options["num_gpus"]) == (32, 4)
    assert [source.partition(" ")[0] for source in run.sources[:2]] == ["job.slurm", "inner.sh"]


WORDS = st.text("ab $'\"\\#=;&|(){}-~\n", max_size=12)


@settings(max_examples=20)
@given(
    st.lists(st.sampled_from(["a", "$X", '"$X b"', "'$X'", "${X:-c}", "\\$X", "a#b"]), max_size=6)
)
def test_words_are_those_of_bash(parts):
    """Beside the shell itself."""
    text = f"X='p q'\nprintf '%s\\n' {' '.join(parts)}\n"
    said = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout
    [command] = [each for each in commands_of(text, "it", {}, []) if each.words[0] == "printf"]
    assert [*command.words[2:]] == said.split("\n")[:-1] or not parts


@given(WORDS)
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(memest.ConfigError):
        commands_of(text, "it", {"X": "1"}, ["y"])


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("A=1 B=2\npython train.py --bf16 --block_size $B\n", {"seq_len": 2}),
        ("A=4\r\npython train.py --bf16 --block_size $A\r\n", {"seq_len": 4}),
    ],
)
def test_several_assignments_and_ends_of_lines(tmp_path, text, options):
    run = run_of(tmp_path, text)
    assert {name: run.options.get(name) for name in options} == options


@pytest.mark.parametrize(
    "text",
    [
        "B=$((1<<4))\npython train.py --block_size $B\n",
        "B=4\nusage() {\nB=64\n}\npython train.py --block_size $B\n",
        "B=4\n[ -n $X ] && {\nB=64\n}\npython train.py --block_size $B\n",
        "A=xxxxxxxxxx\n" + "A=$A$A\n" * 40 + "python train.py --block_size $A\n",
        "A=(x y)\npython train.py --block_size ${A[²]}\n",
    ],
)
def test_what_bash_knows_better_is_refused(tmp_path, text):
    with pytest.raises(memest.ConfigError):
        run_of(tmp_path, text)


def test_what_a_script_computes_is_no_variable_to_set(tmp_path):
    text = 'IFS=, read -ra A <<< "0,1"\ntorchrun --nproc_per_node=${#A[@]} train.py\n'
    with pytest.raises(memest.ConfigError, match="Write the launch command out"):
        run_of(tmp_path, text)


def test_processes_of_srun_are_asked_for(tmp_path):
    run = run_of(tmp_path, "srun python train.py --model_name_or_path gpt2 --block_size 8\n")
    assert any("as many processes" in each for each in run.setup.unpriced)
    assert not memest.read_config(tmp_path / "run.sh", num_gpus=4).setup.unpriced
