"""Models of several senses: sizes that become others, and adapters that peft asks names for."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
import transformers

from memest.config.options import setup_from_options
from memest.config.setup import Task
from memest.errors import ConfigError
from memest.trace.inputs import batch
from memest.trace.inputs.tensors import BatchSizes
from memest.trace.model.adapters import add_adapter

_TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 128, "head_dim": 16,
}  # fmt: skip
_TOWER = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 32,
    "fullatt_block_indexes": [0],
}  # fmt: skip


def notes_of(takes, asked, name="image_size"):
    """What is said of a size by a model that takes what ``takes`` makes of it."""

    def sizes_at(field, value):
        return BatchSizes(**{field: takes(value)})

    setup = setup_from_options(**{name: asked})
    return batch._ignored_size_notes(setup, sizes_at(name, asked), sizes_at)


@pytest.mark.parametrize(
    ("takes", "asked", "said"),
    [
        (lambda size: -(-size // 28) * 28, 1024, "--image-size 1024 is taken as 1036, what this"),
        (lambda size: min(size, 980), 1024, "--image-size 1024 is taken as 980, what this model"),
        (lambda _: 224, 1024, "--image-size 1024 has no effect: this model always takes 224"),
        (lambda _: None, 32, "--image-size 32 has no effect on this model's inputs"),
    ],
)
def test_a_size_that_becomes_another(takes, asked, said):
    (note,) = notes_of(takes, asked)
    assert note.startswith(said)


def test_a_size_that_is_taken_needs_no_word():
    assert notes_of(lambda size: size, 448) == ()


def refusal(model, **options):
    setup = setup_from_options(peft="lora", **options)
    with pytest.raises(ConfigError) as caught:
        add_adapter(model, Task.IMAGE_TEXT_TO_TEXT, setup)
    return str(caught.value)


def test_what_to_type_where_peft_asks_for_names():
    config = transformers.AutoConfig.for_model(
        "qwen2_5_vl", text_config=_TEXT, vision_config=_TOWER
    )
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    words = refusal(model)
    assert "Add --lora-target-modules q_proj,k_proj,v_proj,o_proj (of its language model" in words
    assert "or --lora-target-modules all-linear (all but its head);" in words
    assert " 0," not in words


def test_a_module_of_ones_own_has_names_alone():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        model.add_module("head", torch.nn.Linear(4, 2))
    words = refusal(model, lora_target_modules="nothing")
    assert words.endswith(
        "Name modules with --lora-target-modules; its linear ones are called head."
    )
