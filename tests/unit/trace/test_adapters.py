"""Which modules get adapters, where a list of names says more than peft's own words."""

from __future__ import annotations

import pytest
import torch

from memest.config.options import setup_from_options
from memest.config.setup import Task
from memest.trace.model.adapters import add_adapter, weigh_ranks
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


def weighed(adapter):
    """An adapted model behind a backward and what a script then calls, and what peft keeps."""
    model = twin("llama", runs=False).built_model.model
    setup = setup_from_options(adapter=adapter)
    peft_model, _ = add_adapter(model, Task.CAUSAL_LM, setup)
    for each in peft_model.parameters():
        each.grad = torch.zeros_like(each) if each.requires_grad else None
    weigh_ranks(peft_model)
    allocator = getattr(peft_model.base_model, "rankallocator", None)
    kept = [] if allocator is None else [
        tensor
        for held in vars(allocator).values()
        if isinstance(held, dict)
        for tensor in held.values()
        if isinstance(tensor, torch.Tensor)
    ]  # fmt: skip
    return peft_model, kept


def test_adalora_keeps_three_importances_of_what_trains():
    model, kept = weighed({"peft_type": "ADALORA", "total_step": 10})
    trains = sum(each.numel() for each in model.parameters() if each.requires_grad)

    assert sum(tensor.numel() for tensor in kept) == 3 * trains
    assert weighed({"peft_type": "LORA"})[1] == []
