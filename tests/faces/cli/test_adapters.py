"""Adapters and quantised bases on the command line: spellings, results, refusals."""

from __future__ import annotations

import json
import sys

import pytest

import memest
from memest.config.adapter import METHODS, Adapter, methods
from memest.config.library_sources import peft_methods
from memest.config.options import setup_from_options
from memest.config.quantization import Format, Quantization
from memest.config.setup import Setup
from memest.errors import ConfigError

MODEL = "prajjwal1/bert-tiny"


def adapter(**options):
    return setup_from_options(**options).adapter


class TestSpellings:
    @pytest.mark.parametrize(
        ("options", "method", "settings"),
        [
            ({"lora_r": 16}, "lora", {"r": 16}),
            ({"lora_rank": "16"}, "lora", {"r": 16}),
            ({"lora_r": 8, "lora_alpha": 32}, "lora", {"r": 8, "lora_alpha": 32.0}),
            ({"lora_target_modules": "q_proj,v_proj"}, "lora",
             {"target_modules": ["q_proj", "v_proj"]}),
            ({"lora_target_modules": ["q_proj", "v_proj"]}, "lora",
             {"target_modules": ["q_proj", "v_proj"]}),
            ({"lora_target": "all-linear"}, "lora", {"target_modules": "all-linear"}),
            ({"lora_target_modules": ".*(q|v)_proj"}, "lora",
             {"target_modules": ".*(q|v)_proj"}),
            ({"lora_r": 4, "modules_to_save": "lm_head,embed_tokens"}, "lora",
             {"r": 4, "modules_to_save": ["lm_head", "embed_tokens"]}),
            ({"use_dora": True}, "lora", {"use_dora": True}),
            ({"peft": "dora", "lora_r": 4}, "lora", {"use_dora": True, "r": 4}),
            ({"peft_type": "IA3"}, "ia3", {}),
            ({"peft": "prompt-tuning", "num_virtual_tokens": 20}, "prompt_tuning",
             {"num_virtual_tokens": 20}),
            ({"peft": "adalora", "lora_r": 12}, "adalora", {"init_r": 12}),
            ({"peft": "MISS", "lora_r": 8}, "miss", {"r": 8}),
            ({"peft": "fourierft", "peft_args": ["n_frequency=500", "scaling=25.0"]}, "fourierft",
             {"n_frequency": 500, "scaling": 25.0}),
            ({"peft": "peanut", "peft_args": ["act_fn=relu", "target_modules=['q_proj']"]},
             "peanut", {"act_fn": "relu", "target_modules": ["q_proj"]}),
            ({"lora_r": 8, "peft_args": "use_dora=true"}, "lora", {"r": 8, "use_dora": True}),
        ],
    )  # fmt: skip
    def test_options_become_what_peft_takes(self, options, method, settings):
        found = adapter(**options)
        usual = {"r": 8} if method == "lora" else {}  # as peft has it
        assert (found.method, found.settings) == (method, {**usual, **settings})

    def test_a_file_as_peft_writes_it_and_options_above_it(self, tmp_path):
        saved = {
            "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["query"],
            "base_model_name_or_path": "x", "inference_mode": True, "revision": None,
        }  # fmt: skip
        (tmp_path / "adapter_config.json").write_text(json.dumps(saved))

        for path in (tmp_path, tmp_path / "adapter_config.json"):
            found = adapter(peft_config=str(path))
            assert found.settings == {"r": 4, "lora_alpha": 8, "target_modules": ["query"]}
        assert adapter(peft_config=str(tmp_path), lora_r=32).settings["r"] == 32

    def test_an_object_of_peft_is_taken(self):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=16, target_modules={"v_proj", "q_proj"}, task_type="CAUSAL_LM")
        found = adapter(adapter=config)
        assert found.settings["target_modules"] == ["q_proj", "v_proj"]
        assert found.settings["task_type"] == "CAUSAL_LM"

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"load_in_4bit": True}, Quantization(format=Format.BNB_4BIT)),
            ({"load_in_8bit": True, "llm_int8_threshold": 0},
             Quantization(format=Format.BNB_8BIT, threshold=0.0)),
            ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "double_quant": True,
              "bnb_4bit_compute_dtype": "torch.bfloat16"},
             Quantization(format=Format.BNB_4BIT, quant_type="nf4", double_quant=True,
                          compute_dtype="bfloat16")),
            ({"quantization_config": '{"load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}'},
             Quantization(format=Format.BNB_4BIT, quant_type="nf4")),
            ({"load_in_4bit": False, "bnb_4bit_quant_type": "nf4"}, None),
        ],
    )  # fmt: skip
    def test_bases(self, options, expected):
        assert setup_from_options(loop="plain", **options).quantization == expected

    def test_an_object_of_transformers_is_taken(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16"
        )
        found = setup_from_options(loop="plain", quantization=config).quantization
        assert (found.quant_type, found.compute_dtype) == ("nf4", "bfloat16")

    def test_changes_of_a_base_change_its_adapter(self):
        base = setup_from_options(lora_r=16, lora_target_modules="q", load_in_4bit=True)

        changed = setup_from_options(base, lora_r=8)
        assert changed.adapter.settings == {"r": 8, "target_modules": ["q"]}
        assert changed.quantization == base.quantization
        assert setup_from_options(base, load_in_4bit=False).quantization is None
        eight = setup_from_options(base, load_in_8bit=True)
        assert eight.quantization.format is Format.BNB_8BIT

    def test_setups_survive_json(self):
        setup = setup_from_options(
            lora_r=16, use_dora=True, autocast_adapter_dtype=False, load_in_4bit=True,
            llm_int8_skip_modules="lm_head", prepare_kbit=False,
        )  # fmt: skip
        told = json.loads(json.dumps(setup.to_dict()))
        again = setup_from_options(adapter=told["adapter"], quantization=told["quantization"])
        assert (again.adapter, again.quantization) == (setup.adapter, setup.quantization)


def test_methods_are_those_of_the_registry_of_peft_but_what_is_refused():
    peft = pytest.importorskip("peft")
    refused = {"adamss", "frod", "multitask_prompt_tuning", "poly", "shira", "xlora"}

    assert set(methods()) == {kind.value.lower() for kind in peft.PeftType} - refused


def test_without_peft_methods_are_those_that_have_a_name_here(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    peft_methods.cache_clear()

    assert methods() == tuple(METHODS)
    peft_methods.cache_clear()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_r": 0}, "1 to"),
        ({"lora_r": 8, "lora_dropout": 1.0}, "0 to below 1"),
        ({"peft": "lorra"}, "Did you mean 'lora'"),
        ({"peft": "misss"}, "Did you mean 'miss'"),
        ({"peft": "frod"}, "sparse tensors"),
        ({"peft_config": '{"peft_type": "POLY"}'}, "task_ids"),
        ({"peft": "miss", "peft_args": "r"}, "--peft-arg n_frequency=500"),
        ({"peft": "miss", "peft_args": "r=0"}, "1 to"),
        ({"lora_r": 8, "peft_args": "r=9"}, "--peft-arg r=9 and --lora-r 8 contradict"),
        ({"peft_args": "n_frequency=500"}, "--peft with a method"),
        ({"peft": "ia3", "lora_r": 8}, "has none"),
        ({"peft": "ia3", "lora_alpha": 8}, "an option of LoRA"),
        ({"peft": "prompt_tuning"}, "--num-virtual-tokens 20"),
        ({"peft": "lora", "num_virtual_tokens": 8}, "an option of prompts"),
        ({"modules_to_save": "lm_head"}, "--lora-r 16"),
        ({"peft_config": "/nowhere"}, "adapter_config.json"),
        ({"adapter": {"r": 8}}, "peft_type"),
        ({"adapter": 8}, "a mapping"),
        ({"peft": "ia3", "adapter": {"peft_type": "LORA"}}, "contradict"),
        ({"load_in_4bit": True}, "--lora-r 16"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "exclude each other"),
        ({"bnb_4bit_quant_type": "nf4"}, "--load-in-4bit"),
        ({"load_in_8bit": True, "lora_r": 8, "bnb_4bit_quant_type": "nf4"}, "4-bit bases"),
        ({"load_in_4bit": True, "lora_r": 8, "bnb_4bit_quant_type": "nf5"}, "nf4"),
        ({"load_in_4bit": True, "lora_r": 8, "bnb_4bit_compute_dtype": "int8"}, "Legal"),
        ({"lora_r": 8, "quantization_config": "{"}, "not JSON"),
        ({"lora_r": 8, "quantization_config": {"quant_method": "exl2"}}, "exl2"),
        ({"lora_r": 8, "load_in_4bit": True, "quantization_config": {"load_in_8bit": True}},
         "contradict"),
        ({"lora_r": 8, "dtype": "bfloat16", "master_weights": True}, "--master-weights"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_to_type(options, message):
    with pytest.raises(ConfigError, match=message):
        setup_from_options(**options)


def test_adapters_are_hashable_and_told_apart():
    one, other = Adapter("lora", '{"r":8}'), Adapter("lora", '{"r":16}')
    assert len({Setup(adapter=one), Setup(adapter=other), Setup(adapter=one)}) == 2


@pytest.mark.parametrize("package", ["peft", "bitsandbytes"])
def test_without_the_package_it_is_said_what_to_install(package, here, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # which stands for one that is not there
    monkeypatch.setenv("MEMEST_CACHE", "none")
    options = ["--lora-r", "4"] if package == "peft" else ["--load-in-4bit", "--lora-r", "4"]
    done = here("estimate", MODEL, "--batch", "2", *options)

    assert done.returncode == 6, done.stderr
    assert "pip install 'memest-gpu[peft]'" in done.stderr
    assert "Traceback" not in done.stderr


class TestAnswers:
    @pytest.fixture(autouse=True)
    def _needs(self):
        pytest.importorskip("torch")
        pytest.importorskip("peft")
        pytest.importorskip("bitsandbytes")

    @pytest.mark.slow
    def test_json_tells_what_is_trained(self, cli):
        done = cli("estimate", MODEL, "--batch", "2", "--lora-r", "4", "--json")
        told = json.loads(done.stdout)

        assert told["setup"]["adapter"] == {"peft_type": "LORA", "r": 4}
        # query and value of two layers, and the head that peft saves for classification
        assert told["model"]["trainable_parameters"] == 2 * 2 * 4 * (128 + 128) + 2 * 128 + 2
        assert any("LoRA on query, value" in line for line in told["assumptions"])

    @pytest.mark.slow
    def test_the_report_names_adapters_and_base(self, cli):
        done = cli(
            "estimate", MODEL, "--batch", "2", "--lora-r", "4", "--load-in-4bit",
            "--llm-int8-skip-modules", "classifier",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "4-bit base (fp4, float32 compute)" in done.stdout
        assert "LoRA, r 4" in done.stdout
        assert "base_model" not in done.stdout

    @pytest.mark.slow
    def test_the_library_says_nothing_beside_us(self, process):
        done = process(
            "estimate", MODEL, "--batch", "2", "--lora-r", "4", "--load-in-8bit", "-q",
            "--llm-int8-skip-modules", "classifier",
        )  # fmt: skip
        assert done.returncode == 0
        assert done.stderr == ""

    def test_unknown_modules_are_answered_with_those_there_are(self, here):
        done = here("estimate", MODEL, "--lora-r", "4", "--lora-target-modules", "q_proj")
        assert done.returncode == 2
        assert "query, key, value, dense" in done.stderr

    def test_virtual_tokens_take_positions(self):
        prompts = {"peft": "prompt-tuning", "num_virtual_tokens": 12}
        assert memest.estimate(MODEL, batch=2, **prompts).setup.seq_len == 500
        with pytest.raises(ConfigError, match="12 virtual tokens"):
            memest.estimate(MODEL, batch=2, seq_len=512, **prompts)

    @pytest.mark.slow
    def test_comparisons_tell_who_trains_and_what_a_weight_takes(self):
        found = memest.compare(
            "EleutherAI/pythia-160m?vocab_size=512",
            ["lora-r=8", "lora-r=8 load-in-4bit prepare-kbit=false"],
            batch=1, seq_len=16, optim="adamw_torch_fused",
        )  # fmt: skip
        texts = [" ".join(s.reasons.sentences) for s in found.scenarios[1:]]
        for text in texts:
            assert "parameters train" in text
            assert "gradients and optimizer states are theirs alone" in text
        assert "A weight takes" not in texts[0]
        assert "A weight takes" in texts[1]

    @pytest.mark.slow
    def test_searches_take_them(self):
        limit = memest.max_batch(
            MODEL, gpu_memory="4GiB", lora_r=4, seq_len=128, dtype="bfloat16"
        ).answers[0]
        whole = memest.max_batch(MODEL, gpu_memory="4GiB", seq_len=128, dtype="bfloat16")
        assert limit.largest > 0
        assert whole.answers[0].largest > 0

        swept = memest.sweep(
            MODEL, {"lora_r": [4, 64], "use_dora": [False, True]}, batch=2, seq_len=64
        )
        peaks = [point.peak.allocated_bytes for point in swept.points]
        assert len(set(peaks)) == 4
        assert not swept.failures
