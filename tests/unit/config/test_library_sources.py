"""What sources of installed libraries say is what the libraries do."""

from __future__ import annotations

import textwrap

import pytest

from memest.catalog.models import catalogue
from memest.catalog.resolve import resolve_model
from memest.config import library_sources
from memest.config.adapter import METHODS, methods
from memest.config.kinds import Task
from memest.config.library_sources import default_targets, has_no_plan, linear_names, peft_methods
from memest.config.setup import Setup
from memest.errors import ConfigError


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A peft and a transformers whose sources are what a test writes."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    caches = [each for each in vars(library_sources).values() if hasattr(each, "cache_clear")]
    for each in caches:
        each.cache_clear()
    monkeypatch.setattr(library_sources, "_folder", lambda package: tmp_path / package)
    yield write
    for each in caches:
        each.cache_clear()


def _write_peft(write, tables):
    write("peft/utils/peft_types.py", "class PeftType(str):\n    LORA = 'LORA'\n    IA3 = 'IA3'\n")
    write("peft/utils/constants.py", tables)
    write("transformers/models/a_b/configuration_a_b.py", 'model_type = "a-b"')
    write("transformers/models/other/configuration_other.py", 'model_type = "other"')


LORA, IA3 = (f"TRANSFORMERS_MODELS_TO_{name}_TARGET_MODULES_MAPPING" for name in ("LORA", "IA3"))
OTHER = {"model_type": "other"}


@pytest.mark.parametrize(
    ("tables", "answers"),
    [
        (f'{LORA} = {{"a-b": ["x"]}}', (False, None)),
        (f'{LORA} = {{"a-b": ["x"]}}\n{IA3} = {LORA}.copy()', (False, False)),
        (f'{LORA} = {{"a-b": ["x"]}}\n{IA3} = {LORA}.copy()\n{IA3}["other"] = []', (False, True)),
        (f'{LORA} = {{"a-b": ["x"]}}\n{LORA}.update(more)', (None, None)),
        (f'{LORA} = {{"a-b": ["x"], **more}}', (None, None)),
        (f'{LORA} = {{"a-b": ["x"]}}\nif old:\n    {LORA}["other"] = []', (None, None)),
        ("", (None, None)),
        ("def broken(:", (None, None)),
    ],
    ids=str,
)
def test_tables_of_peft_as_it_writes_them(installed, tables, answers):
    _write_peft(installed, tables)
    assert (default_targets("lora", OTHER), default_targets("ia3", OTHER)) == answers


def test_a_type_that_a_part_may_have_leaves_the_question_to_peft(installed):
    _write_peft(installed, f'{LORA} = {{"a-b": ["x"], "osf": ["x"]}}')
    assert default_targets("lora", OTHER) is False
    assert default_targets("osf", OTHER) is None
    assert default_targets("lora", {**OTHER, "text_config": {"model_type": "a-b"}}) is True
    unknown = {**OTHER, "text_config": {"model_type": "of no source"}}
    assert default_targets("lora", unknown) is None
    assert default_targets("lora", {"text_config": {"model_type": "other"}}) is None
    for line in ('CONFIG_MAPPING["a-b"]()', "from ..a_b import ABConfig"):
        _write_peft(installed, f'{LORA} = {{"a-b": ["x"]}}')
        installed("transformers/models/other/configuration_other.py", f'"other"\n{line}\n')
        library_sources._sources.cache_clear()
        assert default_targets("lora", OTHER) is True


@pytest.mark.parametrize(
    ("settings", "models", "none"),
    [
        ("", "", True),
        ("    base_model_tp_plan = {}", "", False),
        ("", "    _tp_plan = {}", False),
        ("from ..auto import AutoConfig", "", False),
        ("", "from ..llama.modeling_llama import LlamaModel", False),
        ("from ...utils import logging", "from ... import initialization", True),
    ],
    ids=str,
)
def test_a_plan_that_a_source_may_have_leaves_the_question_to_transformers(
    installed, settings, models, none
):
    folder = "transformers/models/other"
    installed(f"{folder}/configuration_other.py", f'model_type = "other"\n{settings}\n')
    assert not has_no_plan(OTHER)  # no model that it is of
    library_sources._sources.cache_clear()
    installed(f"{folder}/modeling_other.py", f"class Model:\n    pass\n{models}\n")
    assert has_no_plan(OTHER) is none
    assert not has_no_plan({**OTHER, "base_model_tp_plan": {"x": "colwise"}})


@pytest.mark.slow
def test_methods_and_names_are_those_of_the_installed_ones():
    import peft

    assert {*peft_methods()} == {each.value.lower() for each in peft.PeftType}
    assert {*METHODS} <= {*methods()}
    assert linear_names({"model_type": "phi3"})[:2] == ["gate_up_proj", "down_proj"]
    assert linear_names({"model_type": "no such type"}) == []


@pytest.mark.slow
def test_nothing_is_refused_early_that_the_libraries_do():
    """Over the whole catalogue: a model of each type, with its own head and as a language model."""
    from memest.trace.model.build import build_model

    entries = {}
    for entry in catalogue():
        source = resolve_model(entry.id)
        entries.setdefault(str(source.config["model_type"]), source)
    plans, targets = 0, set()
    for source in entries.values():
        no_plan = has_no_plan(source.config)
        unknown = [name for name in methods() if default_targets(name, source.config) is False]
        for task in (Task.AUTO, Task.CAUSAL_LM):
            try:
                model = build_model(source, Setup(task=task)).model
            except ConfigError:
                continue
            plans += no_plan
            assert not (no_plan and model.tp_plan), source.id
            targets |= {(name, model.config.model_type) for name in unknown}
    assert plans > 60
    assert len(targets) > 1000
    assert not [each for each in sorted(targets) if _peft_chooses(*each)]
    assert _peft_chooses("lora", "llama")
    assert _peft_chooses("osf", "whisper")


def _peft_chooses(method, model_type):
    """Whether peft finds modules of a model by itself, asked as its tuners ask."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
    from peft.utils.peft_types import PeftType

    kind = PeftType(method.upper())
    tuner = PEFT_TYPE_TO_TUNER_MAPPING[kind]
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind](**({"total_step": 9} if method == "adalora" else {}))
    try:
        tuner.__new__(tuner)._prepare_adapter_config(config, {"model_type": model_type})
    except ValueError:
        return False
    return True
