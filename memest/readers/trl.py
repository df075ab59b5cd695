"""TRL: ``SFTConfig`` with ``ModelConfig``, as ``trl sft --config run.yaml`` reads them.

Source: TRL at July 2026: ``trainer/base_config.py``, ``trainer/sft_config.py``,
``experimental/online_dpo/online_dpo_config.py``,
``trainer/model_config.py``, ``trainer/utils.py`` (``get_quantization_config``,
``get_peft_config``, ``create_model_from_path``), ``trainer/sft_trainer.py``; of losses: the same
files of TRL 1.4 to 1.16.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from memest.catalog.mirrors import is_named_quantised
from memest.config.installed import release
from memest.config.kinds import Method
from memest.errors import ConfigError, not_legal
from memest.readers.mapping import DocumentKeys, Key, KeyTable, by_key, read_table
from memest.readers.training_arguments import (
    ADAPTER_SWITCHES,
    IGNORED_KEYS,
    METHODS,
    MODELS,
    PRICED_METHODS,
    SIZES,
    TRAINER,
    UNMODELLED_KEYS,
    WITHOUT_LIGER,
    note_length,
    read_adapters,
    read_checkpointing,
    read_evaluation,
    read_liger,
    read_loading,
    read_packing,
    read_script_spellings,
    read_sharding,
)
from memest.readers.values import Bounded, Either, KeyOrigin, Level, Saving

__all__ = ["PREPARING", "note_adapters", "predefined_config", "read_completions", "read_trl"]

PREPARING = ("orpo", "cpo", "bco")
"""Trainers that have peft prepare a quantised base before they put adapters beside it."""
_PRESENT_RELEASE = (1, 16)
_KEYS_OF_METHODS = {
    "rloo": "normalize_advantages reward_clip_range",
    "grpo": "num_generations reward_funcs reward_weights vllm_mode",
    "kto": "desirable_weight undesirable_weight",
    "reward": "center_rewards_coefficient",
    "dpo": "precompute_ref_log_probs rpo_alpha ref_model_init_kwargs sync_ref_model",
    "preference": "beta max_prompt_length max_completion_length",
}
"""Keys that the configuration of one trainer has, and that of no other before it."""


def _method_of(keys: DocumentKeys) -> str:
    """The trainer that a configuration is for, by its keys."""
    loss = keys.document.get("loss_type")
    found = "sft" if loss is None or loss in _SFT_LOSSES else "preference"
    for method, names in _KEYS_OF_METHODS.items():
        if any(keys.has(name) for name in names.split()):
            found = method
            break
    # GRPO and DPO call it max_completion_length; GKD and Nash-MD say what they have besides
    writes = found in _RELATIVES and keys.has("max_new_tokens")
    if writes and not any(keys.has(key) for key in ("lmbda", "mixture_coef", "alpha")):
        return Method.ONLINE_DPO.value
    # relatives share their keys; the run's own name, or the file's, often says which
    said = [str(keys.document.get(key, "")) for key in _NAMES_OF_RUNS]
    text = " ".join([*said, Path(keys.source).stem, keys.folder.name if keys.folder else ""])
    named = _RELATIVES.get(found, set()) & set(re.split(r"[^a-z]+", text.lower()))
    return named.pop() if len(named) == 1 else found


_RELATIVES = {"preference": {"dpo", "orpo", "cpo", "kto"}, "grpo": {"grpo", "rloo"}}
_NAMES_OF_RUNS = ("output_dir", "hub_model_id", "run_name", "wandb_project")
_SFT_LOSSES = ("nll", "dft", "chunked_nll")


def predefined_config(name: str) -> str | None:
    """The file of a configuration of accelerate that comes with TRL, where TRL is; None elsewhere.

    A file of that name here comes before it, as TRL's command has it.
    """
    try:
        spec = find_spec("trl") if name.isidentifier() and not Path(name).is_file() else None
    except (ImportError, ValueError):
        spec = None
    places = [] if spec is None else spec.submodule_search_locations or []
    paths = [Path(place) / "accelerate_configs" / f"{name}.yaml" for place in places]
    return next((str(path) for path in paths if path.is_file()), None)


def read_trl(keys: DocumentKeys, *, method: str | None = None, own_loss: bool = True) -> None:
    """Read TRL's arguments.

    Args:
        keys: of the arguments.
        method: of TRL's command line; None for a file or a script, whose keys tell.
        own_loss: SFTTrainer's loss is that of the release; False where another one is in its place,
            or the arguments are of a release that made all logits.

    Raises:
        ConfigError: a value that cannot be.
    """
    trainer = _method_of(keys) if method is None else method

    def note_method(keys: DocumentKeys) -> None:
        quantised = keys.value_of("prepare_kbit") is not None
        if quantised and trainer in PREPARING:
            keys.default("prepare_kbit", True, f"{trainer.upper()}Trainer prepares it")
        elif quantised and keys.value_of("peft") is not None:
            why = "adapters beside a quantised base are made so"
            keys.default("cast_weights", ("trainable=bfloat16",), why)
        if trainer == "sft" and keys.value_of("peft") is not None:
            note_adapters(keys, quantised=quantised, by_trainer=True)
        if trainer in PRICED_METHODS:
            _preference(keys, trainer)
        elif trainer != "sft":
            remark = METHODS.get(trainer, f"what is special of trl {trainer}")
            keys.miss_default(f"trl {trainer}", f"{remark}; priced is supervised fine-tuning")

    if method is None and not any(keys.has(key) for key in ADAPTER_SWITCHES):
        # a script's own arguments: a rank is a word for LoRA; TRL's command needs the switch
        for key in ("lora_r", "lora_rank"):
            if keys.has(key):
                keys.replace("use_peft", True)
    # another trainer's loss_type names no loss of SFTTrainer's
    has_loss = trainer == "sft" and own_loss
    own_length = trainer in _GENERATING
    table = _TABLE
    if trainer == Method.ONLINE_DPO:
        as_saved = "auto", "the trainer's from_pretrained names none"
        table = replace(_TABLE, defaults={**_TABLE.defaults, "dtype": as_saved})
    readers = tuple(
        read
        for read in _TABLE.readers
        if (has_loss or read is not _loss) and not (own_length and read is _length)
    )
    read_table(keys, replace(table, readers=(*readers, note_method)))
    note_length(keys)


def note_adapters(keys: DocumentKeys, *, quantised: bool, by_trainer: bool) -> None:
    """What ``SFTTrainer.__init__`` of TRL 1.16 does with adapters under ZeRO-3.

    Of methods a setup knows it by itself (``TrainingRun.adapts_by_trl``).

    Args:
        keys: of the arguments.
        quantised: the base is.
        by_trainer: the trainer puts adapters beside it, not a call of ``get_peft_model``.
    """
    keys.force_under_stage_3("use_reentrant", True, "beside adapters, whatever is said")
    if by_trainer and not quantised:
        why = "adapters have the dtype of the base"
        keys.force_under_stage_3("autocast_adapter_dtype", False, why)


def _precision(keys: DocumentKeys) -> None:
    """``bf16`` is on unless ``fp16`` is, or it is switched off."""
    bf16, fp16 = keys.switch("bf16"), keys.switch("fp16")
    if fp16 and not bf16:
        keys.set("precision", "fp16", "fp16")
    elif bf16:
        keys.set("precision", "bf16", "bf16")
    elif bf16 is False:
        keys.set_at("precision", "fp32", KeyOrigin(keys.where("bf16"), Level.DEFAULT))
    else:
        # in force like a word of the file: it overrides what accelerate says
        keys.set_at("precision", "bf16", KeyOrigin(f"default of {keys.framework}", Level.FILE))


def _length(keys: DocumentKeys) -> None:
    if "max_length" in keys.document and keys.document["max_length"] is None:
        keys.take("max_length")
        keys.ignore("max_length", "samples are not cut")
    elif not any(keys.has(key) for key in ("max_length", "max_seq_length")):
        keys.default("seq_len", 1024)


def _loss(keys: DocumentKeys) -> None:
    """The loss of the release of TRL that is installed, else of the present one.

    From 1.15 on, ``nll``, ``dft`` and ``chunked_nll`` all go through a fused head; before,
    ``chunked_nll`` was a loss of its own, which 1.6 made the default.
    """
    loss = keys.scalar("loss_type")
    if str(keys.document.get("use_liger_kernel", "")).lower() in ("true", "1", "yes"):
        if loss is not None:
            keys.ignore("loss_type", "Liger's loss is priced in its place")
        keys.miss_default(
            "SFTTrainer", Bounded("TRL 1.15 and later keep their own fused head beside Liger")
        )
        return
    version = _release()
    if version >= (1, 15):
        fused_loss, releases = "trl-fused", "1.15 and later"
    elif loss == "chunked_nll" or (loss is None and version >= (1, 6)):
        fused_loss, releases = "trl-chunked", "1.4 to 1.14"
    elif loss == "dft":
        keys.miss("loss_type", Bounded("the loss dft: priced as nll, with all logits"))
        return
    else:
        if loss is not None:
            keys.ignore("loss_type", f"{loss} of TRL {release('trl')} makes all logits")
        return
    if loss is None:
        # in force like a word of the file: what excludes it is told
        origin = f"default of {keys.framework} (SFTTrainer of TRL {releases})"
        keys.set_at("fused_loss", fused_loss, KeyOrigin(origin, Level.FILE))
    else:
        keys.set("fused_loss", fused_loss, "loss_type")
        if loss == "dft":
            keys.miss("loss_type", Bounded("the weights of dft, one number a token: priced as nll"))


def _preference(keys: DocumentKeys, trainer: str) -> None:
    """A trainer of preferences, as the release of TRL has it."""
    loss = keys.document.get("loss_type")
    losses = loss if isinstance(loss, list) else [loss]
    for name in losses if trainer in _LOSSES else ():
        if name is not None and name not in _LOSSES[trainer]:
            raise not_legal(f"{keys.where('loss_type')} {name!r}", name, _LOSSES[trainer])
    method = "ipo" if trainer == "dpo" and losses == ["ipo"] else trainer
    origin = KeyOrigin(f"default of {keys.framework} ({trainer})", Level.FILE)
    keys.set_at("method", method, origin)
    if trainer == Method.KTO and losses == ["apo_zero_unpaired"]:
        why = "it estimates no divergence from other answers, which is priced"
        keys.miss("loss_type", Saving(f"apo_zero_unpaired: {why}"))
    for name in ("precompute_ref_log_probs", "sync_ref_model"):
        if keys.set_from(name, Key(name, "enabled")) is None and name in keys.document:
            keys.ignore(name, "off")
    if keys.on("use_liger_loss"):  # before TRL called it use_liger_kernel
        keys.miss("use_liger_loss", Either(WITHOUT_LIGER))
    if trainer in _GENERATING:
        read_completions(keys, writes_pairs=trainer == Method.ONLINE_DPO)
    version = _release()
    if version >= (1, 15) or trainer == "reward":
        return
    first = (1, 9) if trainer == "kto" else (1, 6)
    if trainer in _GENERATING or not first <= version < (1, 14):
        keys.miss_default(
            f"trl {trainer}",
            Either(f"TRL {'.'.join(map(str, version))} has losses of its own; priced is TRL 1.16"),
        )
        return
    keys.set_at("log_probs", "logits", origin)


_LOSSES = {
    "dpo": """sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired
        apo_zero apo_down discopop sft sigmoid_norm aot_pair kto_pair""".split(),
    "kto": "kto apo_zero_unpaired bco".split(),
    "grpo": "grpo bnpo dr_grpo dapo luspo cispo sapo vespo".split(),
}
"""What ``loss_type`` may be by TRL 1.16, those that earlier releases had behind them."""


def read_completions(keys: DocumentKeys, *, writes_pairs: bool) -> None:
    """What ``GRPOConfig`` and the like say of completions, and of who writes them.

    Args:
        keys: of the arguments.
        writes_pairs: the method is online DPO.
    """
    (_lengths_of_pairs if writes_pairs else _lengths)(keys)
    rewards = keys.document.get("reward_funcs")
    for name in rewards if isinstance(rewards, list) else [rewards]:
        if isinstance(name, str) and "/" in name:
            keys.miss("reward_funcs", f"the reward model {name} on the same GPU")
    if keys.has("reward_model_name_or_path"):
        keys.miss("reward_model_name_or_path", "a reward model on the same GPU")
        keys.take("reward_model_name_or_path")
    if keys.on("cast_lm_head_to_fp32"):
        why = "the head, embeddings tied to it and what the head computes are float32"
        keys.miss("cast_lm_head_to_fp32", Either(why))
    shares = False
    if keys.on("use_vllm"):
        shares = str(keys.scalar("vllm_mode") or "colocate").lower() == "colocate"
        keys.set("engine", "vllm" if shares else "server", "use_vllm")
    elif keys.document.get("ds3_gather_for_generation") is False:
        why = "ZeRO-3 gathers module by module for every token then; all at once is priced"
        keys.miss("ds3_gather_for_generation", Saving(why))
    if not writes_pairs:
        keys.set_from("beta", Key("kl_beta", "scalar"))
        for name in ("num_generations", "steps_per_generation"):
            keys.set_from(name, Key(name, "whole"))
        _generation_batch(keys)
    if not shares:
        keys.pass_over(_OF_ENGINES, "no engine shares the GPU")
        return
    named_share = keys.set_from("vllm_gpu_memory_utilization", Key("engine_share", "scalar"))
    if writes_pairs and named_share is None:
        keys.default("engine_share", _SHARE_OF_PAIRS)
    keys.set_from("vllm_enable_sleep_mode", Key("engine_sleeps", "enabled"))
    keys.set_from("vllm_tensor_parallel_size", Key("engine_gpus", "whole"))


def _lengths_of_pairs(keys: DocumentKeys) -> None:
    """Of ``OnlineDPOConfig``: what is scored is cut, prompt first."""
    if keys.set_from("max_new_tokens", Key("completion_len", "whole")) is None:
        keys.default("completion_len", _NEW_TOKENS)
    if keys.set_from("max_length", Key("seq_len", "whole")) is None:
        keys.default("seq_len", _LENGTH_OF_PAIRS)
    keys.pass_over(("beta",), "a weight of the loss, which always asks a reference")
    if keys.on("disable_dropout"):
        keys.ignore("disable_dropout", "as OnlineDPOTrainer has it")


def _lengths(keys: DocumentKeys) -> None:
    """Of ``GRPOConfig`` and ``RLOOConfig``: prompts are not cut."""
    named_length = keys.set_from("max_completion_length", Key("completion_len", "whole"))
    length = named_length or _COMPLETION_LENGTH
    if "max_completion_length" in keys.document and named_length is None:
        why = f"completions are not cut: {length} tokens are taken; --completion-len says it"
        keys.miss("max_completion_length", why)
    if named_length is None:
        keys.default("completion_len", length)
    prompt = keys.whole("max_prompt_length")
    if prompt is None:
        why = (
            f"completions of {length} tokens behind prompts of {_PROMPT_LENGTH}, which are not cut"
        )
        keys.default("seq_len", length + _PROMPT_LENGTH, why)
    else:
        keys.set("seq_len", length + prompt, "max_prompt_length")


def _generation_batch(keys: DocumentKeys) -> None:
    """``generation_batch_size``: completions of all processes, in micro-batches of each of them."""
    completions = keys.whole("generation_batch_size")
    if completions is None:
        return
    if keys.value_of("steps_per_generation") is not None:
        raise ConfigError(
            f"{keys.where('generation_batch_size')} {completions} and steps_per_generation say the "
            "same in two ways, and TRL stops: leave one of them out."
        )
    # other keys of theirs are read behind this one
    batch = _number_of(keys, "per_device_train_batch_size") or keys.value_of("batch")
    named_gpus = keys.value_of("num_gpus") or _number_of(keys, "num_gpus")
    together = int(batch or 1) * int(named_gpus or 1)
    if completions % together:
        raise ConfigError(
            f"{keys.where('generation_batch_size')} {completions} is no multiple of the {together} "
            f"completions of a micro-batch on all GPUs, and TRL stops: write {together} or a "
            "multiple of it."
        )
    keys.set(
        "steps_per_generation", max(1, completions // max(1, together)), "generation_batch_size"
    )
    if named_gpus is None and keys.value_of("engine") is None:
        why = "of all processes, taken for those of one: --steps-per-generation says it"
        keys.miss("generation_batch_size", Bounded(why))


def _number_of(keys: DocumentKeys, key: str) -> int | None:
    """What a key says, which stays to be read; None where it is no number above 0."""
    text = str(keys.document.get(key, ""))
    return (int(text) or None) if text.isdecimal() and len(text) < 10 else None


_OF_ENGINES = tuple(
    """vllm_mode vllm_gpu_memory_utilization vllm_enable_sleep_mode
    vllm_tensor_parallel_size""".split()
)
_GENERATING = tuple(method.value for method in Method if method.generates)
_COMPLETION_LENGTH = 512
_PROMPT_LENGTH = 512
"""``max_prompt_length`` while there was one."""
_NEW_TOKENS, _LENGTH_OF_PAIRS, _SHARE_OF_PAIRS = 64, 512, 0.55
"""Defaults of ``OnlineDPOConfig``: ``max_new_tokens``, ``max_length`` and vLLM's share."""


def _release() -> tuple[int, ...]:
    """The release of TRL that is installed, else the present one."""
    installed_release = release("trl") or ""
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed_release)[:2])
    return numbers or _PRESENT_RELEASE


_BASES = {
    "load_in_4bit": Key("load_in_4bit", "enabled"),
    "load_in_8bit": Key("load_in_8bit", "enabled"),
    "use_bnb_nested_quant": Key("bnb_4bit_use_double_quant", "enabled"),
    "bnb_4bit_quant_type": Key("bnb_4bit_quant_type", "scalar", "nf4"),
    "bnb_4bit_quant_storage": Key("bnb_4bit_quant_storage", "scalar"),
}


def _adapters(keys: DocumentKeys) -> None:
    four, eight = (keys.set_from(key, _BASES[key]) for key in ("load_in_4bit", "load_in_8bit"))
    for key, row in _BASES.items():
        if four:
            keys.set_from(key, row)
        else:
            getattr(keys, row.read)(key)
            if not eight and key in keys.document:
                keys.ignore(key, "no quantised base")
    if four:
        dtype = keys.value_of("dtype")
        keys.default("bnb_4bit_compute_dtype", dtype, "get_quantization_config takes dtype")
    if four or eight or is_named_quantised(str(keys.value_of("model"))):
        keys.default("prepare_kbit", False, "SFTTrainer does not prepare it")
    switches = [key for key in ADAPTER_SWITCHES if keys.on(key)]
    on = bool(switches)
    if on:
        keys.set("peft", "lora", switches[0])
        for option, value in (("lora_r", 16), ("lora_alpha", 32), ("lora_dropout", 0.05)):
            keys.default(option, value)
    read_adapters(keys, on=on)


_OF_METHODS = by_key(
    {
        "a setting of the method that is named": """num_generations reward_funcs
            reward_weights vllm_mode desirable_weight undesirable_weight
            center_rewards_coefficient loss_type
            precompute_ref_log_probs rpo_alpha max_prompt_length
            max_completion_length temperature top_p top_k min_p repetition_penalty num_iterations
            epsilon epsilon_high scale_rewards vllm_gpu_memory_utilization vllm_server_host
            vllm_server_port vllm_server_base_url mask_truncated_completions reference_free
            ref_model_mixup_alpha ref_model_sync_steps missing_eos_penalty
            ds3_gather_for_generation""",
        "data is prepared on the host": """dataset_splits dataset_prompt_column system_prompt
            dataset_configs dataset_mixture auto_insert_empty_system_msg cosine_max_len
            benchmarks callbacks overwrite_hub_revision wandb_run_group""",
    }
)
"""Keys of trainers of preferences and rewards, and of recipes; the trainer itself is named."""
_TABLE = KeyTable(
    defaults={
        **TRAINER,
        "dtype": ("float32", "models are loaded so unless dtype is named"),
        "checkpointing": "full",
    },
    options={**MODELS, **SIZES},
    readers=(
        read_loading,
        read_liger,
        _precision,
        read_checkpointing,
        read_evaluation,
        _length,
        _loss,
        _adapters,
        read_script_spellings,
        read_sharding,
        read_packing,
    ),
    own_names=True,
    ignored_keys={**IGNORED_KEYS, **_OF_METHODS},
    unmodelled_keys=UNMODELLED_KEYS,
)
