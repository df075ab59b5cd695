"""Keys whose names memest has too, and means something else by; switches that come with a kind."""

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


@pytest.mark.parametrize(
    ("text", "packing"),
    [
        ("packing: true\nmax_length: 128\n", "bfd"),
        ("packing: true\npacking_strategy: wrapped\nmax_length: 128\n", "wrapped"),
        ("packing: false\npacking_strategy: bfd\nmax_length: 128\n", None),
        ("packing_strategy: wrapped\nmax_length: 128\n", None),
    ],
)
def test_trl_packs_only_where_its_switch_is_on(options, text, packing):
    """``SFTConfig`` has ``packing_strategy`` "bfd" whether it packs or not."""
    found, _ = options(HEAD + text, config_format="trl")
    assert found.get("packing") == packing


@pytest.mark.parametrize(
    ("text", "packing"),
    [
        ("stage: sft\npacking: true\n", "wrapped"),
        ("stage: sft\npacking: false\n", None),
        ("stage: pt\n", "wrapped"),
    ],
)
def test_llama_factory_fills_rows_one_by_one(write, text, packing):
    head = "model_name_or_path: gpt2\nfinetuning_type: lora\ncutoff_len: 64\n"
    run = memest.read_config(write("lf.yaml", head + text))
    assert run.options.get("packing") == packing
    assert not run.setup.padding_free


@pytest.mark.parametrize(
    ("text", "packing"),
    [
        ("flash_attention: true\n", "bfd"),
        ("attn_implementation: flash_attention_2\n", "bfd"),
        ("sdp_attention: true\n", "wrapped"),
        ("", "wrapped"),
        ("flash_attention: true\nmultipack_real_batches: true\n", "wrapped"),
        ("flash_attention: true\nsample_packing: false\n", None),
    ],
)
def test_axolotl_lays_a_batch_in_one_row_where_attention_knows_its_samples(write, text, packing):
    head = "base_model: gpt2\nsequence_len: 64\nmicro_batch_size: 2\n"
    head += "" if "sample_packing" in text else "sample_packing: true\n"
    run = memest.read_config(write("axolotl.yml", head + text))
    assert run.options.get("packing") == packing
    assert run.setup.padding_free is (packing == "bfd")


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
