"""What a script trains with: of several loaders, tokenizers and trainings, the one that counts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import memest

HEAD = """\
import os
import torch
from torch.utils.data import DataLoader
from accelerate import Accelerator
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
tokenizer = AutoTokenizer.from_pretrained("gpt2")
def cut(length):
    return lambda e: tokenizer(e["text"], truncation=True, max_length=length, padding="max_length")
model = AutoModelForCausalLM.from_pretrained("gpt2")
"""
LOOP = """
optimizer = torch.optim.AdamW(model.parameters())
model.train()
def run(loader):
    for step, batch in enumerate(tqdm(loader)):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
TRAINER = "TrainingArguments('o', per_device_train_batch_size=4{more})"


def read(write, text, *, name="run.py", head=HEAD):
    return memest.read_config(write(name, head + text))


def test_the_batch_is_that_of_the_loader_that_the_loop_goes_over(write):
    loaders = "val = DataLoader(a, batch_size=128)\ntrain = DataLoader(b, batch_size=8)\n"
    run = read(write, f"{LOOP}{loaders}run(train)")
    assert run.options["batch"] == 8
    prepared = (
        "accelerator = Accelerator()\na, train = accelerator.prepare(model, train)\nrun(train)"
    )
    assert read(write, f"{LOOP}{loaders}{prepared}").options["batch"] == 8


def trained(data, *, after="", more=""):
    arguments = TRAINER.format(more=more)
    return f"Trainer(model, {arguments}, train_dataset={data}).train()\n{after}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v = ds['validation'].map(cut(1024))\nt = ds['train'].map(cut(128))\n"
         + trained("t"), {"seq_len": 128}),
        ("d = load_dataset('x').map(cut(64))\n" + trained("d['train']"), {"seq_len": 64}),
        ("t = ds.map(lambda e: tokenizer(e['text']))\n"
         "x = tokenizer('What?', max_length=16, padding='max_length')\n" + trained("t"), {}),
        (trained("ds", after="x = tokenizer(asked, max_length=64)"), {}),
        ("def two(e):\n    m = tokenizer(e['body'], max_length=512, truncation=True)\n"
         "    labels = tokenizer(e['title'], max_length=30, truncation=True)\n"
         "    m['labels'] = labels['input_ids']\n    return m\n"
         + trained("ds.map(two)"), {"seq_len": 512, "target_len": 30}),
    ],
)  # fmt: skip
def test_lengths_are_those_of_the_data_that_trains(write, text, expected):
    options = read(write, text).options
    assert {
        key: options.get(key) for key in ("seq_len", "target_len") if key in options
    } == expected


def test_several_lengths_leave_it_open_whether_less_is_taken(write):
    run = read(write, "a = ds.map(cut(64))\nb = ds.map(cut(256))\n" + trained("a + b"))

    assert run.options["seq_len"] == 256
    assert "64, 256" in " ".join(run.setup.overpriced)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (trained("ds", after=trained("more", more=", fp16=True")), "a further training behind"),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'\n" + trained("ds"), "DataParallel"),
        (trained("ds", more=", use_cpu=True"), "on the CPU"),
        ("SFTTrainer(model, SFTConfig('o'), data_collator=lambda e: e, train_dataset=ds).train()",
         "own collator"),
    ],
)  # fmt: skip
def test_what_else_trains_or_where_is_named(write, text, words):
    setup = read(write, text).setup
    assert words in " ".join((*setup.unpriced, *setup.overpriced))


def test_only_what_trains_is_compiled(write):
    other = "big = torch.compile(AutoModelForCausalLM.from_pretrained('gpt2-xl'))\n"
    assert "torch_compile" not in read(write, other + trained("ds")).options
    assert "torch_compile" not in read(write, "lm = torch.compile(model)\n" + trained("ds")).options
    compiled = "model = torch.compile(model)\n"
    assert read(write, compiled + trained("ds")).options["torch_compile"] is True


def test_a_model_is_that_which_the_base_class_is_given(write):
    text = (
        "class Distil(Trainer):\n"
        "    def __init__(self, teacher=None, student=None, **kw):\n"
        "        super().__init__(model=student, **kw)\n"
        "big = AutoModelForCausalLM.from_pretrained('gpt2-xl')\n"
        f"Distil(student=model, teacher=big, args={TRAINER.format(more='')}).train()\n"
    )
    assert read(write, text).model == "gpt2"


def test_a_reference_may_be_given_by_place(write):
    text = (
        "ref = AutoModelForCausalLM.from_pretrained('gpt2')\n"
        "DPOTrainer(model, ref, DPOConfig('o', per_device_train_batch_size=2)).train()\n"
    )
    run = read(write, text)
    assert run.options["batch"] == 2
    assert "further model" not in " ".join(run.setup.unpriced)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("'gpt2'", ""),
        ("None", ""),
        ("'gpt2-xl'", "ref_model: gpt2-xl"),
        ("copy.deepcopy(model)", ""),
        ("copy.deepcopy(model).to('cuda').eval()", ""),
        ("create_reference_model(model)", ""),
        ("create_reference_model(model, num_shared_layers=6)", "create_reference_model"),
        ("copy.deepcopy(model).half()", "copies of the weights"),
        ("copy.deepcopy(other)", "further model"),
        ("AutoModelForCausalLM.from_pretrained('gpt2').half()", "further model"),
        ("AutoModelForCausalLM.from_pretrained('gpt2', dtype='float16')", "further model"),
        ("AutoModelForCausalLM.from_pretrained('gpt2-xl')", "further model"),
    ],
)
def test_a_reference_that_is_another_model_is_named(write, reference, said):
    text = (
        "import copy\nfrom trl import create_reference_model\n"
        + "other = AutoModelForCausalLM.from_pretrained('t5-small')\n" * ("other" in reference)
        + f"ref = {reference}\n"
        "DPOTrainer(model, ref, DPOConfig('o', per_device_train_batch_size=2)).train()\n"
    )
    named = " ".join(read(write, text).setup.unpriced)
    assert said in named
    assert bool(said) is bool(named)


QUANTISED = """\
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig
from trl import ORPOConfig, ORPOTrainer
lora = LoraConfig(r=8, target_modules=["c_attn"])
model = AutoModelForCausalLM.from_pretrained(
    "gpt2", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
"""


@pytest.mark.parametrize(
    ("before", "given", "prepares", "casts"),
    [
        ("", ", peft_config=lora", True, ()),
        ("model = get_peft_model(model, lora)\n", "", False, ()),
        (
            "model = get_peft_model(prepare_model_for_kbit_training(model), lora)\n", "", True,
            ("lm_head|embed_tokens|wte|wpe=float32",),
        ),
    ],
)  # fmt: skip
def test_who_puts_adapters_beside_a_quantised_base_prepares_it(
    write, before, given, prepares, casts
):
    text = f"{QUANTISED}{before}ORPOTrainer(model, args=ORPOConfig('o'){given}).train()\n"
    setup = read(write, text).setup
    assert (setup.method, setup.prepares_base, setup.cast_weights) == ("orpo", prepares, casts)


def test_keywords_of_a_load_that_are_not_all_literal_are_named(write):
    text = (
        "kw = dict(dtype='auto', device_map={'': torch.cuda.current_device()})\n"
        "SFTTrainer('gpt2', SFTConfig('o', model_init_kwargs=kw), train_dataset=ds).train()\n"
    )
    assert read(write, text).model == "gpt2"


IMAGES = """\
import albumentations as A
from transformers import (
    AutoImageProcessor, AutoModelForImageClassification, Trainer, TrainingArguments)
{before}
model = AutoModelForImageClassification.from_pretrained("microsoft/resnet-50")
Trainer(model, TrainingArguments('o'), train_dataset=ds).train()
"""


@pytest.mark.parametrize(
    ("before", "size"),
    [
        ("tf = A.Compose([A.Resize(640, 640), A.Normalize()])", 640),
        ("p = AutoImageProcessor.from_pretrained('x', size={'height': 384, 'width': 384})", 384),
        (("p = AutoImageProcessor.from_pretrained('x')\n"
         "tf = A.Compose([A.Resize(p.size['height'], p.size['width'])])"), None),
        ("", None),
    ],
)  # fmt: skip
def test_images_are_as_large_as_the_script_makes_them(write, before, size):
    run = read(write, IMAGES.format(before=before), head="")

    assert run.options.get("image_size") == size
    assert "images" not in " ".join(run.setup.unpriced)


@pytest.mark.parametrize("words", ["", " --use_peft --lora_r 32"])
def test_trl_s_own_script_is_what_its_command_says(tmp_path, monkeypatch, words):
    """Its defaults are known where a command is: nothing is left open."""
    script = Path(importlib.util.find_spec("trl").origin).parent / "scripts" / "sft.py"
    (tmp_path / "sft.py").write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    run = memest.read_command(
        "python sft.py --model_name_or_path gpt2 --dataset_name d --per_device_train_batch_size 2 "
        f"--max_length 512 --bf16 --output_dir o{words}"
    )

    assert run.model == "gpt2"
    assert (run.options["batch"], run.options["seq_len"]) == (2, 512)
    assert run.options.get("lora_r") == (32 if words else None)
    assert not run.setup.unpriced


def test_nothing_names_how_long_sound_is(write):
    text = "from transformers import AutoModelForCTC, Trainer, TrainingArguments\n{}\n" + trained(
        "d"
    )
    load = "model = AutoModelForCTC.from_pretrained('facebook/wav2vec2-base')"
    run = read(write, text.format(load), head="")

    assert any("5 s are taken" in words for words in run.setup.unpriced)
    again = memest.read_config("run.py", audio_seconds=4)
    assert not any("5 s are taken" in words for words in again.setup.unpriced)
