"""Values that have nothing to act on: an option of DDP on one GPU, a bucket without ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from memest.catalog.mirrors import is_named_quantised
from memest.config.deepspeed import ON_SAVE
from memest.config.kinds import Attention, LogProbs, Method, read_method
from memest.config.option_table import OPTIONS
from memest.config.rollouts import Engine
from memest.readers.training_arguments import METHODS, WITHOUT_LIGER
from memest.readers.values import Bounded, Either, Level, ReadValue, Remark, Saving

__all__ = ["OPTIONS_OF_4BIT", "OPTIONS_OF_LORA", "values_that_act"]

OPTIONS_OF_4BIT = tuple(
    """bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_4bit_use_double_quant
    bnb_4bit_quant_storage""".split()
)
_OPTIONS_OF_BASES = (
    *OPTIONS_OF_4BIT,
    "llm_int8_threshold",
    "llm_int8_skip_modules",
)
"""What says nothing without a quantised base that is asked for; whether one is prepared is said
of those that checkpoints bring, too."""
OPTIONS_OF_LORA = tuple(
    """lora_r lora_alpha lora_dropout lora_target_modules use_dora use_rslora
    modules_to_save""".split()
)
_ADAPTS = ("peft", "adapter", "lora_r", "lora_target_modules")
_OPTIONS_OF_GENERATIONS = ("generation_max_length", "num_beams", "cache_implementation")


_KERNELS = {
    # what transformers itself loads for flash_attention_2 without the package (5.23,
    # FLASH_ATTN_KERNEL_FALLBACK): the same source, built for the hub
    "kernels-community/flash-attn": "flash_attention_2",
    "kernels-community/flash-attn2": "flash_attention_2",
}
_SPELLINGS = {each.value: each.value for each in Attention} | {"": "auto", "None": "auto"}


def _attention(values: dict[str, ReadValue]) -> list[Remark]:
    """Kernels of attention that are another's, or that nobody has priced."""
    entry = values.get("attn_implementation")
    if entry is None or entry.level is Level.FLAG:
        return []
    text = str(entry.value).removeprefix("Attention.")
    # kernels-community/flash-attn2@v1:flash_attn_func
    name = _KERNELS.get(text.partition("@")[0].partition(":")[0])
    if name is not None:
        values["attn_implementation"] = replace(entry, value=name)
        return [Remark(entry.origin, f"{text}: FlashAttention 2 as the hub builds it")]
    if text.lower() in _SPELLINGS:
        return []
    if "flash-attn" in text or text.startswith("flash_attention_"):
        values["attn_implementation"] = replace(entry, value="flash_attention_2")
        why = f"not priced: {text}; taken is flash_attention_2"
        return [Remark(entry.origin, why)]
    if "/" not in text and text not in _KNOWN_KERNELS and not text.startswith("paged|"):
        return []  # a slip of the pen: the option says what is legal
    del values["attn_implementation"]
    why = f"not priced: {text}; taken is the model's own, sdpa or eager"
    return [Remark(entry.origin, Either(why))]


_KNOWN_KERNELS = (
    "flex_attention",
    "flex",
    "xformers",
    "sage",
    "sage_attention",
    "fp8",
    "sdpa_paged",
    "eager_paged",
    "paged_attention",
)


def values_that_act(values: Mapping[str, ReadValue]) -> tuple[dict[str, ReadValue], list[Remark]]:
    """Values that act, and remarks on those that do not and were not named by flags.

    Args:
        values: one value for each option.
    """
    acting = dict(values)
    remarks = _attention(acting)

    def drop(option: str, why: str) -> None:
        if option not in acting or acting[option].level is Level.FLAG:
            return
        value = acting.pop(option)
        if value.level is not Level.DEFAULT:
            remarks.append(Remark(value.origin, why))

    several_gpus = (_number(acting, "num_gpus") or 1) > 1
    for option in [name for name, value in acting.items() if value.several_gpus]:
        if not several_gpus:
            drop(option, "one GPU")
    zero = _number(acting, "zero") or 0
    fsdp = "fsdp" in acting and str(acting["fsdp"].value) not in ("none", "no", "False", "")
    if not zero:
        for option in ("zero_settings", "offload_optimizer", "offload_param"):
            if not (option != "zero_settings" and "zero_settings" in acting):
                drop(option, "ZeRO is off")
    if not fsdp:
        for option in [name for name in acting if name.startswith("fsdp_")]:
            drop(option, "FSDP is off")
    if zero or fsdp or not several_gpus:
        why = "ZeRO takes the place of DDP" if zero else "FSDP takes the place of DDP"
        why = why if zero or fsdp else "one GPU has no DDP"
        for option in [name for name in acting if name.startswith("ddp_")]:
            drop(option, why)
    shared = any((_number(acting, name) or 1) > 1 for name in ("tp", "ep", "pp"))
    if zero or fsdp or shared:
        drop("cast_weights", "who shards weights settles their dtype")
    quantised = _is_quantised(acting)
    if not quantised:
        for option in _OPTIONS_OF_BASES:
            drop(option, "no quantised base")
        if "model" not in acting or not is_named_quantised(str(acting["model"].value)):
            drop("prepare_kbit", "no quantised base")
    elif _is_on(acting, "load_in_8bit"):
        for option in OPTIONS_OF_4BIT:
            drop(option, "an 8-bit base")
    if "peft" in acting and str(acting["peft"].value).lower() not in ("lora", "dora", "adalora"):
        for option in ("lora_alpha", "lora_dropout", "use_dora", "use_rslora"):
            drop(option, f"{acting['peft'].value} has no such setting")
    optimizer = str(acting["optim"].value) if "optim" in acting else "auto"
    if not optimizer.startswith(("galore", "apollo")):
        # the Trainer asks for them beside these alone (_setup_low_rank_optimizer)
        drop("optim_target_modules", f"--optim {optimizer} takes no modules")
    if not any(name in acting for name in ("peft", "adapter", "lora_r", "lora_target_modules")):
        for option in (*OPTIONS_OF_LORA, "autocast_adapter_dtype"):
            drop(option, "no adapters are trained")
    if str(acting["checkpointing"].value if "checkpointing" in acting else "none") == "none":
        drop("use_reentrant", "nothing is recomputed")
    if "lengths" not in acting and "dataset" not in acting:
        drop("group_by_length", "no lengths are named: all samples are as long as each other")
        drop(
            "pad_to_multiple_of",
            Bounded("not priced: without --lengths the length is taken as it is"),
        )
    if not any(name in acting for name in ("seq_len", "lengths", "dataset")):
        drop("packing", "not priced: nothing names the length of packed rows; --seq-len says it")
    if not any(name in acting for name in ("generate", "predict_with_generate")):
        for option in _OPTIONS_OF_GENERATIONS:
            drop(option, "nothing is generated")
    if fsdp and "predict_with_generate" in acting and _number(acting, "fsdp_version") == 1:
        for option in ("predict_with_generate", *_OPTIONS_OF_GENERATIONS):
            drop(option, "not priced: a generation under FSDP1")
    _drop_unasked(acting, drop)
    if "eval_batch" not in acting and "eval_strategy" not in acting:
        for option in ("eval_samples", "eval_accumulation_steps"):
            drop(option, "no evaluation runs")
    if "loop" in acting and str(acting["loop"].value) != "trainer":
        for option in ("eval_batch", "eval_samples", "eval_accumulation_steps"):
            drop(option, "the loop is no Trainer's")
    compiled = any(
        _is_on(acting, name)
        for name in ("torch_compile", "torch_compile_mode", "torch_compile_backend")
    )
    remarks += _settle_method(acting, drop, fsdp=fsdp, zero=zero, compiled=compiled)
    adapts = any(name in acting for name in _ADAPTS)
    own_loop = "loop" in acting and str(acting["loop"].value) == "plain"
    is_fsdp2 = fsdp and _number(acting, "fsdp_version") != 1
    loss = str(acting["fused_loss"].value) if "fused_loss" in acting else ""
    sharing_option = next(
        (name for name in ("cp", "sp", "tp", "ep", "pp") if (_number(acting, name) or 1) > 1), ""
    )
    for applies, circumstance in (
        (sharing_option, f"beside --{sharing_option}"),
        (zero == 3 and loss.startswith("torchtune"), "under ZeRO-3, which torchtune does not have"),
        (fsdp and loss.startswith("torchtune"), "behind a forward of several GPUs' FSDP"),
        (
            is_fsdp2 and adapts and not own_loop and loss != "trl-fused",
            "where several GPUs have the head in an FSDP unit of its own, beside adapters",
        ),
        (compiled, "together with torch.compile"),
        (_is_on(acting, "use_liger_kernel"), "beside Liger's"),
        ("eval_samples" in acting, "with predictions that an evaluation keeps"),
    ):
        if applies:
            drop(
                "fused_loss",
                Saving(
                    f"not priced {circumstance}: a cross entropy of all logits at once is taken"
                ),
            )
    return acting, remarks


def _drop_unasked(acting: dict[str, ReadValue], drop: Callable[[str, str], None]) -> None:
    """Leave out what files say of checkpoints and nodes where nobody asks about these."""
    parts = str(acting["life"].value).lower() if "life" in acting else ""
    why = "no checkpoint is asked about (--with save)"
    if "save" not in parts and "resume" not in parts:
        drop("fsdp_state_dict_type", why)
    if "save" not in parts:
        drop(ON_SAVE, why)
    if not parts and "host_memory" not in acting:
        drop("processes_per_node", "processes of a node: no host memory is asked about")


def _settle_method(
    acting: dict[str, ReadValue],
    drop: Callable[[str, str], None],
    *,
    fsdp: bool,
    zero: int,
    compiled: bool,
) -> list[Remark]:
    """Leave a method of preferences out where it is not priced, else what it does not have."""
    entry = acting.get("method")
    if entry is None or read_method(entry.value) is Method.SUPERVISED:
        if entry is not None and entry.level is Level.FLAG and str(entry.value).lower() != "sft":
            for option in ("fused_loss", "cast_weights", "prepare_kbit"):
                drop(option, f"of SFTTrainer, and {entry.origin} is without")
        for option in _OF_METHODS:
            drop(option, "of a trainer that learns from answers")
        return []
    if entry.level is Level.FLAG:
        return []
    method = read_method(entry.value)
    sharing_option = next(
        (name for name in ("cp", "sp", "tp", "ep", "pp") if (_number(acting, name) or 1) > 1), ""
    )
    for applies, circumstance in (
        (sharing_option, f"beside --{sharing_option}"),
        *_sharded_otherwise(acting, method, fsdp=fsdp, zero=zero),
        (compiled, "together with torch.compile"),
        (_is_quantised(acting) and method.writes_pairs, "on a quantised base"),
    ):
        if applies:
            words = METHODS["dpo" if method is Method.IPO else method.value]
            drop("method", f"not priced {circumstance}: {words}; priced is supervised fine-tuning")
            for option in _OF_METHODS:
                drop(option, "with the method")
            return []
    if fsdp and _is_on(acting, "precompute_ref_log_probs"):
        drop("precompute_ref_log_probs", _PRECOMPUTED)
    if _is_on(acting, "use_liger_kernel"):
        drop("use_liger_kernel", Either(f"not priced beside --method {method}: {WITHOUT_LIGER}"))
    remarks = []
    evaluation = acting.get("eval_batch")
    if evaluation is not None and evaluation.level is not Level.FLAG:
        del acting["eval_batch"]
        pairs = _number({"batch": evaluation}, "batch") or 1
        why = f"not priced: an evaluation of {pairs} pairs at once"
        # without gradients, and keeping its loss alone, it takes less than a step of as many
        small = pairs <= (_number(acting, "batch") or 1)
        remarks.append(Remark(evaluation.origin, Bounded(why) if small else why))
    for option in ("eval_strategy", "eval_samples", "eval_accumulation_steps"):
        drop(option, "with the evaluation")
    for option in ("lengths", "dataset", "group_by_length", "packing", "padding_free"):
        drop(option, Bounded("not of a trainer of preferences; --seq-len says the longest answer"))
    for option in ("fused_loss", "neftune_noise_alpha"):
        drop(option, "not of a trainer of preferences")
    return remarks


def _sharded_otherwise(
    acting: Mapping[str, ReadValue], method: Method, *, fsdp: bool, zero: int
) -> Iterator[tuple[bool, str]]:
    """Where a method is not priced under FSDP and ZeRO-3; the rows of ``config.pairs`` say why."""
    asks, is_first = fsdp and method.has_reference, _number(acting, "fsdp_version") == 1
    adapts = any(name in acting for name in _ADAPTS)
    log_probs = str(acting["log_probs"].value) if "log_probs" in acting else ""
    shards = "under FSDP" if fsdp else "under ZeRO-3"
    if log_probs == LogProbs.VERL:  # an FSDP of its own, and no reference on the GPU
        return
    generates, engine = fsdp and method.generates, acting.get("engine")
    writes = engine is None or engine.value == Engine.MODEL
    merges = zero == 3 and method.generates and adapts and not writes
    yield zero == 3 and method.writes_pairs, "under ZeRO-3"
    yield merges and _is_quantised(acting), "under ZeRO-3, beside adapters on a quantised base"
    yield fsdp and method.writes_pairs, "under FSDP"
    yield (fsdp or zero == 3) and method.generates and log_probs == LogProbs.SWIFT, shards
    yield generates and writes and adapts, "under FSDP, by the model itself with adapters"
    yield generates and adapts and _is_quantised(acting), "under FSDP, on a quantised base"
    yield (asks or generates) and is_first, "under FSDP1"
    of_values = method is Method.REWARD and log_probs == LogProbs.FLOAT32 and not adapts
    yield of_values and (fsdp or zero > 0), "with all weights, under FSDP or ZeRO"
    precomputes = method.has_reference and _is_on(acting, "precompute_ref_log_probs")
    yield precomputes and ((fsdp and adapts) or zero == 3), f"{shards}, precomputed"
    if not adapts and log_probs not in ("", LogProbs.FUSED):
        yield asks, "under FSDP, where this trainer wraps the reference otherwise than TRL 1.16"


_PRECOMPUTED = Saving(
    "not priced: TRL asks the reference before the training begins, gathered whole, and lets go of "
    "it; priced is the reference beside the training"
)
"""Under FSDP: ``precompute_ref_log_probs`` of a model without adapters."""
_OF_METHODS = (
    "log_probs",
    "ref_dtype",
    "precompute_ref_log_probs",
    "sync_ref_model",
    *(option.name for option in OPTIONS if option.field == "rollouts"),
)
"""Options that are nothing without a method."""


def _is_on(values: Mapping[str, ReadValue], option: str) -> bool:
    return option in values and str(values[option].value).lower() not in ("false", "none", "")


def _is_quantised(values: Mapping[str, ReadValue]) -> bool:
    return any(_is_on(values, name) for name in ("load_in_4bit", "load_in_8bit", "quantization"))


def _number(values: Mapping[str, ReadValue], option: str) -> int | None:
    text = str(values[option].value).strip() if option in values else ""
    return int(text) if text.isdigit() and len(text) < 10 else None
