"""Files that are asked before a launch: each is understood, and the answer decides."""

from __future__ import annotations

import shutil

import pytest

import memest
from memest.cli.main import run
from support.paths import ROOT

yaml = pytest.importorskip("yaml")
pytest.importorskip("transformers")

EXAMPLES = ROOT / "examples"
LAUNCH = EXAMPLES / "launch"
READ = {
    "trainer.py": (
        "distilbert-base-uncased",
        {"task": "sequence-classification", "batch": 32, "seq_len": 256, "precision": "fp16",
         "padded": True, "loop": "trainer"},
    ),
    "accelerate_loop.py": (
        "bert-base-cased",
        {"task": "token-classification", "num_labels": 9, "batch": 32, "seq_len": 128,
         "precision": "fp16", "grad_accum": 2, "max_grad_norm": 1.0, "loop": "accelerate"},
    ),
    "lightning_module.py": (
        "bert-base-uncased",
        {"task": "sequence-classification", "batch": 16, "seq_len": 256, "precision": "fp16",
         "grad_accum": 2, "max_grad_norm": 1.0, "loop": "lightning"},
    ),
    "axolotl.yaml": (
        "meta-llama/Llama-3.1-8B",
        {"peft": "lora", "lora_r": 16, "load_in_4bit": True, "batch": 1, "grad_accum": 8,
         "seq_len": 2048, "optim": "paged_adamw_8bit", "checkpointing": "full"},
    ),
    "llama_factory.yaml": (
        "Qwen/Qwen3-8B",
        {"peft": "lora", "lora_r": 16, "batch": 2, "grad_accum": 8, "seq_len": 2048,
         "precision": "bf16", "checkpointing": "full"},
    ),
}  # fmt: skip
"""By file: the model, and options that it says."""
ANSWERS = [
    ("trainer.py", "t4", 0, "Fits: distilbert-base-uncased"),
    ("trainer.py", "t4 --batch 512", 4, "Does not fit"),
    ("accelerate_loop.py", "t4", 0, "Fits: bert-base-cased"),
    ("lightning_module.py", "t4", 0, "Fits: bert-base-uncased"),
    ("axolotl.yaml", "rtx-4090", 0, "Fits: meta-llama/Llama-3.1-8B"),
    ("llama_factory.yaml", "a100-80gb", 0, "Fits: Qwen/Qwen3-8B"),
    ("llama_factory.yaml", "rtx-3090", 4, "Does not fit"),
]


@pytest.mark.parametrize("name", READ)
def test_a_file_is_understood(name):
    model, options = READ[name]
    read = memest.read_config(LAUNCH / name)

    assert read.model == model
    assert options == {key: read.options.get(key) for key in options}
    assert not read.setup.unpriced


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gpu", "code", "words"), ANSWERS)
def test_its_answer_has_a_verdict_and_an_exit_code(name, gpu, code, words, capsys):
    if name.endswith(".yaml"):
        pytest.importorskip("peft")
    assert run(["fits", str(LAUNCH / name), "--gpu", *gpu.split()]) == code
    assert words in capsys.readouterr().out


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
SMALL = "gpt2?n_layer=2&vocab_size=1000"
TRAIN = f"train.py --model_name_or_path {SMALL} --per_device_train_batch_size 2 --max_length 64"


@needs_bash
@pytest.mark.slow("does not fit", "unknown")
@pytest.mark.parametrize(
    ("gpu", "words", "code", "launched", "said"),
    [
        ("t4", TRAIN, 0, True, ""),
        ("t4", TRAIN.replace("batch_size 2", "batch_size 100000"), 4, False, "not launched"),
        ("t5", TRAIN, 0, True, "cannot say"),
    ],
    ids=["fits", "does not fit", "unknown"],
)
def test_a_launch_waits_for_the_answer(bash, gpu, words, code, launched, said):
    bash.tool("torchrun", 'echo "launched $@"')
    script = str(LAUNCH / "launch.sh")
    done = bash(script, "torchrun", *words.split(), GPU=gpu)

    assert done.returncode == code, done.stderr
    assert (f"launched {words}" in done.stdout) is launched
    assert said in done.stderr


@needs_bash
@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "given", "said"),
    [
        ("printf '0\\n1\\n'", {}, "on each of 2 GPUs"),
        ("echo NVIDIA-SMI has failed; exit 9", {}, "--num-gpus says it"),
        ("printf '0\\n1\\n'", {"NUM_GPUS": "1"}, "13.44 GiB to spare"),
    ],
    ids=["counted", "a driver that fails", "named"],
)
def test_a_launch_on_all_gpus_counts_those_of_the_machine(bash, driver, given, said):
    pytest.importorskip("peft")
    bash.tool("axolotl", 'echo "launched $@"')
    bash.tool("nvidia-smi", driver)
    words = ("axolotl", "train", str(LAUNCH / "axolotl.yaml"))
    done = bash(str(LAUNCH / "launch.sh"), *words, GPU="rtx-4090", CUDA_VISIBLE_DEVICES="", **given)

    assert said in done.stdout, done.stderr
    assert "launched train" in done.stdout


@needs_bash
def test_a_launch_of_nothing_is_refused(bash):
    done = bash(str(LAUNCH / "launch.sh"))
    assert done.returncode == 2
    assert "usage" in done.stderr


# A commit


def config(folder, name, batch):
    file = folder / name
    text = {
        "model_name_or_path": "gpt2", "per_device_train_batch_size": batch, "max_seq_length": 512,
        "output_dir": "o",
    }  # fmt: skip
    file.write_text(yaml.safe_dump(text))
    return str(file)


@needs_bash
@pytest.mark.slow(but=("fits",))
@pytest.mark.parametrize(
    ("batches", "code"),
    [((8, 4), 0), ((8, 512, 4), 1), ((8, "many"), 1)],
    ids=["fits", "does not fit", "unread"],
)
def test_a_commit_is_held_by_what_does_not_fit(bash, batches, code):
    hook = str(EXAMPLES / "pre-commit/fits_each.sh")
    names = [config(bash.tmp_path, f"{n}.yaml", batch) for n, batch in enumerate(batches)]
    done = bash(hook, "t4", *names)

    assert done.returncode == code, done.stderr
    for name in names:  # whatever one says, all are asked
        assert f"{name}: " in done.stdout
    assert done.stdout.count("Fits: gpt2") == [type(x) is int and x < 10 for x in batches].count(
        True
    )


def test_the_hook_is_one_that_pre_commit_takes():
    (repo,) = yaml.safe_load((EXAMPLES / "pre-commit/pre-commit-config.yaml").read_text())["repos"]
    (hook,) = repo["hooks"]

    assert repo["repo"] == "local"
    assert {"id", "name", "language", "entry", "files"} <= hook.keys()
    assert hook["entry"].endswith("/fits_each.sh")
    from memest.catalog.gpus import find_gpu

    (gpu,) = hook["args"]
    assert find_gpu(gpu).name


# A pod


def manifests():
    text = (EXAMPLES / "kubernetes/job.yaml").read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_the_job_trains_what_was_asked_about_and_ends_for_good_where_it_does_not_fit():
    job = manifests()["Job"]["spec"]
    pod = job["template"]["spec"]
    (asks,) = pod["initContainers"]
    (trains,) = pod["containers"]

    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": asks["name"], "operator": "In", "values": [4]}
    assert pod["restartPolicy"] == "Never"
    path = next(each["value"] for each in asks["env"] if each["name"] == "RUN")
    assert path in trains["command"]
    assert asks["volumeMounts"] == trains["volumeMounts"]


@needs_bash
@pytest.mark.slow("fits", "does not fit")
@pytest.mark.parametrize(
    ("gpu", "code", "said"),
    [("a100-80gb", 0, "Fits"), ("t4", 4, "not started"), ("t5", 0, "cannot say (exit code 5)")],
    ids=["fits", "does not fit", "unknown"],
)
def test_the_first_container_stops_the_pod_by_its_exit_code(bash, gpu, code, said):
    pytest.importorskip("peft")
    found = manifests()
    asks = found["Job"]["spec"]["template"]["spec"]["initContainers"][0]
    (script,) = asks["args"]
    file = bash.tmp_path / "run.yaml"
    file.write_text(found["ConfigMap"]["data"]["run.yaml"])
    done = bash("-c", script, GPU=gpu, RUN=str(file))

    assert done.returncode == code, done.stderr
    assert said in done.stdout
