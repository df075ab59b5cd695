"""Training scripts and notebooks: read from the syntax tree, and nothing of them runs."""

import json
import subprocess
import sys
import time

import pytest

import memest
from memest.errors import ConfigError
from support.paths import RUN_CONFIGURATIONS

SCRIPTS = RUN_CONFIGURATIONS / "scripts"

EXAMPLES = {
    "plain_loop.py": (
        {"task": "sequence-classification", "num_labels": 5, "batch": 8, "seq_len": 512,
         "padded": True, "optim": "adamw_torch", "loop": "plain"},
        "bert-large-uncased", "", "",
    ),
    "qlora.py": (
        {"task": "causal-lm", "batch": 4, "grad_accum": 16, "precision": "fp16",
         "optim": "paged_adamw_8bit", "checkpointing": "full", "prepare_kbit": True,
         "use_cache": False, "seq_len": 256},
        "meta-llama/Llama-2-7b-hf", "", "",
    ),
    "sft.py": (
        {"batch": 4, "grad_accum": 2, "seq_len": 2048, "packing": "bfd", "dtype": "bfloat16",
         "attn_implementation": "flash_attention_2", "precision": "bf16",
         "checkpointing": "full"},
        "Qwen/Qwen2.5-0.5B", "", "",
    ),
    "dpo.py": (
        {"batch": 2, "seq_len": 1024, "dtype": "bfloat16", "method": "dpo"},
        "Qwen/Qwen2.5-0.5B-Instruct", "", "",
    ),
    "accelerate_loop.py": (
        {"batch": 16, "seq_len": 128, "grad_accum": 2, "precision": "bf16",
         "loop": "accelerate", "max_grad_norm": 1.0},
        "bert-base-cased", "", "",
    ),
    "arguments.py": (
        {"batch": 4, "seq_len": 1024, "grad_accum": 8, "optim": "adamw_torch_fused",
         "max_grad_norm": 1.0, "precision": None, "checkpointing": None},
        "gpt2-medium", "", "",
    ),
    "made_elsewhere.py": (
        {"batch": 2, "precision": "bf16"}, None, "cannot be told", "",
    ),
    "unsloth_colab.ipynb": (
        {"batch": 2, "grad_accum": 4, "seq_len": 2048, "precision": "bf16", "dtype": "bfloat16",
         "optim": "adamw_8bit", "weight_decay": 0.01, "checkpointing": "full",
         "prepare_kbit": False, "packing": None, "fused_loss": None},
        "unsloth/llama-3-8b", "kernels keep buffers", "checkpoints move to the host",
    ),
}  # fmt: skip
"""By file: options, the model, what the verdict must rest on, and what must be named besides."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_a_script_says(name, examples):
    """Each value is one of the file's, and the file is never run: its first line would stop it."""
    options, model, unpriced, named = EXAMPLES[name]

    run = memest.read_config(SCRIPTS / name)

    assert model == run.model
    assert options == {key: run.options.get(key) for key in options}
    assert all(each.origin.startswith((name, "default", "what is not")) for each in run.values)
    assert unpriced in " ".join(run.setup.unpriced)
    assert bool(unpriced) == bool(run.setup.unpriced)
    assert named in " ".join(map(str, run.not_modelled))


def test_adapters_and_bases_are_the_libraries_own_settings():
    run = memest.read_config(SCRIPTS / "qlora.py")

    assert run.setup.adapter.settings["target_modules"] == ["q_proj", "v_proj"]
    assert run.setup.quantization.words == (
        "4-bit base (nf4, double quantisation, bfloat16 compute)"
    )


def test_origins_name_file_and_line():
    origins = {each.option: each.origin for each in memest.read_config(SCRIPTS / "sft.py").values}

    assert origins["batch"] == "sft.py:14 per_device_train_batch_size"
    origins = {each.option: each.origin for each in _notebook().values}
    assert origins["batch"].startswith("unsloth_colab.ipynb:cell 7, line 14 ")


def _notebook(**options):
    return memest.read_config(SCRIPTS / "unsloth_colab.ipynb", **options)


def test_what_unsloth_only_lowers_leaves_the_verdict():
    """What adds is in ``unpriced``; offloading and the fused loss are named and bounded."""
    run = _notebook()

    assert len(run.setup.unpriced) == 1
    assert "loss works in chunks" in " ".join(map(str, run.not_modelled))


def test_the_command_line_wins_over_defaults(examples):
    run = memest.read_command(
        "python scripts/arguments.py --bf16 -b 2 --checkpointing --max_length=256"
    )

    assert {"batch": 2, "precision": "bf16", "checkpointing": "full", "seq_len": 256}.items() <= (
        run.options.items()
    )
    origins = {each.option: each.origin for each in run.values}
    assert origins["batch"] == "command: --batch-size"
    assert origins["model"] == "arguments.py:26 default of --model_name"
    assert not run.setup.unpriced


def test_code_comes_before_what_launches_it(examples):
    run = memest.read_command(
        "accelerate launch --num_processes 2 --mixed_precision fp16 scripts/accelerate_loop.py"
    )

    assert run.options["precision"] == "bf16"
    assert run.options["num_gpus"] == 2


def test_nothing_bounds_what_a_script_does_that_is_not_here_and_says_nothing():
    setup = memest.read_command("python elsewhere.py model.path=gpt2", model="gpt2").setup

    assert any("the script is not read" in remark for remark in setup.unpriced)


@pytest.mark.parametrize(
    ("command", "framework"),
    [
        ("deepspeed --module openrlhf.cli.train_dpo --pretrain gpt2 --beta 0.1", "OpenRLHF"),
        ("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo", "verl"),
        ("deepspeed openrlhf/cli/train_kto.py --pretrain gpt2 --max_len 2048", "OpenRLHF"),
        ("python3 /home/me/verl/verl/trainer/main_ppo.py actor.model.path=gpt2", "verl"),
    ],
)
def test_a_framework_that_nobody_reads_is_refused_by_its_name(command, framework):
    with pytest.raises(memest.ConfigError, match=f"is {framework}'s") as refused:
        memest.read_command(command, model="gpt2")

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("", "--engine-share 0.5 --engine-sleeps, with"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.6", "--engine-share 0.6 --engine-sl"),
        ("+actor_rollout_ref.rollout.free_cache_engine=False", "--engine-share 0.5, with"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=$SHARE", "--engine-share 0.5 --engine"),
    ],
)
def test_what_is_nearest_to_a_run_of_verl_has_its_share_of_the_gpu(said, words):
    with pytest.raises(memest.ConfigError, match=f"memest estimate MODEL .*{words}"):
        memest.read_command(f"python3 -m verl.trainer.main_ppo {said}", model="gpt2")


def test_a_script_that_is_not_here_is_read_by_its_arguments(write):
    run = memest.read_command("python elsewhere.py --model_name_or_path gpt2 --bf16")

    assert run.options["precision"] == "bf16"
    assert "the script is not read" in str(run.not_modelled[-1])


def test_a_script_here_that_is_no_python_is_read_by_its_arguments(write):
    write("old.py", "print 'training'\n")

    run = memest.read_command("python old.py --model_name_or_path gpt2 --bf16")

    assert "it is Python 2" in " ".join(map(str, run.not_modelled))


TRAINER = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
{before}
model = AutoModelForCausalLM.from_pretrained({model})
args = TrainingArguments("out", {arguments})
{between}
Trainer(model=model, args=args{trainer}).train()
{after}
"""


DATACLASS = """
from dataclasses import dataclass, field
@dataclass
class C:
    b: int = field(default=4)
c = C()
"""
PARSER = """
import argparse
p = argparse.ArgumentParser()
p.add_argument('--b', type=int, {})
args = p.parse_args()
"""


@pytest.fixture
def script(write):
    """A run of a Trainer, with parts of its script given."""

    def read(**parts):
        names = ("before", "arguments", "between", "trainer", "after")
        text = TRAINER.format(**{**dict.fromkeys(names, ""), "model": "'gpt2'", **parts})
        return memest.read_config(write("train.py", text), seq_len=8)

    return read


@pytest.mark.parametrize(
    ("before", "expression", "batch"),
    [
        ("B = 4", "B", 4),
        ("B = 2\nB = 4", "B", 4),
        ("B = 2\nB += 2", "B", 4),
        ("A, B = 1, 4", "B", 4),
        ("C = dict(b=4)", "C['b']", 4),
        ("C = {'a': {'b': 4}}", "C['a']['b']", 4),
        ("TOTAL = 32", "TOTAL // 8", 4),
        ("TOTAL = 32", "int(TOTAL / 8)", 4),
        ("DEBUG = False", "1 if DEBUG else 4", 4),
        ("DEBUG = False\nif DEBUG:\n    B = 1\nelse:\n    B = 4", "B", 4),
        ("def size(n=2):\n    return n * 2", "size()", 4),
        ("def size(n=2):\n    return n * 2", "size(n=3)", 6),
        ("class Config:\n    batch = 4\ncfg = Config()", "cfg.batch", 4),
        ("class Config:\n    batch = 4", "Config.batch", 4),
        (DATACLASS, "c.b", 4),
        (PARSER.format("default='4'"), "args.b", 4),
        ("try:\n    B = 4\nexcept ImportError:\n    B = 1", "B", 4),
    ],
)  # fmt: skip
def test_values_that_can_be_told(script, before, expression, batch):
    run = script(before=before, arguments=f"per_device_train_batch_size={expression}")

    assert run.options["batch"] == batch
    assert not run.setup.unpriced


@pytest.mark.parametrize(
    ("before", "expression"),
    [
        ("from config import B", "B"),
        ("import config", "config.B"),
        ("import os", "int(os.environ['B'])"),
        ("import os", "int(os.environ.get('B', 4))"),
        ("import sys", "int(sys.argv[1])"),
        ("import random", "random.choice([1, 2])"),
        ("from util import big\nB = 8\nif big():\n    B = 4", "B"),
        ("from util import big", "4 if big() else 8"),
        ("B = 1\nfor _ in range(3):\n    B *= 2", "B"),
        ("B = [1]\nB.append(2)", "B[1]"),
        ("def size(n):\n    return size(n)", "size(1)"),
        ("C = {'b': 8}\nfrom util import big\nif big():\n    C['b'] = 4", "C['b']"),
        (PARSER.format("required=True"), "args.b"),
        ("", "nowhere"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_told_are_said(script, before, expression):
    """Never guessed: the default is priced, the verdict rests on it, and the flag settles it."""
    run = script(before=before, arguments=f"per_device_train_batch_size={expression}")

    assert run.options["batch"] == 8
    assert "per_device_train_batch_size: cannot be told without running" in run.setup.unpriced[0]
    assert "train.py:" in run.setup.unpriced[0]
    assert not run.with_options(batch=4).setup.unpriced


def test_what_matters_nothing_may_be_unknown(script):
    run = script(before="from util import rate", arguments="learning_rate=rate(), seed=rate()")

    assert not run.setup.unpriced


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"between": "teacher = AutoModelForCausalLM.from_pretrained('gpt2-xl')"},
         "a further model in memory"),
        ({"between": "model.resize_token_embeddings(50300)"}, "rows of the embeddings"),
        (
            {"between": "tok.add_tokens(new)\nmodel.resize_token_embeddings(len(tok))"},
            "rows of the embeddings",
        ),
        ({"between": "model.generate(None)"}, "generation besides"),
        ({"before": "class Own(Trainer):\n    def compute_loss(self, model, inputs): ...",
          "between": "Trainer = Own"}, "a loss of the script's own"),
        ({"trainer": ", compute_loss_func=print"}, "a loss of the script's own"),
        ({"arguments": "eval_strategy='epoch'", "trainer": ", compute_metrics=print"},
         "predictions of the evaluation"),
        ({"before": "from util import more", "arguments": "**more()"}, "further arguments"),
        ({"before": "from util import args_of", "between": "args = args_of()"},
         "training arguments cannot be told"),
        ({"before": "import torch", "trainer": ", optimizers=(torch.optim.LBFGS([]), None)"},
         "an optimizer that memest does not know"),
        ({"model": "'gpt2', output_hidden_states=True"}, "every layer's output"),
    ],
)  # fmt: skip
def test_what_may_add_memory_makes_the_verdict_open(script, parts, words):
    assert words in " ".join(script(**parts).setup.unpriced)


EVALUATES = {"before": "from datasets import load_dataset\nraw = load_dataset('imdb')['test']",
             "arguments": "eval_strategy='epoch'"}  # fmt: skip
PICKS = """
def pick(logits, labels):
    return logits.argmax(-1)

def pick_first(logits, labels):
    if isinstance(logits, tuple):
        logits = logits[0]
    return torch.argmax(logits, dim=-1)
"""


@pytest.mark.parametrize(
    ("dataset", "samples"),
    [
        ("raw.shuffle(seed=1).select(range(300)).map(print)", 300),
        ("load_dataset('imdb', split='test[:200]').select(range(99))", 99),
        ("raw.select([4, 5])", 2),
        ("raw", None),
        ("raw.select(range(300)).map(print, batched=True)", None),  # may make other rows
        ("raw.select(range(300)).filter(print)", None),
        ("load_dataset('imdb', split='test[:10%]')", None),
        ("load_dataset('imdb', split='test[:1000000]')", None),  # as many as there are
        ("load_dataset('imdb', split='test[100:300]').shuffle()", None),
    ],
)
def test_predictions_that_metrics_have_the_trainer_keep(script, dataset, samples):
    """Of as many samples as the script cuts its evaluation to; else the verdict stays open."""
    run = script(trainer=f", eval_dataset={dataset}, compute_metrics=print", **EVALUATES)
    assert run.setup.eval_samples == samples
    assert ("predictions of the evaluation" in " ".join(run.setup.unpriced)) is (samples is None)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"trainer": ", compute_metrics=None"}, None),
        ({"trainer": ", compute_metrics=print",
          "arguments": "eval_strategy='epoch', prediction_loss_only=True"}, None),
        ({"trainer": ", compute_metrics=print, preprocess_logits_for_metrics=print"},
         "what it makes of predictions and labels"),
        ({"between": PICKS,
          "trainer": ", compute_metrics=print, preprocess_logits_for_metrics=pick"},
         "indices of predictions (8 bytes each) and labels"),
    ],
)  # fmt: skip
def test_what_is_kept_in_place_of_predictions(script, parts, words):
    """Nothing where the loss alone is kept; what is made of predictions is named as that."""
    run = script(**{**EVALUATES, **parts})
    assert run.setup.eval_samples is None
    said = " ".join(run.setup.unpriced)
    assert words in said if words else "evaluation" not in said
    assert not run.setup.overpriced


@pytest.mark.parametrize(
    ("made", "kept"),
    [
        ("print", "what it makes of predictions"),
        ("pick", "indices of predictions (8 bytes each)"),
        ("pick_first", "indices of predictions (8 bytes each)"),
    ],
)
def test_whole_predictions_are_the_most_that_is_kept_of_them(script, made, kept):
    """Told how many, an estimate has all logits: the run takes less, and no more."""
    trainer = f", compute_metrics=print, preprocess_logits_for_metrics={made}"
    run = script(**{**EVALUATES, "between": PICKS, "trainer": trainer})
    words = f"whole predictions are priced: the run keeps {kept}"
    assert not any(words in each for each in run.setup.overpriced)
    told = run.with_options(eval_samples=200)
    assert told.setup.eval_samples == 200
    assert told.setup.unpriced == ()
    assert [
        each.partition(" preprocess_logits_for_metrics: ")[2] for each in told.setup.overpriced
    ] == [words]
    assert told.options["overpriced"] == told.setup.overpriced


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"between": "for p in model.parameters():\n    p.requires_grad = False"}, "frozen"),
        ({"between": "model.transformer.wte.weight.requires_grad = False"}, "frozen"),
        ({"before": "from util import big", "between":
          "if big():\n    model.gradient_checkpointing_enable()"}, "under a condition"),
        ({"before": "from peft import get_peft_model\nfrom util import config",
          "between": "model = get_peft_model(model, config)"}, "all weights are priced"),
        ({"before": "import torch", "arguments": "bf16=torch.cuda.is_bf16_supported()"},
         "the GPU decides"),
        ({"before": "import torch", "trainer":
          ", optimizers=(torch.optim.AdamW(model.lm_head.parameters()), None)"},
         "it has model.lm_head.parameters() alone"),
    ],
)  # fmt: skip
def test_what_only_lowers_memory_is_named(script, parts, words):
    run = script(**parts)

    assert words in " ".join(map(str, run.not_modelled))
    assert not run.setup.unpriced


@pytest.mark.parametrize(
    "parts",
    [
        {"after": "model.generate(None)"},
        {"after": "again = AutoModelForCausalLM.from_pretrained('out')"},
        {"between": "old = AutoModelForCausalLM.from_pretrained('gpt2-xl')\ndel old"},
        {"before": "if False:\n    x = AutoModelForCausalLM.from_pretrained('gpt2-xl')"},
        {"before": "def unused():\n    return AutoModelForCausalLM.from_pretrained('gpt2-xl')"},
    ],
)
def test_what_training_does_not_meet_is_no_matter(script, parts):
    assert not script(**parts).setup.unpriced


@pytest.mark.parametrize(
    ("between", "options"),
    [
        ("model.gradient_checkpointing_enable({'use_reentrant': False})",
         {"checkpointing": "full", "use_reentrant": False}),
        ("import torch\nmodel = torch.compile(model)", {"torch_compile": True}),
        ("model.half()", {"dtype": "float16"}),
        ("import torch\nmodel = model.to('cuda', dtype=torch.bfloat16)", {"dtype": "bfloat16"}),
        ("model.config.use_cache = False", {"use_cache": False}),
        ("args.gradient_accumulation_steps = 4", {"grad_accum": 4}),
        ("import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'",
         {"alloc_conf": "expandable_segments:True"}),
    ],
)  # fmt: skip
def test_what_is_done_to_the_model(script, between, options):
    assert options.items() <= script(between=between).options.items()


LOOP = """
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForMaskedLM
model = AutoModelForMaskedLM.from_pretrained("bert-base-uncased").cuda()
loader = DataLoader([], batch_size=4)
optimizer = {optimizer}
for batch in loader:
{body}
"""


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (["model(**batch).loss.backward()", "optimizer.step()", "optimizer.zero_grad()"],
         {"zero_grad_at": None, "batch": 4, "loop": "plain", "task": "masked-lm"}),
        (["optimizer.zero_grad()", "model(**batch).loss.backward()", "optimizer.step()"],
         {"zero_grad_at": "before-forward"}),
        (["loss = model(**batch).loss", "optimizer.zero_grad(set_to_none=False)",
          "loss.backward()", "optimizer.step()"],
         {"zero_grad_at": "before-backward", "zero_grad": "zero"}),
        (["with torch.autocast('cuda', torch.bfloat16):", "    loss = model(**batch).loss",
          "loss.backward()", "optimizer.step()"], {"precision": "bf16"}),
        (["with torch.cuda.amp.autocast():", "    loss = model(**batch).loss",
          "loss.backward()", "optimizer.step()"], {"precision": "fp16"}),
    ],
)  # fmt: skip
def test_loops(write, body, options):
    text = LOOP.format(
        optimizer="torch.optim.SGD(model.parameters(), momentum=0.9)",
        body="\n".join(f"    {line}" for line in body),
    )
    run = memest.read_config(write("loop.py", text), seq_len=8)

    assert options == {key: run.options.get(key) for key in options}
    assert run.options["optim"] == "sgd_momentum"


@pytest.mark.parametrize(
    ("made", "optim"),
    [
        ("torch.optim.AdamW(model.parameters())", "adamw_torch"),
        ("torch.optim.Adam(model.parameters(), fused=True)", "adam_fused"),
        ("torch.optim.AdamW(model.parameters(), foreach=False)", "adamw_torch_loop"),
        ("__import__('x')", "adamw_torch"),
    ],
)
def test_optimizers(write, made, optim):
    text = LOOP.format(optimizer=made, body="    model(**batch).loss.backward()")
    run = memest.read_config(write("loop.py", text), seq_len=8)

    assert run.options["optim"] == optim
    assert bool(run.setup.unpriced) == ("import" in made)


GROUPS = """[
    {'params': [p for n, p in model.named_parameters() if 'bias' in n]},
    {'params': [p for n, p in model.named_parameters() if 'bias' not in n]},
]"""


@pytest.mark.parametrize(
    ("given", "is_part"),
    [
        ("[p for p in model.parameters() if p.requires_grad]", False),
        ("filter(lambda p: p.requires_grad, model.parameters())", False),
        ("list(model.module.parameters())", False),
        ("[{'params': [p for n, p in model.named_parameters() if c(n)]} for c in (a, b)]", False),
        (GROUPS, False),
        ("[p for n, p in model.named_parameters() if 'bias' in n]", True),
        ("filter(lambda p: p.ndim > 1, model.parameters())", True),
        ("model.cls.parameters()", True),
        ("[p for p in model.bert.encoder.layer[-1].parameters() if p.requires_grad]", True),
        ("[{'params': model.cls.parameters(), 'lr': 0.1}]", True),
    ],
)  # fmt: skip
def test_an_optimizer_of_a_part_is_named(write, given, is_part):
    body = "    model(**batch).loss.backward()\n    optimizer.step()"
    text = LOOP.format(optimizer=f"torch.optim.AdamW({given}, lr=1e-4)", body=body)
    run = memest.read_config(write("loop.py", text), seq_len=8)

    assert ("alone" in " ".join(map(str, run.not_modelled))) == is_part
    assert (run.model, run.options["optim"]) == ("bert-base-uncased", "adamw_torch")
    assert not run.setup.unpriced


STEP = ["loss = model(**batch).loss", "loss.backward()", "optimizer.step()"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (["batch = {k: v.repeat(8, 1) for k, v in batch.items()}", *STEP], "repeat"),
        (["x = torch.cat([batch['input_ids']] * 3)", *STEP], "torch.cat"),
        (["x = batch['input_ids'][:, :128]", *STEP], "slice"),
        (["logits = model(**batch).logits.float()", "loss = logits.mean()", *STEP[1:]], "float"),
        (["logits = model(**batch).logits",
          "loss = torch.nn.functional.cross_entropy(logits, batch['labels'])", *STEP[1:]],
         "loss of its own"),
        (["loss = model(**batch).loss + model(**batch).loss", *STEP[1:]], "2 forwards"),
        (["loss = 0", "for view in (1, 2):", "    loss = loss + model(**batch).loss", *STEP[1:]],
         "a forward in a loop of its own"),
        (["loss = model(**batch, output_attentions=True).loss", *STEP[1:]], "every layer's output"),
        ([STEP[0], "loss.backward(retain_graph=True)", STEP[2]], "retain_graph"),
        (["kept.append(model(**batch))", *STEP], "kept"),
        (["helper(batch)", *STEP], "helper"),
    ],
)  # fmt: skip
def test_what_a_loop_does_besides_is_named(write, body, words):
    lines = "\n".join(f"    {line}" for line in body)
    text = LOOP.format(optimizer="torch.optim.AdamW(model.parameters())\nkept = []", body=lines)
    run = memest.read_config(write("loop.py", text), seq_len=8)

    assert words in " ".join(run.setup.unpriced)


def test_what_loops_have_as_a_rule_leaves_the_verdict(write):
    body = [
        "batch = {k: v.to('cuda', non_blocking=True) for k, v in batch.items()}",
        "with torch.autocast('cuda', torch.bfloat16):",
        "    outputs = model(**batch)",
        "outputs.loss.backward()",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "optimizer.step()",
        "optimizer.zero_grad(set_to_none=True)",
        "losses.append(outputs.loss.item())",
        "right = (outputs.logits.argmax(-1) == batch['labels']).float().mean()",
        "print(torch.cuda.max_memory_allocated())",
        "if step % 100 == 0:",
        "    model.eval()",
        "    with torch.no_grad():",
        "        for other in loader:",
        "            seen = model(**other).logits.softmax(-1)",
        "    model.train()",
    ]
    lines = "\n".join(f"    {line}" for line in body)
    text = LOOP.format(optimizer="torch.optim.AdamW(model.parameters())\nlosses = []", body=lines)
    run = memest.read_config(write("loop.py", text), seq_len=8)

    assert not run.setup.unpriced
    assert run.options["precision"] == "bf16"


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("model.gradient_checkpointing_enable()", "does not call train()"),
        ("model = torch.nn.parallel.DistributedDataParallel(model)", "buckets of gradients"),
        ("for m in model.modules():\n    m.register_forward_hook(print)", "register_forward_hook"),
        ("torch.backends.cuda.enable_flash_sdp(False)", "enable_flash_sdp"),
        ("data = torch.zeros(4096, 4096, device='cuda')", "torch.zeros"),
        ("head = torch.nn.Linear(768, 500000).cuda()", "torch.nn.Linear"),
    ],
)
def test_what_stands_beside_the_model_is_named(write, before, words):
    optimizer = f"torch.optim.AdamW(model.parameters())\n{before}"
    text = LOOP.format(optimizer=optimizer, body="\n".join(f"    {line}" for line in STEP))
    run = memest.read_config(write("loop.py", text), seq_len=8)

    assert words in " ".join(run.setup.unpriced)
    trained = text.replace("for batch in", "model.train()\nfor batch in")
    again = memest.read_config(write("loop.py", trained), seq_len=8)
    assert bool(again.setup.unpriced) == ("checkpointing" not in before)


def test_a_share_of_the_card_is_taken(write):
    optimizer = (
        "torch.optim.SGD(model.parameters())\ntorch.cuda.set_per_process_memory_fraction(0.5)"
    )
    text = LOOP.format(optimizer=optimizer, body="\n".join(f"    {line}" for line in STEP))
    run = memest.read_config(write("loop.py", text), seq_len=8)

    assert run.options["alloc_conf"] == "per_process_memory_fraction:0.5"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("kw.update(per_device_train_batch_size=32)", 32),
        ("kw.setdefault('per_device_train_batch_size', 32)", 4),
        ("kw.setdefault('gradient_accumulation_steps', 2)", 4),
        ("kw.pop('per_device_train_batch_size')", 8),
        ("del kw['per_device_train_batch_size']", 8),
        ("kw = kw.copy(); kw['per_device_train_batch_size'] = 16", 16),
    ],
)
def test_arguments_in_a_mapping(script, change, expected):
    before = f"kw = {{'per_device_train_batch_size': 4}}\n{change}"
    run = script(before=before, arguments="**kw")

    assert run.options.get("batch", 8) == expected
    assert run.options.get("grad_accum", 1) == (2 if "accumulation" in change else 1)


@pytest.mark.parametrize(("multiple", "is_named"), [(8, False), (1024, True)])
def test_rows_that_are_filled_up_far_are_named(write, multiple, is_named):
    collator = f"DataCollatorForLanguageModeling(None, pad_to_multiple_of={multiple})"
    parts = {"before": "from transformers import DataCollatorForLanguageModeling",
             "trainer": f", data_collator={collator}"}  # fmt: skip
    names = ("before", "arguments", "between", "trainer", "after")
    text = TRAINER.format(**{**dict.fromkeys(names, ""), "model": "'gpt2'", **parts})
    run = memest.read_config(write("train.py", text))

    assert ("filled up" in " ".join(run.setup.unpriced)) == is_named


@pytest.mark.parametrize("change", ["kw.update(more)", "kw.pop(name)", "kw.setdefault(name, 1)"])
def test_a_mapping_that_changes_by_what_cannot_be_told(script, change):
    before = f"from util import more, name\nkw = {{'fp16': True}}\n{change}"
    run = script(before=before, arguments="**kw")

    assert "further arguments cannot be told" in " ".join(run.setup.unpriced)


@pytest.mark.parametrize("kind", ["(Dataset)", ""])
def test_a_data_set_has_data_of_its_own_and_a_weight_has_not(script, kind):
    own = f"class Rows{kind}:\n    def __init__(self, rows):\n        self.data = rows\nRows(3)"
    before = f"from torch.utils.data import Dataset\n{own}"
    assert not script(before=before).setup.unpriced
    weights = "for p in model.parameters():\n    p.data = p.data.float()"
    assert "made of weights" in " ".join(script(between=weights).setup.unpriced)


@pytest.mark.parametrize(
    ("between", "batch"),
    [
        ("setattr(args, 'per_device_train_batch_size', 32)", 32),
        ("for name in ('a', 'b'):\n    setattr(args, name, 3)", None),
        ("args.set_training(batch_size=32)", None),
    ],
)
def test_arguments_that_are_set_later(script, between, batch):
    run = script(between=f"args = TrainingArguments('out')\n{between}")

    if batch is None:
        assert "further arguments cannot be told" in " ".join(run.setup.unpriced)
    else:
        assert run.options["batch"] == batch


def test_an_adapter_that_is_changed_after_it_was_made(script):
    run = script(
        before="from peft import LoraConfig, get_peft_model",
        between="config = LoraConfig(r=8)\nconfig.r = 256\nmodel = get_peft_model(model, config)",
    )
    assert run.options["adapter"]["r"] == 256


def test_a_function_that_may_be_another_has_no_defaults(write):
    text = LOOP.format(optimizer="torch.optim.AdamW(model.parameters())", body="    pass")
    text = text.replace("loader = DataLoader([], batch_size=4)", MOCKED).replace("    pass", "")
    run = memest.read_config(write("loop.py", text + "    model(**batch).loss.backward()"))

    assert "batch" not in run.options
    assert "batch_size, an argument" in " ".join(run.setup.unpriced)


MOCKED = """
import os
def make(batch_size=16):
    return DataLoader([], batch_size=batch_size)
if os.environ.get("MOCKED") == "1":
    from mocks import make
loader = make(2)
"""


def test_older_arguments_of_trl_bring_older_defaults(write):
    """``max_seq_length`` went with TRL 0.20, which brought bf16 and checkpointing."""
    text = (
        "from trl import SFTConfig, SFTTrainer\n"
        "SFTTrainer('gpt2', args=SFTConfig(max_seq_length=256, packing=True)).train()\n"
    )
    options = memest.read_config(write("sft.py", text)).options

    assert (options["precision"], options["checkpointing"]) == ("fp32", "none")
    assert options["seq_len"] == 256
    assert "fused_loss" not in options


def test_dataclasses_are_filled_by_the_command(write):
    text = """
from dataclasses import dataclass, field
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "the model"})
    dtype: str = "bfloat16"
parser = HfArgumentParser((ModelArguments, TrainingArguments))
model_args, training_args = parser.parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained(
    model_args.model_name_or_path, torch_dtype=model_args.dtype
)
Trainer(model=model, args=training_args).train()
"""
    write("train.py", text)

    with pytest.raises(ConfigError, match=r"model cannot be told .*--model_name_or_path"):
        memest.read_config("train.py").with_model(None, {})
    run = memest.read_command(
        "python train.py --model_name_or_path gpt2 --per_device_train_batch_size 3 --output_dir o",
        seq_len=8,
    )
    assert (run.model, run.options["batch"], run.options["dtype"]) == ("gpt2", 3, "bfloat16")
    assert not run.setup.unpriced


def test_adapters_on_a_way_that_cannot_be_told_are_not_dropped_in_silence(script):
    """A run that goes on from a checkpoint, as QLoRA's script has it."""
    run = script(
        before="from peft import LoraConfig, PeftModel, get_peft_model\nfrom util import last",
        between="if last():\n    model = PeftModel.from_pretrained(model, last())\n"
        "else:\n    model = get_peft_model(model, LoraConfig(r=8))",
    )

    assert run.model == "gpt2"
    assert "adapters under a condition" in " ".join(map(str, run.not_modelled))
    assert "adapters that are there already" in " ".join(run.setup.unpriced)


def test_a_module_of_the_scripts_own_is_named(write):
    text = """
import torch
from torch import nn
from transformers import AutoModel
class Classifier(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.body = AutoModel.from_pretrained(name)
        self.head = nn.Linear(768, 2)
    def forward(self, x):
        return self.head(self.body(x)[0])
model = Classifier("bert-base-uncased")
optimizer = torch.optim.AdamW(model.parameters())
loss = model(None)
loss.backward()
"""
    run = memest.read_config(write("own.py", text), seq_len=8)

    assert run.model == "bert-base-uncased"
    assert "a module of the script's own (Classifier)" in " ".join(run.setup.unpriced)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("from transformers import pipeline\npipeline('text-generation')('a')\n", "pipeline"),
        ("import transformers as t\nt.AutoModel.from_pretrained('gpt2').generate()\n", "generate"),
        ("print(1)\n", "has no model"),
        ("", "has no model"),
    ],
)  # fmt: skip
def test_a_script_that_trains_nothing_is_told_so(write, text, words):
    with pytest.raises(ConfigError, match="trains nothing") as caught:
        memest.read_config(write("use.py", text))
    assert words in str(caught.value)


def test_magics_are_dropped_and_other_cells_are_left_out(write):
    cells = [
        ["!pip install trl\n", "%matplotlib inline\n", "B = 2"],
        ["%%bash\n", "rm -rf ("],
        ["files = !ls\n", "help?\n", "x = (9\n", "  % 4)"],
        ["from transformers import *\n", "import transformers\n",
         "model = transformers.AutoModelForCausalLM.from_pretrained('gpt2')\n",
         "transformers.Trainer(model, transformers.TrainingArguments(\n",
         "    per_device_train_batch_size=B)).train()"],
    ]  # fmt: skip
    document = {"cells": [{"cell_type": "code", "source": each} for each in cells]}

    run = memest.read_config(write("run.ipynb", json.dumps(document)), seq_len=8)

    assert (run.model, run.options["batch"]) == ("gpt2", 2)


def test_lines_that_go_on_belong_to_their_magic_and_a_cell_that_is_no_python_is_named(write):
    cells = [
        "if True:\n    !pip install \\\n        trl \\\n        x==0.0.32.post2\nelse:\n    a = 1",
        "x = (",
        TRAINER.format(model="'gpt2'", before="", arguments="", between="", trainer="", after=""),
    ]
    document = {"cells": [{"cell_type": "code", "source": each} for each in cells]}

    run = memest.read_config(write("run.ipynb", json.dumps(document)), seq_len=8)

    assert run.model == "gpt2"
    (unpriced,) = run.setup.unpriced
    assert unpriced == "run.ipynb:cell 2, line 1 cell: it is not read: '(' was never closed."


def test_a_trainer_of_another_library_is_named(write):
    text = "import sentence_transformers as s\ns.SentenceTransformerTrainer('a').train()\n"

    with pytest.raises(ConfigError, match="trains by sentence_transformers"):
        memest.read_config(write("train.py", text))


def test_reading_is_quick_and_loads_no_torch():
    code = (
        "import sys, memest\n"
        f"memest.read_config({str(SCRIPTS / 'unsloth_colab.ipynb')!r})\n"
        "assert not {'torch', 'pandas', 'yaml', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    start = time.perf_counter()
    memest.read_config(SCRIPTS / "unsloth_colab.ipynb")
    assert time.perf_counter() - start < 0.5


def read(folder, text):
    path = folder / "train.py"
    path.write_text(text)
    return memest.read_config(path, seq_len=8)


LOADED = """
import copy, torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model
model = AutoModelForCausalLM.from_pretrained("gpt2")
{}
Trainer(model, TrainingArguments("o", per_device_train_batch_size=2), train_dataset=d).train()
"""
MORE = {
    "ema = copy.deepcopy(model)": "deepcopy: copies of the weights",
    "best = copy.deepcopy(model.state_dict())": "deepcopy",
    "ema = torch.optim.swa_utils.AveragedModel(model)": "AveragedModel",
    "ema = ModelEmaV3(model, decay=0.99)": "ModelEmaV3",
    "shadow = {n: p.clone() for n, p in model.named_parameters()}": "copies of the weights",
    "for p in model.parameters():\n    kept.append(p.detach().clone())": "copies of the weights",
    "other = type(model)(model.config)": "a further model",
    "model.config.num_hidden_layers = 6": "config.num_hidden_layers",
    "model.config.update({'n_layer': 2})": "config",
    "model.config.output_hidden_states = True": "every layer's output",
    "model.lm_head = torch.nn.Linear(768, 300000)": "lm_head",
    "model.lm_head.to(torch.float32)": "lm_head",
    "model.transformer.h = model.transformer.h[:4]": "transformer.h",
    "del model.transformer.h[6:]": "transformer.h",
    "setattr(model, 'head', torch.nn.Linear(4, 4))": "head",
    "model = patched(model)": "what it makes of the model",
    "model.set_something(3)": "set_something",
    "model = get_peft_model(model, LoraConfig(r=4))\n"
    "for p in model.lm_head.parameters():\n    p.requires_grad = True": "more parameters train",
    "model = torch.nn.DataParallel(model)": "a model on every GPU",
}
CHANGED = {
    "config = AutoConfig.from_pretrained('gpt2', n_layer=48)\n"
    "model = AutoModelForCausalLM.from_config(config)": "gpt2?n_layer=48",
    "config = AutoConfig.from_pretrained('gpt2')\nconfig.n_head = 6\n"
    "model = AutoModelForCausalLM.from_pretrained('gpt2', config=config)": "gpt2?n_head=6",
    "model = AutoModelForCausalLM.from_pretrained('gpt2', n_layer=2)": "gpt2?n_layer=2",
    "config = transformers.GPT2Config(n_layer=6, n_ctx=64)\n"
    "model = transformers.GPT2LMHeadModel(config)": "transformers/gpt2?n_layer=6",
    "config = AutoConfig.for_model('roberta', num_hidden_layers=6)\nconfig.vocab_size = 52000\n"
    "model = transformers.AutoModelForMaskedLM.from_config(config)": "transformers/roberta"
    "?num_hidden_layers=6&vocab_size=52000",
}
LESS = {
    "model.freeze_encoder()": "freeze_encoder",
    "for n, p in model.named_parameters():\n    p.requires_grad = 'head' in n": "which parameters",
    "[p.requires_grad_(False) for p in model.transformer.parameters()]": "parameters are frozen",
    "list(map(lambda p: setattr(p, 'requires_grad', False), model.parameters()))": "are frozen",
}


@pytest.mark.parametrize("code", MORE)
def test_what_is_made_of_the_model_is_named(tmp_path, code):
    run = read(tmp_path, LOADED.format(code))
    assert any(MORE[code] in each for each in run.setup.unpriced), run.setup.unpriced


@pytest.mark.parametrize("code", LESS)
def test_what_does_not_train_is_named(tmp_path, code):
    run = read(tmp_path, LOADED.format(code))
    assert not run.setup.unpriced
    assert any(LESS[code] in each for each in run.setup.overpriced), run.setup.overpriced


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("model.config._attn_implementation = 'eager'", {"attn_implementation": "eager"}),
        ("model.set_attn_implementation('eager')", {"attn_implementation": "eager"}),
        ("model = model.to('cuda', torch.bfloat16)", {"dtype": "bfloat16"}),
        ("model = torch.compile(model, mode='default')", {"torch_compile_mode": "default"}),
        ("print(sum(p.numel() for p in model.parameters()))", {}),
        ("model.resize_token_embeddings(len(tok))", {}),
        ("model.config.use_cache = False\nmodel.config.pad_token_id = 0", {"use_cache": False}),
        ("def report(m):\n    print(m)\nreport(model)\nmodel.train()", {}),
        ("model.enable_input_require_grads()\nmodel.print_trainable_parameters()", {}),
    ],
)
def test_what_is_known_of_the_model_is_read(tmp_path, code, options):
    run = read(tmp_path, LOADED.format(code))
    assert run.setup.unpriced == run.setup.overpriced == ()
    assert {name: run.options.get(name) for name in options} == options


@pytest.mark.parametrize("code", CHANGED)
def test_entries_of_the_configuration_go_with_the_model(tmp_path, code):
    text = LOADED.replace('model = AutoModelForCausalLM.from_pretrained("gpt2")\n', "")
    run = read(tmp_path, text.format(code))
    assert (run.model, run.setup.unpriced) == (CHANGED[code], ())


@pytest.mark.parametrize(
    ("config", "model", "why"),
    [
        ("GPT2Config(50257, 1024)", None, "values of a configuration that is made here"),
        ("GPT2Config(vocab_size=len(t))", "transformers/gpt2", "vocab_size: an entry of"),
    ],
)
def test_what_cannot_be_told_of_a_configuration_leaves_both_sides_open(
    tmp_path, config, model, why
):
    text = LOADED.replace('model = AutoModelForCausalLM.from_pretrained("gpt2")\n', "")
    code = f"model = transformers.GPT2LMHeadModel(transformers.{config})"
    run = read(tmp_path, text.format(code))
    assert run.model == model
    for told in (run.setup.unpriced, run.setup.overpriced):
        assert any(why in each for each in told), told


@pytest.mark.parametrize(
    ("device_map", "num_gpus", "is_open"),
    [("'auto'", 4, True), ("'auto'", 1, False), ("'cuda'", 4, False)],
)
def test_layers_that_are_laid_on_several_gpus_are_priced_on_each(
    tmp_path, device_map, num_gpus, is_open
):
    path = tmp_path / "train.py"
    text = LOADED.replace('"gpt2"', f'"gpt2", device_map={device_map}')
    path.write_text(text.format(""))
    run = memest.read_config(path, seq_len=8, num_gpus=num_gpus)
    assert run.setup.unpriced == ()
    assert bool(run.setup.overpriced) is is_open


@pytest.mark.parametrize(
    ("before", "dtype"),
    [("", "float32"), ("torch.set_default_dtype(torch.bfloat16)\n", "bfloat16")],
)
def test_a_class_makes_parameters_of_the_default_dtype(tmp_path, before, dtype):
    text = LOADED.replace('model = AutoModelForCausalLM.from_pretrained("gpt2")\n', "")
    config = "config = AutoConfig.from_pretrained('Qwen/Qwen3-0.6B')\n"
    run = read(
        tmp_path,
        text.format(f"{before}{config}model = transformers.Qwen3ForCausalLM(config)"),
    )
    assert run.options["dtype"] == dtype


def test_a_model_that_a_script_loads_for_trl_has_its_own_dtype(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(LOADED.replace("Trainer(", "trl.DPOTrainer(").format("import trl"))
    run = memest.read_config(path, seq_len=8)
    assert (run.options["method"], run.options["dtype"]) == ("dpo", "auto")


def test_samples_are_what_the_head_takes(tmp_path):
    path = tmp_path / "train.py"
    for kind, unpriced in (
        ("AutoModelForCausalLM", "length of samples"),
        ("AutoModelForSpeechSeq2Seq", "length of labels"),
        ("AutoModelForImageClassification", ""),
    ):
        path.write_text(LOADED.format("").replace("AutoModelForCausalLM", kind))
        told = memest.read_config(path).setup.unpriced
        assert [unpriced in each for each in told] == ([True] if unpriced else [])


def test_trl_makes_adapters_beside_a_quantised_base_bfloat16(tmp_path):
    text = """
from transformers import BitsAndBytesConfig
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
SFTTrainer("gpt2", SFTConfig("o", max_length=64), train_dataset=d, peft_config=LoraConfig(r=4),
           quantization_config=BitsAndBytesConfig(load_in_4bit=True)).train()
"""
    options = read(tmp_path, text).options
    assert options["quantization"] == {"load_in_4bit": True}
    assert options["cast_weights"] == ["trainable=bfloat16"]
    assert options["prepare_kbit"] is False


_ADAPTED = """
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import {0}Config, {0}Trainer
model = AutoModelForCausalLM.from_pretrained("gpt2")
args = {0}Config("o", deepspeed={{"zero_optimization": {{"stage": {1}}}}}, max_length=8,
                 gradient_checkpointing_kwargs={{"use_reentrant": False}})
{2}
"""
_BY_TRAINER = "{}Trainer(model, args=args, train_dataset=d, peft_config=LoraConfig(r=4)).train()"
_BY_PEFT = "{}Trainer(get_peft_model(model, LoraConfig(r=4){}), args=args, train_dataset=d).train()"


@pytest.mark.parametrize("trainer", ["SFT", "DPO"])
@pytest.mark.parametrize(
    ("stage", "made", "casts"),
    [(3, _BY_TRAINER, False), (2, _BY_TRAINER, True), (3, _BY_PEFT, True),
     (3, _BY_PEFT.replace("{})", ", autocast_adapter_dtype=False)"), False)],
)  # fmt: skip
def test_trl_leaves_adapters_in_the_dtype_of_their_base_under_stage_3(
    tmp_path, trainer, stage, made, casts
):
    text = _ADAPTED.format(trainer, stage, made.format(trainer, ""))
    setup = memest.read_command(
        f"accelerate launch --num_processes 4 {_script(tmp_path, text)}"
    ).setup
    assert setup.adapter.autocast_adapter_dtype is casts
    assert setup.recomputes_reentrantly is (stage == 3)


def _script(folder, text):
    path = folder / "train.py"
    path.write_text(text)
    return path


def test_a_generation_in_the_loop_is_none_behind_it(tmp_path):
    text = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("gpt2")
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(3):
    for batch in torch.utils.data.DataLoader(d, batch_size=2):
        model(**batch).loss.backward()
        optimizer.step()
    {}model.generate(x)
"""
    for place, unpriced in (("", 1), ("pass\n", 0)):
        run = read(tmp_path, text.format(place))
        assert len(run.setup.unpriced) == unpriced


_ONLINE_DPO = """
from transformers import AutoModelForCausalLM
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
def reward(completions, **_):
    return [0.0 for _ in completions]
model = AutoModelForCausalLM.from_pretrained("gpt2")
args = OnlineDPOConfig("o", per_device_train_batch_size=4, gradient_accumulation_steps=2)
OnlineDPOTrainer({}, reward_funcs={}, args=args, train_dataset=d).train()
"""


@pytest.mark.parametrize(
    ("model", "reward", "named"),
    [("model", "reward", 0), ("'gpt2'", "reward", 0), ("model", "'some/reward-model'", 1)],
)
def test_an_online_dpo_trainer_has_the_defaults_of_its_configuration(
    tmp_path, model, reward, named
):
    path = tmp_path / "train.py"
    path.write_text(_ONLINE_DPO.format(model, reward))
    setup = memest.read_config(path).setup

    assert (setup.method, setup.batch, setup.grad_accum) == ("online-dpo", 4, 2)
    assert (setup.seq_len, setup.rollouts.completion_len) == (512, 64)
    assert (setup.dtype, setup.precision, setup.checkpointing) == ("auto", "bf16", "full")
    assert len(setup.unpriced) == named


def test_the_configuration_of_online_dpo_stands_behind_reference_and_rewards(tmp_path):
    text = _ONLINE_DPO.replace("reward_funcs={}, args=args", "None, reward, args")
    assert read(tmp_path, text.format("model")).setup.batch == 4
