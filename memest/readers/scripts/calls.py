"""What calls of a script are: which class loads a model, which trains it, which optimizer it is.

Names are those of transformers 5.23, TRL 1.16, peft 0.21, accelerate 1.15, bitsandbytes 0.50 and
torch 2.13, with those that earlier releases had.
"""

from __future__ import annotations

from textwrap import shorten

from memest.readers.scripts.calling import root_of
from memest.readers.scripts.things import Call, Class, NamedPart, Part, Value
from memest.readers.scripts.vision import is_vision_load

__all__ = [
    "ADAPTERS",
    "SCRIPT_LOOPS",
    "TRAINERS",
    "arguments_of",
    "is_config",
    "is_load",
    "is_made_of_config",
    "is_optimizer",
    "optimizer_name",
    "task_of",
    "updated_part",
]

_TASKS = {
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "ForMaskedLM": "masked-lm",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForSeq2SeqLM": "seq2seq-lm",
    "ForImageClassification": "image-classification",
    "ForSemanticSegmentation": "image-segmentation",
    "ForMaskedImageModeling": "masked-image-modeling",
    "ForAudioClassification": "audio-classification",
    "ForCTC": "ctc",
    "ForSpeechSeq2Seq": "speech-seq2seq",
    "ForImageTextToText": "image-text-to-text",
    "ForVision2Seq": "image-text-to-text",
}
"""Heads by the end of a class's name."""
_OWN_HEADS = ("ForConditionalGeneration", "FastLanguageModel", "FastModel", "FastVisionModel")
"""Ends of names whose head is the model's own."""
_NO_MODELS = ("Tokenizer", "TokenizerFast", "Processor", "FeatureExtractor", "Config", "Pipeline")
_NOT_BUILT = ("diffusers", "speechbrain", "open_clip", "flair")
"""Libraries whose ``from_pretrained`` makes models that memest does not build."""
_PEFT_LOADS = ("PeftModel", "AutoPeftModel")

ADAPTERS = {
    "LoraConfig": "LORA",
    "AdaLoraConfig": "ADALORA",
    "IA3Config": "IA3",
    "VeraConfig": "VERA",
    "LoHaConfig": "LOHA",
    "LoKrConfig": "LOKR",
    "OFTConfig": "OFT",
    "BOFTConfig": "BOFT",
    "LNTuningConfig": "LN_TUNING",
    "PromptTuningConfig": "PROMPT_TUNING",
    "PromptEncoderConfig": "P_TUNING",
    "PrefixTuningConfig": "PREFIX_TUNING",
}
"""Configurations of peft, with the ``peft_type`` that they stand for."""

TRAINERS = {
    "Trainer": "",
    "Seq2SeqTrainer": "",
    "UnslothTrainer": "sft",
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "GRPOTrainer": "grpo",
    "KTOTrainer": "kto",
    "ORPOTrainer": "orpo",
    "CPOTrainer": "cpo",
    "PPOTrainer": "ppo",
    "PPOv2Trainer": "ppo",
    "RLOOTrainer": "rloo",
    "RewardTrainer": "reward",
    "PRMTrainer": "reward",
    "GKDTrainer": "gkd",
    "BCOTrainer": "bco",
    "OnlineDPOTrainer": "online-dpo",
    "NashMDTrainer": "nash_md",
    "XPOTrainer": "xpo",
}
"""Trainers of transformers and TRL, by the methods of TRL's command line."""
_PLACES = {**dict.fromkeys(("dpo", "kto", "grpo", "rloo"), 2), "online-dpo": 3}
"""Where a configuration stands behind a reference, rewards, or both."""

SCRIPT_LOOPS = {
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "lightning_fabric": "Fabric",
    "deepspeed": "DeepSpeed",
    "keras": "Keras",
    "fastai": "fastai",
    "composer": "Composer",
    "sentence_transformers": "sentence-transformers",
    "setfit": "SetFit",
}
"""Libraries with loops of their own, which are priced as a plain one."""

_TORCH = {
    "AdamW": "adamw_torch",
    "Adam": "adam",
    "SGD": "sgd",
    "RMSprop": "rmsprop",
    "Adagrad": "adagrad",
    "Adadelta": "adadelta",
    "Adamax": "adamax",
    "NAdam": "nadam",
    "RAdam": "radam",
    "Adafactor": "adafactor_torch",
}
_LOOPS = ("adamw_torch", "adam", "sgd", "sgd_momentum", "rmsprop", "adagrad")
_BITSANDBYTES = {
    "AdamW8bit": "adamw_bnb_8bit",
    "Adam8bit": "adamw_bnb_8bit",
    "PagedAdamW": "paged_adamw_32bit",
    "PagedAdamW32bit": "paged_adamw_32bit",
    "PagedAdamW8bit": "paged_adamw_8bit",
    "PagedAdam8bit": "paged_adamw_8bit",
    "Lion": "lion_32bit",
    "Lion32bit": "lion_32bit",
    "Lion8bit": "lion_8bit",
    "PagedLion": "paged_lion_32bit",
    "PagedLion32bit": "paged_lion_32bit",
    "PagedLion8bit": "paged_lion_8bit",
    "AdEMAMix": "ademamix",
    "AdEMAMix8bit": "ademamix_8bit",
    "PagedAdEMAMix": "paged_ademamix_32bit",
    "PagedAdEMAMix8bit": "paged_ademamix_8bit",
    "RMSprop": "rmsprop_bnb",
    "RMSprop8bit": "rmsprop_bnb_8bit",
}
_OTHERS = {
    "transformers": {"AdamW": "adamw_hf", "Adafactor": "adafactor"},
    "bitsandbytes": _BITSANDBYTES,
    "torchao": {"AdamW8bit": "adamw_torch_8bit", "AdamW4bit": "adamw_torch_4bit"},
}


_TIMM = {
    "adamw": "adamw_torch",
    "adam": "adam",
    "sgd": "sgd_momentum",
    "momentum": "sgd_momentum",
}
"""``opt`` of timm's ``create_optimizer_v2``, where it is torch's class, with a momentum of 0.9."""


def is_load(call: Call) -> bool:
    """Whether a call makes a model with weights: ``AutoModel.from_pretrained``."""
    if is_vision_load(call):
        return True
    if call.receiver is not None:
        return isinstance(call.receiver, Class) and call.name == "from_pretrained"
    if call.name not in ("from_pretrained", "from_config") and not is_made_of_config(call):
        return False
    if call.library in _NOT_BUILT:
        return False
    kind = call.kind
    return bool(kind) and not kind.endswith(_NO_MODELS) and not kind.startswith(_PEFT_LOADS)


def is_made_of_config(call: Call) -> bool:
    """Whether a class of transformers is given a configuration: ``GPT2LMHeadModel(config)``."""
    config = call.argument(0, "config")
    makes = call.library == "transformers" and call.name[:1].isupper()
    return makes and config is not None and is_config(config.data)


def is_config(data: object) -> bool:
    """Whether something is a configuration that a class of transformers made."""
    return isinstance(data, Call) and data.receiver is None and data.kind.endswith("Config")


def task_of(kind: str) -> str | None:
    """The head that a class gives a model: "" for the model's own, None for one not modelled.

    Example:
        >>> [task_of(kind) for kind in ("BertForMaskedLM", "AutoModel", "DetrForObjectDetection")]
        ['masked-lm', 'base', None]
    """
    for end, task in _TASKS.items():
        if kind.endswith(end):
            return task
    if kind.endswith(_OWN_HEADS):
        return ""
    return "base" if kind.endswith("Model") else None


def arguments_of(trainer: Call) -> Value | None:
    """The configuration of a trainer: its second argument, or behind a reference or rewards."""
    place = _PLACES.get(TRAINERS.get(trainer.name, ""), 1)
    return trainer.argument(place, "args", "config")


def is_optimizer(call: Call) -> bool:
    """Whether a call makes an optimizer: a library's class that is given parameters."""
    first = call.parameters
    if call.library == "torch" and ".optim." in call.path:
        return "lr_scheduler" not in call.path and "swa" not in call.path
    if call.library == "timm" and call.name == "create_optimizer_v2":
        return True
    if not call.name[:1].isupper() or call.library == "collections":
        return False
    known_here = call.name in _OTHERS.get(call.library, {})
    return known_here or (first is not None and _is_parameters(first))


def _is_parameters(value: Value) -> bool:
    data = value.data
    return (
        isinstance(data, Call)
        and data.name in ("parameters", "named_parameters", "trainable_parameters")
        and isinstance(root_of(data.receiver), Call)
        and bool(root_of(data.receiver))
        and data.receiver is not None
    )


def optimizer_name(call: Call) -> str | None:
    """Memest's name of an optimizer, None for one that it does not know."""
    if call.library == "timm" and call.name == "create_optimizer_v2":
        opt = call.argument(1, "opt") or Value("sgd")
        moves = call.keywords.get("momentum", Value(0.9)).data != 0
        return _TIMM.get(str(opt.data).lower()) if moves else None
    if call.library != "torch":
        return _OTHERS.get(call.library, {}).get(call.name)
    name = _TORCH.get(call.name)
    if name == "sgd" and _given(call, "momentum"):
        name = "sgd_momentum"
    if _given(call, "fused") and name in ("adamw_torch", "adam"):
        return f"{name}_fused"
    foreach = call.keywords.get("foreach")
    if foreach is not None and foreach.data is False and name in _LOOPS:
        return f"{name}_loop"
    return name


def updated_part(call: Call) -> str:
    """That an optimizer has a part of the model's parameters, in words; empty where it has all.

    Lists that go by names are the usual groups, with weight decay and without: together all.
    """
    first = call.parameters
    groups = [None if first is None else first.data]
    if isinstance(groups[0], list):
        groups = [each.get("params") if isinstance(each, dict) else each for each in groups[0]]
    parts = [each for each in groups if isinstance(each, Part)]
    if not parts or (len(groups) > 1 and all(isinstance(each, NamedPart) for each in groups)):
        return ""
    what = shorten(", ".join(part.why for part in parts), 60, placeholder=" ...")
    return f"it has {what} alone: all parameters are priced as updated"


def _given(call: Call, name: str) -> bool:
    value = call.keywords.get(name)
    return value is not None and value.data not in (None, False, 0, 0.0)
