"""Keys whose names memest has too, and means something else by; switches that come with a kind."""

import dataclasses

import pytest

import memest

HEAD = "model_name_or_path: gpt2\nper_device_train_batch_size: 2\n"


@pytest.mark.parametrize(
    "line",
    [
        "dataset: identity,alpaca_en_demo",
        "tokenizer: gpt2",
        "padding: max_length",
        "data_seed: 7",
        "lengths: [1, 2]",
        "max_new_tokens: 512",
        "generate: true",
        "group_by_length: true",
        "num_beams: 4",
        "generation_max_length: 64",
        "loss: mse",
    ],
)
def test_a_key_of_another_meaning_changes_nothing(options, line):
    """Names of datasets are no files, and generation settings without a generation do nothing."""
    plain, _ = options(HEAD + "max_length: 64\n")
    assert options(f"{HEAD}max_length: 64\n{line}\n")[0] == plain


def test_a_multiple_without_lengths_is_reported(options):
    found, missed = options(HEAD + "pad_to_multiple_of: 64\n")
    assert "pad_to_multiple_of" not in found
    assert "pad_to_multiple_of" in missed


def test_lengths_named_besides_bring_their_settings_back(options, tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("17\n30\n")
    text = HEAD + "pad_to_multiple_of: 64\ngroup_by_length: true\n"
    found, _ = options(text, lengths=str(lengths))
    assert found["pad_to_multiple_of"] == 64
    assert found["group_by_length"] is True


FACTORY = "model_name_or_path: gpt2\nfinetuning_type: lora\ncutoff_len: 64\n"
ROWS = "base_model: gpt2\nsequence_len: 64\nmicro_batch_size: 2\n"
PACKED = f"{ROWS}sample_packing: true\n"


@pytest.mark.parametrize(
    ("head", "text", "packing"),
    [
        (HEAD, "packing: true\nmax_length: 128\n", "bfd"),
        (HEAD, "packing: true\npacking_strategy: wrapped\nmax_length: 128\n", "wrapped"),
        (HEAD, "packing: false\npacking_strategy: bfd\nmax_length: 128\n", None),
        (HEAD, "packing_strategy: wrapped\nmax_length: 128\n", None),
        (FACTORY, "stage: sft\npacking: true\n", "wrapped"),
        (FACTORY, "stage: sft\npacking: false\n", None),
        (FACTORY, "stage: pt\n", "wrapped"),
        (PACKED, "flash_attention: true\n", "bfd"),
        (PACKED, "attn_implementation: flash_attention_2\n", "bfd"),
        (PACKED, "sdp_attention: true\n", "wrapped"),
        (PACKED, "", "wrapped"),
        (PACKED, "flash_attention: true\nmultipack_real_batches: true\n", "wrapped"),
        (ROWS, "flash_attention: true\nsample_packing: false\n", None),
    ],
)
def test_who_packs_and_how(write, head, text, packing):
    """TRL has a strategy whether it packs or not; LLaMA-Factory fills rows one by one.

    axolotl lays a batch in one row where attention knows its samples.
    """
    kind = "trl" if head == HEAD else None
    run = memest.read_config(write("run.yaml", head + text), config_format=kind)
    assert run.options.get("packing") == packing
    assert run.setup.padding_free is (packing == "bfd")


def test_axolotls_float32_reaches_a_tied_head_of_other_names(write):
    """gpt2 calls neither norms nor embeddings so: of the names its head is there, which is tied."""
    run = memest.read_config(write("run.yaml", f"{ROWS}optimizer: adamw_torch\n"))
    model = f"{run.model}?n_layer=1"
    cast = memest.estimate(model, run.setup).model
    setup = dataclasses.replace(run.setup, cast_weights=())
    plain = memest.estimate(model, setup).model
    assert cast.parameter_bytes - plain.parameter_bytes == 2 * 50257 * 768


def test_a_generation_has_the_evaluations_batch(write):
    """A script with ``--do_eval`` generates behind the training, in its own batches."""
    command = (
        "python run_summarization.py --model_name_or_path t5-small --do_train --do_eval "
        "--per_device_eval_batch_size 4 --predict_with_generate --num_beams 2"
    )
    found = memest.read_command(command).options
    assert (found["eval_batch"], found["predict_with_generate"], found["num_beams"]) == (4, True, 2)
    found = memest.read_command(command.replace("--do_eval ", "")).options
    assert not {"eval_batch", "predict_with_generate", "num_beams"} & set(found)


def test_what_several_gpus_cannot_have_is_left_out_and_reported(write):
    command = (
        "torchrun --nproc_per_node 2 run_summarization.py --model_name_or_path t5-small --do_eval "
        "--predict_with_generate --torch_compile True"
    )
    run = memest.read_command(command)
    assert run.options["num_gpus"] == 2
    assert run.options["predict_with_generate"] is True
    reported = {remark.key for remark in run.not_modelled if remark.why.startswith("not priced")}
    assert {"command: --torch_compile"} <= reported


@pytest.mark.parametrize(
    "tail",
    ["> log.txt 2>&1 &", ">log.txt", "2>&1 | tee log.txt", "&> log.txt", "; echo done", "&& ls",
     "< /dev/null"],
)  # fmt: skip
def test_what_the_shell_does_with_the_output_is_no_argument(tail):
    run = memest.read_command(f"nohup python -u train.py --model_name_or_path gpt2 --bf16 {tail}")
    assert run.options["precision"] == "bf16"


@pytest.mark.parametrize("option", ["lengths", "dataset"])
def test_a_path_that_no_system_has_is_refused_as_one(option):
    """A null byte in a name is the reader's ValueError, and no traceback of the user's."""
    with pytest.raises(memest.errors.ConfigError, match="cannot be read"):
        memest.estimate("gpt2", batch=2, **{option: "a\0b.jsonl"})
