"""The model catalogue: its files, its index, looking a model up."""

from __future__ import annotations

import csv
import json
from importlib.resources import files

import pytest

from memest.catalog import models as module
from memest.catalog.models import aliases, catalogue, closest_models, lookup
from memest.errors import ModelLoadError

FOLDER = files("memest.data") / "models"
ENTRIES = catalogue()


class TestData:
    def test_index_equals_folder(self):
        in_folder = {each.name for each in (FOLDER / "configs").iterdir()}

        assert in_folder == {entry.file for entry in ENTRIES}
        assert len(ENTRIES) == len(in_folder) >= 700

    @pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
    def test_entry_is_whole(self, entry):
        config = entry.config()

        assert config["model_type"] == entry.model_type
        assert "auto_map" not in config
        assert entry.auto_class.startswith("AutoModel")
        assert entry.parameters > 100_000
        assert entry.source
        assert entry.provenance in {"config.json", "reconstructed"}
        assert entry.file == f"{entry.id.replace('/', '--')}.json"
        if entry.published_parameters:
            # may be rounded or count tied weights twice, but not be another model
            assert 0.85 < entry.parameters / entry.published_parameters < 1.15 or entry.note

    @pytest.mark.parametrize(
        ("name", "positions"),
        [
            ("meta-llama/Llama-2-13b-hf", 4096),
            ("meta-llama/Llama-2-70b-hf", 4096),
            ("meta-llama/Llama-2-70b-chat-hf", 4096),
            ("mistralai/Mistral-7B-Instruct-v0.2", 32768),
            ("01-ai/Yi-6B-Chat", 4096),
            ("Qwen/Qwen1.5-1.8B-Chat", 32768),
            ("Qwen/Qwen2.5-VL-3B-Instruct", 128_000),
            ("EleutherAI/pythia-14m", 512),
            ("EleutherAI/pythia-31m", 1024),
        ],
    )
    def test_positions_are_those_the_model_was_made_for(self, name, positions):
        """Not what a copy of its config was cut to for an accelerator, or an early export."""
        entry = lookup(name)

        assert entry.config()["max_position_embeddings"] == positions
        assert "max_position_embeddings" in entry.source

    def test_what_was_left_out_has_a_reason(self):
        text = (FOLDER / "excluded.csv").read_text(encoding="utf-8")
        rows = list(csv.DictReader(text.splitlines()))

        assert text.startswith("id,auto_class,reason")
        assert all(row["reason"] and lookup(row["id"]) is None for row in rows)


class TestLookup:
    @pytest.mark.parametrize(
        ("name", "parameters", "auto_class"),
        [
            ("bert-large-uncased", 336_226_108, "AutoModelForPreTraining"),
            ("gpt2", 124_439_808, "AutoModelForCausalLM"),
            ("meta-llama/Meta-Llama-3-8B", 8_030_261_248, "AutoModelForCausalLM"),
            ("Qwen/Qwen2.5-7B", 7_615_616_512, "AutoModelForCausalLM"),
            ("mistralai/Mistral-7B-v0.1", 7_241_732_096, "AutoModelForCausalLM"),
            ("google/vit-base-patch16-224", 86_567_656, "AutoModelForImageClassification"),
        ],
    )
    def test_golden_counts(self, name, parameters, auto_class):
        entry = lookup(name)

        assert entry is not None
        assert (entry.parameters, entry.auto_class) == (parameters, auto_class)

    @pytest.mark.parametrize("alias", aliases())
    def test_every_alias_resolves(self, alias):
        assert lookup(alias).id == aliases()[alias]

    @pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
    def test_every_id_resolves_to_itself(self, entry):
        assert entry is lookup(entry.id)
        assert entry is lookup(entry.id.upper())

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("google-bert/bert-large-uncased", "bert-large-uncased"),
            ("FacebookAI/roberta-base", "roberta-base"),
            ("EleutherAI/gpt-j-6B", "EleutherAI/gpt-j-6b"),
            ("qwen2.5-7b", "Qwen/Qwen2.5-7B"),
            ("Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
            (" gpt2/ ", "gpt2"),
        ],
    )
    def test_other_spellings(self, name, expected):
        assert lookup(name).id == expected

    @pytest.mark.parametrize("name", ["someone/bert-large-uncased", "", "/", "bert", "no such"])
    def test_what_it_does_not_know(self, name):
        assert lookup(name) is None

    def test_configurations_are_fresh(self):
        lookup("gpt2").config()["n_layer"] = 0

        assert lookup("gpt2").config()["n_layer"] == 12

    def test_damaged_installation(self, monkeypatch):
        def broken(text):
            raise json.JSONDecodeError("broken", text, 0)

        monkeypatch.setattr(module.json, "loads", broken)
        with pytest.raises(ModelLoadError, match="reinstall"):
            lookup("gpt2").config()


class TestClosest:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("bert-large", "bert-large-uncased"),
            ("bert-larg-uncased", "bert-large-uncased"),
            ("someone/bert-large-uncased", "bert-large-uncased"),
            ("meta-llama/Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
            ("mistral-7b", "mistralai/Mistral-7B-v0.1"),
        ],
    )
    def test_slips(self, name, expected):
        found = closest_models(name)

        assert expected in found
        assert len(found) <= 3

    @pytest.mark.parametrize("name", ["", "zzzzzzzz"])
    def test_nothing_alike(self, name):
        assert closest_models(name) == ()
