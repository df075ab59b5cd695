"""How large images become: a cap is priced, what nothing names leaves a verdict open."""

import pytest

import memest
from memest.config.images import ImageSize, length_around

QWEN = "Qwen/Qwen2-VL-2B-Instruct"
FACTORY = f"llamafactory-cli train --model_name_or_path {QWEN} --stage sft --template qwen2_vl"
PUBLISHED = f"torchrun qwenvl/train/train_qwen.py --model_name_or_path {QWEN}"

SCRIPT = """
import torch
from transformers import AutoProcessor, Qwen2VLForConditionalGeneration, Trainer, TrainingArguments
model = Qwen2VLForConditionalGeneration.from_pretrained("{model}", torch_dtype=torch.bfloat16)
processor = AutoProcessor.from_pretrained("{model}"{cap})
{told}
def collate(rows):
    images = [row["image"]{scaled} for row in rows]
    messages = [{{"type": "image", "image": image{inside}}} for image in images]
    return processor(text=["a"], images=images, return_tensors="pt"{called})
args = TrainingArguments("out", per_device_train_batch_size=2)
Trainer(model=model, args=args, train_dataset=rows, data_collator=collate).train()
"""


def read(write, model=QWEN, **parts):
    """A script's run, fitted to its model as an answer has it."""
    names = ("cap", "told", "scaled", "inside", "called")
    text = SCRIPT.format(**{**dict.fromkeys(names, ""), "model": model, **parts})
    return memest.read_config(write("train.py", text)).fitted()


@pytest.mark.parametrize(
    ("parts", "side"),
    [
        ({"cap": ", max_pixels=1280 * 28 * 28"}, 1008),
        ({"called": ", max_pixels=224 * 224"}, 224),
        ({"told": "processor.image_processor.max_pixels = 512 * 28 * 28"}, 644),
        ({"inside": ', "max_pixels": 256 * 28 * 28'}, 448),
        ({"cap": ", size={'shortest_edge': 3136, 'longest_edge': 501760}"}, 728),
        ({"scaled": ".resize((560, 560))"}, 560),
        # both hold: PIL's image is the smaller
        ({"scaled": ".resize((280, 560))", "cap": ", max_pixels=1280 * 28 * 28"}, 420),
    ],
)
def test_a_cap_in_pixels_is_priced(write, parts, side):
    """In units of the model's tokens, rounded up: no image has more, and some have less."""
    run = read(write, **parts)
    assert run.setup.image_size == side
    assert not any("size of images" in each for each in run.setup.unpriced)
    assert any("no image has more" in each for each in run.setup.overpriced)
    tokens = (side // 28) ** 2
    assert any(f"{length_around(tokens)} tokens" in each for each in run.setup.unpriced)


def test_no_cap_leaves_the_verdict_open(write):
    """Until the size is said; the length around the image stays open then."""
    run = read(write)
    assert run.setup.image_size is None
    assert any("size of images: nothing names it: 448 x 448" in e for e in run.setup.unpriced)
    said = run.with_options(image_size=448).fitted()
    assert "size of images" not in " ".join(said.setup.unpriced)
    assert "length of samples" in " ".join(said.setup.unpriced)
    assert not run.with_options(image_size=448, seq_len=1024).fitted().setup.unpriced


def test_a_model_with_a_size_of_its_own_is_not_asked(write):
    """LLaVA brings every image to its tower's size, whatever the cap."""
    run = read(write, "llava-hf/llava-1.5-7b-hf", cap=", max_pixels=1280 * 28 * 28")
    assert run.setup.image_size is None
    assert "size of images" not in " ".join(run.setup.unpriced)


def test_an_image_is_no_longer_than_its_sample(write):
    """A cap beyond the length that is named holds no image that trains."""
    config = {"model_type": "qwen2_vl", "vision_config": {"patch_size": 14}}
    size = ImageSize(config)
    assert size.up_to(1280 * 28 * 28, None) == 36 * 28
    assert size.up_to(1280 * 28 * 28, 512) == 22 * 28
    assert size.tokens(22 * 28) + 8 <= 512
    assert ImageSize({"vision_config": {"patch_size": 16}}).unit == 32


@pytest.mark.parametrize(
    ("command", "side"),
    [
        (f"MAX_PIXELS=50176 swift sft --model {QWEN}", 224),
        (f"swift sft --model {QWEN} --max_pixels 50176", 224),
        (f"{PUBLISHED} --max_pixels 50176 --min_pixels 784", 224),
        # LLaMA-Factory caps unasked
        (FACTORY, 784),
        (f"{FACTORY} --image_max_pixels 262144", 532),
        (f"swift sft --model {QWEN}", None),
    ],
)  # fmt: skip
def test_frameworks_cap_images(command, side):
    """By an argument, a variable or unasked."""
    run = memest.read_config(command=command.split()).fitted()
    assert run.setup.image_size == side
    assert any("size of images" in each for each in run.setup.unpriced) is (side is None)


def test_a_model_of_text_has_no_images():
    """LLaMA-Factory's cap is nothing to it."""
    command = "llamafactory-cli train --model_name_or_path gpt2 --stage sft --template default"
    run = memest.read_config(command=command.split()).fitted()
    assert run.setup.image_size is None
    assert "images" not in " ".join(map(str, run.not_modelled))
    # and its length is brought down to the model's positions, in the options as in the setup
    assert run.setup.seq_len == run.options["seq_len"] == 1024
