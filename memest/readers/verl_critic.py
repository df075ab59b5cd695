"""The critic of verl's PPO: a model of values under the same FSDP as the actor.

Source: verl 0.9.1 ``trainer/config/critic/critic.yaml`` and ``dp_critic.yaml``,
``workers/config/critic.py``, ``workers/config/engine.py`` (``use_dynamic_bsz``),
``trainer/ppo/v1/trainer_base.py`` (``_setup``, which gives the critic's engine
``ppo_infer_max_token_len_per_gpu`` and no other size), ``trainer/ppo/utils.py`` (``need_critic``).
"""

from __future__ import annotations

from memest.errors import ConfigError
from memest.readers.mapping import DocumentKeys
from memest.readers.values import Bounded, Either, KeyOrigin, Level, Saving
from memest.readers.verl_keys import ACTOR, DTYPES, FSDP, MODEL, OPTIM

__all__ = ["has_critic", "read_critic"]

_CRITIC = "critic."
_OWN_MODEL = f"{_CRITIC}model."
_OWN_FSDP = (f"{_CRITIC}fsdp.", f"{_OWN_MODEL}fsdp_config.")
"""Its sharding, as releases name it and as earlier ones did."""
_TOKENS = f"{_CRITIC}ppo_infer_max_token_len_per_gpu"
_USUAL_TOKENS = 32768
_CHANGES = "override_config."
_UNREAD = (
    "ppo_micro_batch_size_per_gpu ppo_micro_batch_size ppo_max_token_len_per_gpu use_dynamic_bsz"
).split()
"""Sizes that the trainer of 0.9.1 gives no engine."""
_ALIKE: tuple[tuple[str, tuple[str, ...], dict[str, str]], ...] = (
    (
        FSDP,
        _OWN_FSDP,
        {
            **dict.fromkeys(("offload_policy", "use_orig_params", "forward_prefetch"), "false"),
            **dict.fromkeys(("model_dtype", "mixed_precision.reduce_dtype"), "float32"),
            "mixed_precision.param_dtype": "bfloat16",
            "reshard_after_forward": "true",
            "fsdp_size": "-1",
            "wrap_policy.transformer_layer_cls_to_wrap": "none",
            "wrap_policy.min_num_params": "0",
        },
    ),
    (
        MODEL,
        (_OWN_MODEL,),
        dict.fromkeys(("enable_gradient_checkpointing", "use_remove_padding"), "true"),
    ),
    (OPTIM, (f"{_CRITIC}optim.",), {"optimizer": "adamw", "optimizer_impl": "torch.optim"}),
)
"""What is priced as the actor has it: sections of both, keys with verl's defaults."""
_SPARES = ("enable_activation_offload", "use_liger", "tiled_mlp.enabled")


def has_critic(keys: DocumentKeys) -> bool:
    """Whether a critic trains: where it is said, else with the estimate of advantages."""
    enabled = keys.switch(f"{_CRITIC}enable")
    estimator = keys.document.get("algorithm.adv_estimator") or "gae"
    return str(estimator).lower() == "gae" if enabled is None else enabled


def read_critic(keys: DocumentKeys, *, samples: int, length: int) -> None:
    """What of a critic lies on the actor's GPU, and what is not priced of it.

    Args:
        keys: of the whole configuration.
        samples: completions of an optimizer step on one GPU.
        length: tokens of the longest prompt and completion.

    Raises:
        ConfigError: a critic that is not priced; sizes at which verl stops.
    """
    actors, own = keys.document.get(f"{ACTOR}strategy"), keys.text(f"{_CRITIC}strategy")
    if (own or "fsdp") != (actors or "fsdp"):
        raise ConfigError(
            f"a critic under {own or 'fsdp'} beside an actor under {actors or 'fsdp'} is not "
            f"priced. Write {_CRITIC}strategy={actors or 'fsdp'}."
        )
    for name in ("lora_rank", "lora.rank"):
        if keys.whole(f"{_OWN_MODEL}{name}"):
            raise ConfigError(
                f"{keys.where(f'{_OWN_MODEL}{name}')}: a critic with adapters is not priced, one "
                f"that trains whole is. Write {_OWN_MODEL}{name}=0."
            )
    for section in (_CRITIC, *_OWN_FSDP):
        key = f"{section}ulysses_sequence_parallel_size"
        if (keys.whole(key) or 1) > 1:
            raise ConfigError(f"{keys.where(key)}: verl's Ulysses is not priced. Write {key}=1.")
    _set_model(keys)
    _set_batch(keys, samples, length)
    for section, own_sections, usual in _ALIKE:
        for name, default in usual.items():
            _compare(keys, f"{section}{name}", [f"{own}{name}" for own in own_sections], default)
    for name in _SPARES:
        if keys.on(f"{_OWN_MODEL}{name}"):
            keys.miss(f"{_OWN_MODEL}{name}", Saving("a critic that takes less"))


def _set_model(keys: DocumentKeys) -> None:
    """Which model, and what of it is on the host between its turns."""
    path, actor = keys.text(f"{_OWN_MODEL}path"), keys.value_of("model")
    if path is None:
        raise ConfigError(
            f"{keys.source}: no {_OWN_MODEL}path, without which verl takes its author's own folder "
            f"of deepseek-llm-7b-chat: write {_OWN_MODEL}path={actor or 'MODEL'}."
        )
    # verl changes the configuration of each by itself
    is_changed = any(key.startswith(f"{MODEL}{_CHANGES}") for key in keys.document)
    alike = path == actor and not is_changed
    keys.set_at("critic", "actor" if alike else path, keys.origin(f"{_OWN_MODEL}path"))
    for key in keys.document:
        if key.startswith(f"{_OWN_MODEL}{_CHANGES}") and not key.endswith(".attn_implementation"):
            keys.miss(key, Either("an entry of the critic's own configuration"))
    moved = {
        name: f"{section}{name}_offload"
        for name in ("param", "optimizer")
        for section in _OWN_FSDP
        if keys.on(f"{section}{name}_offload")
    }
    if moved:
        words = "both" if len(moved) == 2 else "model" if "param" in moved else "optimizer"
        keys.set("critic_moves", words, next(iter(moved.values())))


def _set_batch(keys: DocumentKeys, samples: int, length: int) -> None:
    """``rearrange_micro_batches`` of as many tokens as the trainer gives the critic's engine."""
    most = keys.whole(_TOKENS) or _USUAL_TOKENS
    if length > most:
        raise ConfigError(
            f"{_TOKENS} {most} is less than the {length} tokens of the longest prompt and answer, "
            f"where verl stops: write +{_TOKENS}={length} or more."
        )
    batch = min(samples, -(-most // length))
    origin = KeyOrigin(f"default of {keys.framework} ({_TOKENS})", Level.FILE)
    keys.set_at("critic_batch", batch, keys.origin(_TOKENS) if keys.has(_TOKENS) else origin)
    kind = Saving if batch * length > 1.05 * most else Bounded
    why = (
        f"verl 0.9.1 fills the critic's micro-batches to {most:,} tokens ({_TOKENS}), whatever is "
        f"named; priced are {batch} of the longest, {batch * length:,}"
    )
    named = [f"{_CRITIC}{name}" for name in _UNREAD if keys.has(f"{_CRITIC}{name}")]
    if named:
        keys.miss(named[0], kind(why))
    else:
        (keys.miss if keys.has(_TOKENS) else keys.miss_default)(_TOKENS, kind(why))


def _compare(keys: DocumentKeys, actors: str, own: list[str], default: str) -> None:
    """Name a key in which the critic is not as the actor."""
    own_key = next((key for key in own if keys.has(key)), own[0])
    words = []
    for key in (actors, own_key):
        word = str(keys.document[key] if keys.has(key) else default).lower()
        words.append(DTYPES.get(word, word))
    if words[0] != words[1]:
        why = Either(f"the critic has {words[1]} there, and is priced as the actor, {words[0]}")
        if keys.has(own_key):
            keys.miss(own_key, why)
        else:
            keys.miss_default(own_key, why)
