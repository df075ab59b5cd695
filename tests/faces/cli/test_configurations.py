"""Configurations and launch commands on the command line and in Python: one answer by any way."""

import json
import shlex
from dataclasses import replace

import pytest

import memest
from memest.cli.argv import refuse_launch, with_launch
from memest.cli.main import run
from memest.cli.question import read_question
from memest.config.options import setup_from_options
from memest.errors import ConfigError
from support.paths import RUN_CONFIGURATIONS

MODEL = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64,
    "n_head": 2, "vocab_size": 128, "n_positions": 128, "dtype": "bfloat16",
}  # fmt: skip
ARGS = """\
model_name_or_path: ./tiny
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
max_seq_length: 64
bf16: true
learning_rate: 1.0e-4
teacher_model_name_or_path: ./tiny
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a model, training arguments and accelerate's file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    (tmp_path / "args.yaml").write_text(ARGS, encoding="utf-8")
    (tmp_path / "acc.yaml").write_text(
        "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\n", encoding="utf-8"
    )
    return tmp_path


def document(capsys, *words):
    assert run([*words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_file_stands_for_its_options(place, capsys):
    """The same peaks and setup from the file, its options, and Python; origins besides."""
    typed = document(capsys, "estimate", "./tiny", "-b4", "--grad-accum=2", "--seq-len=64",
                     "--bf16", "--max-grad-norm", "1")  # fmt: skip
    for words in (["args.yaml"], ["--config", "args.yaml"], ["./tiny", "--config=args.yaml"]):
        read = document(capsys, "estimate", *words)
        assert read["peak"] == typed["peak"]
        assert read["breakdown"] == typed["breakdown"]
    answer = memest.estimate(memest.read_config("args.yaml"))
    assert answer.to_dict()["peak"] == typed["peak"]
    assert answer.to_dict()["setup"] == read["setup"]
    origins = {row["option"]: (row["value"], row["origin"]) for row in read["origins"]}
    assert origins["batch"] == (4, "args.yaml:per_device_train_batch_size")
    assert origins["optim"] == ("adamw_torch_fused", "default of transformers")
    assert origins["task"] == ("causal-lm", "model config")
    assert origins["zero"] == (0, "default")
    assert any("teacher" in note for note in read["notes"])
    assert any("read: args.yaml (transformers)" in line for line in read["assumptions"])
    assert {row["option"]: row["origin"] for row in typed["origins"]}["batch"] == "--batch"


@pytest.mark.slow
def test_flags_come_first(place, capsys):
    read = document(capsys, "estimate", "args.yaml", "--batch", "1", "--fp16", "--dtype", "float32")
    assert (read["setup"]["batch"], read["setup"]["precision"]) == (1, "fp16")
    origins = {row["option"]: row["origin"] for row in read["origins"]}
    assert (origins["batch"], origins["precision"]) == ("--batch", "--fp16")
    assert memest.estimate(memest.read_config("args.yaml"), batch=1).setup.batch == 1


def test_explain_prints_what_is_no_default(place, capsys):
    read = document(capsys, "estimate", "args.yaml", "--json")
    assert run(["estimate", "args.yaml", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "Values and where they come from" in out
    table = out[out.index("Values and") :]
    assert "args.yaml:bf16" in table
    assert "Not modelled" in table
    assert "args.yaml:learning_rate: rates and schedules" in table
    sources = {row["option"]: row["origin"] for row in read["origins"]}
    for option, source in sources.items():
        shown = source not in ("default", "what is not modelled")  # which has a part of its own
        assert (f"  {option} " in table) == shown, option
    assert f"The other {list(sources.values()).count('default')} have" in table
    assert set(memest.Setup().to_dict()) <= set(sources)


@pytest.mark.slow
def test_a_command_after_two_dashes(place, capsys):
    words = "accelerate launch --config_file acc.yaml train.py --model_name_or_path ./tiny --bf16"
    words += " --per_device_train_batch_size 2 --max_seq_length 32 --logging_steps 5"
    read = document(capsys, "estimate", "--gpu=t4", "--batch=3", "--json", f"--launch={words}")
    assert read["setup"]["num_gpus"] == 2
    assert read["setup"]["batch"] == 3
    assert run(["estimate", "--batch=3", "--gpu=t4", "--json", "--", *words.split()]) == 0
    assert json.loads(capsys.readouterr().out) == read


@pytest.mark.slow
def test_every_command_takes_a_configuration(place, capsys):
    assert run(["fits", "args.yaml", "--gpu", "t4"]) == 7
    assert "not priced: args.yaml:teacher_model_name_or_path" in capsys.readouterr().out
    assert run(["max-batch", "args.yaml", "--gpu-memory", "2GiB", "-q"]) == 7
    assert int(capsys.readouterr().out) == 0  # none is known to be safe
    assert run(["compare", "--config", "args.yaml", "--vs", "batch=8", "--json"]) == 0
    columns = json.loads(capsys.readouterr().out)["scenarios"]
    assert [column["estimate"]["setup"]["batch"] for column in columns] == [4, 8]
    assert run(["sweep", "args.yaml", "--over", "batch=2,4", "--over", "precision=fp32,bf16",
                "--json"]) == 0  # fmt: skip
    assert '"batch": 2' in capsys.readouterr().out
    assert run(["advise", "args.yaml", "--gpu", "t4", "--effective-batch", "8", "-q"]) == 7


@pytest.mark.slow("max-batch")
@pytest.mark.parametrize(
    "words",
    [
        ["sweep", "args.yaml", "--over", "batch=1,2"],
        ["max-batch", "args.yaml", "--gpu-memory", "1GiB"],
        ["compare", "args.yaml", "--vs", "batch=2"],
    ],
    ids=lambda words: words[0],
)
def test_every_command_says_what_it_read_ignored_and_cannot_model(place, capsys, words):
    assert run([*words, "--json"]) == (7 if words[0] == "max-batch" else 0)
    told = capsys.readouterr()
    json.loads(told.out)
    assert "memest: read: args.yaml (transformers)" in told.err
    assert "1 key was ignored (memest estimate --explain lists them)" in told.err
    assert "memest: not modelled: args.yaml:teacher_model_name_or_path" in told.err
    assert run([*words[:1], "./tiny", *words[2:], "--seq-len", "64", "--json"]) == 0
    assert "read:" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["estimate"], 2, "Missing argument"),
        (["estimate", "acc.yaml"], 2, "names no model"),
        (["estimate", "./tiny", "--config-format", "trl"], 2, "add --config"),
        (["estimate", "none.yaml"], 2, "cannot be read"),
        (["read", "pointer.yaml"], 2, "cannot be read: it is a pointer of Git LFS"),
        (["estimate", "./tiny", "--config", "training_args.bin"], 2, "is a pickle"),
        (["estimate", "training_args.bin"], 2, "is a pickle"),
        (["estimate", "--", "rm", "-rf", "x"], 2, "names no script"),
        (
            ["estimate", "--config", "acc.yaml", "--config", "args.yaml", "--batch", "x"],
            2,
            "--batch",
        ),
    ],
)
def test_what_cannot_be_is_one_paragraph(place, capsys, words, code, said):
    (place / "training_args.bin").write_bytes(b"\x80\x04")
    (place / "pointer.yaml").write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    assert run(words) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_one_word_after_two_dashes_is_a_model():
    assert with_launch(["estimate", "--", "gpt2"]) == ["estimate", "--", "gpt2"]
    assert with_launch(["gpus", "--", "a", "b"]) == ["gpus", "--", "a", "b"]


@pytest.mark.parametrize("command", ["explain-oom", "explain-growth"])
def test_a_launch_command_is_no_log(command, capsys):
    assert run([command, "--json", "torchrun", "train.py", "--bf16"]) == 2
    said = capsys.readouterr().err
    assert f"memest {command} run.log -- torchrun train.py --bf16." in said
    assert run([command, "python train.py"]) == 2
    assert f"memest {command} run.log -- python train.py." in capsys.readouterr().err
    assert run([command, "run.log", "python", "train.py"]) == 2
    said = capsys.readouterr().err
    assert f"stands behind --: memest {command} run.log -- python train.py" in said


def test_a_log_in_the_place_of_a_model_is_wrong_usage(tmp_path, capsys):
    log = tmp_path / "oom.txt"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB.")
    for words in (["fits", str(log)], ["fits", str(log), "--gpu", "t4"], ["estimate", str(log)]):
        assert run(words) == 2
        assert f"memest explain-oom {log}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["estimate", "fits", "max-batch", "advise", "stages"])
@pytest.mark.parametrize(
    "launch",
    ["torchrun --nproc-per-node 4 train.py --batch 8", "python train.py", "deepspeed train.py",
     "CUDA_VISIBLE_DEVICES=0 accelerate launch train.py", "srun -n 4 python train.py",
     "axolotl train run.yaml", "bash run.sh", "uv run train.py", "nohup python train.py"],
)  # fmt: skip
def test_a_launch_command_without_two_dashes_is_told_how(command, launch, capsys):
    """Nobody can tell whose options are whose, so the command to type is said."""
    assert run([command, "--gpu", "t4", *launch.split()]) == 2
    said = capsys.readouterr().err
    assert (
        f" begins a launch command, which stands behind --: memest {command} --gpu t4 -- {launch}"
        in said
    )


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("torchrun train.py --gpu t4", "--gpu t4 -- torchrun train.py"),
        ("python train.py --gpu_memory=3GiB --bs 2 -q --gpu t4 --lr 1",
         "--gpu_memory=3GiB -q --gpu t4 -- python train.py --bs 2 --lr 1"),
        ("accelerate launch -q train.py --json", "--json -- accelerate launch -q train.py"),
        ("--gpu=t4 python train.py --gpu 0", "--gpu=t4 -- python train.py --gpu 0"),
        ("python train.py --profile --gpu t4", "--gpu t4 -- python train.py --profile"),
        ("trl sft --batch 2 --gpu t4", "--gpu t4 -- trl sft --batch 2"),
        ("srun --wrap 'python train.py --gpu t4'", "-- srun --wrap 'python train.py --gpu t4'"),
    ],
)  # fmt: skip
def test_options_that_are_surely_memests_are_told_in_front(typed, told):
    """Only behind the script; what names the card twice, or is quoted, stays where it is."""
    with pytest.raises(ConfigError) as refused:
        refuse_launch(["fits", *shlex.split(typed)])
    assert f": memest fits {told} (memest's own" in str(refused.value)


@pytest.mark.parametrize(
    "words",
    ["compare gpt2 python train.py", "sweep gpt2 python train.py",
     "estimate bash", "estimate uv --bf16", "estimate train.py --bf16",
     "estimate --config-format deepspeed ds.json", "estimate gpt2",
     "estimate deepspeed", "estimate --launch python train.py", "gpus python train.py",
     "estimate -- python train.py"],
)  # fmt: skip
def test_what_is_no_launch_command_is_left_alone(words):
    refuse_launch(words.split())


def test_a_file_is_told_as_what_it_is(tmp_path, monkeypatch, capsys):
    """One that is not there by the name that is near, a log by the command for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "oom.txt").write_text("CUDA out of memory. Tried to allocate 20.00 MiB.")
    assert run(["fits", "./trian.py"]) == 2
    assert "there is no such script. Did you mean 'train.py'?" in capsys.readouterr().err
    assert run(["fits", "oom.txt"]) == 2  # whatever else the question lacks
    assert "is a log with" in (said := capsys.readouterr().err)
    assert "memest explain-oom oom.txt" in said


def test_reading_is_light(cli, place):
    """A configuration is read without torch; nothing of YAML is loaded for a plain question."""
    code = (
        "import sys, memest; memest.read_config('args.yaml', command='torchrun x.py');"
        "assert 'yaml' in sys.modules; print([m for m in ('torch', 'transformers', 'typer') "
        "if m in sys.modules])"
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    for words in (["fits", "train.py"], ["fits", "--", "torchrun", "train.py"]):
        code = (
            f"import sys; from memest.cli.main import run; assert run({words}) == 2;"
            "print('typer' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "False", words
    code = "import sys, memest.cli.main, memest.estimation.estimate; print('yaml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--use-liger-kernel", "false"], "use_liger_kernel"),
        (["--no-use-liger-kernel"], "use_liger_kernel"),
        (["--use_liger_kernel=False"], "use_liger_kernel"),
        (["--use-liger-kernel", "true", "--no-use-liger-kernel"], "use_liger_kernel"),
    ],
)
def test_a_switch_named_off_takes_back_what_a_file_says(place, capsys, words, option):
    """Flags come before files, whatever they say."""
    with (place / "args.yaml").open("a") as file:
        file.write("use_liger_kernel: true\ntf32: true\n")
    assert run(["estimate", "args.yaml", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["setup"][option] is False
    assert document["setup"]["tf32"] is True


@pytest.mark.slow
def test_autocast_named_off_is_fp32(place, capsys):
    assert run(["estimate", "args.yaml", "--bf16", "false", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["setup"]["precision"] == "fp32"
    words = ["estimate", "args.yaml", "--no-bf16", "--fp16", "--dtype", "float32", "--json"]
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out)["setup"]["precision"] == "fp16"


_AUTOCASTS_OFF = [
    ({"bf16": False}, "fp32"),
    ({"fp16": False}, "bf16"),
    ({"fp16": False, "bf16": False}, "fp32"),
    ({"bf16": False, "fp16": True}, "fp16"),
]


@pytest.mark.parametrize(("switches", "precision"), _AUTOCASTS_OFF, ids=str)
def test_an_autocast_switched_off_is_the_same_everywhere(switches, precision):
    """``bf16`` of TRL's configurations is ``not fp16`` where nobody says it."""
    off = [name for name, value in switches.items() if not value]
    on = {name: value for name, value in switches.items() if value}
    asked = read_question(["gpt2"], {"method": "dpo", **on}, off=off).options
    command = "trl dpo --model_name_or_path gpt2 --per_device_train_batch_size 2"

    assert setup_from_options(**asked).precision == precision
    assert setup_from_options(method="dpo", **switches).precision == precision
    assert memest.read_config(command=command, **switches).setup.precision == precision
    words = [f"--{name} {value}" for name, value in switches.items()]
    assert memest.read_config(command=" ".join([command, *words])).setup.precision == precision


@pytest.mark.slow("wrapped")
@pytest.mark.parametrize("value", ["bfd", "wrapped", "true"])
def test_a_kind_of_packing_is_the_word_behind_it(place, capsys, value):
    words = ["estimate", "./tiny", "--packing", value, "--batch", "2", "--seq-len", "32", "--json"]
    assert run(words) == 0
    setup = json.loads(capsys.readouterr().out)["setup"]
    assert setup["padding_free"] is (value != "wrapped")


@pytest.mark.slow
def test_configurations_side_by_side_are_runs_of_their_own(tmp_path, capsys):
    paths, alone = [], []
    for name, batch, more in (("a", 2, "bf16: true"), ("b", 4, "optim: sgd")):
        path = tmp_path / name / "run.yaml"
        path.parent.mkdir()
        path.write_text(
            f"model_name_or_path: prajjwal1/bert-tiny\nper_device_train_batch_size: {batch}\n"
            f"learning_rate: 1.0e-4\n{more}\n"
        )
        paths.append(str(path))
        alone.append(document(capsys, "estimate", str(path), "--seq-len", "64"))
    columns = document(capsys, "compare", *paths, "--seq-len", "64")["scenarios"]
    assert [column["name"] for column in columns] == ["run.yaml", "run.yaml (2)"]
    for column, own in zip(columns, alone, strict=True):
        assert column["estimate"]["peak"] == own["peak"]
        assert column["estimate"]["setup"] == own["setup"]
    read = [memest.read_config(path, seq_len=64) for path in paths]
    in_python = [each.estimate.to_dict() for each in memest.compare(read).scenarios]
    assert [each["peak"] for each in in_python] == [own["peak"] for own in alone]
    for switches, on in ((["--tf32", "--no-tf32"], False), (["--no-tf32", "--tf32"], True)):
        assert run(["compare", *paths, *switches, "--json"]) == 0  # the last one counts
        both = json.loads(capsys.readouterr().out)["scenarios"]
        assert [column["estimate"]["setup"]["tf32"] for column in both] == [on, on]
    assert run(["compare", *paths]) == 0
    told = capsys.readouterr()
    assert told.err.count("memest: read: ") == 2
    assert "run.yaml (2)" in told.out


@pytest.mark.parametrize(
    "words", [["compare", "prajjwal1/bert-tiny"], ["sweep", "--over", "batch=1,2"]]
)
def test_configurations_among_models_or_in_a_sweep_are_told_how_to_go_on(tmp_path, capsys, words):
    paths = []
    for name in "ab":
        (tmp_path / f"{name}.yaml").write_text("model_name_or_path: gpt2\nlearning_rate: 1.0\n")
        paths.append(str(tmp_path / f"{name}.yaml"))
    assert run([*words, *paths]) == 2
    said = capsys.readouterr().err
    assert "stand in the place of models" in said
    assert "memest compare A B" in said


def test_where_a_default_was_read_is_explained(cli):
    words = ("estimate", "gpt2", "--batch", "1", "--seq-len", "64")
    old = cli(
        *words, "--software", "torch=2.4,transformers=4.44", "--explain", "--dtype", "float16"
    )

    lines = {line.split()[0]: line for line in old.stdout.splitlines() if line.startswith("  ")}
    assert "TrainingArguments.optim of transformers 4.32.1" in lines["optim"]
    assert "gradient_checkpointing_enable" in lines["use_reentrant"]
    assert "--dtype" in lines["dtype"]


def test_what_is_understood_is_shown_without_an_estimate(place, capsys):
    assert run(["read", "args.yaml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    values = {row["option"]: (row["value"], row["origin"]) for row in document["values"]}
    assert values["batch"] == (4, "args.yaml:per_device_train_batch_size")
    assert document["command"].startswith("memest estimate ./tiny --batch 4")
    assert "teacher" in " ".join(document["unpriced"])
    assert "a second model in memory" in document["unpriced"][0]
    assert document["command"].endswith("--unpriced args.yaml:teacher_model_name_or_path")
    assert run(["read", "gpt2"]) == 2


FILES = sorted(
    str(path.relative_to(RUN_CONFIGURATIONS))
    for path in RUN_CONFIGURATIONS.rglob("*")
    if path.is_file() and path.name != "adapter_config.json"
)


@pytest.mark.parametrize("name", FILES)
def test_the_same_question_can_be_asked(monkeypatch, capsys, name):
    """What ``memest read`` prints leads back to the setup that was read."""
    folder = (RUN_CONFIGURATIONS / name).parent
    monkeypatch.chdir(folder if "unseen" in name else RUN_CONFIGURATIONS)
    name = name.removeprefix("unseen/")
    try:
        read = memest.read_config(name, model="gpt2").with_model(None, {})
    except memest.ConfigError:
        pytest.skip("no configuration by itself")
    shown = document(capsys, "read", "gpt2", "--config", name)
    asked = []
    for place in ("argv", "estimate"):
        monkeypatch.setattr(
            f"memest.cli.{place}.run_estimate", lambda *a, **kw: asked.append((*a, kw)) or 0
        )
    assert run(shlex.split(shown["command"])[1:]) == 0, capsys.readouterr().err
    _, options, _, more = asked[0]
    setup = more["run"].setup if more.get("run") else setup_from_options(**options)
    # what leaves the verdict open goes by its keys: as many words, and shorter ones
    for name in ("unpriced", "overpriced"):
        words = getattr(setup, name)
        assert bool(words) == bool(getattr(read.setup, name))
        assert all(any(word in text for text in getattr(read.setup, name)) for word in words)
    assert replace(setup, unpriced=(), overpriced=()) == replace(
        read.setup, unpriced=(), overpriced=()
    )


def test_what_a_command_varies_is_no_longer_open(place):
    """An axis names it, point by point: neither a note nor an open verdict is left of it."""
    (place / "args.yaml").write_text(f"{ARGS}fsdp: full_shard\n", encoding="utf-8")
    typed = {"fsdp": "full_shard", "bf16": True}
    for models, options in ((["gpt2"], typed), (["args.yaml"], {})):
        asked = read_question(models, options)
        assert any("number of GPUs" in note for note in asked.run.notes)
        swept = read_question(models, options, axes=["num-gpus=2,4,8"])
        assert not any("number of GPUs" in note for note in swept.run.notes)
        words = str(swept.options.get("unpriced")), str(swept.options.get("overpriced"))
        assert not any("number of GPUs" in each for each in words)


PICKS = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def pick(logits, labels):
    return logits.argmax(-1)

Trainer(
    AutoModelForCausalLM.from_pretrained("gpt2"), TrainingArguments("out", eval_strategy="epoch"),
    compute_metrics=print, preprocess_logits_for_metrics=pick,
).train()
"""


def test_what_is_left_of_it_is_open_on_its_own_side(place):
    """Whole predictions are the most that is kept: varied, no longer more, and still less."""
    (place / "train.py").write_text(PICKS, encoding="utf-8")
    told = {"seq_len": 64}
    asked = read_question(["train.py"], told)
    assert (bool(asked.options.get("unpriced")), "overpriced" in asked.options) == (True, False)
    swept = read_question(["train.py"], told, axes=["eval-samples=16,200"])
    assert "unpriced" not in swept.options
    assert "whole predictions are priced" in str(swept.options["overpriced"])


@pytest.mark.slow
def test_stages_lays_beside_each_other_what_a_file_chose(tmp_path, capsys):
    """What the file says of sharding is one row of the table; what is typed is refused."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "model_name_or_path: prajjwal1/bert-tiny\nper_device_train_batch_size: 2\nbf16: true\n"
        "deepspeed: {zero_optimization: {stage: 3}}\n"
    )
    words = ["stages", str(file), "--num-gpus", "2", "--seq-len", "32"]
    assert run(words) == 0
    assert "ZeRO-2" in capsys.readouterr().out
    assert run([*words, "--zero", "2"]) == 2
    assert "that memest stages varies" in capsys.readouterr().err
