"""Ulysses sequence parallelism as DeepSpeed and accelerate do it, on one rank that talks to nobody.

Source: ``deepspeed/runtime/sequence_parallel/ulysses_sp.py`` of DeepSpeed 0.19.8
(``UlyssesSPAttentionHF``, ``UlyssesSPDataLoaderAdapter``); shapes and names here are those there.
Its attention takes the place of the one that the model is configured with: queries, keys and values
of the rank's tokens go round, so that every rank has some of the heads of all tokens, the kernel
works on those, and what comes out goes back. ``ulysses_batches.py`` has the batches and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.trace.cuda.known_values import attach
from memest.trace.parallel.ulysses_batches import UlyssesBatches

__all__ = [
    "SharedHeads",
    "check_evaluates",
    "check_shares_heads",
    "shared_sequence",
]

_LARGEST_GROUPED = 256
"""The largest head with which ``use_gqa_in_sdpa`` leaves repeating keys to the kernel."""


@dataclass(slots=True)
class SharedHeads:
    """The heads of a model, as its configuration has them (``register_with_transformers``).

    Attributes:
        ranks: how many share a sequence.
        key_heads: heads of keys and values.
        calls: how often attention was asked for.
        groups: modules whose ``num_key_value_groups`` was set, with what it was.
    """

    ranks: int
    key_heads: int
    calls: int = 0
    groups: list[tuple[Any, int]] = field(default_factory=list)

    @property
    def copies(self) -> int:
        """``kv_replication_factor``: how often each head of keys and values is there."""
        return self.ranks // self.key_heads

    @property
    def local_keys(self) -> int:
        """Heads of keys and values that a rank attends with."""
        return 1 if self.copies > 1 else self.key_heads // self.ranks

    def restore(self) -> None:
        """Give modules back what attention changed of them."""
        while self.groups:
            module, before = self.groups.pop()
            module.num_key_value_groups = before


def check_shares_heads(model: Any, ranks: int) -> SharedHeads:
    """Whether ranks can share the heads of a model, and which attention it is that does.

    Sources: ``UlyssesSPAttentionHF.__init__``; ``Accelerator._prepare_deepspeed`` and
    ``_refuse_recurrent_layers_under_sequence_parallelism`` of accelerate 1.15.

    Raises:
        ConfigError: they cannot, or the model is no causal language model of transformers.
    """
    kind = type(model).__name__
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(config, "layer_types", None) or []
    recurrent = sorted({str(kind) for kind in layers if "linear_attention" in str(kind)})
    if recurrent:
        raise ConfigError(
            f"--sp: accelerate refuses layers of type {', '.join(recurrent)}, as {kind} has them: "
            "their state goes along the sequence, which would begin anew on every GPU. Leave --sp "
            "out."
        )
    heads = getattr(config, "num_attention_heads", None)
    key_heads = getattr(config, "num_key_value_heads", None)
    if not isinstance(heads, int) or not isinstance(key_heads, int):
        raise ConfigError(
            f"--sp: the configuration of {kind} does not say how many heads there are "
            "(num_attention_heads, num_key_value_heads), which DeepSpeed reads there. Leave --sp "
            "out."
        )
    if getattr(model, "loss_type", None) != "ForCausalLM":
        raise ConfigError(
            f"--sp: {kind} is not trained as a causal language model, and Ulysses drops every mask "
            "but the causal one. Leave --sp out."
        )
    legal = [
        n
        for n in range(2, heads + 1)
        if heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)
    ]
    if ranks not in legal:
        raise ConfigError(
            f"--sp {ranks} cannot share the {heads} heads of {kind}, {key_heads} of them of keys "
            "and values: it has to divide the first, and divide the second or be a multiple of it. "
            f"Legal: {', '.join(map(str, legal)) or 'none'}."
        )
    return SharedHeads(ranks, key_heads)


def check_evaluates(model: Any, setup: Setup) -> None:
    """Whether an evaluation after a training with shared heads runs.

    Evaluations bypass Ulysses (``disable_in_eval``, which ``Accelerator._prepare_deepspeed`` asks
    for), so attention has all heads again. Where training copied heads of keys, it set
    ``num_key_value_groups`` of every attention to the groups of one rank, and nothing sets it back:
    ``sdpa_attention_forward`` of transformers 5.23 takes 1 to say that there are as many keys as
    queries, and repeats keys by it where heads are too large for ``enable_gqa``. Flash attention
    does not look at it.

    Raises:
        ConfigError: it stops.
    """
    ranks = setup.distributed.sp
    if ranks == 1 or str(getattr(model.config, "_attn_implementation", "")) != "sdpa":
        return
    key_heads = check_shares_heads(model, ranks).key_heads
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if ranks <= key_heads or (heads > ranks and size <= _LARGEST_GROUPED):
        return
    raise ConfigError(
        f"--eval-batch beside --sp {ranks} stops in the first batch of the evaluation: in training "
        f"the GPUs copy the {key_heads} heads of keys and values of {type(model).__name__}, for "
        "which DeepSpeed changes num_key_value_groups of every layer, and evaluations, which share "
        f"no heads, find it changed. Write --sp {key_heads} or less, or --attn-implementation "
        "flash_attention_2."
    )


class _Exchange(torch.autograd.Function):
    """``_dim_zero_all_to_all``: into a tensor of its own; nothing is kept for backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        tensor = gradient.contiguous()
        return torch.empty_like(tensor)


def _exchange(tensor: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = _Exchange.apply(tensor)
    return output


def _gather(part: torch.Tensor, count: int, local: int, copies: int, ranks: int) -> torch.Tensor:
    """``combine_sequence``: [sl_l, bs, hc, hs] becomes [sl, bs, hc_l, hs]."""
    if copies > 1:
        part = part.repeat_interleave(copies, dim=2)
    length, batch, _, size = part.shape
    part = part.reshape(length, batch, ranks, local, size)
    part = part.permute(2, 0, 1, 3, 4).contiguous()
    out = _exchange(part)
    return out.reshape(length * count, batch, local, size)


def _scatter(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """``_partition_global_sequence``: [sl, bs, em_l] becomes [sl_l, bs, em]."""
    length, batch, size = whole.shape
    whole = whole.reshape(ranks, length // ranks, batch, size).contiguous()
    out = _exchange(whole)
    out = out.permute(1, 2, 0, 3)
    return out.reshape(length // ranks, batch, -1)


def _positions(part: torch.Tensor, ranks: int, *, nccl: bool) -> list[torch.Tensor]:
    """The positions of all ranks' tokens, gathered in every layer.

    ``all_gather`` into a list of tensors goes through one tensor on a GPU
    (``ProcessGroupNCCL::allgather``, ``newLikeFlat``).
    """
    parts = [torch.empty_like(part) for _ in range(ranks)]
    if nccl:
        torch.empty((ranks, *part.shape), dtype=part.dtype, device=part.device)
    return parts


def _attention(heads: SharedHeads, core: Callable[[], Callable[..., Any]], *, nccl: bool) -> Any:
    """``UlyssesSPAttentionHF.forward``, and the function that is registered in front of it."""
    ranks = heads.ranks

    def attend(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        heads.calls += 1
        attention_mask = None
        if kwargs.get("position_ids") is None:
            raise ConfigError(
                f"--sp: {type(module).__name__} does not hand position_ids to its attention, which "
                "DeepSpeed asks for. Leave --sp out."
            )
        query, key, value = (part.permute(2, 0, 1, 3) for part in (query, key, value))
        # a local: the parts stay until attention is done
        parts = _positions(kwargs["position_ids"], ranks, nccl=nccl)
        positions = torch.cat(parts, dim=1)
        kwargs["position_ids"] = attach(
            positions, torch.arange(positions.shape[1]).expand(positions.shape)
        )
        del positions
        local = query.shape[2] // ranks
        wholes = (
            _gather(query, ranks, local, 1, ranks),
            _gather(key, ranks, heads.local_keys, heads.copies, ranks),
            _gather(value, ranks, heads.local_keys, heads.copies, ranks),
        )
        query_layer, key_layer, value_layer = wholes
        del wholes
        query_layer = query_layer.permute(1, 2, 0, 3).contiguous()
        key_layer = key_layer.permute(1, 2, 0, 3).contiguous()
        value_layer = value_layer.permute(1, 2, 0, 3).contiguous()
        if heads.copies > 1:
            heads.groups.append((module, module.num_key_value_groups))
            module.num_key_value_groups = query_layer.size(1) // key_layer.size(1)
        context, weights = core()(
            module, query_layer, key_layer, value_layer, attention_mask, *args, **kwargs
        )
        context = context.transpose(0, 1)
        context = context.reshape(*context.shape[:2], -1)
        out = _scatter(context, ranks).transpose(0, 1)
        return out.reshape(*out.shape[:2], -1), weights

    return attend


@contextmanager
def _replace_attention(model: Any, heads: SharedHeads, *, nccl: bool) -> Iterator[None]:
    """In front of the attention that the model is configured with (``register_with_transformers``).

    Raises:
        ConfigError: the model's attention does not go by that name.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = str(getattr(model.config, "_attn_implementation", ""))
    mapping = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    if name not in mapping:
        raise ConfigError(
            f"--sp stands in front of an attention that transformers knows by name, and that of "
            f"{type(model).__name__} is {name or 'none'}: write --attn-implementation sdpa or "
            "flash_attention_2."
        )
    ALL_ATTENTION_FUNCTIONS[name] = _attention(heads, lambda: mapping[name], nccl=nccl)
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
        heads.restore()
    if not heads.calls:
        raise ConfigError(
            f"--sp: the attention of {type(model).__name__} does not go by transformers' table of "
            "attention functions, so DeepSpeed would leave it to every GPU's own tokens. Leave "
            "--sp out."
        )


@contextmanager
def shared_sequence(
    model: Any, setup: Setup, *, nccl: bool = True
) -> Iterator[UlyssesBatches | None]:
    """What a loop asks where GPUs share sequences by Ulysses; None where they do not.

    Args:
        model: on meta, as it is trained.
        setup: the run.
        nccl: whose collectives allocate: those of GPUs, or those of a group that moves nothing.

    Raises:
        ConfigError: a model that cannot share sequences so.
    """
    ranks = setup.distributed.sp
    if ranks == 1:
        yield None
        return
    with _replace_attention(model, check_shares_heads(model, ranks), nccl=nccl):
        yield UlyssesBatches(model, setup, nccl=nccl)
