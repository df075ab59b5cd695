"""``MODEL?name=value``: a model with some of its configuration changed."""

from __future__ import annotations

import json

import pytest

import memest
from memest.catalog.changes import split_changes
from memest.catalog.resolve import resolve_model
from memest.errors import ConfigError, UnknownModelError

SHORT = {"batch": 2, "seq_len": 64, "loop": "plain"}


@pytest.mark.parametrize(
    ("ref", "base", "changes"),
    [
        ("gpt2", "gpt2", {}),
        ("gpt2?n_layer=2", "gpt2", {"n_layer": 2}),
        ("a/b?x=1.5&y=true&z=null", "a/b", {"x": 1.5, "y": True, "z": None}),
        ("a?act=gelu&flag=False&list=[1,2]", "a", {"act": "gelu", "flag": False, "list": [1, 2]}),
        ("a?act=with%20space", "a", {"act": "with space"}),
    ],
)
def test_what_is_written_is_read(ref, base, changes):
    assert split_changes(ref) == (base, changes)


@pytest.mark.parametrize(
    ("ref", "said"),
    [
        ("gpt2?", "is not a change of"), ("gpt2?n_layer", "is not a change of"),
        ("gpt2?n layer=2", "is not a change of"), ("gpt2?a=1&a=2", "twice"),
        ("gpt2?model_type=llama", "cannot be changed"), ("gpt2?auto_map={}", "cannot be changed"),
        ("pkg.mod:build?x=1", "no configuration to change"),
    ],
)  # fmt: skip
def test_slips_are_explained(ref, said):
    with pytest.raises(ConfigError, match=said):
        resolve_model(ref)


def test_names_that_the_configuration_has_not_are_refused():
    with pytest.raises(ConfigError, match=r"has no .n_layr.\. Did you mean .n_layer."):
        memest.estimate("gpt2?n_layr=2", **SHORT)


def test_the_source_says_what_was_changed():
    plain, source = resolve_model("gpt2"), resolve_model("gpt2?n_layer=2")
    assert source.id == "gpt2?n_layer=2"
    assert source.config == {**plain.config, "n_layer": 2}
    assert "n_layer" not in plain.config or plain.config["n_layer"] != 2
    assert any("was changed: n_layer=2" in note for note in source.notes)
    assert source != plain
    with pytest.raises(UnknownModelError):
        resolve_model("nobody/knows?n_layer=2")


@pytest.mark.slow
def test_fewer_layers_are_fewer_parameters(tmp_path):
    twelve = memest.estimate("gpt2", **SHORT)
    two = memest.estimate("gpt2?n_layer=2", **SHORT)
    layer = (twelve.model.parameters - two.model.parameters) // 10
    assert two.model.parameters + 10 * layer == twelve.model.parameters
    assert layer == 7_087_872
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**resolve_model("gpt2").config, "n_layer": 2}))
    assert memest.estimate(str(path), **SHORT).peak == two.peak
    assert memest.estimate(f"{path}?n_layer=3", **SHORT).model.parameters == (
        two.model.parameters + layer
    )
