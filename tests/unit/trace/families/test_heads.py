"""The head that ``--task auto`` chooses is the one that people train."""

from __future__ import annotations

import pytest
import transformers

from memest.catalog.models import catalogue
from memest.config.setup import Task
from memest.errors import ConfigError
from memest.trace.model.tasks import choose_head, task_of_class

ENTRIES = {entry.id: entry for entry in catalogue()}

# one for each way of choosing
GOLDEN = {
    "bert-base-uncased": ("sequence-classification", "BertForSequenceClassification"),
    "google/electra-base-discriminator": (
        "sequence-classification", "ElectraForSequenceClassification",
    ),
    "xlnet-base-cased": ("sequence-classification", "XLNetForSequenceClassification"),
    "google/canine-s": ("sequence-classification", "CanineForSequenceClassification"),
    "bert-large-uncased-whole-word-masking-finetuned-squad": (
        "question-answering", "BertForQuestionAnswering",
    ),
    "microsoft/layoutlmv3-base": ("token-classification", "LayoutLMv3ForTokenClassification"),
    "gpt2": ("causal-lm", "GPT2LMHeadModel"),
    "meta-llama/Llama-3.1-8B": ("causal-lm", "LlamaForCausalLM"),
    "state-spaces/mamba-130m-hf": ("causal-lm", "MambaForCausalLM"),
    "t5-base": ("seq2seq-lm", "T5ForConditionalGeneration"),
    "facebook/bart-base": ("seq2seq-lm", "BartForConditionalGeneration"),
    "facebook/bart-large-mnli": ("sequence-classification", "BartForSequenceClassification"),
    "Helsinki-NLP/opus-mt-de-en": ("seq2seq-lm", "MarianMTModel"),
    "google/vit-base-patch16-224": ("image-classification", "ViTForImageClassification"),
    "facebook/dinov3-vitb16-pretrain-lvd1689m": ("base", "DINOv3ViTModel"),
    "microsoft/resnet-101": ("image-classification", "ResNetForImageClassification"),
    "facebook/deit-base-distilled-patch16-224": (
        "image-classification", "DeiTForImageClassification",
    ),
    "facebook/vit-mae-base": ("masked-image-modeling", "ViTMAEForPreTraining"),
    "nvidia/segformer-b0-finetuned-ade-512-512": (
        "image-segmentation", "SegformerForSemanticSegmentation",
    ),
    "facebook/sam-vit-base": ("image-segmentation", "SamModel"),
    "openai/clip-vit-base-patch32": ("contrastive", "CLIPModel"),
    "laion/clap-htsat-fused": ("contrastive", "ClapModel"),
    "openai/whisper-large-v3": ("speech-seq2seq", "WhisperForConditionalGeneration"),
    "facebook/wav2vec2-base": ("ctc", "Wav2Vec2ForCTC"),
    "facebook/w2v-bert-2.0": ("ctc", "Wav2Vec2BertForCTC"),
    "MIT/ast-finetuned-audioset-10-10-0.4593": (
        "audio-classification", "ASTForAudioClassification",
    ),
    "microsoft/speecht5_tts": ("base", "SpeechT5ForTextToSpeech"),
    "Qwen/Qwen2-VL-2B-Instruct": ("image-text-to-text", "Qwen2VLForConditionalGeneration"),
    "llava-hf/llava-1.5-13b-hf": ("image-text-to-text", "LlavaForConditionalGeneration"),
    "google/gemma-3-4b-it": ("image-text-to-text", "Gemma3ForConditionalGeneration"),
    "Salesforce/blip2-flan-t5-xl": ("image-text-to-text", "Blip2ForConditionalGeneration"),
    "Qwen/Qwen2-Audio-7B-Instruct": ("speech-seq2seq", "Qwen2AudioForConditionalGeneration"),
    "Qwen/Qwen2.5-Omni-7B": (
        "image-text-to-text", "Qwen2_5OmniThinkerForConditionalGeneration",
    ),
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": (
        "image-text-to-text", "Qwen3OmniMoeThinkerForConditionalGeneration",
    ),
}  # fmt: skip


def config_of(model_id):
    values = ENTRIES[model_id].config()
    values.pop("quantization_config", None)
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    return mapping[values["model_type"]].from_dict(values)


@pytest.mark.parametrize("model_id", sorted(GOLDEN))
def test_auto_chooses_the_head_people_train(model_id):
    head = choose_head(config_of(model_id), Task.AUTO, model_id, transformers)

    assert (head.task.value, head.cls.__name__) == GOLDEN[model_id]


@pytest.mark.slow
def test_every_checkpoint_of_a_family_has_a_head():
    kinds = {(entry.model_type, tuple(entry.config().get("architectures") or ())): entry.id
             for entry in catalogue()}  # fmt: skip

    for model_id in kinds.values():
        head = choose_head(config_of(model_id), Task.AUTO, model_id, transformers)

        assert isinstance(head.cls, type), model_id


def test_a_task_can_be_asked_for():
    config = config_of("bert-base-uncased")

    head = choose_head(config, Task.MASKED_LM, "bert-base-uncased", transformers)

    assert head.cls.__name__ == "BertForMaskedLM"


def test_a_task_the_model_has_not_names_the_legal_ones():
    config = config_of("bert-base-uncased")

    with pytest.raises(ConfigError, match=r"ctc does not exist.*Legal: .*masked-lm"):
        choose_head(config, Task.CTC, "bert-base-uncased", transformers)


def test_contrastive_training_needs_two_towers():
    with pytest.raises(ConfigError, match="does not exist"):
        choose_head(config_of("gpt2"), Task.CONTRASTIVE, "gpt2", transformers)


@pytest.mark.parametrize(
    ("cls", "task"),
    [
        (transformers.LlamaForCausalLM, Task.CAUSAL_LM),
        (transformers.WhisperForConditionalGeneration, Task.SPEECH_SEQ2SEQ),
        (transformers.LlavaForConditionalGeneration, Task.IMAGE_TEXT_TO_TEXT),
        (transformers.BertModel, Task.BASE),
    ],
)
def test_the_task_of_a_class_is_in_its_name(cls, task):
    assert task_of_class(cls) is task


@pytest.mark.parametrize(
    ("model_type", "saved", "built", "said"),
    [
        ("dpt", "DPTForDepthEstimation", "DPTForSemanticSegmentation", True),
        ("clipseg", "CLIPSegForImageSegmentation", "CLIPSegModel", True),
        # all such heads are replaced, as the documentation of tasks says
        ("esm", "EsmForMaskedLM", "EsmForSequenceClassification", False),
        # a class that makes the loss which its bare model does not, and the one class of its kind
        ("bridgetower", "BridgeTowerForContrastiveLearning", "BridgeTowerForContrastiveLearning",
         False),
        ("superpoint", None, "SuperPointForKeypointDetection", False),
        ("pix2struct", None, "Pix2StructForConditionalGeneration", False),
    ],
)  # fmt: skip
def test_a_head_that_is_replaced_is_said(model_type, saved, built, said):
    config = transformers.AutoConfig.for_model(model_type, architectures=saved and [saved])

    head = choose_head(config, Task.AUTO, "m", transformers)

    assert head.cls.__name__ == built
    assert any(saved and saved in note for note in head.notes) == said
