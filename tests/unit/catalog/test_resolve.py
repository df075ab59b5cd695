"""From what a user types to a configuration; the hub is a stand-in."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from memest.catalog import hub
from memest.catalog.config_file import MAX_CONFIG_BYTES, guess_auto_class
from memest.catalog.libraries import names_in_libraries
from memest.catalog.models import lookup
from memest.catalog.resolve import resolve_model
from memest.errors import ConfigError, ModelLoadError, UnknownModelError

TINY = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}
OWN_CODE = {"model_type": "internlm2", "auto_map": {"AutoModel": "modeling.InternLM2"}}


@pytest.fixture(autouse=True)
def hub_calls(monkeypatch):
    """No test may reach a network; each sets what the hub answers."""
    calls = []

    def refuse(*args, **kwargs):
        calls.append(args)
        raise hub_errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: None)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    return calls


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def status_error(kind, code):
    response = SimpleNamespace(
        status_code=code, headers={}, request=SimpleNamespace(method="HEAD", url="x"), url="x"
    )
    error = kind.__new__(kind)
    Exception.__init__(error, f"HTTP {code}")
    error.response = response
    return error


class TestFile:
    def test_file_and_folder(self, tmp_path):
        path = write(tmp_path / "config.json", TINY)

        for ref in (str(path), str(tmp_path), f"{tmp_path}/"):
            source = resolve_model(ref)
            assert source.kind == "file"
            assert source.config == TINY
            assert source.path == path
            assert source.auto_class == "AutoModelForCausalLM"

    def test_a_folder_here_goes_before_the_catalogue(self, tmp_path, monkeypatch):
        """One without a config that has a catalogue's name is passed over."""
        monkeypatch.chdir(tmp_path)
        for name in ("mine", "gpt2", "bert-base-uncased"):
            (tmp_path / name).mkdir()
        write(tmp_path / "mine" / "config.json", TINY)
        path = write(tmp_path / "gpt2" / "config.json", "")
        path.write_text(json.dumps(TINY), encoding="utf-8-sig")

        assert resolve_model("mine").kind == "file"
        assert resolve_model("gpt2").config == TINY
        source = resolve_model("bert-base-uncased")
        assert source.kind == "catalogue"
        assert "passed over" in source.notes[0]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "not valid JSON: .* in line 1, column 2"),
            ("", "not valid JSON"),
            ("[1]", "holds a JSON array"),
            ('"x"', "holds a JSON string"),
            ("null", "holds a JSON null"),
            ("3", "holds a JSON number"),
            ("[" * 100_000, "nested too deeply|not valid JSON"),
            ({"hidden_size": 8}, "has no model_type"),
            ({"model_type": 3}, "has no model_type"),
            ({"model_type": "gpt2", "n_layer": -1}, "n_layer is -1: a number of layers"),
            ({"model_type": ""}, "has no model_type"),
            ({"_class_name": "UNet2DConditionModel"}, "diffusers"),
        ],
    )
    def test_bad_content(self, tmp_path, content, message):
        path = write(tmp_path / "config.json", content)

        with pytest.raises(ConfigError, match=message) as caught:
            resolve_model(str(path))
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)

    def test_the_folder_of_a_pipeline(self, tmp_path):
        write(tmp_path / "model_index.json", {"_class_name": "StableDiffusionPipeline"})

        with pytest.raises(
            ConfigError, match=r"StableDiffusionPipeline of .*memest help diffusers"
        ):
            resolve_model(str(tmp_path))

    def test_binary(self, tmp_path):
        path = tmp_path / "model.safetensors"
        path.write_bytes(b"\xff\xfe\x00\x80")

        with pytest.raises(ConfigError, match="not text"):
            resolve_model(str(path))

    def test_huge_file_is_not_read(self, tmp_path):
        path = tmp_path / "config.json"
        with path.open("wb") as stream:
            stream.truncate(MAX_CONFIG_BYTES + 1)

        with pytest.raises(ConfigError, match=r"at most 10 MiB"):
            resolve_model(str(path))

    @pytest.mark.parametrize(
        "ref", ["./none", "none.json", "/none/here", "a/b/c", "~nobody-here/x", "none/"]
    )
    def test_missing(self, ref):
        with pytest.raises(ConfigError, match="does not exist"):
            resolve_model(ref)

    def test_a_folder_without_a_config_names_the_way_out(self, tmp_path):
        with pytest.raises(ConfigError, match=r"no config\.json"):
            resolve_model(str(tmp_path))
        write(tmp_path / "adapter_config.json", {})
        with pytest.raises(ConfigError, match="base model"):
            resolve_model(str(tmp_path))


def test_code_of_the_repository(tmp_path):
    path = str(write(tmp_path / "config.json", OWN_CODE))
    with pytest.raises(ModelLoadError, match="--trust-remote-code"):
        resolve_model(path)
    source = resolve_model(path, trust_remote_code=True)
    assert source.trust_remote_code
    assert source.config == OWN_CODE

    write(tmp_path / "config.json", {**TINY, "auto_map": {"a": "b"}})
    source = resolve_model(path)
    assert source.config == TINY
    assert "auto_map" in source.notes[0]


class TestFactory:
    @pytest.mark.parametrize("ref", ["pkg.module:build", "module:Class.make"])
    def test_is_not_imported(self, ref):
        source = resolve_model(ref)

        assert (source.kind, source.factory, source.config) == ("factory", ref, None)

    @pytest.mark.parametrize("ref", ["a:b:c", "1x:y", "x:", ":y", "http://x"])
    def test_other_colons(self, ref):
        with pytest.raises((UnknownModelError, ConfigError)):
            resolve_model(ref)


class TestCatalogue:
    def test_needs_no_hub(self, hub_calls):
        source = resolve_model("google-bert/bert-large-uncased")

        assert (source.kind, source.id) == ("catalogue", "bert-large-uncased")
        assert source.config["num_hidden_layers"] == 24
        assert source.auto_class == "AutoModelForPreTraining"
        assert not hub_calls

    def test_alias_of_another_name_is_noted(self):
        assert (
            "Qwen/Qwen3-235B-A22B" in resolve_model("Qwen/Qwen3-235B-A22B-Thinking-2507").notes[0]
        )
        assert not any(
            "architecture of" in note for note in resolve_model("openai-community/gpt2").notes
        )

    def test_rebuilt_configuration_says_so(self):
        source = resolve_model("01-ai/Yi-1.5-34B")

        assert lookup(source.id).provenance == "reconstructed"
        assert "rebuilt" in source.provenance
        assert any("real config.json" in note for note in source.notes)
        assert any("float32" in note for note in resolve_model("adept/persimmon-8b-base").notes)

    def test_is_hashable(self):
        assert len({resolve_model("gpt2"), resolve_model("gpt2")}) == 1


class TestLibraries:
    def test_a_bare_name_is_told_how_libraries_call_it(self):
        with pytest.raises(UnknownModelError, match="are timm/gone50 or torchvision/gone50, or"):
            resolve_model("gone50")
        with pytest.raises(UnknownModelError, match="are timm/NAME or torchvision/NAME, or"):
            resolve_model("someone/gone50")

    def test_an_installed_library_is_asked_without_importing_it(self, tmp_path, monkeypatch):
        (tmp_path / "torchvision" / "models").mkdir(parents=True)
        write(tmp_path / "torchvision" / "__init__.py", "raise AssertionError")
        write(tmp_path / "torchvision" / "models" / "net.py", "import torch\ndef gone50(): pass\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(UnknownModelError, match=r"a library: torchvision/gone50\. "):
            resolve_model("gone50")
        assert names_in_libraries("gone51") == names_in_libraries("gone50.tag") == ()


class TestHub:
    def test_local_cache_is_enough(self, tmp_path, monkeypatch, hub_calls):
        path = write(tmp_path / "config.json", TINY)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: str(path))
        source = resolve_model("me/mine")

        assert (source.kind, source.id, source.config) == ("hub", "me/mine", TINY)
        assert "local cache" in source.provenance
        assert not hub_calls

    def test_download_asks_for_the_config_alone(self, tmp_path, monkeypatch):
        path = write(tmp_path / "config.json", TINY)
        asked = []

        def download(*args, **kwargs):
            asked.append((args, kwargs))
            return str(path)

        monkeypatch.setattr(
            huggingface_hub, "get_hf_file_metadata", lambda *a, **k: SimpleNamespace(size=100)
        )
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)

        assert resolve_model("me/mine").path == path
        assert asked == [(("me/mine", "config.json"), {"etag_timeout": hub.TIMEOUT_SECONDS})]

    def test_huge_config_is_not_downloaded(self, monkeypatch, hub_calls):
        monkeypatch.setattr(
            huggingface_hub,
            "get_hf_file_metadata",
            lambda *a, **k: SimpleNamespace(size=MAX_CONFIG_BYTES + 1),
        )

        with pytest.raises(ModelLoadError, match="at most"):
            resolve_model("me/mine")
        assert not hub_calls

    @pytest.mark.parametrize(
        ("error", "kind", "message"),
        [
            (hub_errors.OfflineModeIsEnabled("x"), UnknownModelError, "HF_HUB_OFFLINE is set"),
            (hub_errors.LocalEntryNotFoundError("x"), UnknownModelError, "cannot be reached"),
            (ConnectionError("no route"), UnknownModelError, "cannot be reached: .*no route"),
            (TimeoutError("slow"), UnknownModelError, "cannot be reached"),
            (OSError("[Errno -2] no name"), UnknownModelError, r"check the network \(no name\)"),
            (status_error(hub_errors.GatedRepoError, 403), ModelLoadError, "gated.*HF_TOKEN"),
            (
                status_error(hub_errors.RepositoryNotFoundError, 401),
                UnknownModelError,
                "shows no such model",
            ),
            (
                status_error(hub_errors.RemoteEntryNotFoundError, 404),
                ModelLoadError,
                r"has no config\.json",
            ),
            (status_error(hub_errors.HfHubHTTPError, 401), ModelLoadError, "refuses.*401"),
            (status_error(hub_errors.HfHubHTTPError, 503), UnknownModelError, "HTTP 503"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_failures_say_which_and_suggest(self, monkeypatch, error, kind, message):
        def fail(*args, **kwargs):
            raise error

        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)

        with pytest.raises(kind, match=message) as caught:
            resolve_model("someone/bert-large-uncased")
        assert "bert-large-uncased, " in str(caught.value)
        assert caught.value.exit_code == (5 if kind is UnknownModelError else 1)
        assert "\n" not in str(caught.value)

    def test_a_name_that_cannot_be_an_id(self, monkeypatch):
        monkeypatch.undo()

        with pytest.raises(UnknownModelError, match="cannot be an id"):
            resolve_model("two words")

    def test_without_the_package(self, monkeypatch):
        def missing(name):
            raise ImportError(name)

        monkeypatch.setattr(importlib, "import_module", missing)

        with pytest.raises(UnknownModelError, match=r"memest-gpu\[torch\]"):
            resolve_model("me/mine")

    def test_nothing(self):
        with pytest.raises(UnknownModelError, match="no model was named"):
            resolve_model("  ")


class TestAutoClass:
    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ({"architectures": ["GPT2LMHeadModel"]}, "AutoModelForCausalLM"),
            ({"architectures": ["BertForMaskedLM"]}, "AutoModelForMaskedLM"),
            ({"architectures": ["BertModel"]}, "AutoModel"),
            ({"architectures": ["T5ForConditionalGeneration"]}, "AutoModelForSeq2SeqLM"),
            (
                {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"},
                "AutoModelForSpeechSeq2Seq",
            ),
            (
                {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}},
                "AutoModelForImageTextToText",
            ),
            ({"architectures": ["Strange"]}, None),
            ({"architectures": []}, None),
            ({}, None),
        ],
    )
    def test_from_the_architectures(self, config, expected):
        assert guess_auto_class(config) == expected
