"""The batch: shapes, the sizes a model can take, and what is said about them."""

from __future__ import annotations

import pytest
import torch

from memest.catalog.resolve import ModelSource
from memest.config.setup import Setup, Task
from memest.errors import ConfigError, TraceError
from memest.trace.inputs.batch import PlannedBatch, blaming_inputs, plan_batch, realise
from memest.trace.inputs.tensors import forward_parameters
from memest.trace.losses.loss import loss_for
from memest.trace.model.adjust import separate_head
from memest.trace.model.build import build_model


@pytest.fixture
def plan(build):
    def make(model_id, **options):
        built, setup = build(model_id, **options)
        plans, sizes, notes = plan_batch(built, setup)
        return {p.name: p for p in plans}, sizes, notes

    return make


# -- text ------------------------------------------------------------------------------------------


def test_text_has_ids_types_mask_and_labels(plan):
    plans, sizes, _ = plan("bert-large-uncased", batch=3, seq_len=32)

    assert list(plans) == ["input_ids", "token_type_ids", "attention_mask", "labels"]
    assert plans["input_ids"].shape == (3, 32)
    assert plans["labels"].shape == (3,)
    assert sizes.seq_len == 32


def test_the_default_length_is_said(plan):
    _, sizes, notes = plan("gpt2")

    assert sizes.seq_len == 512
    assert any("--seq-len" in note for note in notes)


@pytest.mark.parametrize(
    ("model_id", "limit"),
    [
        ("bert-base-uncased", 512),
        ("roberta-base", 512),
        ("gpt2", 1024),
        ("google/canine-s", 16384),
        ("openai/clip-vit-base-patch32", 77),
        ("allenai/led-base-16384", 16384),
    ],
)
def test_a_text_longer_than_the_positions_is_refused(plan, model_id, limit):
    with pytest.raises(ConfigError, match=f"--seq-len {limit} or less"):
        plan(model_id, seq_len=limit + 1)


@pytest.mark.parametrize("model_id", ["t5-base", "bigscience/bloom-560m", "xlnet-base-cased"])
def test_relative_positions_have_no_limit(plan, model_id):
    assert plan(model_id, seq_len=9000)[1].seq_len == 9000


def test_a_seq2seq_target_is_as_long_as_the_source_unless_asked(plan):
    assert plan("t5-base", seq_len=64)[0]["labels"].shape == (2, 64)
    assert plan("t5-base", seq_len=64, target_len=16)[0]["labels"].shape == (2, 16)


def test_padding_is_in_the_mask(plan):
    plans, _, notes = plan("bert-base-uncased", seq_len=8, padded=True)

    assert plans["attention_mask"].value().tolist() == [[1] * 8, [1] * 7 + [0]]
    assert any("padded" in note for note in notes)


def test_questions_have_a_start_and_an_end(plan):
    plans, _, _ = plan("bert-base-uncased", seq_len=8, task="question-answering")

    assert plans["start_positions"].shape == plans["end_positions"].shape == (2,)


def test_multiple_choice_has_four(plan):
    plans, _, _ = plan("bert-base-uncased", seq_len=8, task="multiple-choice")

    assert plans["input_ids"].shape == (2, 4, 8)


@pytest.mark.parametrize(
    ("model_id", "changes", "end"),
    [
        ("openai/clip-vit-base-patch32", None, 2),
        ("gpt2", None, 50256),
        # an end token that the vocabulary does not have: a real embedding would fail on it
        ("google/siglip-base-patch16-224", None, None),
        ("gpt2", {"vocab_size": 1000}, None),
    ],
)
def test_texts_end_with_the_end_token_where_the_vocabulary_has_it(plan, model_id, changes, end):
    plans, _, _ = plan(model_id, seq_len=4, changes=changes)

    ids = plans["input_ids"].value()
    assert ids[:, :-1].unique().tolist() == [5]
    assert ids[:, -1].unique().tolist() == [5 if end is None else end]


@pytest.mark.parametrize(
    ("changes", "pads", "said"),
    [
        ({"eos_token_id": [7, 9]}, 7, "its end-of-sequence token pads"),
        # an embedding cannot be built around a padding token that it has no row for
        ({"eos_token_id": 128001, "vocab_size": 1000}, 0, "token 0 pads"),
    ],
)
def test_a_decoder_that_classifies_pads_with_a_token_it_has(build, changes, pads, said):
    built, _ = build(
        "meta-llama/Llama-3.1-8B",
        task=Task.SEQUENCE_CLASSIFICATION,
        changes={"pad_token_id": None} | changes,
    )

    assert built.config.pad_token_id == pads
    assert built.model.get_input_embeddings().padding_idx == pads
    assert any(said in note for note in built.notes)


# -- images ----------------------------------------------------------------------------------------


def test_images_have_the_size_of_the_config(plan):
    plans, sizes, _ = plan("google/vit-base-patch16-224")

    assert plans["pixel_values"].shape == (2, 3, 224, 224)
    assert sizes.image_size == 224


def test_another_size_builds_another_position_table(build):
    built, _ = build("google/vit-base-patch16-224", image_size=384)

    assert built.model.vit.embeddings.position_embeddings.shape[1] == (384 // 16) ** 2 + 1
    assert any("384" in note for note in built.notes)


def test_an_image_smaller_than_a_patch_is_refused(plan):
    with pytest.raises(ConfigError, match="smaller than one patch"):
        plan("google/vit-base-patch16-224", image_size=8)


def test_segmentation_labels_every_pixel(plan):
    plans, _, _ = plan("nvidia/segformer-b0-finetuned-ade-512-512")

    assert plans["labels"].shape == (2, 512, 512)


# -- sound -----------------------------------------------------------------------------------------


def test_a_length_is_that_of_what_is_spoken_where_none_is_named(build):
    built, setup = build("openai/whisper-large-v3", seq_len=100)
    answer = PlannedBatch(built).answer(setup)

    assert answer.batch_sizes["target_len"] == 100
    assert "target length 100, like --seq-len (--target-len sets it)" in answer.notes
    assert not any("no effect" in note for note in answer.notes)


def test_whisper_has_a_window_of_thirty_seconds(plan):
    plans, sizes, notes = plan("openai/whisper-large-v3")

    assert plans["input_features"].shape == (2, 128, 3000)
    assert sizes.audio_seconds == 30
    assert any("30 s window" in note for note in notes)


def test_a_clip_longer_than_the_window_is_refused(plan):
    with pytest.raises(ConfigError, match="longer than the 30 s window"):
        plan("openai/whisper-large-v3", audio_seconds=31.0)


def test_a_transcript_longer_than_the_decoder_is_refused(plan):
    with pytest.raises(ConfigError, match="448 target positions"):
        plan("openai/whisper-large-v3", target_len=449)


def test_waveforms_are_as_long_as_asked(plan):
    plans, _, _ = plan("facebook/wav2vec2-base", audio_seconds=2.0)

    assert plans["input_values"].shape == (2, 32_000)
    assert plans["labels"].shape == (2, 28)


@pytest.mark.parametrize(
    ("model_id", "shape"),
    [
        ("MIT/ast-finetuned-audioset-10-10-0.4593", (2, 1024, 128)),
        ("facebook/w2v-bert-2.0", (2, 250, 160)),
        ("nvidia/parakeet-ctc-0.6b", (2, 501, 80)),
        ("laion/clap-htsat-fused", (2, 4, 1001, 64)),
    ],
)
def test_frames_have_the_extractor_s_shape(plan, model_id, shape):
    plans, _, _ = plan(model_id)
    name = "input_values" if "ast" in model_id else "input_features"

    assert plans[name].shape == shape


# -- images and text -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_id", "tokens"),
    [
        ("llava-hf/llava-1.5-13b-hf", 576),
        ("llava-hf/llava-v1.6-mistral-7b-hf", 576 + 48 * 49),
        ("google/paligemma-3b-pt-224", 256),
        ("google/gemma-3-4b-it", 256),
        ("Qwen/Qwen2-VL-2B-Instruct", 256),
        ("Salesforce/blip2-flan-t5-xl", 32),
        ("Qwen/Qwen2-Audio-7B-Instruct", 125),
    ],
)
def test_an_image_takes_its_placeholders_in_the_text(build, model_id, tokens):
    built, setup = build(model_id)
    plans, sizes, notes = plan_batch(built, setup)
    ids = next(p for p in plans if p.name == "input_ids").value()
    config = built.config
    names = ("audio_token_id",) if "Audio" in model_id else ("image_token_id",)
    placeholder = next(getattr(config, name) for name in names)

    assert (ids == placeholder).sum(dim=1).tolist() == [tokens, tokens]
    what = "clip of 5 s" if "Audio" in model_id else f"image of {sizes.image_size} x "
    (said,) = [note for note in notes if note.startswith(f"1 {what}")]
    assert said.endswith(f" a sample: {tokens} of its {sizes.seq_len} tokens")


def test_a_text_without_room_for_the_image_is_refused(plan):
    with pytest.raises(ConfigError, match="takes 576 tokens"):
        plan("llava-hf/llava-1.5-13b-hf", seq_len=128)


def test_two_towers_are_told_to_return_their_loss(plan):
    plans, _, _ = plan("openai/clip-vit-base-patch32")

    assert plans["return_loss"].constant is True


# -- losses ----------------------------------------------------------------------------------------


def test_a_model_without_a_loss_gets_one_and_says_so(build):
    built, setup = build("facebook/dinov3-vitb16-pretrain-lvd1689m")
    _, _, notes = plan_batch(built, setup)
    outputs = {"a": torch.ones(2, 3, requires_grad=True) * 2, "b": None, "c": torch.zeros(1)}

    loss = loss_for(built)(outputs, {})

    assert loss.item() == 2
    assert any("returns no loss" in note for note in notes)


def test_a_model_s_own_loss_is_taken(build):
    built, _ = build("bert-base-uncased")

    assert loss_for(built)({"loss": torch.tensor(3.0), "logits": None}, {}).item() == 3


# -- models of the user ----------------------------------------------------------------------------


def plain():
    return torch.nn.Linear(4, 4)


def tiny_gpt():
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=32)
    return transformers.GPT2LMHeadModel(config)


def _factory(monkeypatch, function):
    import sys
    import types

    module = types.ModuleType("factories_of_a_test")
    module.make = function
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return ModelSource(
        kind="factory", id="x", provenance="a test", factory=f"{module.__name__}:make"
    )


def test_a_plain_module_needs_example_inputs(monkeypatch):
    built = build_model(_factory(monkeypatch, plain), Setup())

    with pytest.raises(ConfigError, match=r"forward takes input.*inputs=\{"):
        plan_batch(built, Setup())


def test_a_factory_of_transformers_needs_none(monkeypatch):
    setup = Setup(seq_len=16)
    built = build_model(_factory(monkeypatch, tiny_gpt), setup)

    assert built.task == "causal-lm"
    assert plan_batch(built, setup)[1].seq_len == 16
    assert {p.device.type for p in built.model.parameters()} == {"meta"}


# -- configurations of several parts ---------------------------------------------------------------

QWEN = {
    "model_type": "qwen2", "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
INTERNVL = {
    "model_type": "internvl", "architectures": ["InternVLForConditionalGeneration"],
    "image_token_id": 399, "downsample_ratio": 0.5, "image_seq_length": 16,
    "vision_config": {"model_type": "internvl_vision", "hidden_size": 32, "num_hidden_layers": 1,
                      "num_attention_heads": 2, "intermediate_size": 64, "image_size": [112, 112],
                      "patch_size": [14, 14]},
    "text_config": QWEN,
}  # fmt: skip
GIT = {
    "model_type": "git", "architectures": ["GitForCausalLM"], "vocab_size": 400, "hidden_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                      "num_attention_heads": 2, "image_size": 64, "patch_size": 16},
}  # fmt: skip


def stepped(config, **options):
    """The plan of a model of a configuration, with which a real one runs."""
    setup = Setup(batch=2, **options)
    source = ModelSource(kind="file", id="m", config=config, provenance="a test")
    built = build_model(source, setup)
    plans, sizes, _ = plan_batch(built, setup)
    real = type(built.model)(built.model.config)
    assert real(**realise(plans, "cpu")).loss.isfinite()
    return {plan.name: plan for plan in plans}, sizes


def test_patches_may_be_pairs_and_be_put_together():
    plans, sizes = stepped(INTERNVL, seq_len=32)
    ids = plans["input_ids"].value()

    assert sizes.image_size == 112
    assert int((ids == 399).sum()) == 2 * (112 // 14) ** 2 // 4


def test_an_image_before_the_text_takes_none_of_its_tokens():
    plans, _ = stepped(GIT, seq_len=8)

    assert plans["input_ids"].shape == (2, 8)


@pytest.mark.parametrize(
    ("whole", "part", "shared"),
    [(True, False, True), (False, True, False), (None, False, False), (None, None, True)],
)
def test_the_whole_says_whether_the_head_is_tied_before_its_part_does(whole, part, shared):
    says = {} if whole is None else {"tie_word_embeddings": whole}
    inner = {} if part is None else {"tie_word_embeddings": part}
    config = INTERNVL | says | {"text_config": QWEN | inner}
    source = ModelSource(kind="file", id="m", config=config, provenance="a test")
    built = build_model(source, Setup(batch=2))
    separate_head(built.model, config)

    head, embedding = built.model.get_output_embeddings(), built.model.get_input_embeddings()
    assert (head.weight is embedding.weight) == shared


def test_what_is_not_fed_is_said(small):
    setup = Setup(batch=2, task=Task.BASE)
    built = build_model(small("llava-hf/llava-1.5-13b-hf"), setup)
    parameters = forward_parameters(built.model)
    _, _, notes = plan_batch(built, setup)

    assert "pixel_values" in parameters
    assert any("pixel_values" in note and "text alone" in note for note in notes)


# -- inputs that nobody makes ----------------------------------------------------------------------

BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 64, "vocab_size": 400}  # fmt: skip


def built_of(config, **options):
    setup = Setup(batch=2, **options)
    source = ModelSource(kind="file", id="m", config=config, provenance="a test")
    return build_model(source, setup), setup


@pytest.mark.parametrize(
    ("config", "names"),
    [
        # a parameter that must be given, a form of an image, a tower that would not run
        ({"model_type": "videomae", "architectures": ["VideoMAEForPreTraining"], **BERT},
         "bool_masked_pos"),
        ({"model_type": "pix2struct"}, "flattened_patches"),
        ({"model_type": "flava"}, "pixel_values"),
    ],
)  # fmt: skip
def test_inputs_that_nobody_makes_are_named(config, names):
    built, setup = built_of(config)

    with pytest.raises(ConfigError, match=rf"inputs of .*{names}.* are not modelled.*--input"):
        plan_batch(built, setup)


@pytest.mark.parametrize("model_type", ["visual_bert", "luke"])
def test_senses_that_a_model_may_do_without_are_said(model_type):
    built, setup = built_of({"model_type": model_type, **BERT})

    assert any("not fed" in note for note in plan_batch(built, setup)[2])


def test_code_that_fails_on_made_inputs_says_what_they_were(build):
    built, setup = build("bert-base-uncased", seq_len=8)
    batch = PlannedBatch(built)

    with (
        pytest.raises(TraceError, match=r"It broke\. The inputs.*input_ids:int64\[2,8\].*--input"),
        blaming_inputs(batch.plan, batch.plan(setup), built.model),
    ):
        raise TraceError("It broke. Try something.", "It broke.")


def test_labels_that_a_loss_misses_are_said(build):
    built, _ = build("bert-base-uncased")
    loss = loss_for(built)
    loss({"logits": torch.ones(2, requires_grad=True)}, {})

    assert any("makes no labels for, returns no loss" in note for note in loss.notes)
