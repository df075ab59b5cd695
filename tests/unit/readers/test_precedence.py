"""Who has the last word, and what contradicts, against the libraries' own objects."""

import json

import pytest

import memest
from memest.config.deepspeed import ON_SAVE
from memest.errors import ConfigError


def deepspeed_check(document):
    """The Trainer's own check of a configuration, which asks for DeepSpeed only to be installed."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    class Check(HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):
        def __init__(self):
            HfDeepSpeedConfig.__init__(self, document)
            self._dtype = None
            self.mismatches = []

    return Check()


def origin(run, option):
    return next(each.origin for each in run.values if each.option == option)


def test_flag_command_file_default(examples):
    command = "trl sft --config sft.yaml --per_device_train_batch_size 3"
    assert origin(memest.read_config("sft.yaml"), "batch") == "sft.yaml:per_device_train_batch_size"
    run = memest.read_command(command)
    assert (run.setup.batch, origin(run, "batch")) == (
        3, "command: --per_device_train_batch_size",
    )  # fmt: skip
    assert origin(run, "checkpointing") == "default of TRL"
    run = run.with_options(batch=5, checkpointing=False)
    assert (run.setup.batch, origin(run, "batch")) == (5, "--batch")
    assert run.setup.checkpointing == "none"
    assert run.with_options().setup == run.setup


def test_what_was_named_stays_until_it_is_named_again(examples):
    run = memest.read_config("training_args.json", model="gpt2", batch=3, fp16=True)
    later = run.with_options(seq_len=64).with_options(bf16=True)
    assert (later.model, later.setup.batch, later.setup.seq_len) == ("gpt2", 3, 64)
    assert later.setup.precision == "bf16"
    assert later.with_options("bert-base-uncased", batch=5).model == "bert-base-uncased"
    assert later.with_options(per_device_train_batch_size=5).setup.batch == 5


def test_every_field_of_real_training_arguments_has_a_place(tmp_path):
    """The Trainer's own JSON, with all of its fields: what matters is what the object says."""
    from transformers import Seq2SeqTrainingArguments

    args = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=3, gradient_accumulation_steps=5,
        bf16=True, optim="adafactor", max_grad_norm=0.5, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False}, eval_strategy="epoch",
        per_device_eval_batch_size=11, weight_decay=0.1, use_cpu=True,
    )  # fmt: skip
    file = tmp_path / "training_args.json"
    file.write_text(args.to_json_string(), encoding="utf-8")

    run = memest.read_config(file)

    setup = run.setup
    assert (setup.batch, setup.grad_accum, setup.max_grad_norm) == (3, 5, 0.5)
    assert (setup.precision, setup.optim, setup.weight_decay) == ("bf16", "adafactor", 0.1)
    assert (setup.checkpointing, setup.use_reentrant, setup.eval_batch) == ("full", False, 11)
    unknown = [r.key for r in run.ignored if "does not know" in r.why]
    assert unknown == []


def test_defaults_are_those_of_the_real_objects(tmp_path):
    from transformers import TrainingArguments

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    file = tmp_path / "a.json"
    file.write_text('{"num_train_epochs": 1}', encoding="utf-8")
    run = memest.read_config(file)
    assert run.setup.batch == args.per_device_train_batch_size
    assert run.setup.grad_accum == args.gradient_accumulation_steps
    assert run.setup.max_grad_norm == args.max_grad_norm
    assert run.setup.optimizer == args.optim
    assert run.setup.precision == "fp32"
    assert (args.bf16, args.fp16) == (False, False)


@pytest.mark.parametrize("name", ["fsdp", "deepspeed", "ddp"])
def test_accelerate_takes_the_examples(examples, name):
    """The examples are files that accelerate itself loads, and it means the same by them."""
    from accelerate.commands.config.config_args import load_config_from_file

    file = f"accelerate_{name}.yaml"
    theirs = load_config_from_file(file)
    run = memest.read_config(file)
    assert run.setup.distributed.num_gpus == theirs.num_processes
    assert run.setup.precision == theirs.mixed_precision
    strategy = {"FSDP": "fsdp", "DEEPSPEED": "zero", "MULTI_GPU": "ddp"}
    assert run.setup.distributed.strategy == strategy[theirs.distributed_type.value]


@pytest.mark.parametrize(
    ("args", "config"),
    [
        ({"per_device_train_batch_size": 4}, {"train_micro_batch_size_per_gpu": 2}),
        ({"num_train_epochs": 1}, {"train_micro_batch_size_per_gpu": 2}),
        ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}),
        ({"max_grad_norm": 1.0}, {"gradient_clipping": 0.3}),
        ({"bf16": False, "num_train_epochs": 1}, {"bf16": {"enabled": True}}),
        ({"per_device_train_batch_size": 4}, {"train_micro_batch_size_per_gpu": 4}),
        ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": "auto"}),
        ({"bf16": True, "num_train_epochs": 1}, {"bf16": {"enabled": True}}),
    ],
)
def test_deepspeed_must_agree_as_for_the_trainer(tmp_path, args, config):
    """We stop where the Trainer's own check finds a mismatch, and nowhere else."""
    from transformers import TrainingArguments

    theirs = deepspeed_check({"zero_optimization": {"stage": 2}, **config})
    real = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True,
        **{"num_train_epochs": 1, **{k: v for k, v in args.items() if k != "bf16"}},
    )  # fmt: skip
    real.bf16 = bool(args.get("bf16"))
    theirs.trainer_config_process(real)
    files = tmp_path / "args.json", tmp_path / "ds.json"
    files[0].write_text(json.dumps({"per_device_eval_batch_size": 8, **args}), encoding="utf-8")
    files[1].write_text(json.dumps({"zero_optimization": {"stage": 2}, **config}), encoding="utf-8")
    if theirs.mismatches:
        with pytest.raises(ConfigError, match="The Trainer stops") as error:
            memest.read_config(*files)
        assert "ds.json:" in str(error.value)
        option = {"train_micro_batch_size_per_gpu": "batch", "bf16": "bf16",
                  "gradient_accumulation_steps": "grad_accum",
                  "gradient_clipping": "max_grad_norm"}[next(iter(config))]  # fmt: skip
        value = {"bf16": True, "max_grad_norm": 1.0}.get(option, 4)
        assert memest.read_config(*files, **{option: value}).setup is not None
    else:
        assert memest.read_config(*files).setup.distributed.zero == 2


def test_training_arguments_come_before_accelerate(write):
    """bf16 of the arguments wins; without it accelerate's setting is left alone."""
    write("acc.yaml", "distributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 2\n")
    on = write("on.yaml", "per_device_train_batch_size: 2\nbf16: true\n")
    off = write("off.yaml", "per_device_train_batch_size: 2\nbf16: false\n")
    for files in (("acc.yaml", on), (on, "acc.yaml")):
        assert memest.read_config(*files).setup.precision == "bf16"
    run = memest.read_config(off, "acc.yaml")
    assert (run.setup.precision, origin(run, "precision")) == ("fp16", "acc.yaml:mixed_precision")
    # TRL switches bf16 on unless it is told not to
    trl = write("trl.yaml", "per_device_train_batch_size: 2\nmax_length: 64\n")
    assert origin(memest.read_config(trl, "acc.yaml"), "precision") == "default of TRL"


def test_two_files_of_a_kind_contradict(write):
    one = write("one.yaml", "per_device_train_batch_size: 2\n")
    two = write("two.yaml", "per_device_train_batch_size: 4\n")
    with pytest.raises(ConfigError, match=r"one.yaml:per_device.* 2, and two.yaml:.* 4"):
        memest.read_config(one, two)
    assert memest.read_config(one, two, batch=8).setup.batch == 8


def test_what_has_nothing_to_act_on_is_said_to(write):
    name = write("a.yaml", "per_device_train_batch_size: 2\nddp_bucket_cap_mb: 50\n")
    run = memest.read_config(name)
    assert [r.why for r in run.ignored if "ddp" in r.key] == ["one GPU has no DDP"]
    assert memest.read_config(name, num_gpus=2).setup.distributed.ddp_bucket_cap_mb == 50
    with pytest.raises(ConfigError, match="no effect here"):
        memest.read_config(name, ddp_bucket_cap_mb=20)


@pytest.mark.parametrize("key", [ON_SAVE, "gather_16bit_weights_on_model_save"])
@pytest.mark.parametrize(
    ("stage", "flags", "why"),
    [
        (2, {}, "stage 3 alone gathers weights to save, and this is stage 2"),
        (2, {"with_": "save"}, "stage 3 alone gathers weights to save, and this is stage 2"),
        (3, {}, "no checkpoint is asked about (--with save)"),
        (3, {"with_": "save"}, None),
    ],
)
def test_gathering_to_save_is_a_value_or_ignored_and_never_both(write, key, stage, flags, why):
    document = {"zero_optimization": {"stage": stage, key: True}}
    path = write("ds.json", json.dumps({**document, "train_micro_batch_size_per_gpu": 1}))
    run = memest.read_config(path, model="gpt2", **flags)

    reasons = [remark.why for remark in run.ignored if remark.key.endswith(key)]
    assert reasons == ([] if why is None else [why])
    assert (ON_SAVE in {each.option for each in run.values}) is (why is None)


def test_a_flag_takes_the_place_of_another_way_to_shard(examples):
    run = memest.read_config("accelerate_fsdp.yaml", zero=1)
    assert run.setup.distributed.strategy == "zero"
    run = memest.read_config("accelerate_deepspeed.yaml", fsdp="full_shard")
    assert run.setup.distributed.strategy == "fsdp"
    run = memest.read_config("axolotl_qlora.yaml", load_in_8bit=True)
    assert run.setup.quantization.format == "bnb-8bit"
    run = memest.read_config("training_args.json", fp16=True)
    assert (run.setup.precision, origin(run, "precision")) == ("fp16", "--fp16")


def test_a_wrong_value_is_blamed_on_its_key(write):
    for text, words in (
        ("per_device_train_batch_size: 0\n", "run.yaml:per_device_train_batch_size"),
        ("per_device_train_batch_size: [1]\n", "run.yaml:per_device_train_batch_size"),
        ("per_device_train_batch_size: 2\nbf16: perhaps\n", "run.yaml:bf16 'perhaps'"),
        ("per_device_train_batch_size: 2\noptim: adamw_x\n", "run.yaml:optim"),
        ("per_device_train_batch_size: 2\nbf16: true\nfp16: true\n", "exclude each other"),
        ("per_device_train_batch_size: 2\ndeepspeed: not-there.json\n", "run.yaml:deepspeed names"),
        ("per_device_train_batch_size: 2\nfsdp: sideways\n", "no way to shard"),
    ):
        name = write("run.yaml", text)
        with pytest.raises(ConfigError) as error:
            memest.read_config(name)
        assert words in str(error.value), text


def test_an_evaluation_that_is_not_priced_is_left_out_and_told(write):
    name = write("run.yaml", "per_device_train_batch_size: 2\neval_strategy: epoch\n")
    assert memest.read_config(name).setup.eval_batch == 8
    assert memest.read_config(name, num_gpus=2).setup.eval_batch == 8
    assert memest.read_config(name, num_gpus=2, tp=2).setup.eval_batch == 8
    run = memest.read_config(name, num_gpus=2, tp=2, ep=2)
    assert run.setup.eval_batch is None
    assert [r for r in run.not_modelled if r.why.startswith("not priced")]


def test_train_batch_size_of_deepspeed(write):
    zero = '"zero_optimization": {"stage": 1}, '
    name = write(
        "ds.json", f'{{{zero}"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}}'
    )
    assert memest.read_config(name, num_gpus=4).setup.grad_accum == 2
    args = write("args.yaml", "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n")
    assert memest.read_config(name, args, num_gpus=4).setup.grad_accum == 2
    acc = write("acc.yaml", "distributed_type: DEEPSPEED\nnum_processes: 8\n"
                "deepspeed_config: {deepspeed_config_file: ds.json}\n")  # fmt: skip
    with pytest.raises(ConfigError, match=r"4 x accumulation 2 x 8 GPUs are 64"):
        memest.read_config(args, acc)
