"""verl: ``python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=... data....``.

What is read is the actor of one GPU: weights in float32, sharded by FSDP, which computes in
bfloat16; the micro-batches of its update; the critic of PPO, which trains in turn with it
(:mod:`memest.readers.verl_critic`); and the engine that writes answers on the same GPU. The
reference lies on the host whatever is said (``forward_only`` has FSDP offload it).

Source: verl 0.9.1 ``trainer/config/ppo_trainer.yaml`` with its parts (names and defaults),
``trainer/ppo/v1/trainer_base.py``,
``workers/engine_workers.py``, ``workers/engine/fsdp/transformer_impl.py``,
``utils/seqlen_balancing.py`` (``rearrange_micro_batches``), ``workers/config/actor.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memest.errors import ConfigError
from memest.readers.mapping import DocumentKeys, Key
from memest.readers.values import CHANGES, Bounded, Either, KeyOrigin, Level, Saving
from memest.readers.verl_critic import has_critic, read_critic
from memest.readers.verl_keys import (
    ACTOR,
    DTYPES,
    FSDP,
    MODEL,
    OPTIM,
    OPTIMIZERS,
    ROLLOUT,
    UNMODELLED,
    why_ignored,
)

__all__ = ["read_verl"]

_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(?P<name>[\w.]+)(?:,[^}]*)?\}")


def read_verl(keys: DocumentKeys, *, config: str = "") -> None:
    """Read the configuration of ``verl.trainer.main_ppo``.

    Args:
        keys: its sections, with what the command line changes.
        config: the name of hydra's configuration; "" for the usual one.

    Raises:
        ConfigError: what is not priced, by name; a value at which verl stops.
    """
    document, untold = _followed(_flat(keys.document))
    flat = replace(keys, document=document, samples_per_step=None)
    _refuse_others(flat, config)
    flat.set_from(f"{MODEL}path", Key("model", "text"))
    _method(flat)
    num_gpus = _gpus(flat)
    _sharding(flat, num_gpus)
    _sizes(flat, num_gpus)
    _engine(flat, num_gpus)
    _model(flat)
    _optimizer(flat)
    for key, why in UNMODELLED.items():
        if flat.take(key) not in (None, False, 0, "", "null"):
            flat.miss(key, why)
    for key in flat.remaining:
        if why := why_ignored(key):
            flat.pass_over((key,), why)
    for key, value in untold.items():
        if not why_ignored(key):
            flat.miss(key, Either(f"{value} is not followed; verl's default is taken"))
    flat.ignore_rest({}, {})
    keys.absorb(flat)


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys with all their sections."""
    out: dict[str, Any] = {}
    for key, value in document.items():
        name = f"{prefix}{key}"
        out |= _flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return out


def _followed(document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The same with the values that references lead to, and what cannot be told.

    ``${oc.select:data.max_prompt_length,512}``, of a key that is not here, is verl's own way to
    write a default, which is left to it.
    """
    out: dict[str, Any] = {}
    untold: dict[str, str] = {}
    for key, value in document.items():
        found, seen = value, {key}
        while isinstance(found, str) and (match := _REFERENCE.fullmatch(found)):
            name = match["name"]
            if name not in document or name in seen:
                break
            seen.add(name)
            found = document[name]
        if not (isinstance(found, str) and "${" in found):
            out[key] = found
        elif not found.startswith("${oc.select:"):
            untold[key] = value
    return out, untold


def _refuse_others(keys: DocumentKeys, config: str) -> None:
    """What verl trains beside or in place of an actor under FSDP.

    Raises:
        ConfigError: it is asked for.
    """
    priced = "priced is an actor under fsdp or fsdp2"
    engine = keys.text("model_engine") or ""
    if "megatron" in f"{config} {engine}":
        raise ConfigError(
            f"verl with Megatron-Core ({config or engine}) is not priced: {priced}. Write "
            "actor_rollout_ref.actor.strategy=fsdp2 in place of it."
        )
    estimator = keys.text("algorithm.adv_estimator") or "gae"
    strategy = keys.text(f"{ACTOR}strategy") or "fsdp"
    if strategy not in ("fsdp", "fsdp2"):
        raise ConfigError(
            f"{keys.where(f'{ACTOR}strategy')} {strategy} is not priced: {priced}. Write "
            f"{ACTOR}strategy=fsdp2."
        )
    for part in (ACTOR, FSDP):
        key = f"{part}ulysses_sequence_parallel_size"
        size = keys.whole(key) or 1
        if size > 1:
            raise ConfigError(
                f"{keys.where(key)} {size}: verl's Ulysses is not priced. Write {key}=1."
            )
    keys.set_at("fsdp_version", 2 if strategy == "fsdp2" else 1, _told(keys, f"{ACTOR}strategy"))
    # estimates differ in numbers alone; what RLOO takes is told as what it is
    keys.set_at(
        "method",
        "rloo" if estimator.lower().startswith("rloo") else "grpo",
        _told(keys, "algorithm.adv_estimator"),
    )


def _told(keys: DocumentKeys, key: str) -> KeyOrigin:
    """Where a key stands; a default of verl's that is in force like a word of the file."""
    if keys.has(key):
        return keys.origin(key)
    return KeyOrigin(f"default of {keys.framework} ({key})", Level.FILE)


def _method(keys: DocumentKeys) -> None:
    """The step, and the reference of its divergence."""
    origin = KeyOrigin(f"default of {keys.framework}", Level.FILE)
    for option, value in (("log_probs", "verl"), ("loop", "plain")):
        keys.set_at(option, value, origin)
    beta = keys.scalar(f"{ACTOR}kl_loss_coef")
    if keys.switch(f"{ACTOR}use_kl_loss"):
        keys.set_at("kl_beta", 0.001 if beta is None else beta, _told(keys, f"{ACTOR}use_kl_loss"))
    else:
        keys.set_at("kl_beta", 0.0, _told(keys, f"{ACTOR}use_kl_loss"))
    if keys.on("algorithm.use_kl_in_reward"):
        keys.ignore("algorithm.use_kl_in_reward", "its reference lies on the host, and takes less")
    coefficient = keys.scalar(f"{ACTOR}entropy_coeff")
    if str(coefficient) not in ("None", "0", "0.0"):
        why = "the entropy's softmax of all logits, and its gradients beside those of the answers"
        keys.miss(f"{ACTOR}entropy_coeff", why)
    for key in ("entropy_checkpointing", "entropy_from_logits_with_chunking"):
        keys.pass_over((f"{ACTOR}{key}", f"{FSDP}{key}"), "how an entropy is computed")
    temperature = keys.scalar(f"{ROLLOUT}temperature")
    if str(temperature) not in ("None", "1", "1.0"):
        keys.miss(f"{ROLLOUT}temperature", "logits are divided by it: all of them once more")


def _gpus(keys: DocumentKeys) -> int:
    per_node = keys.whole("trainer.n_gpus_per_node") or 8
    nodes = keys.whole("trainer.nnodes") or 1
    named = "trainer.n_gpus_per_node" if keys.has("trainer.n_gpus_per_node") else "trainer.nnodes"
    keys.set_at("num_gpus", per_node * nodes, _told(keys, named))
    if nodes > 1:
        keys.set_at("processes_per_node", per_node, _told(keys, "trainer.nnodes"))
    return per_node * nodes


def _sharding(keys: DocumentKeys, num_gpus: int) -> None:
    """Of ``fsdp_config``: what shards, in which dtypes.

    Raises:
        ConfigError: a dtype that is not priced.
    """
    reshards = keys.switch(f"{FSDP}reshard_after_forward")
    mode = "shard_grad_op" if reshards is False else "full_shard"
    keys.set_at("fsdp", mode, _told(keys, f"{FSDP}reshard_after_forward"))
    size = keys.whole(f"{FSDP}fsdp_size")
    if size is not None and 1 < size < num_gpus:
        keys.set("fsdp_shard_size", size, f"{FSDP}fsdp_size")
    elif size == 1 and num_gpus > 1:
        raise ConfigError(
            f"{keys.where(f'{FSDP}fsdp_size')} 1: an actor whole on every GPU is not priced. "
            f"Write {FSDP}fsdp_size=-1, which all GPUs share."
        )
    if keys.on(f"{FSDP}offload_policy"):
        keys.set("fsdp_offload", True, f"{FSDP}offload_policy")
    layers = keys.take(f"{FSDP}wrap_policy.transformer_layer_cls_to_wrap")
    if layers:
        keys.set("fsdp_wrap", layers, f"{FSDP}wrap_policy.transformer_layer_cls_to_wrap")
    if (keys.whole(f"{FSDP}wrap_policy.min_num_params") or 0) > 0:
        why = "units by their size; layers are priced"
        keys.miss(f"{FSDP}wrap_policy.min_num_params", Either(why))
    dtype = _dtype(keys, f"{FSDP}model_dtype", "float32")
    keys.set_at("dtype", dtype, _told(keys, f"{FSDP}model_dtype"))
    mixed = f"{FSDP}mixed_precision."
    computes = _dtype(keys, f"{mixed}param_dtype", "bfloat16")
    if computes == "float16":
        raise ConfigError(
            f"{keys.where(f'{mixed}param_dtype')} float16 is not priced under verl's FSDP: write "
            f"{mixed}param_dtype=bf16."
        )
    halves = computes == "bfloat16"
    keys.set_at("precision", "bf16" if halves else "fp32", _told(keys, f"{mixed}param_dtype"))
    if halves:
        keys.set_at("fsdp_mixed_precision", True, _told(keys, f"{mixed}param_dtype"))
    if _dtype(keys, f"{mixed}reduce_dtype", "float32") != "float32":
        keys.miss(f"{mixed}reduce_dtype", Saving("gradients are reduced in half precision"))
    keys.pass_over((f"{mixed}buffer_dtype",), "of some KiB")
    use_orig_params = keys.switch(f"{FSDP}use_orig_params")
    if use_orig_params:
        keys.set("fsdp_use_orig_params", True, f"{FSDP}use_orig_params")
    keys.pass_over(
        (f"{FSDP}seed", f"{FSDP}strategy", f"{FSDP}forward_only", f"{FSDP}dtype"), "as it is"
    )


def _dtype(keys: DocumentKeys, key: str, default: str) -> str:
    text = keys.text(key)
    if text in (None, "null", "None"):
        return default
    found = DTYPES.get(str(text).lower().removeprefix("torch."))
    if found is None:
        raise ConfigError(f"{keys.where(key)} {text!r} is no dtype: write fp32 or bf16.")
    return found


def _sizes(keys: DocumentKeys, num_gpus: int) -> None:
    """Lengths, and how the answers of an optimizer step are dealt out.

    Raises:
        ConfigError: sizes at which verl stops.
    """
    answer = keys.whole("data.max_response_length") or 512
    prompt = keys.whole("data.max_prompt_length") or 512
    length = prompt + answer
    keys.set_at("completion_len", answer, _told(keys, "data.max_response_length"))
    keys.set_at("seq_len", length, _told(keys, "data.max_prompt_length"))
    number = keys.whole(f"{ROLLOUT}n") or 1
    if number > 1:
        keys.set("num_generations", number, f"{ROLLOUT}n")
    mini = keys.whole(f"{ACTOR}ppo_mini_batch_size") or 256
    samples = mini * number // num_gpus
    if not samples or mini * number % num_gpus:
        raise ConfigError(
            f"{keys.where(f'{ACTOR}ppo_mini_batch_size')} {mini} prompts of {number} answers do "
            f"not divide among {num_gpus} GPUs, where verl stops: write a multiple."
        )
    if keys.switch(f"{ACTOR}use_dynamic_bsz"):
        _dynamic(keys, samples, length)
    else:
        _static(keys, samples, num_gpus)
    if has_critic(keys):
        mini = keys.whole("critic.ppo_mini_batch_size") or mini
        read_critic(keys, samples=max(1, mini * number // num_gpus), length=length)


def _dynamic(keys: DocumentKeys, samples: int, length: int) -> None:
    """``rearrange_micro_batches``: no more tokens in a micro-batch than are allowed, evened out."""
    key = f"{ACTOR}ppo_max_token_len_per_gpu"
    most = keys.whole(key) or 16384
    if length > most:
        raise ConfigError(
            f"{keys.where(key)} {most} is less than the {length} tokens of the longest prompt and "
            f"answer, where verl stops: write {key}={length} or more."
        )
    batch = min(samples, -(-most // length))
    keys.set_at("batch", batch, _told(keys, key))
    keys.set_at(
        "grad_accum", -(-samples // (most // length)), _told(keys, f"{ACTOR}ppo_mini_batch_size")
    )
    tokens = batch * length
    kind = Saving if tokens > 1.05 * most else Bounded
    why = f"{most:,} tokens at most, of any lengths; priced are {batch} of the longest, {tokens:,}"
    (keys.miss if keys.has(key) else keys.miss_default)(key, kind(why))
    key = f"{ROLLOUT}log_prob_max_token_len_per_gpu"
    scored = keys.whole(key)
    if scored is not None:
        keys.set("scored_at_once", min(samples, -(-scored // length)), key)
    keys.pass_over(_MICRO_BATCHES, "micro-batches are filled by tokens")


def _static(keys: DocumentKeys, samples: int, num_gpus: int) -> None:
    """Micro-batches of as many samples as was asked for."""
    key = f"{ACTOR}ppo_micro_batch_size_per_gpu"
    batch = keys.whole(key)
    whole = keys.whole(f"{ACTOR}ppo_micro_batch_size")
    if batch is None and whole is not None:
        key, batch = f"{ACTOR}ppo_micro_batch_size", max(1, whole // num_gpus)
    if batch is None:
        raise ConfigError(
            f"{keys.source}: no {key}, without which verl stops: write it, or "
            f"{ACTOR}use_dynamic_bsz=True."
        )
    if batch < 1 or samples % batch:
        near = math.gcd(samples, max(batch, 1))
        raise ConfigError(
            f"{keys.where(key)} {batch} does not divide the {samples} answers of a step on each "
            f"GPU, where verl stops: write {key}={near}."
        )
    keys.set("batch", batch, key)
    keys.set_at("grad_accum", samples // batch, _told(keys, f"{ACTOR}ppo_mini_batch_size"))
    keys.set_from(f"{ROLLOUT}log_prob_micro_batch_size_per_gpu", Key("scored_at_once", "whole"))


_MICRO_BATCHES = tuple(
    f"{part}{name}"
    for part, name in (
        (ACTOR, "ppo_micro_batch_size_per_gpu"),
        (ACTOR, "ppo_micro_batch_size"),
        (ROLLOUT, "log_prob_micro_batch_size_per_gpu"),
    )
)


def _engine(keys: DocumentKeys, num_gpus: int) -> None:
    """Who writes answers on the same GPU.

    Raises:
        ConfigError: an engine that is not priced.
    """
    name = keys.text(f"{ROLLOUT}name")
    if name not in (None, "vllm", "sglang"):
        raise ConfigError(
            f"{keys.where(f'{ROLLOUT}name')} {name} is not priced: vllm and sglang are."
        )
    keys.set_at("engine", "vllm", _told(keys, f"{ROLLOUT}name"))
    if name == "sglang":
        why = (
            "SGLang's share (mem_fraction_static) has its weights and cache alone: what it "
            "computes with comes on top"
        )
        keys.miss(f"{ROLLOUT}name", why)
    share = keys.scalar(f"{ROLLOUT}gpu_memory_utilization")
    origin = _told(keys, f"{ROLLOUT}gpu_memory_utilization")
    keys.set_at("engine_share", 0.5 if share is None else share, origin)
    if keys.switch(f"{ROLLOUT}free_cache_engine") is not False:
        keys.set_at("engine_sleeps", True, _told(keys, f"{ROLLOUT}free_cache_engine"))
    # between steps alone: the update has both back on the GPU
    moved = [name for name in ("param", "optimizer") if keys.switch(f"{FSDP}{name}_offload")]
    if moved:
        words = "both" if len(moved) == 2 else "model" if moved == ["param"] else "optimizer"
        keys.set("engine_moves", words, f"{FSDP}{moved[0]}_offload")
    _engine_gpus(keys, num_gpus)
    # set_expandable_segments(True) behind every hand-over of weights
    keys.set_at(
        "alloc_conf",
        "expandable_segments:True",
        KeyOrigin(f"default of {keys.framework} (update_weights)", Level.FILE),
    )


def _engine_gpus(keys: DocumentKeys, num_gpus: int) -> None:
    """How many GPUs one engine has, all of which must be of the run.

    Raises:
        ConfigError: the GPUs do not divide among engines.
    """
    key = f"{ROLLOUT}tensor_model_parallel_size"
    tensor = keys.whole(key) or 2
    stages = keys.whole(f"{ROLLOUT}pipeline_model_parallel_size") or 1
    copies = keys.whole(f"{ROLLOUT}data_parallel_size") or 1
    if num_gpus % (tensor * stages * copies):
        where = keys.where(key) if keys.has(key) else f"verl's default of {key}"
        raise ConfigError(
            f"{where} {tensor}: {num_gpus} GPUs do not divide among engines of "
            f"{tensor * stages * copies}, where verl stops. Write {key}=1."
        )
    keys.set_at("engine_gpus", tensor * stages, _told(keys, key))


def _model(keys: DocumentKeys) -> None:
    """Checkpointing, attention, rows without padding, adapters."""
    recomputes = keys.switch(f"{MODEL}enable_gradient_checkpointing")
    origin = _told(keys, f"{MODEL}enable_gradient_checkpointing")
    keys.set_at("checkpointing", "none" if recomputes is False else "full", origin)
    if recomputes is not False:
        keys.set_at("use_reentrant", False, origin)
    attention = f"{MODEL}override_config.attn_implementation"
    kernel = keys.text(attention) or "flash_attention_2"
    keys.set_at("attn_implementation", kernel, _told(keys, attention))
    if keys.switch(f"{MODEL}use_remove_padding") is False:
        why = "padded rows, and all logits once more without the padding"
        keys.miss(f"{MODEL}use_remove_padding", why)
    rank = keys.whole(f"{MODEL}lora_rank") or keys.whole(f"{MODEL}lora.rank") or 0
    if rank < 1:
        names = ("lora_alpha", "target_modules", "exclude_modules", "lora.alpha", "lora.rank")
        keys.pass_over([f"{MODEL}{name}" for name in names], "no adapters are trained")
    else:
        key = f"{MODEL}lora_rank" if keys.has(f"{MODEL}lora_rank") else f"{MODEL}lora.rank"
        keys.set("lora_r", rank, key)
        keys.set_from(f"{MODEL}lora_alpha", Key("lora_alpha", "scalar", default=16))
        modules = Key("lora_target_modules", default="all-linear")
        keys.set_from(f"{MODEL}target_modules", modules)
        if keys.value_of("fsdp_version") == 1:
            why = "FSDP1 beside adapters is not priced; priced is FSDP2"
            origin = _told(keys, f"{ACTOR}strategy")
            keys.set_at("fsdp_version", 2, KeyOrigin(origin.origin, Level.COMMAND))
            note = keys.miss if keys.has(f"{ACTOR}strategy") else keys.miss_default
            note(f"{ACTOR}strategy", Either(why))
    for key in keys.remaining:
        if key.startswith(f"{MODEL}override_config."):
            name = key.removeprefix(f"{MODEL}override_config.").removeprefix("model_config.")
            if "." in name:
                keys.miss(key, Either("an entry of a part of the model's configuration"))
            else:
                keys.set(CHANGES, {name: keys.take(key)}, key)


def _optimizer(keys: DocumentKeys) -> None:
    """``build_optimizer``: a class by its module and name; torch's AdamW unless told otherwise."""
    package = keys.text(f"{OPTIM}optimizer_impl") or "torch.optim"
    name = keys.text(f"{OPTIM}optimizer") or "AdamW"
    found = OPTIMIZERS.get(f"{package}.{name}")
    if found is None:
        keys.miss(
            f"{OPTIM}optimizer", Either(f"{package}.{name} is not priced; torch's AdamW is taken")
        )
    keys.set_at("optim", found or "adamw_torch", _told(keys, f"{OPTIM}optimizer"))
    norm = keys.scalar(f"{OPTIM}clip_grad")
    keys.set_at("max_grad_norm", 1.0 if norm is None else norm, _told(keys, f"{OPTIM}clip_grad"))
    if keys.take(f"{OPTIM}override_optimizer_config"):
        keys.miss(f"{OPTIM}override_optimizer_config", Either("options of the optimizer"))
