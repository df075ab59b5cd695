"""Loops of a script's own: what their calls say of a step, and what they do besides."""

import pytest

import memest
from support.training_scripts import LOOP, STEP, read


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
