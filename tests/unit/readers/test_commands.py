"""Launch commands: what each launcher and program says, and that nothing of them is run."""

import shlex
import sys

import pytest

import memest
from memest.errors import ConfigError
from memest.readers.command_words import read_arguments, split_command, words_of


def read(command, **options):
    return memest.read_command(command, **options)


def value(run, option):
    return next(((v.value, v.origin) for v in run.values if v.option == option), None)


CASES = {
    "accelerate launch --config_file accelerate_ddp.yaml train.py --model_name_or_path gpt2 "
    "--bf16 True --per_device_train_batch_size 4 --block_size 256": {
        "model": ("gpt2", "command: --model_name_or_path"),
        "num_gpus": (8, "accelerate_ddp.yaml:num_processes"),
        "precision": ("bf16", "command: --bf16"),
        "seq_len": (256, "command: --block_size"),
        "batch": (4, "command: --per_device_train_batch_size"),
    },
    "accelerate launch --config_file accelerate_ddp.yaml --num_processes 2 --mixed_precision bf16 "
    "train.py --model_name_or_path gpt2": {
        "num_gpus": (2, "command: accelerate --num_processes"),
        "precision": ("bf16", "command: accelerate --mixed_precision"),
    },
    "accelerate launch --use_deepspeed --zero_stage 1 --num-processes=2 x.py --model_name gpt2": {
        "zero": (1, "command: accelerate --zero_stage"),
        "num_gpus": (2, "command: accelerate --num_processes"),
    },
    "accelerate launch --use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward false "
    "--num_processes 4 -m pkg.train --model_name gpt2": {
        "fsdp": ("shard_grad_op", "command: accelerate --fsdp_reshard_after_forward"),
        "num_gpus": (4, "command: accelerate --num_processes"),
    },
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True CUDA_VISIBLE_DEVICES=0,1 torchrun "
    "--nproc_per_node=gpu --nnodes 2 train.py --model_name_or_path gpt2 "
    "--no_gradient_checkpointing --fp16 --deepspeed ds_zero2.json": {
        "alloc_conf": ("expandable_segments:True", "command: PYTORCH_CUDA_ALLOC_CONF"),
        "num_gpus": (4, "command: torchrun CUDA_VISIBLE_DEVICES"),
        "checkpointing": ("none", "command: --gradient_checkpointing"),
        "precision": ("fp16", "command: --fp16"),
        "zero": (2, "ds_zero2.json:zero_optimization.stage"),
    },
    "deepspeed --include localhost:0,1,2,3 run_clm.py --model_name_or_path gpt2 --deepspeed "
    "ds_zero2.json --bf16": {
        "num_gpus": (4, "command: deepspeed --include"),
        "precision": ("bf16", "command: --bf16"),
    },
    "deepspeed --num_gpus 2 --num_nodes 2 cifar.py --deepspeed --deepspeed_config ds_zero2.json": {
        "num_gpus": (4, "command: deepspeed --num_gpus"),
        "zero": (2, "ds_zero2.json:zero_optimization.stage"),
        "loop": None,
    },
    "python3.11 -u -m torch.distributed.run --nproc-per-node 4 -m my.train --model_name_or_path "
    "gpt2 --gradient-checkpointing --lora_r 8 --lora_target_modules q_proj v_proj": {
        "num_gpus": (4, "command: torchrun --nproc_per_node"),
        "checkpointing": ("full", "command: --gradient_checkpointing"),
        "lora_r": (8, "command: --lora_r"),
        "lora_target_modules": (("q_proj", "v_proj"), "command: --lora_target_modules"),
    },
    "env A=1 nohup python examples/train.py training_args.json": {
        "batch": (4, "training_args.json:per_device_train_batch_size"),
    },
    "trl sft --config sft.yaml --lora-r 64 --num_processes 1 --no_packing": {
        "lora_r": (64, "command: --lora_r"),
        "num_gpus": (1, "command: accelerate --num_processes"),
        "seq_len": (2048, "sft.yaml:max_length"),
        "checkpointing": ("full", "default of TRL"),
    },
    "llamafactory-cli train llama_factory_lora.yaml per_device_train_batch_size=2 "
    "quantization_bit=8": {
        "batch": (2, "command: per_device_train_batch_size"),
        "load_in_8bit": (True, "command: quantization_bit"),
        "load_in_4bit": None,
        "alloc_conf": None,
    },
    "CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train llama_factory_full.yaml": {
        "num_gpus": (2, "command: torchrun CUDA_VISIBLE_DEVICES"),
        "alloc_conf": (
            "expandable_segments:True", "default of LLaMA-Factory (OPTIM_TORCH of its launcher)",
        ),
    },
    "axolotl train axolotl_qlora.yaml --micro_batch_size 1 --num-processes 2": {
        "batch": (1, "command: --micro_batch_size"),
        "num_gpus": (2, "command: accelerate --num_processes"),
        "alloc_conf": ("expandable_segments:True", "default of axolotl (its command line sets it)"),
    },
    "PYTORCH_ALLOC_CONF=max_split_size_mb:128 axolotl train axolotl_qlora.yaml": {
        "alloc_conf": ("max_split_size_mb:128", "command: PYTORCH_ALLOC_CONF"),
    },
    "tune run lora_finetune_single_device --config torchtune_lora.yaml batch_size=8 "
    "model.lora_rank=16 optimizer.fused=False": {
        "batch": (8, "command: batch_size"),
        "lora_r": (16, "command: model.lora_rank"),
        "alloc_conf": ("expandable_segments:True", "default of torchtune (importing it sets it)"),
        "optim": ("adamw_torch_foreach", "torchtune_lora.yaml:optimizer._component_"),
    },
    "tune run --nproc_per_node 4 full_finetune_distributed --config torchtune_full.yaml "
    "optimizer._component_=torch.optim.AdamW optimizer_in_bwd=False": {
        "num_gpus": (4, "command: torchrun --nproc_per_node"),
        "fsdp": ("full_shard", "recipe: distributed, FSDP2"),
        "optim": ("adamw_torch_foreach", "command: optimizer._component_"),
    },
    "NGPU=8 CONFIG_FILE=torchtitan_8b.toml ./run_train.sh --training.seq_len 4096": {
        "num_gpus": (8, "command: NGPU"),
        "seq_len": (4096, "command: --training.seq_len"),
        "alloc_conf": (
            "expandable_segments:True", "default of torchtitan (its run_train.sh sets it)",
        ),
    },
    "torchrun --nproc_per_node=2 train.py --job.config_file torchtitan_8b.toml "
    "--training.local_batch_size=4": {
        "num_gpus": (2, "command: torchrun --nproc_per_node"),
        "batch": (4, "command: --training.local_batch_size"),
        "alloc_conf": ("", "command: no run_train.sh, which sets PYTORCH_CUDA_ALLOC_CONF"),
    },
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True torchrun --nproc_per_node=2 -m "
    "torchtitan.train --job.config_file torchtitan_8b.toml": {
        "alloc_conf": ("expandable_segments:True", "command: PYTORCH_CUDA_ALLOC_CONF"),
    },
}  # fmt: skip


@pytest.mark.parametrize("command", CASES)
def test_a_command_is_read(examples, command):
    """As one text and as words: the same values from the same places."""
    run = read(command)
    for option, expected in CASES[command].items():
        assert value(run, option) == expected, option
    assert read(shlex.split(command)).values == run.values


def test_what_a_script_does_not_know_is_told(examples):
    run = read("python train.py --model_name_or_path gpt2 --bf16 --whatever 3 --lr=1e-3 stray")
    remarks = {r.key: r.why for r in run.ignored}
    assert remarks["command: --whatever"] == "memest does not know it"
    assert remarks["command: stray"] == "memest does not know it"
    assert "command: --lr" in remarks
    assert any(r.key == "command: train.py" for r in run.not_modelled)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("rm -rf x", "names no script"),
        ("", "names no script"),
        ("python -c 'print(1)'", "python -c"),
        ("accelerate launch", "given no script"),
        ("accelerate config", "launch starts a training"),
        ("llamafactory-cli chat a.yaml", "does not train"),
        ("axolotl train", "names no configuration"),
        ("tune run full_finetune_single_device --config llama3_1/8B_full", "tune cp llama3_1"),
        ("bash run.sh", "not on this machine"),
        ("torchrun --nproc_per_node=many train.py", "not a whole number"),
        ("torchrun --nproc_per_node=0 train.py", "out of range"),
        ("trl sft --config not-there.yaml", "is not there"),
        ("python train.py 'unclosed", "cannot be read"),
        ("torchrun --nproc_per_node ${N:-4} train.py", "not a whole number"),
        ("python prepare.py && python train.py --bf16", "Give the one that trains"),
        ("bash -c 'python train.py; python test.py'", "python test.py"),
        ("ssh node 'python train.py'", "names no script"),
        ("python train.py --model_name gpt2 --per_device_train_batch_size x", "x"),
    ],
)
def test_a_wrong_command_says_what_to_do(examples, command, words):
    with pytest.raises(ConfigError) as error:
        read(command)
    assert words in str(error.value)


def test_nothing_is_run(tmp_path, monkeypatch):
    """A script that would leave a mark, a config that would too: neither does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('mark', 'w')\nraise SystemExit\n", encoding="utf-8")
    (tmp_path / "conf.py").write_text(
        "import pathlib\npathlib.Path('mark').touch()\n\n\ndef f():\n"
        "    pathlib.Path('mark').touch()\n    return Trainer.Config(model_spec=m('8B'))\n",
        encoding="utf-8",
    )
    read("X=$(touch mark) python train.py --model_name_or_path gpt2 --bf16 --x '$(touch mark)'")
    assert memest.read_config("conf.py").model is None
    assert not (tmp_path / "mark").exists()


def test_dpo_is_priced_with_its_reference(examples):
    run = read("trl dpo --model_name_or_path gpt2")
    assert run.setup.method == "dpo"
    assert not any("trl dpo" in words for words in run.setup.unpriced)


def test_a_reference_of_trl_that_follows_the_model(examples):
    run = read("trl dpo --model_name_or_path gpt2 --sync_ref_model --ref_model_sync_steps 64")
    assert run.setup.sync_ref_model
    with pytest.raises(ConfigError, match="Drop --sync-ref-model"):
        read("trl grpo --model_name_or_path gpt2 --sync_ref_model true")


def test_dpo_with_a_reference_before_training_under_fsdp_is_bounded(examples):
    command = "trl dpo --model_name_or_path gpt2 --fsdp full_shard --num_processes 4"
    assert read(command).setup.method == "dpo"
    run = read(f"{command} --precompute_ref_log_probs")
    assert run.setup.method == "dpo"
    assert not run.setup.precompute_ref_log_probs
    assert any("reference" in r.why for r in run.not_modelled), [r.why for r in run.not_modelled]


def test_the_pieces_of_a_command():
    taken = split_command(words_of("A=1 srun -n 2 torchrun --standalone --nproc-per-node 2 a.py x"))
    assert taken.environment == {"A": "1"}
    assert taken.skipped_words == ("srun", "-n", "2")
    assert taken.launchers[0].values == {"standalone": True, "nproc_per_node": 2}
    assert (taken.program, taken.words) == ("a.py", ("x",))
    named, changes, loose = read_arguments(["--a", "-1", "--b", "1", "2", "--c=x=y", "-f", "d=e"])
    assert named == {"a": -1, "b": [1, 2], "c": "x=y", "f": True}
    assert (changes, loose) == ({"d": "e"}, [])


GPT2 = "train.py --model_name_or_path gpt2 --block_size 8"


@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        ("deepspeed --include localhost:0-3 TRAIN", 4),
        ("deepspeed --include worker-1:0,2-3@worker-2:0 TRAIN", 4),
        ("torchrun --nproc_per_node 2 --nnodes 3:4 TRAIN", 6),
        ("torchrun --nproc_per_node 2 -- TRAIN", 2),
        ("torchrun --nproc_per=3 TRAIN", 3),
        ("torchrun --nproc 4 --nn 2 TRAIN", 8),
        ("torchrun --stand --virtual-local-rank --nproc-per 2 TRAIN", 2),
        ("deepspeed --num_gpu 4 TRAIN", 4),
        ("deepspeed -i localhost:0,1 TRAIN", 2),
        ("export CUDA_VISIBLE_DEVICES=0,1; torchrun --nproc_per_node gpu TRAIN", 2),
        ("docker run --gpus all image bash -lc 'cd /x && torchrun --nproc_per_node 2 TRAIN'", 2),
        ("sbatch --nodes 1 --wrap 'torchrun --nproc_per_node 2 TRAIN'", 2),
        ("torchrun --nproc_per_node 2 TRAIN 2>&1 | tee train.py", 2),
        # an environment or a package that is called as a framework is not its command
        ("conda run -n axolotl torchrun --nproc_per_node 2 TRAIN", 2),
        ("uv run --with trl --with peft torchrun --nproc_per_node 2 TRAIN", 2),
    ],
)
def test_processes_are_counted(command, gpus):
    run = read(command.replace("TRAIN", GPT2))

    assert run.model == "gpt2"
    assert run.options["num_gpus"] == gpus


@pytest.mark.parametrize(
    ("command", "who"),
    [
        ("horovodrun -np 4 python TRAIN", "horovodrun"),
        ("/usr/bin/mpiexec.hydra -n 4 python TRAIN", "mpiexec"),
        ("fabric run TRAIN --devices 2", "fabric"),
        ("WORLD_SIZE=4 RANK=0 python TRAIN", "WORLD_SIZE"),
        ("deepspeed --hostfile hosts --num_gpus 4 TRAIN", "--hostfile"),
    ],
)
def test_processes_that_nothing_counts_are_asked_for(command, who):
    command = command.replace("TRAIN", GPT2)

    assert any(
        who in words and "--num-gpus says it" in words for words in read(command).setup.unpriced
    )
    assert not any(who in words for words in read(command, num_gpus=4).setup.unpriced)


@pytest.mark.parametrize("command", ["python -m", "torchrun --nproc_per_node 1 -m"])
@pytest.mark.parametrize(("file", "module"), [
    ("train.py", "train"), ("tool/sft.py", "tool.sft"), ("tool/__main__.py", "tool"),
])  # fmt: skip
def test_a_module_of_the_folder_is_the_script_that_it_is(
    file, module, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool").mkdir()
    (tmp_path / file).write_text(
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2')\n"
        "args = TrainingArguments('out', per_device_train_batch_size=3)\n"
        "Trainer(model=model, args=args).train()\n"
    )

    run = read(f"{command} {module}")

    assert (run.model, run.options["batch"]) == ("gpt2", 3)


def test_the_last_of_several_spellings_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import argparse\nfrom transformers import Trainer, TrainingArguments\n"
        "from transformers import AutoModelForCausalLM\np = argparse.ArgumentParser()\n"
        "p.add_argument('-b', '--bs', type=int, default=1)\na = p.parse_args()\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2')\n"
        "args = TrainingArguments('out', per_device_train_batch_size=a.bs)\n"
        "Trainer(model=model, args=args).train()\n"
    )

    for words in ("--bs 2 --bs 4", "--bs=2 --bs=4", "-b 2 --bs 4", "--bs 2 -b 4"):
        assert read(f"python train.py {words}").options["batch"] == 4


@pytest.mark.parametrize(
    ("start", "gpus"),
    [
        ("import torch.multiprocessing as mp\nmp.spawn(main, args=(), nprocs=4)", 4),
        ("N = 2\nfrom torch.multiprocessing import spawn\nspawn(main, (), N)", 2),
        ("from accelerate import notebook_launcher\nnotebook_launcher(main, num_processes=8)", 8),
        ("from accelerate import notebook_launcher\nnotebook_launcher(main)", None),
        ("import torch\ntorch.multiprocessing.spawn(main, nprocs=torch.cuda.device_count())", None),
        ("main()", 1),
    ],
)
def test_processes_that_a_script_starts_are_counted(tmp_path, monkeypatch, start, gpus):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        "def main(*given):\n    model = AutoModelForCausalLM.from_pretrained('gpt2')\n"
        f"    Trainer(model=model, args=TrainingArguments('out')).train()\n{start}\n"
    )
    run = read("python train.py", seq_len=8)

    assert run.options.get("num_gpus") == gpus
    asked = any("as many processes" in words for words in run.setup.unpriced)
    assert asked is (gpus is None)
    assert not read("python train.py", seq_len=8, num_gpus=2).setup.unpriced


def test_trl_knows_configurations_of_accelerate_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "site" / "trl" / "accelerate_configs"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("open('mark', 'w')\n")
    (folder / "zero2.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\nnum_processes: 8\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    run = read("trl sft --model_name_or_path gpt2 --accelerate_config zero2")

    assert (run.options["zero"], run.options["num_gpus"]) == (2, 8)
    assert not (tmp_path / "mark").exists()


def test_llama_factory_takes_the_gpus_of_the_machine(examples):
    command = "llamafactory-cli train llama_factory_full.yaml"
    assert any("--num-gpus says it" in each for each in read(command).setup.unpriced)
    alone = read(f"CUDA_VISIBLE_DEVICES=0 {command}")
    assert alone.options["num_gpus"] == 1
    assert not any("--num-gpus says it" in each for each in alone.setup.unpriced)


def test_what_accelerate_takes_from_the_environment_is_named(examples):
    run = read(f"ACCELERATE_USE_FSDP=true FSDP_VERSION=2 torchrun --nproc_per_node 4 {GPT2}")

    assert ["ACCELERATE_USE_FSDP" in run.setup.unpriced[0], len(run.setup.unpriced)] == [True, 2]
    run = read(f"export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; python {GPT2}")
    assert run.options["alloc_conf"] == "expandable_segments:True"
