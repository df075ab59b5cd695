"""Trainers of transformers and TRL: their configuration by the readers of those formats."""

from __future__ import annotations

from memest.readers.scripts.calls import TRAINERS, arguments_of, optimizer_name, updated_part
from memest.readers.scripts.document import CallDocument
from memest.readers.scripts.found import Found
from memest.readers.scripts.lengths import put_lengths
from memest.readers.scripts.loading import is_old_trl
from memest.readers.scripts.predictions import put_predictions
from memest.readers.scripts.things import Call, Function, Unknown, Value
from memest.readers.scripts.unsloth import CONFIG_DEFAULTS, is_unsloth
from memest.readers.training_arguments import is_of_model, read_training_arguments
from memest.readers.trl import read_trl
from memest.readers.values import DocumentReading, Either, Saving

__all__ = ["read_trainer"]

_OF_TRAINER = frozenset(
    "max_seq_length packing dataset_text_field dataset_num_proc neftune_noise_alpha "
    "dataset_batch_size dataset_kwargs model_init_kwargs num_of_sequences beta max_length "
    "max_prompt_length max_target_length loss_type label_smoothing".split()
)
"""Settings that earlier releases of TRL took beside their configuration."""
_OVERRIDES = {
    "compute_loss": "a loss of the script's own",
    "training_step": "a step of the script's own",
    "create_optimizer": "an optimizer of the script's own",
    "create_optimizer_and_scheduler": "an optimizer of the script's own",
    "prediction_step": "an evaluation of the script's own",
}


def read_trainer(found: Found) -> tuple[DocumentReading, set[str]]:
    """The configuration of the trainer.

    Raises:
        ConfigError: a value that cannot be.
    """
    trainer = found.trainer
    assert trainer is not None
    method = TRAINERS[trainer.name]
    document = CallDocument(found.source, "TRL" if method else "transformers")
    config = arguments_of(trainer)
    _configure(document, config, trainer, found)
    for key in sorted(_OF_TRAINER & set(trainer.keywords)):
        document.put(key, trainer.keywords[key], trainer)
    rewards = trainer.keywords.get("reward_funcs")
    if rewards is not None and isinstance(rewards.data, str):
        document.put("reward_funcs", rewards, trainer)  # a model's name
    _own_parts(document, trainer)
    for key in ("use_cpu", "no_cuda"):
        if document.get(key) is True:
            document.miss(trainer.line, key, Saving("it trains on the CPU: a GPU's run is priced"))
    unsloth = found.load is not None and is_unsloth(found.load)
    if method:
        _defaults(document, found, config, unsloth=unsloth)
    if not method or not any(key in document for key in ("max_length", "max_seq_length")):
        put_lengths(document, found)
    collator = trainer.keywords.get("data_collator")
    if method == "sft" and collator is not None and isinstance(collator.data, Function):
        why = (
            "the script's own collator makes samples, and TRL does not cut them; --seq-len says it"
        )
        document.miss(collator.line or trainer.line, "data_collator", why)
    keys = document.keys()
    if not method:
        read_training_arguments(keys)
    else:
        read_trl(keys, method=method, own_loss=not is_old_trl(found) and not unsloth)
    return document.reading(keys), document.used


def _defaults(document: CallDocument, found: Found, config: Value | None, *, unsloth: bool) -> None:
    """What is in force in place of the defaults of TRL's present configuration."""
    kind = config.data.name if config is not None and isinstance(config.data, Call) else ""
    if unsloth and kind.endswith("Config"):
        for key, value in CONFIG_DEFAULTS.items():
            document.say_default(key, value, "default of Unsloth")
    if unsloth or kind.endswith("TrainingArguments") or is_old_trl(found):
        # training arguments bring their own, and those of the configuration came with TRL 0.20
        for key in ("gradient_checkpointing", "bf16"):
            document.say_default(key, False, "default of TrainingArguments")
    if found.load is not None and not unsloth:
        document.say_default("dtype", "auto", "from_pretrained names none")


def _configure(document: CallDocument, config: Value | None, trainer: Call, found: Found) -> None:
    """The arguments of ``TrainingArguments(...)`` and what was assigned to them since.

    What a class of the script adds to them of models says nothing where the model is loaded here:
    what its code makes of that is read.
    """
    if config is None:
        return
    data = config.data
    if isinstance(data, Call) and data.is_instance:
        own = [] if found.load is None else [name for name in data.own if is_of_model(name)]
        for name in sorted(own):
            document.ignore(data.line, name, "a field of the script's own, whose code is read")
        document.put_all(data, without=("output_dir", *own))
        for key, value in data.attributes.items():
            if key not in data.methods:
                document.put(key, value, data)
    else:
        why = data.why if isinstance(data, Unknown) else "they are not made in this file"
        document.miss(
            trainer.line,
            "args",
            Either(
                f"training arguments cannot be told without running ({why}): their defaults are"
            ),
        )


def _own_parts(document: CallDocument, trainer: Call) -> None:
    """What the trainer is given or does besides."""
    for name in sorted(set(_OVERRIDES) & trainer.methods):
        document.miss(trainer.line, f"{trainer.subclass}.{name}", f"{_OVERRIDES[name]} is not read")
    if "compute_loss_func" in trainer.keywords:
        document.miss(trainer.line, "compute_loss_func", "a loss of the script's own is not read")
    put_predictions(document, trainer)
    if "optimizer_cls_and_kwargs" in trainer.keywords:
        why = "an optimizer of the script's own: priced is that of the arguments; --optim says it"
        document.miss(trainer.line, "optimizer_cls_and_kwargs", why)
    optimizers = trainer.keywords.get("optimizers")
    if optimizers is not None:
        _optimizer(document, optimizers.data, trainer)


def _optimizer(document: CallDocument, pair: object, trainer: Call) -> None:
    """The optimizer of ``optimizers=(optimizer, scheduler)``."""
    optimizer = pair[0] if isinstance(pair, list) and pair else None
    found = optimizer_name(optimizer) if isinstance(optimizer, Call) else None
    if found is not None and isinstance(optimizer, Call):
        document.say("optim", found, trainer.line)
        if part := updated_part(optimizer):
            document.miss(optimizer.line, optimizer.name, Saving(part))
    elif isinstance(optimizer, Call):
        document.miss(
            optimizer.line, optimizer.path, Either("an optimizer that memest does not know")
        )
    elif optimizer is not None or isinstance(pair, Unknown):
        why = "an optimizer that cannot be told; --optim says it"
        document.miss(trainer.line, "optimizers", Either(why))
