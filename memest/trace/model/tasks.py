"""Which head a model gets: the class of transformers that is built, and the task it stands for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memest.config.setup import Task
from memest.errors import ConfigError

__all__ = ["Head", "choose_head", "task_of_class"]

_AUTO_CLASSES = {
    Task.SEQUENCE_CLASSIFICATION: ("AutoModelForSequenceClassification",),
    Task.TOKEN_CLASSIFICATION: ("AutoModelForTokenClassification",),
    Task.QUESTION_ANSWERING: ("AutoModelForQuestionAnswering",),
    Task.MULTIPLE_CHOICE: ("AutoModelForMultipleChoice",),
    Task.MASKED_LM: ("AutoModelForMaskedLM",),
    Task.CAUSAL_LM: ("AutoModelForCausalLM",),
    Task.SEQ2SEQ_LM: ("AutoModelForSeq2SeqLM",),
    Task.IMAGE_CLASSIFICATION: ("AutoModelForImageClassification",),
    Task.IMAGE_SEGMENTATION: (
        "AutoModelForSemanticSegmentation",
        "AutoModelForMaskGeneration",
    ),
    Task.MASKED_IMAGE_MODELING: ("AutoModelForMaskedImageModeling", "AutoModelForPreTraining"),
    Task.AUDIO_CLASSIFICATION: ("AutoModelForAudioClassification",),
    Task.CTC: ("AutoModelForCTC",),
    Task.SPEECH_SEQ2SEQ: ("AutoModelForSpeechSeq2Seq", "AutoModelForMultimodalLM"),
    Task.IMAGE_TEXT_TO_TEXT: ("AutoModelForImageTextToText", "AutoModelForMultimodalLM"),
    Task.CONTRASTIVE: ("AutoModel",),
    Task.BASE: ("AutoModel",),
}
"""The auto classes of a task, first choice first."""

_ENDINGS = {
    "ForSequenceClassification": Task.SEQUENCE_CLASSIFICATION,
    "ForTokenClassification": Task.TOKEN_CLASSIFICATION,
    "ForQuestionAnswering": Task.QUESTION_ANSWERING,
    "ForMultipleChoice": Task.MULTIPLE_CHOICE,
    "ForMaskedLM": Task.MASKED_LM,
    "WithLMHeadModel": Task.MASKED_LM,
    "ForCausalLM": Task.CAUSAL_LM,
    "LMHeadModel": Task.CAUSAL_LM,
    "ForImageClassification": Task.IMAGE_CLASSIFICATION,
    "ForSemanticSegmentation": Task.IMAGE_SEGMENTATION,
    "ForMaskedImageModeling": Task.MASKED_IMAGE_MODELING,
    "ForAudioClassification": Task.AUDIO_CLASSIFICATION,
    "ForCTC": Task.CTC,
    "ForSpeechSeq2Seq": Task.SPEECH_SEQ2SEQ,
}
# heads of pre-training, in place of which people train others: nobody asks where they went
_PRETRAINED = ("Model", "ForPreTraining", "ForMaskedLM", "ForCausalLM", "ForMaskedImageModeling")
# a checkpoint that was saved with one of these heads is trained with it
_SAVED_HEADS = (
    Task.SEQUENCE_CLASSIFICATION,
    Task.TOKEN_CLASSIFICATION,
    Task.QUESTION_ANSWERING,
    Task.MULTIPLE_CHOICE,
    Task.AUDIO_CLASSIFICATION,
    Task.IMAGE_SEGMENTATION,
)
_DOCUMENTS = frozenset(("layoutlm", "layoutlmv2", "layoutlmv3", "lilt"))
# text models that read both ways, though another head of theirs or their config suggests else
_TEXT_ENCODERS = frozenset(("xlnet", "xlm", "flaubert", "funnel", "reformer", "canine"))
# in AutoModelForPreTraining, and made for nothing else
_MASKED_IMAGES = frozenset(("vit_mae", "hiera"))


@dataclass(frozen=True, slots=True)
class Head:
    """A decision: the task, the class to build and what to tell the user."""

    task: Task
    cls: Any
    notes: tuple[str, ...] = ()


def choose_head(config: Any, requested_task: Task, model_id: str, transformers: Any) -> Head:
    """Pick the class of transformers for a config and a task.

    Args:
        config: a config of transformers.
        requested_task: the task, or ``auto`` for what people train this kind of model for.
        model_id: how messages call the model.
        transformers: the package.

    Raises:
        ConfigError: the task does not exist for this model.
    """
    if requested_task is Task.AUTO:
        for task in _preferred_tasks(config):
            cls = _class_for(config, task, transformers)
            if task is Task.CONTRASTIVE:
                cls = _with_contrastive_loss(config, transformers) or cls
            if cls is not None:
                return _say_replaced(
                    _replace_wrapper(Head(task, cls), config, transformers), config
                )
        cls = _own_class(config, transformers) or _sole_class(config, model_id, transformers)
        return _replace_wrapper(Head(Task.BASE, cls), config, transformers)
    cls = _class_for(config, requested_task, transformers)
    if cls is None or (requested_task is Task.CONTRASTIVE and not _is_contrastive(config)):
        legal = [
            task.value
            for task in _AUTO_CLASSES
            if _class_for(config, task, transformers) is not None
            and (task is not Task.CONTRASTIVE or _is_contrastive(config))
        ]
        raise ConfigError(
            f"--task {requested_task} does not exist for {model_id} ({config.model_type}). "
            f"Legal: {', '.join(legal)}."
        )
    return _replace_wrapper(Head(requested_task, cls), config, transformers)


def _saved_class(config: Any) -> str:
    """The class that the checkpoint was saved with; "" where it does not say."""
    return (config.architectures or [""])[0] or ""


def _task_of_name(name: str) -> Task | None:
    """The task that the name of a class ends with."""
    return next((task for ending, task in _ENDINGS.items() if name.endswith(ending)), None)


def task_of_class(cls: type, *, encoder_decoder: bool = False) -> Task:
    """The task a class of transformers is made for, by the conventions of its name."""
    for ancestor in cls.__mro__:
        name = ancestor.__name__
        task = _task_of_name(name)
        if task is not None:
            return task
        if name.endswith("ForConditionalGeneration"):
            main = getattr(cls, "main_input_name", "input_ids")
            if main in ("input_features", "input_values"):
                return Task.SPEECH_SEQ2SEQ
            return Task.SEQ2SEQ_LM if encoder_decoder else Task.IMAGE_TEXT_TO_TEXT
    return Task.BASE


def _preferred_tasks(config: Any) -> Iterator[Task]:
    """Tasks in the order in which people would train them, for this config."""
    own = _own_task(config)
    kind = config.model_type
    if own in _SAVED_HEADS and not (own is Task.SEQUENCE_CLASSIFICATION and kind in _DOCUMENTS):
        yield own
    if kind in _DOCUMENTS:
        yield Task.TOKEN_CLASSIFICATION
    if kind in _MASKED_IMAGES:
        yield Task.MASKED_IMAGE_MODELING
    if hasattr(config, "mask_decoder_config"):
        yield Task.IMAGE_SEGMENTATION
        return
    if _is_speech(config):
        yield from _speech(config, own)
        return
    if _is_contrastive(config) and own not in (Task.IMAGE_TEXT_TO_TEXT, Task.CAUSAL_LM):
        yield Task.CONTRASTIVE
        return
    if _has_vision(config):
        yield from (Task.IMAGE_TEXT_TO_TEXT, Task.SPEECH_SEQ2SEQ)
        return
    if getattr(config, "is_encoder_decoder", False):
        yield Task.SEQ2SEQ_LM
    if kind in _TEXT_ENCODERS or _is_text_encoder(config):
        yield from (Task.SEQUENCE_CLASSIFICATION, Task.MASKED_LM)
    if hasattr(config, "vocab_size"):
        yield Task.CAUSAL_LM
    yield from (Task.IMAGE_CLASSIFICATION, Task.IMAGE_SEGMENTATION)
    if hasattr(config, "vocab_size"):
        yield from (Task.SEQUENCE_CLASSIFICATION, Task.MASKED_LM)


def _speech(config: Any, own: Task) -> Iterator[Task]:
    names = config.architectures or ()
    if any(str(name).endswith("ForTextToSpeech") for name in names):
        # no task of its own: the checkpoint's class is built
        return
    if own in (Task.CTC, Task.AUDIO_CLASSIFICATION):
        yield own
    if getattr(config, "is_encoder_decoder", False) or hasattr(config, "text_config"):
        yield Task.SPEECH_SEQ2SEQ
    yield from (Task.CTC, Task.AUDIO_CLASSIFICATION, Task.SPEECH_SEQ2SEQ)


def _own_task(config: Any) -> Task:
    """The task of the class that the checkpoint was saved with."""
    name = _saved_class(config)
    task = _task_of_name(name)
    if task is not None:
        return task
    if name.endswith("ForConditionalGeneration") and (
        _has_vision(config) or _is_contrastive(config)
    ):
        return Task.IMAGE_TEXT_TO_TEXT
    return Task.BASE


def _is_speech(config: Any) -> bool:
    if hasattr(config, "vision_config") or hasattr(config, "thinker_config"):
        return False
    if hasattr(config, "audio_config"):
        return not _is_contrastive(config)
    if hasattr(config, "audio_token_id") and hasattr(config, "encoder_config"):
        return True
    return any(
        hasattr(config, name)
        for name in ("num_mel_bins", "feat_extract_norm", "feature_projection_input_dim")
    ) or config.model_type in ("moonshine", "parakeet_ctc", "encodec")


def _has_vision(config: Any) -> bool:
    return hasattr(config, "vision_config") or hasattr(config, "thinker_config")


def _is_contrastive(config: Any) -> bool:
    """Two towers and a projection each: CLIP, SigLIP, CLAP and their kin."""
    has_text = hasattr(config, "text_config")
    has_other = hasattr(config, "vision_config") or hasattr(config, "audio_config")
    name = _saved_class(config)
    generates = name.endswith(("ForConditionalGeneration", "ForCausalLM", "LMHeadModel"))
    return has_text and has_other and not generates and hasattr(config, "initializer_factor")


def _is_text_encoder(config: Any) -> bool:
    """A text model that reads both ways: it has a masked-LM head, or no causal one."""
    import transformers

    if not hasattr(config, "vocab_size") or getattr(config, "is_decoder", False):
        return False
    name = _saved_class(config)
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return False
    kind = type(config)
    has_masked_lm = kind in transformers.AutoModelForMaskedLM._model_mapping
    return has_masked_lm or kind not in transformers.AutoModelForCausalLM._model_mapping


def _class_for(config: Any, task: Task, transformers: Any) -> Any:
    """The class for a task, None if there is none.

    For a config with code of its own it is the auto class that finds that code.
    """
    kind = type(config)
    own_code = getattr(config, "auto_map", None) or {}
    for name in _AUTO_CLASSES[task]:
        if name in own_code:
            return getattr(transformers, name)
        mapping = getattr(getattr(transformers, name, None), "_model_mapping", None)
        if mapping is None or kind not in mapping:
            continue
        if name == "AutoModelForPreTraining" and config.model_type not in _MASKED_IMAGES:
            continue
        if name == "AutoModelForMultimodalLM" and not _multimodal(config, task):
            continue
        choice = mapping[kind]
        return choice if not isinstance(choice, (tuple, list)) else _pick_class(config, choice)
    return None


def _multimodal(config: Any, task: Task) -> bool:
    is_speech = _is_speech(config)
    return is_speech if task is Task.SPEECH_SEQ2SEQ else not is_speech


def _pick_class(config: Any, classes: Any) -> Any:
    """Auto classes with a choice take the checkpoint's own class, or their first."""
    names = config.architectures or ()
    own = [cls for cls in classes if cls.__name__ in names]
    with_loss = [cls for cls in classes if "WithTeacher" not in cls.__name__]
    return next((cls for cls in own if cls in with_loss), with_loss[0] if with_loss else classes[0])


def _own_class(config: Any, transformers: Any) -> Any:
    """The class named by the checkpoint, else the bare model."""
    for name in config.architectures or ():
        cls = getattr(transformers, str(name), None)
        if cls is not None and isinstance(cls, type):
            return cls
    return _class_for(config, Task.BASE, transformers)


def _with_contrastive_loss(config: Any, transformers: Any) -> Any:
    """The checkpoint's class where it makes the loss that its bare model does not (BridgeTower)."""
    cls = getattr(transformers, _saved_class(config) or "None", None)
    if cls is None or "return_loss" not in inspect.signature(cls.forward).parameters:
        return None
    return cls


def _sole_class(config: Any, model_id: str, transformers: Any) -> Any:
    """The class of a kind of model that has one class, and no bare model.

    Raises:
        ConfigError: it has none, or more than one.
    """
    kind = type(config)
    mappings = (
        getattr(getattr(transformers, name), "_model_mapping", None)
        for name in dir(transformers)
        if name.startswith("AutoModelFor")
    )
    choices = [m[kind] for m in mappings if m is not None and kind in m]
    names = {
        c.__name__: c
        for choice in choices
        for c in (choice if isinstance(choice, tuple) else (choice,))
    }
    if len(names) == 1:
        return next(iter(names.values()))
    if names:
        raise ConfigError(
            f"{model_id}: its config.json does not say which class is trained, and transformers "
            f"has several for {config.model_type}: {', '.join(sorted(names))}. Add "
            f'"architectures": ["{min(names)}"], or another of them, to it.'
        )
    raise ConfigError(
        f"{model_id}: no auto class of transformers has a class for {config.model_type}. Name one "
        'in its config.json ("architectures": [...]), or give a factory of your own, '
        "package.module:function."
    )


def _say_replaced(head: Head, config: Any) -> Head:
    """Say that the checkpoint was saved with another head, unless all such are replaced."""
    own, name = _saved_class(config), head.cls.__name__
    if head.notes or own in ("", name) or own.endswith(_PRETRAINED):
        return head
    note = f"{name} is trained instead of {own}, the checkpoint's class (--task names others)"
    return Head(head.task, head.cls, (note,))


def _replace_wrapper(head: Head, config: Any, transformers: Any) -> Head:
    """Replace wrappers that have no training forward by the part that trains."""
    name = head.cls.__name__
    if name.endswith(("OmniForConditionalGeneration", "OmniMoeForConditionalGeneration")):
        thinker = name.replace("ForConditional", "ThinkerForConditional")
        part = getattr(transformers, thinker, None)
        if part is not None:
            note = f"{name} has no training forward; its thinker, {thinker}, is what trains"
            return Head(head.task, part, (note,))
    own = _saved_class(config)
    if "WithTeacher" in own and "WithTeacher" not in name:
        note = f"{own} has no loss; {name} is trained instead"
        return Head(head.task, head.cls, (note,))
    return head
