"""How a script loads its model, quantises it and puts adapters beside it."""

import pytest

import memest
from support.paths import RUN_CONFIGURATIONS
from support.training_scripts import LOADED, read


def test_adapters_and_bases_are_the_libraries_own_settings():
    run = memest.read_config(RUN_CONFIGURATIONS / "scripts" / "qlora.py")

    assert run.setup.adapter.settings["target_modules"] == ["q_proj", "v_proj"]
    assert run.setup.quantization.words == (
        "4-bit base (nf4, double quantisation, bfloat16 compute)"
    )


def test_adapters_on_a_way_that_cannot_be_told_are_not_dropped_in_silence(script):
    """A run that goes on from a checkpoint, as QLoRA's script has it."""
    run = script(
        before="from peft import LoraConfig, PeftModel, get_peft_model\nfrom util import last",
        between="if last():\n    model = PeftModel.from_pretrained(model, last())\n"
        "else:\n    model = get_peft_model(model, LoraConfig(r=8))",
    )

    assert run.model == "gpt2"
    assert "adapters under a condition" in " ".join(map(str, run.not_modelled))
    assert "adapters that are there already" in " ".join(run.setup.unpriced)


CHANGED = {
    "config = AutoConfig.from_pretrained('gpt2', n_layer=48)\n"
    "model = AutoModelForCausalLM.from_config(config)": "gpt2?n_layer=48",
    "config = AutoConfig.from_pretrained('gpt2')\nconfig.n_head = 6\n"
    "model = AutoModelForCausalLM.from_pretrained('gpt2', config=config)": "gpt2?n_head=6",
    "model = AutoModelForCausalLM.from_pretrained('gpt2', n_layer=2)": "gpt2?n_layer=2",
    "config = transformers.GPT2Config(n_layer=6, n_ctx=64)\n"
    "model = transformers.GPT2LMHeadModel(config)": "transformers/gpt2?n_layer=6",
    "config = AutoConfig.for_model('roberta', num_hidden_layers=6)\nconfig.vocab_size = 52000\n"
    "model = transformers.AutoModelForMaskedLM.from_config(config)": "transformers/roberta"
    "?num_hidden_layers=6&vocab_size=52000",
}


@pytest.mark.parametrize("code", CHANGED)
def test_entries_of_the_configuration_go_with_the_model(tmp_path, code):
    text = LOADED.replace('model = AutoModelForCausalLM.from_pretrained("gpt2")\n', "")
    run = read(tmp_path, text.format(code))
    assert (run.model, run.setup.unpriced) == (CHANGED[code], ())


@pytest.mark.parametrize(
    ("config", "model", "why"),
    [
        ("GPT2Config(50257, 1024)", None, "values of a configuration that is made here"),
        ("GPT2Config(vocab_size=len(t))", "transformers/gpt2", "vocab_size: an entry of"),
    ],
)
def test_what_cannot_be_told_of_a_configuration_leaves_both_sides_open(
    tmp_path, config, model, why
):
    text = LOADED.replace('model = AutoModelForCausalLM.from_pretrained("gpt2")\n', "")
    code = f"model = transformers.GPT2LMHeadModel(transformers.{config})"
    run = read(tmp_path, text.format(code))
    assert run.model == model
    for told in (run.setup.unpriced, run.setup.overpriced):
        assert any(why in each for each in told), told


@pytest.mark.parametrize(
    ("device_map", "num_gpus", "is_open"),
    [("'auto'", 4, True), ("'auto'", 1, False), ("'cuda'", 4, False)],
)
def test_layers_that_are_laid_on_several_gpus_are_priced_on_each(
    tmp_path, device_map, num_gpus, is_open
):
    path = tmp_path / "train.py"
    text = LOADED.replace('"gpt2"', f'"gpt2", device_map={device_map}')
    path.write_text(text.format(""))
    run = memest.read_config(path, seq_len=8, num_gpus=num_gpus)
    assert run.setup.unpriced == ()
    assert bool(run.setup.overpriced) is is_open


@pytest.mark.parametrize(
    ("before", "dtype"),
    [("", "float32"), ("torch.set_default_dtype(torch.bfloat16)\n", "bfloat16")],
)
def test_a_class_makes_parameters_of_the_default_dtype(tmp_path, before, dtype):
    text = LOADED.replace('model = AutoModelForCausalLM.from_pretrained("gpt2")\n', "")
    config = "config = AutoConfig.from_pretrained('Qwen/Qwen3-0.6B')\n"
    run = read(
        tmp_path,
        text.format(f"{before}{config}model = transformers.Qwen3ForCausalLM(config)"),
    )
    assert run.options["dtype"] == dtype


def test_samples_are_what_the_head_takes(tmp_path):
    path = tmp_path / "train.py"
    for kind, unpriced in (
        ("AutoModelForCausalLM", "length of samples"),
        ("AutoModelForSpeechSeq2Seq", "length of labels"),
        ("AutoModelForImageClassification", ""),
    ):
        path.write_text(LOADED.format("").replace("AutoModelForCausalLM", kind))
        told = memest.read_config(path).setup.unpriced
        assert [unpriced in each for each in told] == ([True] if unpriced else [])
