"""Mirrors of models and their copies in 4 bits are answered as the original, which is said."""

from __future__ import annotations

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

import memest
from memest.catalog.mirrors import original_of_copy
from memest.catalog.models import MIRRORS, alias_reason, aliases, closest_models, lookup
from memest.catalog.resolve import resolve_model
from memest.config.options import setup_from_options
from memest.config.quantization import own_quantization
from memest.config.setup import Setup
from memest.errors import ConfigError, ModelLoadError, UnknownModelError

COPIES = [name for name in aliases() if name.endswith("-bnb-4bit")]
DYNAMIC = [name for name in COPIES if name.endswith("-unsloth-bnb-4bit")]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """No test may reach a network."""

    def refuse(*args, **kwargs):
        raise hub_errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: None)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)


@pytest.mark.parametrize(
    ("name", "original"),
    [
        ("unsloth/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("unsloth/Qwen3-4B-Base", "Qwen/Qwen3-4B-Base"),
        ("NousResearch/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-chat-hf"),
        ("NousResearch/Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct"),
    ],
)
def test_a_mirror_is_its_original_and_says_so(name, original):
    source = resolve_model(name)

    assert source.config == lookup(original).config()
    assert source.id == original
    assert source.notes[0] == f"{name} is answered as {original}: mirror of the same weights"


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.2-1B", "Llama-3.2-1B", "google-bert/bert-base-uncased", "gpt2"]
)
def test_the_models_own_names_say_nothing(name):
    assert resolve_model(name).notes == ()


def test_what_a_mirror_of_a_relative_stands_for_is_said():
    note = resolve_model("unsloth/medgemma-4b-it").notes[0]

    assert "google/gemma-3-4b-it" in note
    assert "mirror of google/medgemma-4b-it, of the same architecture" in note


def test_a_copy_is_quantised_on_disk():
    source = resolve_model("unsloth/llama-3-8b-Instruct-bnb-4bit")
    original = lookup("meta-llama/Meta-Llama-3-8B-Instruct").config()
    quantization = source.config["quantization_config"]

    assert source.id == "unsloth/llama-3-8b-Instruct-bnb-4bit"
    assert quantization["bnb_4bit_quant_type"] == "nf4"
    assert quantization["bnb_4bit_use_double_quant"] is True
    assert quantization["bnb_4bit_compute_dtype"] == source.config["torch_dtype"] == "bfloat16"
    assert source.config["hidden_size"] == original["hidden_size"]
    assert "quantization_config" not in original


@pytest.mark.parametrize("name", COPIES)
def test_every_copy_is_of_a_model_or_refused(name):
    """Which layers a dynamic copy leaves in 16 bits, or one with eyes, its own file says alone."""
    entry = lookup(name)
    if name in DYNAMIC or entry.auto_class != "AutoModelForCausalLM":
        with pytest.raises(ModelLoadError, match=f"{entry.id} with --qlora"):
            resolve_model(name)
    else:
        assert resolve_model(name).config["quantization_config"]["load_in_4bit"]


def test_a_copy_whose_own_file_is_in_the_cache_is_read(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "quantization_config": {"load_in_4bit": true}}')
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: str(path))

    assert resolve_model(DYNAMIC[0]).kind == "hub"


@pytest.mark.parametrize("name", ["unsloth/Zebra-1B-bnb-4bit", "someone/Llama-3.2-1B-bnb-4bit"])
def test_what_only_looks_like_a_mirror_is_not_known(name):
    with pytest.raises(UnknownModelError):
        resolve_model(name)


def test_originals_are_suggested_and_no_copies():
    assert closest_models("someone/Llama-3.2-1B-bnb-4bit")[0] == "meta-llama/Llama-3.2-1B"
    for name in ("unsloth/Zebra-1B-bnb-4bit", "unsloth/Llama-3.2-1X"):
        assert not any(alias_reason(each).startswith(MIRRORS) for each in closest_models(name))


@pytest.mark.parametrize(
    ("name", "original"),
    [
        ("unsloth/Llama-3.2-1B-unsloth-bnb-4bit", "unsloth/Llama-3.2-1B"),
        ("unsloth/Llama-3.2-1B-BNB-4bit", "unsloth/Llama-3.2-1B"),
        ("unsloth/Llama-3.2-1B", "unsloth/Llama-3.2-1B"),
    ],
)
def test_originals_of_copies(name, original):
    assert original_of_copy(name) == original


@pytest.mark.slow
def test_a_copy_is_priced_as_the_4bit_base_that_it_is():
    options = {
        "batch": 1, "seq_len": 128, "gpu": "t4", "max_batch": False, "checkpointing": "none",
    }  # fmt: skip
    copy = memest.estimate("unsloth/SmolLM-135M-bnb-4bit", lora_r=16, **options)
    qlora = memest.estimate(
        "HuggingFaceTB/SmolLM-135M", qlora=True, lora_r=16, dtype="bfloat16", **options
    )

    assert copy.peak.allocated_bytes == qlora.peak.allocated_bytes
    with pytest.raises(ConfigError, match="add adapters"):
        memest.estimate("unsloth/SmolLM-135M-bnb-4bit", **options)


@pytest.mark.parametrize(
    ("options", "checkpointing"),
    [
        ({"lora_r": 8}, "full"),
        ({"lora_r": 8, "load_in_4bit": True}, "full"),
        ({"lora_r": 8, "checkpointing": "none"}, "none"),
        ({"setup": Setup(adapter={"peft_type": "LORA", "r": 8})}, "none"),
    ],
)
def test_a_copy_that_peft_prepares_is_recomputed_unless_told_otherwise(options, checkpointing):
    """As a base that is quantised when it is loaded; a whole setup stays as it is."""
    estimate = memest.estimate("unsloth/SmolLM-135M-bnb-4bit", max_batch=False, **options)

    assert estimate.setup.checkpointing == checkpointing


def test_copies_that_were_made_llamas_are_not_taken_for_the_original():
    # Unsloth's Phi models have Llama's layers, with projections of their own
    assert lookup("unsloth/phi-4") is None
    assert lookup("unsloth/Phi-3-mini-4k-instruct") is None


def test_a_mirror_takes_no_short_name_away():
    assert lookup("Meta-Llama-3.1-70B").id == "meta-llama/Meta-Llama-3.1-70B"


def test_a_copy_in_4_bits_is_not_made_one_of_8():
    config = resolve_model("unsloth/Meta-Llama-3.1-8B-bnb-4bit").config
    with pytest.raises(ConfigError, match="quantised to 4 bits already"):
        own_quantization(config, setup_from_options(load_in_8bit=True, lora_r=16).quantization)


@pytest.mark.parametrize(
    ("asked", "says"), [({"load_in_4bit": True}, ": transformers takes its"), ({"qlora": True}, "")]
)
def test_a_copy_in_4_bits_keeps_its_own_settings_whatever_is_asked_for(asked, says):
    """As ``merge_quantization_configs`` of transformers does, which warns."""
    config = resolve_model("unsloth/Meta-Llama-3.1-8B-bnb-4bit").config
    setup = setup_from_options(lora_r=16, prepare_kbit=False, **asked)

    quantization, (note,) = own_quantization(config, setup.quantization)

    assert (quantization.quant_type, quantization.compute_dtype) == ("nf4", "bfloat16")
    assert quantization.double_quant
    assert quantization.prepare is False
    assert note.partition(" its")[0] == f"the checkpoint is quantised already{says}".removesuffix(
        " its"
    )


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
def test_a_checkpoint_of_another_method_takes_no_bitsandbytes(method):
    config = {"quantization_config": {"quant_method": method}}
    with pytest.raises(ConfigError, match=f"quantised by {method} already"):
        own_quantization(config, setup_from_options(qlora=True).quantization)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("llama 3.1 8b", "meta-llama/Llama-3.1-8B"),
        ("Qwen3 8B", "Qwen/Qwen3-8B"),
        ("gpt-2", "gpt2"),
        ("T5_large", "t5-large"),
    ],
)
def test_a_name_as_one_says_it_is_understood_and_said(said, meant):
    source = resolve_model(said)
    assert source.id == meant
    assert source.notes[0] == f"{said!r} was taken as {meant}"


@pytest.mark.parametrize("said", ["someone/gpt-2", "meta-llama/Llama 3.1 8B", "llama 8b", "gpt"])
def test_a_name_as_one_says_it_has_no_organisation_and_all_its_parts(said):
    assert lookup(said) is None


def test_a_folder_here_is_no_name_as_one_says_it(tmp_path, monkeypatch):
    (tmp_path / "Qwen3_8B").mkdir()
    (tmp_path / "Qwen3_8B/adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match="holds an adapter"):
        resolve_model("Qwen3_8B")
