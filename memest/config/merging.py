"""From options by name to the values of a setup that several of them make. Torch-free.

Each function takes its options out of ``values``, options by name, and puts the value of a field
in; ``base`` is the setup that the options change.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from memest.config.data_loading import DataLoading
from memest.config.deepspeed import ON_SAVE, read_deepspeed
from memest.config.finetuning import expand_qlora, merge_adapter, merge_quantization
from memest.config.generation import Generation
from memest.config.kinds import Dtype, LogProbs, Loop, Method, read_method
from memest.config.length_files import lengths_of_dataset, read_lengths
from memest.config.lengths import Batching, Lengths
from memest.config.life import merge_life
from memest.config.option import OFF_WORDS, ON_WORDS
from memest.config.option_table import FLAGS, take_parts
from memest.config.parallelism import ONE_GPU
from memest.config.quantization import prepares_base
from memest.config.rollouts import Rollouts
from memest.config.setup import Precision, Setup
from memest.errors import ConfigError, hint, not_legal

__all__ = ["implied_options", "merge_all", "read_bool"]

_EVAL_BATCH = 8
"""``per_device_eval_batch_size`` of ``TrainingArguments``."""
_STRATEGIES = ("bfd", "bfd_split", "bfd-requeue", "wrapped", "none")
_BF16_NAMES = ("precision", "bf16")
_OF_SFT = "trl-fused"
"""The loss that SFTTrainer alone has."""
_OF_BASES = ("qlora", "load_in_4bit", "load_in_8bit")


def merge_all(values: dict[str, Any], base: Setup | None) -> None:
    """Replace options that are parts of a field's value, or other words for it, by that value.

    Raises:
        ConfigError: contradictions, wrong values, options without what they belong to.
    """
    if _is_sft(values) and values.get("loop") not in (None, Loop.TRAINER, Loop.TRAINER.value):
        raise ConfigError(
            f"--method sft and --loop {values['loop']} exclude each other: what is priced is "
            "TRL's trainer. Drop one of them."
        )
    implied = implied_options(values) if base is None else _of_other_trainer(values, base)
    _merge_precision(values, base)
    expand_qlora(values, base)
    _merge_deepspeed(values, base)
    for name, value in implied.items():  # a file's word goes before
        values.setdefault(name, value)
    merge_adapter(values, base)
    merge_quantization(values, base)
    _merge_checkpointing(values, base)
    _merge_lengths(values, base)
    _merge_generation(values, base)
    _merge_rollouts(values, base)
    _merge_segments(values, base)
    if parts := take_parts(values, "life"):
        evaluates = base is not None and base.eval_batch is not None
        merge_life(parts, values, None if base is None else base.life, evaluates=evaluates)
    _merge_evaluation(values, base)
    if loading := take_parts(values, "data_loading"):
        base_value = None if base is None else base.data_loading
        values["data_loading"] = dataclasses.replace(base_value or DataLoading(), **loading)
    if parts := take_parts(values, "distributed"):
        values["distributed"] = dataclasses.replace(
            ONE_GPU if base is None else base.distributed, **parts
        )


def implied_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Values that options imply for others, unless those are named.

    Peft's preparation of a quantised base switches checkpointing on unless it is told not to
    (:func:`prepares_base`), which TRL's own trainers do not ask for. All configurations of TRL have
    checkpointing on, and bf16 where fp16 is not (``_BaseConfig`` of TRL 1.16). Its trainers load a
    model that they are given by name in float32 (``create_model_from_path`` of TRL 1.16,
    ``from_pretrained`` of transformers 4 before), OnlineDPOTrainer alone as it was saved; what is
    quantised comes from a ``from_pretrained`` of the user's own. The method ``sft`` is a supervised
    step as SFTTrainer takes it: by its fused head, adapters beside a quantised base in bfloat16.
    """

    def is_on(name: str) -> bool:
        value = options.get(name)
        return value is not None and read_bool(name, value)

    out: dict[str, Any] = {}
    method = read_method(options.get("method") or Method.SUPERVISED)
    by_sft_trainer = _is_sft(options)
    is_trl = by_sft_trainer or not method.is_supervised
    in_full = is_trl and not method.writes_pairs
    is_quantised = options.get("quantization") is not None or any(map(is_on, _OF_BASES))
    if in_full and not is_quantised:
        out["dtype"] = Dtype.FLOAT32.value
    by_trl = method.is_in_trl_trainer and options.get("log_probs") in (None, LogProbs.FUSED)
    is_prepared = is_quantised and _is_prepared(options, by_trl=by_trl)
    if is_prepared or is_trl:
        out["checkpointing"] = "full"
    names_autocast = is_on("fp16") or any(options.get(name) is not None for name in _BF16_NAMES)
    if is_trl and not names_autocast:
        out["precision"] = Precision.BF16.value
    if by_sft_trainer:
        out |= _made_by_sft_trainer(liger=is_on("use_liger_kernel"), quantised=is_quantised)
    return out


def _of_other_trainer(options: Mapping[str, Any], base: Setup) -> dict[str, Any]:
    """What a run gets by SFTTrainer in place of its trainer, or loses by the Trainer in its place.

    Its other options stand for both.
    """
    quantised = base.quantization is not None
    if _is_sft(options):
        liger = options.get("use_liger_kernel", base.use_liger_kernel)
        named = any(options.get(name) for name in ("quantization", *_OF_BASES))
        return _made_by_sft_trainer(
            liger=read_bool("use_liger_kernel", liger), quantised=named or quantised
        )
    method = options.get("method")
    if method is None or not read_method(method).is_supervised or base.fused_loss != _OF_SFT:
        return {}
    out: dict[str, Any] = {"fused_loss": ""}
    if quantised and base.adapter is not None:
        out |= {"prepare_kbit": True, "cast_weights": ()}
    return out


def _made_by_sft_trainer(*, liger: bool, quantised: bool) -> dict[str, Any]:
    """What SFTTrainer does whatever its configuration says (TRL 1.16), beside Liger or a base."""
    out: dict[str, Any] = {} if liger else {"fused_loss": _OF_SFT}
    if quantised:
        out |= {"prepare_kbit": False, "cast_weights": ("trainable=bfloat16",)}
    return out


def _is_sft(options: Mapping[str, Any]) -> bool:
    """Whether options name SFTTrainer's way of a supervised step."""
    return str(options.get("method")).strip().lower() == "sft"


def _is_prepared(options: Mapping[str, Any], *, by_trl: bool) -> bool:
    """Whether peft prepares the base that options of a run name.

    Args:
        options: as they were given.
        by_trl: adapters are those of TRL's own trainers.
    """
    values = dict(options)
    try:
        expand_qlora(values, None)
        merge_adapter(values, None)
        merge_quantization(values, None)
    except ConfigError:
        return False  # which is said where they are merged for good
    adapts = values.get("adapter") is not None and not by_trl
    return prepares_base(values.get("quantization"), adapts=adapts)


def read_bool(option: str, value: Any) -> bool:
    """True or False, as Python or as the words that configuration files use."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ON_WORDS or text in OFF_WORDS:
        return text in ON_WORDS
    raise ConfigError(f"{option} {value!r} is neither true nor false.")


def _merge_precision(values: dict[str, Any], base: Setup | None) -> None:
    """Replace the switches fp16 and bf16 by the field they stand for."""
    given = {name: values.pop(name) for name in ("fp16", "bf16") if name in values}
    switches = {name for name, is_on in given.items() if is_on}
    if base is not None and not switches and base.precision in given:
        values.setdefault("precision", "fp32")  # it is switched off
    if len(switches) == 2:
        raise ConfigError(
            "--fp16 and --bf16 exclude each other: autocast has one dtype. Drop one of them."
        )
    for name in switches:
        if str(values.get("precision", name)) != name:
            raise ConfigError(
                f"--{name} and --precision {values['precision']} contradict each other: drop one."
            )
        values["precision"] = name


def _merge_deepspeed(values: dict[str, Any], base: Setup | None) -> None:
    """Read a DeepSpeed file; what it says must not contradict what else was given.

    As the Trainer does, which stops where its arguments and the file differ.
    """
    value = values.get("zero_settings")
    if value is None or (isinstance(value, Mapping) and "zero_optimization" not in value):
        return
    pieces = values.get("sp", 1 if base is None else base.distributed.sp)
    deep_speed_file = read_deepspeed(value, shares_sequences=pieces != 1)
    values["zero_settings"] = deep_speed_file.settings
    asks = "life" in values or (base is not None and base.life is not None)
    for name, value in deep_speed_file.options.items():
        if name == ON_SAVE and not asks:
            continue  # a file's word on saving, about which nobody asks
        if name in values and str(values[name]) != str(value):
            raise ConfigError(
                f"{FLAGS[name]} {values[name]} and the DeepSpeed configuration's "
                f"{value} contradict each other: drop one, or write auto in the file."
            )
        values[name] = value


_CHECKPOINT_KWARGS = (
    "use_reentrant every_n_layers preserve_rng_state context_fn determinism_check debug early_stop"
).split()
"""Arguments of ``torch.utils.checkpoint.checkpoint`` of torch 2.13, and transformers' own."""


def _merge_checkpointing(values: dict[str, Any], base: Setup | None) -> None:
    """Read ``gradient_checkpointing_kwargs``."""
    value = values.pop("gradient_checkpointing_kwargs", None)
    if value is None:
        return
    flag = "--checkpointing-kwargs"
    if not isinstance(value, Mapping):
        try:
            value = json.loads(str(value))
        except ValueError as error:  # a number of thousands of digits is another one
            raise ConfigError(
                f"{flag} {value!r} is not valid JSON ({error}): write "
                "for example '{\"use_reentrant\": false}'"
            ) from None
        if not isinstance(value, dict):
            raise ConfigError(f'{flag} takes a JSON object, for example {{"use_reentrant": true}}')
    for name in value:
        if name not in _CHECKPOINT_KWARGS:
            raise not_legal(f"{flag}: {name!r}", name, _CHECKPOINT_KWARGS)
    if value.get("use_reentrant") is not None:
        reentrant = read_bool("use_reentrant", value["use_reentrant"])
        if values.setdefault("use_reentrant", reentrant) != reentrant:
            raise ConfigError(f"--use-reentrant and {flag} contradict each other: drop one.")
    interval = value.get("every_n_layers")
    if interval is None:
        return
    mode = values.get("checkpointing", "none" if base is None else base.checkpointing)
    if mode == "none":
        raise ConfigError(
            f"{flag}: every_n_layers says nothing where nothing is recomputed: add --checkpointing."
        )
    if mode in (True, "full"):
        values["checkpointing"] = f"every_n:{interval}"


def _merge_lengths(values: dict[str, Any], base: Setup | None) -> None:
    parts = take_parts(values, "batching")
    file, dataset = values.pop("lengths", None), values.pop("dataset", None)
    tokenizer, column = values.pop("tokenizer", None), values.pop("dataset_column", None)
    _merge_packing(values, base, file is not None or dataset is not None)
    base_value = None if base is None else base.batching
    if file is not None and dataset is not None:
        raise ConfigError("--lengths and --dataset both say how long samples are: drop one.")
    if dataset is None and (tokenizer is not None or column is not None):
        flag = "--tokenizer" if tokenizer is not None else "--dataset-column"
        raise ConfigError(f"{flag} says nothing without a dataset: add --dataset FILE.")
    lengths = file if isinstance(file, Lengths) else None
    if lengths is None and file is not None:
        lengths = read_lengths(file)
    elif dataset is not None:
        lengths = lengths_of_dataset(dataset, tokenizer, column)
    given_parts = {name: v for name, v in parts.items() if v is not False or base_value is not None}
    if lengths is None and base_value is None:
        if given_parts:
            raise ConfigError(
                f"{FLAGS[next(iter(given_parts))]} says nothing where every sample has the same "
                "length: add --lengths FILE (one length a line, or length,count) or --dataset FILE."
            )
        return
    flat = bool(values.get("padding_free", base.padding_free if base is not None else False))
    cap = values.pop("seq_len", None if base_value is None else base_value.max_length)
    given_parts |= {"max_length": cap, "flat": flat}
    if lengths is not None:
        given_parts["lengths"] = lengths
    values["batching"] = (
        dataclasses.replace(base_value, **given_parts) if base_value else Batching(**given_parts)
    )


def _merge_packing(values: dict[str, Any], base: Setup | None, lengths: bool) -> None:
    """TRL: ``bfd`` turns padding-free on; ``wrapped`` makes plain rows that are full."""
    value = values.pop("packing", None)
    if value is None or value is False:
        return
    strategy = "bfd" if value is True else str(value).strip().lower().replace("-", "_")
    # "ffd" is what TRL called it until 0.20 (huggingface/trl#3696): the same rows
    strategy = {"true": "bfd", "ffd": "bfd", "false": "none"}.get(strategy, strategy)
    strategies = [s.replace("-", "_") for s in _STRATEGIES]
    if strategy not in strategies:
        suggestion = hint(strategy, strategies)
        raise ConfigError(
            f"--packing {value!r} is not known.{suggestion} Legal: bfd, wrapped, none."
        )
    if strategy in ("none", "wrapped") and base is not None:
        values.setdefault("padding_free", False)
    if strategy == "none":
        return
    if lengths:
        raise ConfigError(
            "--packing fills every row to --seq-len, whatever the samples' lengths: drop --lengths."
        )
    if values.get("seq_len") is None and (base is None or base.seq_len is None):
        raise ConfigError(
            "--packing fills rows to a length (max_length of TRL, 1024 unless a script says more): "
            "add --seq-len 1024."
        )
    if strategy != "wrapped":
        values["padding_free"] = True


def _merge_generation(values: dict[str, Any], base: Setup | None) -> None:
    parts = take_parts(values, "generation")
    predicts = values.pop("predict_with_generate", None)
    longest = values.pop("generation_max_length", None)
    number = parts.get("new_tokens")
    base_value = None if base is None else base.generation
    if number is None and not predicts and base_value is None:
        if longest is not None or parts:
            raise ConfigError(
                "--generation-max-length, --num-beams and --cache-implementation say nothing where "
                "nothing is generated: add --generate 128, or --predict-with-generate."
            )
        return
    if predicts is False and base_value is not None and number is None:
        values["generation"] = None
        return
    if number is not None and longest is not None:
        raise ConfigError("--generate and --generation-max-length exclude each other: drop one.")
    if longest is not None and not predicts:
        raise ConfigError("--generation-max-length belongs to --predict-with-generate: add it.")
    if predicts and values.get("eval_samples") is not None:
        raise ConfigError(
            f"--eval-samples {values['eval_samples']} is of logits that an evaluation keeps, and "
            "with --predict-with-generate it keeps the tokens that it generates, 8 bytes each: "
            "drop --eval-samples."
        )
    if predicts:
        values.setdefault("eval_batch", _EVAL_BATCH)
    if number is not None or longest is not None:
        parts["max_length"] = longest
    values["generation"] = (
        dataclasses.replace(base_value, **parts) if base_value else Generation(**parts)
    )


def _merge_rollouts(values: dict[str, Any], base: Setup | None) -> None:
    parts = take_parts(values, "rollouts")
    method = read_method(values.get("method", Method.SUPERVISED if base is None else base.method))
    base_value = None if base is None else base.rollouts
    if method.generates:
        rollouts = dataclasses.replace(base_value, **parts) if base_value else Rollouts(**parts)
        if parts.get("engine_share") is not None:  # named, be it what it is when left out
            rollouts.check_shares("--engine-share")
        values["rollouts"] = rollouts
    elif parts:
        raise ConfigError(
            f"{FLAGS[next(iter(parts))]} says nothing where a run learns from no completions of "
            "its own: add --method grpo, rloo or online-dpo."
        )
    elif base_value is not None:
        values["rollouts"] = None


def _merge_segments(values: dict[str, Any], base: Setup | None) -> None:
    """Write the switch expandable_segments into the allocator's configuration."""
    is_asked = values.pop("expandable_segments", None)
    conf = values.get("alloc_conf", "" if base is None else base.alloc_conf)
    items = [item for item in conf.split(",") if item.strip().startswith("expandable_segments")]
    if is_asked is False and base is not None and "alloc_conf" not in values:
        values["alloc_conf"] = ",".join(item for item in conf.split(",") if item not in items)
    if not is_asked:
        return
    if any(item.partition(":")[2].strip().lower() == "false" for item in items):
        raise ConfigError(
            f"--expandable-segments and --alloc-conf {conf} contradict each other: drop one."
        )
    if not items:
        values["alloc_conf"] = ",".join(filter(None, (conf, "expandable_segments:True")))


def _merge_evaluation(values: dict[str, Any], base: Setup | None) -> None:
    """``eval_strategy`` of the Trainer: with ``no`` the other options of evaluations do nothing."""

    def leave_out(*names: str) -> None:
        for name in names:
            values.pop(name, None)
            if base is not None:
                values[name] = None

    if values.pop("prediction_loss_only", False):
        leave_out("eval_samples")
    value = values.pop("eval_strategy", None)
    if value is None:
        return
    strategy = str(value).strip().lower().rpartition(".")[2]
    if strategy not in ("no", "steps", "epoch"):
        raise ConfigError(f"--eval-strategy {value!r} is not known. Legal: no, steps, epoch.")
    if strategy != "no":
        values.setdefault("eval_batch", _EVAL_BATCH)
        return
    leave_out("eval_batch", "eval_samples", "eval_accumulation_steps")
