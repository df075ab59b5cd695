"""What a script makes of its model between load and training: nothing of it goes unsaid."""

import pytest

import memest
from support.training_scripts import LOADED, read


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


@pytest.mark.parametrize("kind", ["(Dataset)", ""])
def test_a_data_set_has_data_of_its_own_and_a_weight_has_not(script, kind):
    own = f"class Rows{kind}:\n    def __init__(self, rows):\n        self.data = rows\nRows(3)"
    before = f"from torch.utils.data import Dataset\n{own}"
    assert not script(before=before).setup.unpriced
    weights = "for p in model.parameters():\n    p.data = p.data.float()"
    assert "made of weights" in " ".join(script(between=weights).setup.unpriced)


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
