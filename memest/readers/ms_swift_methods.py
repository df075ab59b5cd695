"""Methods of ``swift rlhf``: what they are priced as, and what leaves the verdict open.

Source: ms-swift 4.6.0: ``arguments/rlhf_args.py``, ``rlhf_trainers/args_mixin.py`` (fields and
defaults), ``rlhf_trainers/*_trainer.py`` (what a method computes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memest.readers.mapping import DocumentKeys
from memest.readers.ms_swift_keys import OF_METHODS, TRAINERS
from memest.readers.training_arguments import METHODS
from memest.readers.trl import read_completions
from memest.readers.values import Either, KeyOrigin, Level, Saving

__all__ = ["read_preference"]


def read_preference(keys: DocumentKeys, kind: str) -> None:
    """Read what ``swift rlhf`` trains for, by losses of its own that make all logits.

    Args:
        keys: of the arguments.
        kind: ``rlhf_type``.

    Raises:
        ConfigError: a value that cannot be.
    """
    method, circumstance = _method_of(keys, kind), ""
    if method is None:
        remark = METHODS.get(TRAINERS.get(kind, kind), f"what is special of {kind}")
    elif named := [key for key, means in _OTHERWISE.items() if means(keys.document.get(key))]:
        remark, circumstance = METHODS[TRAINERS.get(kind, kind)], f" with {named[0]}"
        method = None
    is_named = keys.has("rlhf_type")
    if method is None:
        note = keys.miss if is_named else keys.miss_default
        note("rlhf_type", f"{kind}{circumstance}: {remark}; priced is supervised fine-tuning")
        why = f"of {kind}, which is not priced"
    else:
        default = KeyOrigin(f"default of {keys.framework} (rlhf_type)", Level.FILE)
        origin = keys.origin("rlhf_type") if is_named else default
        keys.set_at("method", method, origin)
        keys.set_at("log_probs", "ms-swift", origin)
        if method == "grpo":
            _completions(keys)
        if method == "kto" and keys.document.get("loss_type") in _WITHOUT_KL:
            why = "it estimates no divergence from other answers, which is priced"
            keys.miss("loss_type", Saving(f"apo_zero_unpaired: {why}"))
        why = f"a setting of {kind} that changes no size"
    keys.pass_over([key for key in keys.remaining if OF_METHODS.match(key)], why)


def _method_of(keys: DocumentKeys, kind: str) -> str | None:
    """The method that is priced; None for others.

    CPO and SimPO compute the loss of the chosen answers unless ``cpo_alpha``, 1 by default, is 0.
    """
    if kind in ("cpo", "simpo"):
        return "simpo" if str(keys.document.get("cpo_alpha")) in ("0", "0.0") else "cpo"
    loss = keys.document.get("loss_type")
    if kind == "dpo" and loss in ("ipo", ["ipo"]):
        return "ipo"
    return {"dpo": "dpo", "kto": "kto", "orpo": "orpo", "rm": "reward", "grpo": "grpo"}.get(kind)


def _completions(keys: DocumentKeys) -> None:
    """Of ``swift rlhf --rlhf_type grpo``: ``max_length`` cuts prompts alone."""
    older = [name for name in ("response_length", "max_new_tokens") if keys.document.get(name)]
    if older and keys.has(_COMPLETION):
        keys.replace(_COMPLETION, keys.take(older[0]))
    keys.rename({"max_length": "max_prompt_length", **dict.fromkeys(older, _COMPLETION)})
    read_completions(keys, writes_pairs=False)
    keys.default("kl_beta", 0.04)
    engine = keys.value_of("engine")
    if engine == "vllm":
        keys.default("engine_share", 0.9)
        level = keys.whole("sleep_level")
        if level:
            keys.set("engine_sleeps", True, "sleep_level")
        elif level is not None:
            keys.ignore("sleep_level", "0: it stays awake")
    elif engine is None:
        why = "ms-swift's own engine writes completions; priced is generate of transformers"
        keys.miss_default("TransformersEngine", Either(why))
    for name in ("offload_model", "offload_optimizer"):
        if keys.on(name):
            why = "on the host while completions are written, which is not priced"
            keys.miss(name, Saving(why))
    rewards = keys.take("reward_model")
    if rewards:
        keys.miss("reward_model", f"the reward model {rewards} on the same GPU")


_WITHOUT_KL = ("apo_zero_unpaired", ["apo_zero_unpaired"])
_COMPLETION = "max_completion_length"


def _is_switched_on(value: Any) -> bool:
    return str(value).lower() not in ("none", "", "false", "0")


_OTHERWISE: dict[str, Callable[[Any], bool]] = {
    "packing": _is_switched_on,
    "padding_free": _is_switched_on,
    "sequence_parallel_size": lambda value: str(value) not in ("None", "1"),
    "ref_model": _is_switched_on,
    "ref_adapters": _is_switched_on,
    # DPOTrainer stops at it
    "precompute_ref_log_probs": _is_switched_on,
    # of GRPO: entropies of all words, and other models and batches beside the one that trains
    "log_entropy": _is_switched_on,
    "top_entropy_quantile": lambda value: str(value) not in ("None", "1", "1.0"),
    "multi_turn_scheduler": _is_switched_on,
    "chord_sft_dataset": _is_switched_on,
    "teacher_model": _is_switched_on,
}
"""What makes another step of a method, or needs another reference."""
