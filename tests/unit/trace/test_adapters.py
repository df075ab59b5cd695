"""Which modules get adapters, where a list of names says more than peft's own words."""

from __future__ import annotations

import pytest

from memest.config.options import setup_from_options
from memest.config.setup import Task
from memest.trace.model.adapters import add_adapter
from support.cases import twin

pytest.importorskip("peft")
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted(*targets):
    """Names of the parameters of adapters, and what is said of them."""
    model = twin("llama", runs=False).built_model.model
    setup = setup_from_options(lora_r=4, lora_target_modules=targets)
    peft_model, notes = add_adapter(model, Task.CAUSAL_LM, setup)
    return {name for name, each in peft_model.named_parameters() if each.requires_grad}, notes


def test_linear_layers_besides_names_are_the_union():
    named, notes = adapted("and-all-linear", *LAYERS)
    assert named == adapted("all-linear")[0]
    assert not any("no effect" in note for note in notes)

    with_head, _ = adapted("and-all-linear", "q_proj", "lm_head")
    assert with_head > named
    assert all("lm_head" in name for name in with_head - named)


def test_the_word_of_peft_among_names_stays_a_name_that_matches_nothing():
    named, notes = adapted("all-linear", "q_proj")
    assert all("q_proj" in name for name in named)
    assert any("all-linear of the adapters has no effect" in note for note in notes)
