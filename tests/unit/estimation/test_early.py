"""What options, a config.json and packages tell is refused before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from functools import cache

import pytest

import memest
from memest.catalog.libraries import library_need
from memest.catalog.models import catalogue
from memest.config.attention import stored_dtype
from memest.config.compatibility import check_stored
from memest.config.installed import release
from memest.config.kinds import Task
from memest.config.options import setup_from_options
from memest.config.packages import Need, pinned
from memest.config.positions import RawConfig, check_lengths, max_positions, max_targets
from memest.config.setup import Setup
from memest.errors import ConfigError, MissingDependencyError
from memest.events import Weight
from memest.sharding.fsdp_units import stored_dtype as shard_dtype
from support.paths import ROOT

TWO = ("--num-gpus", "2")
FRESH = "gpt2?n_layer=3"
"""No profile of it is there, so it would be built."""
REFUSED = {
    "a length": (
        ["gpt2", "--seq-len", "2000"], 2,
        ("--seq-len 2000 is longer than the 1024 positions of this model. Use --seq-len 1024 or "
        "less."),
    ),
    "a length of a large model": (
        ["facebook/opt-66b", "--seq-len", "4000", "--bf16"], 2,
        ("--seq-len 4000 is longer than the 2048 positions of this model. Use --seq-len 2048 or "
        "less."),
    ),
    "a length, where positions begin behind the padding": (
        ["roberta-base", "--seq-len", "514"], 2,
        "--seq-len 514 is longer than the 512 positions of this model. Use --seq-len 512 or less.",
    ),
    "a length beside virtual tokens": (
        ["gpt2", "--seq-len", "1020", "--peft", "prompt_tuning", "--num-virtual-tokens", "20"], 2,
        ("--seq-len 1020 is longer than the 1004 positions of this model beside 20 virtual tokens. "
        "Use --seq-len 1004 or less."),
    ),
    "a target": (
        ["facebook/bart-base", "--target-len", "2000"], 2,
        ("--target-len 2000 is longer than the 1024 target positions of this model. Use "
        "--target-len 1024 or less."),
    ),
    "a model": (
        ["no-such-model-at-all"], 5, "'no-such-model-at-all' is neither a file nor in memest's",
    ),
    "a card": (["gpt2", "--gpu", "no-such-card"], 5, "no GPU is called 'no-such-card'."),
    "options": (
        ["gpt2", "--bf16", "--fp16"], 2,
        "--fp16 and --bf16 exclude each other: autocast has one dtype. Drop one of them.",
    ),
    "gradients that are not scaled": (
        ["Qwen/Qwen2.5-0.5B", "--fp16"], 2,
        "--fp16 with bfloat16 weights that train stops at the first update",
    ),
    "a checkpoint in half precision": (
        ["openai/whisper-large-v3", "--fp16"], 2,
        ("--fp16 with float16 weights cannot train: openai/whisper-large-v3 is stored in float16, "
        "from_pretrained of transformers 5 loads weights in the dtype of the checkpoint where none "
        "is named, and the gradient scaler refuses fp16 gradients. Use --dtype float32 (in a "
        "script dtype=torch.float32"),
    ),
    "a kernel that a card has not": (
        ["gpt2", "--fp16", "--attn-implementation", "flash_attention_2", "--gpu", "v100"], 2,
        ("Tesla V100-SXM2-16GB: --attn-implementation flash_attention_2 needs a GPU of compute "
        "capability 8.0 or newer, and this one has 7.0"),
    ),
    "heads": (
        ["meta-llama/Llama-3.1-8B", "--tp", "3", "--num-gpus", "3"], 2,
        ("--tp 3 does not divide the 32 heads of this model (num_attention_heads). Legal: 1, 2, 4, "
        "8, 16, 32."),
    ),
    "a model without a plan to share it": (
        ["bert-base-uncased", "--tp", "2", *TWO], 2,
        ("--tp cannot shard bert-base-uncased: transformers has no plan for it (base_model_tp_plan "
        "of its configuration), as it has for decoders such as llama"),
    ),
    "adapters in modules that peft does not choose": (
        ["Qwen/Qwen2.5-VL-7B-Instruct", "--lora-r", "16"], 2,
        (f"--peft lora: peft {release('peft')} has no modules of its own choice for models of type "
        "qwen2_5_vl: name them with --lora-target-modules, or add --lora-target-modules all-linear "
        "(all but its head). Linear layers in its source are called "),
    ),
    "a method that has no images": (
        ["Qwen/Qwen2.5-VL-7B-Instruct", "--method", "grpo"], 2,
        ("--method grpo and a model of images and text exclude each other: TRL trains some, and of "
        "its steps the tokens alone are modelled"),
    ),
    "layers": (
        ["meta-llama/Llama-3.2-1B", "--pp", "32", "--num-gpus", "32"], 2,
        ("--pp 32 makes 32 stages, and the model has 16 layers: each stage needs one. Take --pp 16 "
        "or less."),
    ),
    "stages of another task": (
        ["bert-base-uncased", "--task", "masked-lm", "--pp", "2", *TWO], 2,
        ("--pp is priced for language models alone, and --task is masked-lm: stages pass on hidden "
        "states, and the last one has the labels of the next words."),
    ),
    "generating in stages": (
        ["gpt2", "--pp", "2", "--generate", "8", *TWO], 2,
        ("--generate and --pp 2 exclude each other: generate calls a whole model, of which a GPU "
        "has stages here, and torch's schedules run micro-batches of one shape without caches. "
        "Leave one of them out."),
    ),
    "a kernel of half precision": (
        ["gpt2", "--attn-implementation", "flash_attention_2"], 2,
        ("--attn-implementation flash_attention_2 needs queries in fp16 or bf16, and these weights "
        "are float32 without autocast. Add --bf16 or --fp16 (autocast), or --dtype bfloat16."),
    ),
    "a release to compile for": (
        [FRESH, "--torch-compile", "--software", "torch=2.4"], 2,
        ("--software torch=2.4 and --torch-compile exclude each other here: the graphs are those "
        "of the installed torch "),
    ),
    "an optimizer that a release lacks": (
        ["gpt2", "--optim", "muon", "--software", "torch=2.8"], 2,
        "--optim muon: torch.optim.Muon is there since torch 2.9, and 2.8 is asked for.",
    ),
    "hooks that a release lacks": (
        ["gpt2", "--optim", "sgd", "--optim-in-backward", "--software", "torch=2.0"], 2,
        "--optim sgd in backward needs hooks that torch has since 2.1, and 2.0 is asked for.",
    ),
    "an argument of an optimizer": (
        ["gpt2", "--optim", "sgd", "--optim-args", "momentum=much"], 2,
        "--optim-args 'momentum=much': momentum is 'much', which is not a number.",
    ),
    "a rank of an optimizer": (
        ["gpt2", "--optim", "galore_adamw", "--optim-target-modules", "all-linear",
         "--optim-args", "rank=0"], 2,
        "--optim-args 'rank=0': rank is '0', and must be a whole number from 1 on.",
    ),
    "arguments of no factory": (
        [FRESH, "--model-arg", "depth=2"], 2,
        (f"--model-arg depth: {FRESH} is built from its configuration: write MODEL?name=value to "
        "change that. Arguments are for package.module:factory."),
    ),
    "an evaluation of one's own step": (
        ["module:make", "--step", "module:step", "--input", "x:float32[B,3]", "--eval-batch", "4"],
        2, "An evaluation (--eval-batch, --with eval) has no --step: leave one of them out.",
    ),
    "a compiled step of one's own": (
        ["module:make", "--step", "module:step", "--input", "x:float32[B,3]", "--torch-compile"], 2,
        ("--torch-compile compiles the model that a loop calls, and a step of one's own calls what "
        "it likes: leave --torch-compile out, or give inputs and a loss."),
    ),
}  # fmt: skip
"""By what is wrong: the words, the exit code, and what is said behind ``memest: ``."""
ABSENT = {
    "torch": (
        [FRESH],
        ("Tracing a model needs torch and transformers: pip install 'memest-gpu[torch]'. No run of "
         f"{FRESH} comes with memest."),
    ),
    "transformers": (
        [FRESH],
        "Tracing a model by name needs torch and transformers: pip install 'memest-gpu[torch]'.",
    ),
    "peft": (
        [FRESH, "--lora-r", "7"],
        ("Adapters (--lora-r, --peft) are built by peft, which is not installed: pip install "
        "'memest-gpu[peft]'."),
    ),
    "bitsandbytes": (
        [FRESH, "--load-in-4bit", "--lora-r", "7"],
        ("Quantised bases (--load-in-4bit, --load-in-8bit) are built by bitsandbytes, which is not "
        "installed: pip install 'memest-gpu[peft]'."),
    ),
    "liger_kernel": (
        [FRESH, "--use-liger-kernel"],
        ("--use-liger-kernel is priced by tracing liger-kernel, which is not installed: pip "
        "install --no-deps liger-kernel"),
    ),
    "cut_cross_entropy": (
        [FRESH, "--fused-loss", "cce"],
        ("--fused-loss cce is priced by tracing cut-cross-entropy, which is not installed: pip "
        "install --no-deps cut-cross-entropy"),
    ),
    "schedulefree": (
        [FRESH, "--optim", "schedule_free_adamw"],
        ("--optim schedule_free_adamw is priced by tracing schedulefree, which is not installed: "
        "pip install schedulefree"),
    ),
    "lomo_optim": (
        [FRESH, "--optim", "lomo"],
        ("--optim lomo is priced by tracing lomo-optim, which is not installed: pip install "
        "lomo-optim"),
    ),
}  # fmt: skip
"""By package that is not installed: the words, and what is said."""


@cache
def _answers():
    """What is said to all of them, by one process."""
    questions = [{"words": ["estimate", *words], "absent": []} for words, _, _ in REFUSED.values()]
    questions += [
        {"words": ["estimate", *words], "absent": [name]} for name, (words, _) in ABSENT.items()
    ]
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "support" / "guarded.py"], text=True, check=False,
        input="".join(f"{json.dumps(question)}\n" for question in questions),
        capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip((*REFUSED, *ABSENT), answers, strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_that_needs_no_torch(name):
    _, code, words = REFUSED[name]
    answer = _answers()[name]
    assert answer["said"].startswith(f"memest: {words}")
    assert answer["exit"] == code


@pytest.mark.parametrize("name", ABSENT)
def test_a_package_that_is_not_installed(name):
    answer = _answers()[name]
    words = pinned(ABSENT[name][1])  # to type it keeps what is installed
    assert answer["said"].strip() == f"memest: {words}"
    assert answer["exit"] == 6


@pytest.mark.parametrize(
    ("installed", "index", "kept"),
    [
        (
            {"torch": "2.13.0", "transformers": "5.23.0"},
            "",
            " 'torch==2.13.0' 'transformers==5.23.0'",
        ),
        (
            {"torch": "2.13.0+cpu"},
            " --extra-index-url https://download.pytorch.org/whl/cpu",
            " 'torch==2.13.0'",
        ),
        ({"torch": "2.13.0+our.own"}, "", " 'torch==2.13.0'"),
        ({"torch": "2.10.1+cpu"}, "", ""),  # the extra asks for another
        ({}, "", ""),
    ],
    ids=str,
)
def test_what_is_typed_to_install_keeps_the_torch_that_is_there(
    monkeypatch, installed, index, kept
):
    monkeypatch.setattr("memest.config.packages.full_release", installed.get)
    monkeypatch.setattr(
        "memest.config.packages.release", lambda name: installed[name].partition("+")[0]
    )
    monkeypatch.setattr(
        "memest.config.packages.installed_version",
        lambda name: tuple(map(int, installed[name].split(".")[:2])) if name in installed else None,
    )
    monkeypatch.setattr("memest.config.packages.is_there", lambda _: False)
    with pytest.raises(MissingDependencyError) as caught:
        library_need("torchvision").check()
    assert str(caught.value).endswith(f"pip install 'memest-gpu[vision]'{index}{kept}.")
    assert pinned("pip install --no-deps liger-kernel") == "pip install --no-deps liger-kernel"


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({}, True),
        ({"num_gpus": 2}, True),
        ({"loop": "accelerate"}, True),
        ({"loop": "plain"}, False),  # scales nothing
        ({"optim": "none"}, False),
        ({"num_gpus": 2, "fsdp": "full_shard"}, False),  # shards are float32
        ({"num_gpus": 2, "zero": 2}, False),
        ({"dtype": "float32"}, False),
        ({"software": "transformers=4.50"}, False),  # loads float32
    ],
    ids=str,
)
def test_who_meets_gradients_of_a_half_checkpoint(options, refused):
    """The scaler of whole models alone, where no dtype is named."""
    setup = setup_from_options(precision="fp16", **options)
    said = pytest.raises(ConfigError, match="is stored in float16")
    with said if refused else nullcontext():
        check_stored(setup, "float16", "a/model")
    check_stored(setup, "float32", "a/model")


@pytest.mark.parametrize("part", ["text_config", "vision_config", None])
def test_a_half_checkpoint_of_several_parts_is_known_by_its_parts(part):
    named = {"dtype": "float16"}
    config = {"model_type": "qwen3_vl", **(named if part is None else {part: named})}
    assert stored_dtype(config) == "float16"
    assert stored_dtype({"model_type": "qwen3_vl", "text_config": {}}) == ""


@pytest.mark.parametrize(
    ("options", "trains"),
    [
        ({"fsdp": "full_shard"}, True),  # accelerate's fsdp2_prepare_model upcasts
        ({"fsdp": "full_shard", "fsdp_version": 1}, True),  # and Accelerator.prepare_model
        ({"zero": 2}, True),  # a scaler and float32 copies of its own
        ({}, False),
        ({"fsdp": "full_shard", "tp": 2, "num_gpus": 4}, False),  # sharded by transformers
        ({"fsdp": "full_shard", "qlora": True, "autocast_adapter_dtype": False}, False),
    ],
    ids=str,
)
def test_half_weights_train_beside_fp16_where_what_trains_is_upcast(options, trains):
    """``_unscale_grads_`` of torch's scaler refuses fp16 gradients; here they are float32."""
    half = {"num_gpus": 2, **options, "dtype": "float16", "precision": "fp16"}
    said = nullcontext() if trains else pytest.raises(ConfigError, match="refuses fp16 gradients")
    with said:
        setup = setup_from_options(**half)
        in_full = setup_from_options(**{**half, "dtype": "float32"})
        weight = Weight(
            name="w", shape=(4, 4), stride=(4, 1), dtype="float16", trains=True, decays=True,
            has_grad=True,
        )  # fmt: skip
        assert shard_dtype(weight, setup) == shard_dtype(weight, in_full) == "float32"


def test_a_refusal_names_the_line_that_loads_the_model(tmp_path):
    """What is known of the model alone is refused with the places of the file that it is of."""
    script = tmp_path / "train.py"
    script.write_text(
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        "model = AutoModelForCausalLM.from_pretrained('facebook/opt-125m')\n"
        "args = TrainingArguments('out', fp16=True)\n"
        "Trainer(model, args, train_dataset=data).train()\n"
    )
    with pytest.raises(ConfigError, match="opt-125m is stored in float16") as caught:
        memest.estimate(memest.read_config(script))
    assert "(facebook/opt-125m is loaded by train.py:2 " in str(caught.value)
    assert "--fp16 is train.py:3 fp16.)" in str(caught.value)


def test_a_package_that_is_too_old(monkeypatch):
    monkeypatch.setattr("memest.config.packages.is_there", lambda _: True)
    monkeypatch.setattr("memest.config.packages.installed_version", lambda _: (0, 49))
    Need("bitsandbytes", "why").check()
    Need("bitsandbytes", "why", since=(0, 49)).check()
    with pytest.raises(MissingDependencyError, match=r"bitsandbytes 0\.49 is older .*>=0\.50'"):
        Need("bitsandbytes", "why", since=(0, 50)).check()


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"model_type": "mistral", "rope_theta": 1e4}, "MODEL?max_position_embeddings=65 in"),
        ({"model_type": "llama"}, "MODEL?max_position_embeddings=65 in"),
        ({"model_type": "gptj", "rotary_dim": 4, "n_positions": 64}, "MODEL?n_positions=65 in"),
        ({"model_type": "bert"}, ""),  # a table of its checkpoint ends there
    ],
)
def test_positions_that_are_angles_may_be_asked_beyond(entries, told):
    positions = {} if "n_positions" in entries else {"max_position_embeddings": 64}
    values = {"vocab_size": 100, **positions, **entries}
    with pytest.raises(ConfigError, match="Use --seq-len 64 or less") as caught:
        check_lengths(values, "AutoModelForCausalLM", Setup(seq_len=65))
    assert told in str(caught.value) if told else "MODEL?" not in str(caught.value)


def test_what_is_told_of_positions_is_legal():
    """The length that was refused is answered by what the refusal says to type."""
    small = "Qwen/Qwen2.5-0.5B?num_hidden_layers=1&max_position_embeddings=64"
    with pytest.raises(ConfigError, match=r"MODEL\?max_position_embeddings=65 "):
        memest.estimate(small, seq_len=65, batch=1)
    longer = small.replace("=64", "=65")
    assert memest.estimate(longer, seq_len=65, batch=1, max_batch=False).setup.seq_len == 65


def test_what_a_file_does_not_tell_is_left_to_the_model():
    bert = {"model_type": "bert", "vocab_size": 100, "max_position_embeddings": 64}
    head = "AutoModelForMaskedLM"
    long = Setup(seq_len=65)
    with pytest.raises(ConfigError, match="the 64 positions"):
        check_lengths(bert, head, long)
    check_lengths(bert, head, Setup(seq_len=64))
    many = {**bert, "max_position_embeddings": 1_048_576}
    with pytest.raises(ConfigError, match=r"4000000 is longer than the 1048576 .* 1048576 or less"):
        check_lengths(many, head, Setup(seq_len=4_000_000))
    check_lengths({**bert, "model_type": "t5"}, head, long)  # relative positions
    check_lengths({"vocab_size": 100, "max_position_embeddings": 64}, head, long)
    check_lengths({**bert, "vision_config": {}}, head, long)
    check_lengths(bert, "AutoModelForSpeechSeq2Seq", long)
    check_lengths(bert, head, Setup(seq_len=65, task=Task.IMAGE_CLASSIFICATION))


@pytest.mark.slow
def test_files_tell_what_the_configurations_of_transformers_do():
    """No model of the catalogue takes a length that its file would refuse."""
    transformers = pytest.importorskip("transformers")
    classes = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    told = 0
    for entry in catalogue():
        values = {k: v for k, v in entry.config().items() if k != "quantization_config"}
        raw = RawConfig(values)
        if values["model_type"] not in classes or not raw.reads_text(entry.auto_class):
            continue
        config = classes[values["model_type"]].from_dict(dict(values))
        assert max_positions(raw) in (None, max_positions(config)), entry.id
        assert max_targets(raw) in (None, max_targets(config)), entry.id
        told += max_positions(raw) is not None
    assert told > 300
