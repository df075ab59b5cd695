"""Models that a script has on the GPU beside the one that trains: none of them goes unsaid."""

import pytest

import memest

SCRIPT = """
import copy, torch, clip, lpips
from diffusers import AutoencoderKL
from transformers import AutoModelForMaskedLM, AutoTokenizer
from parts import Teacher, MyLoss, Rows
model = AutoModelForMaskedLM.from_pretrained("bert-base-uncased").to("cuda")
model.train()
{beside}
loader = torch.utils.data.DataLoader(rows, batch_size=2)
optimizer = torch.optim.AdamW(model.parameters())
for batch in loader:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
{after}
"""


def said(write, beside="", after=""):
    run = memest.read_config(
        write("train.py", SCRIPT.format(beside=beside, after=after)), seq_len=8
    )
    return " ".join(run.setup.unpriced)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("ema = copy.deepcopy(model).to('cuda')", "copies of the weights"),
        ("other = Teacher()\nema = copy.deepcopy(other).cuda()", "copies of the weights, on the"),
        ("vae = AutoencoderKL.from_pretrained('vae').to('cuda')", "AutoencoderKL: a further model"),
        ("vae = AutoencoderKL.from_pretrained('vae')\nvae.to('cuda')", "AutoencoderKL: a further"),
        ("critic = lpips.LPIPS(net='vgg').cuda()", "LPIPS: a further model"),
        ("teacher = Teacher(3).cuda()", "Teacher: a further model"),
        ("old = torch.hub.load('a', 'b').cuda()", "torch.hub.load: a further model"),
    ],
)
def test_a_model_beside_it_is_named(write, made, words):
    assert said(write, made).count(words) == 1


@pytest.mark.parametrize(
    "made",
    [
        "loss = MyLoss().cuda()",
        "vae = AutoencoderKL.from_pretrained('vae')",  # stays on the host
        "tokenizer = AutoTokenizer.from_pretrained('a')",
    ],
)
def test_what_is_none_is_not(write, made):
    assert not said(write, made)


def test_a_model_behind_the_training_is_not(write):
    assert not said(write, after="vae = AutoencoderKL.from_pretrained('vae').to('cuda')")


DIFFUSION = """
import torch
from diffusers import UNet2DConditionModel
from transformers import CLIPTextModel
encoder = CLIPTextModel.from_pretrained(args.pretrained_model_name_or_path)
unet = UNet2DConditionModel.from_pretrained(args.pretrained_model_name_or_path)
loader = torch.utils.data.DataLoader(rows, batch_size=2)
optimizer = torch.optim.AdamW(unet.parameters())
for batch in loader:
    unet(batch).sample.mean().backward()
    optimizer.step()
"""


def test_what_a_model_of_another_library_trains_beside_is_none_of_its_own(write):
    """Neither is the name that both are loaded by taken for a model that is priced."""
    parsed = (
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--pretrained_model_name_or_path')\nargs = parser.parse_args()\n"
    )
    write("train.py", parsed + DIFFUSION)
    command = "python train.py --pretrained_model_name_or_path some/diffusion"
    run = memest.read_config(command=command)
    assert run.model is None
    assert any("CLIPTextModel.from_pretrained: a further" in each for each in run.setup.unpriced)
    assert run.model_words == "package.module:name"
