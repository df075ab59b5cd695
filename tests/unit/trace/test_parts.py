"""Parts of multimodal models: which parameters stop, and which modules adapters leave out."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from memest.config.options import setup_from_options
from memest.config.setup import Task
from memest.errors import ConfigError
from memest.trace.model.adapters import add_adapter
from memest.trace.model.build import freeze

_TEXT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64,
         "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1,
          "num_attention_heads": 2, "num_heads": 2, "out_hidden_size": 32, "image_size": 28,
          "patch_size": 14, "embed_dim": 32}  # fmt: skip
PROJECTORS = {
    "qwen2_5_vl": "visual.merger",
    "qwen2_vl": "visual.merger",
    "llava": "multi_modal_projector",
    "gemma3": "multi_modal_projector",
    "idefics3": "connector",
}


def _model(kind):
    config = transformers.AutoConfig.for_model(kind, text_config=_TEXT, vision_config=_TOWER)
    with torch.device("meta"):
        return transformers.AutoModelForImageTextToText.from_config(config)


@pytest.mark.parametrize("kind", PROJECTORS)
def test_a_frozen_tower_leaves_the_others(kind):
    projector = PROJECTORS[kind]
    model = _model(kind)
    freeze(model, setup_from_options(frozen_parts=("vision",)))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert any(projector in name for name in trained)
    assert any("language_model" in name or "text_model" in name for name in trained)
    assert frozen
    assert all("vis" in name and projector not in name for name in frozen)

    freeze(model, setup_from_options(frozen_parts=("projector", "vision")))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("vis" not in name and projector not in name for name in trained)
    freeze(model, setup_from_options(frozen_parts=("language",)))
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", PROJECTORS)
def test_adapters_leave_parts_out(kind):
    options = {"lora_r": 4, "lora_target_modules": "all-linear"}
    targets = {}
    for parts in ((), ("vision", "projector"), ("language",)):
        setup = setup_from_options(frozen_parts=parts, **options)
        peft_model, _ = add_adapter(_model(kind), Task.IMAGE_TEXT_TO_TEXT, setup)
        targets[parts] = {
            name.partition(".lora_")[0]
            for name, parameter in peft_model.named_parameters()
            if parameter.requires_grad
        }
    language, rest = targets["vision", "projector"], targets["language",]
    assert language
    assert rest
    assert not language & rest
    assert language | rest == targets[()]
    assert not any("vis" in name or "connector" in name for name in language)


def test_a_model_of_one_part_trains_whole():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model("llama", **_TEXT)
        )
    freeze(model, setup_from_options(frozen_parts=("vision", "projector", "language")))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_tower_of_an_unknown_name_is_refused():
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(vision_config=3)
    with pytest.raises(ConfigError, match="vision_config, and no module of a name"):
        freeze(model, setup_from_options(frozen_parts=("vision",)))


def test_a_part_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"--frozen-parts 'visoin' .*vision"):
        setup_from_options(frozen_parts=("visoin",))


def test_names_that_peft_passes_over_are_said():
    config = transformers.LlamaConfig(**_TEXT)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    named = ["q_proj", "qkv_proj", "self_attn.v_proj"]
    setup = setup_from_options(lora_target_modules=named, modules_to_save=["lm_head", "score"])
    _, notes = add_adapter(model, Task.CAUSAL_LM, setup)

    assert [note for note in notes if "no effect" in note] == [
        "target_modules qkv_proj of the adapters has no effect: no module is called so",
        "modules_to_save score of the adapters has no effect: no module is called so",
    ]
