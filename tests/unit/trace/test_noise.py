"""NEFTune: where transformers' hook sits, and models that have no place for it."""

import pytest
import torch
import transformers

from memest.config.options import setup_from_options
from memest.errors import ConfigError
from memest.trace.model.adapters import add_adapter
from memest.trace.model.noise import add_noise
from support.cases import twin


@pytest.mark.parametrize("adapted", [False, True])
def test_the_hook_is_transformers_own(adapted):
    options = {"lora_r": 4, "lora_target_modules": "all-linear"} if adapted else {}
    setup = setup_from_options(neftune_noise_alpha=5, **options)
    built_model = twin("llama", runs=False).built_model
    model = built_model.model
    trained = add_adapter(model, built_model.task, setup)[0] if adapted else model
    add_noise(trained, setup)
    hooks = [hook.__name__ for hook in model.get_input_embeddings()._forward_hooks.values()]
    assert "neftune_post_forward_hook" in hooks


@pytest.mark.parametrize("kind", ["module", "resnet"])
def test_a_model_without_embeddings_is_refused(kind):
    model = torch.nn.Linear(2, 2)
    if kind == "resnet":
        with torch.device("meta"):
            model = transformers.ResNetModel(transformers.ResNetConfig())
    with pytest.raises(ConfigError, match="has no input embeddings"):
        add_noise(model, setup_from_options(neftune_noise_alpha=1))
    add_noise(model, setup_from_options())
