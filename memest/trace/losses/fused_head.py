"""TRL's fused head: log-probabilities of tokens, tile by tile, without all logits at once.

Tiles are 4,096 tokens by 32,768 words in one buffer; the backward computes each anew and sums
gradients in fp32. What is allocated is born and dies in the order of the source; what the Triton
kernels write is not computed, as a trace has no numbers. Tiles of tokens that only do once more
what those before them did are traced as one, whose products are theirs and which allocates nothing:
a trace of a million tokens is no longer than one of ten thousand.

Source: TRL 1.16 ``kernels/chunked_logprob.py``, ``trainer/utils.py`` (``add_fused_lm_head``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers.utils import ModelOutput

from memest.trace.losses.parts import Parts

__all__ = [
    "IGNORED",
    "LossOutput",
    "backbone_outputs",
    "balancing_loss",
    "fused_head",
    "has_router_loss",
]

IGNORED = -100
_TILE_TOKENS = 4096  # TOKEN_CHUNK_SIZE
_TILE_WORDS = 32768  # _CHUNKED_LOGPROB_CHUNK_SIZE


@dataclass
class LossOutput(ModelOutput):  # type: ignore[misc]
    """What the forward with the head returns (``FusedCausalLMOutput``).

    Values of tokens are (sequences, length - 1); those that nobody asked for are None.

    Attributes:
        loss: the mean over tokens that count.
        own_loss: the model's, where a trainer puts another one in its place.
        log_probs: of the labels.
        entropy: of the predictions.
        mean_logits: over the vocabulary.
        hits: whether the label is the most probable word.
        label_mask: which tokens count.
        aux_loss: of the routers.
    """

    loss: torch.Tensor | None = None
    own_loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    hits: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


def has_router_loss(parts: Parts) -> bool:
    """Whether the configuration has a coefficient for the load-balancing loss of routers."""
    coefficient = getattr(parts.config, "router_aux_loss_coef", 0.0) or 0.0
    return hasattr(parts.config, "output_router_logits") and coefficient != 0.0


def backbone_outputs(
    parts: Parts, inputs: dict[str, Any], *, asks: bool = True
) -> tuple[Any, bool]:
    """The backbone's outputs, and whether a load-balancing loss is added.

    Args:
        parts: of the model.
        inputs: of its forward.
        asks: whether the trainer asks for the routers' logits, where the model has their loss.
    """
    balances = asks and has_router_loss(parts)
    inputs = {**inputs, "use_cache": False}
    if balances:
        inputs["output_router_logits"] = True
    return parts.backbone(**inputs), balances


def balancing_loss(parts: Parts, outputs: Any, attention_mask: Any) -> torch.Tensor:
    """The loss of the routers, as Mixtral has it."""
    from transformers.models.mixtral import modeling_mixtral

    loss = modeling_mixtral.load_balancing_loss_func(
        outputs.router_logits,
        parts.config.num_experts,
        parts.config.num_experts_per_tok,
        attention_mask,
    )
    return cast("torch.Tensor", loss)


def fused_head(
    parts: Parts, values: Sequence[str], *, balances_with_gradients_alone: bool = False
) -> Callable[..., LossOutput]:
    """The forward that ``add_fused_lm_head`` puts in a model's place.

    Args:
        parts: of the model.
        values: of tokens that are computed beside ``log_probs``: names of :class:`LossOutput`.
        balances_with_gradients_alone: the trainer asks for the routers' loss where it trains by
            it, and not where answers are only scored.
    """

    def forward(labels: Any = None, num_items_in_batch: Any = None, **inputs: Any) -> LossOutput:
        asks = torch.is_grad_enabled() or not balances_with_gradients_alone
        outputs, balances = backbone_outputs(parts, inputs, asks=asks)
        hidden_states, labels = outputs.last_hidden_state[:, :-1], labels[:, 1:]
        weight, bias = parts.head.weight, getattr(parts.head, "bias", None)
        mask = labels != IGNORED
        weight, bias = parts.whole(weight), parts.whole(bias)
        per_token: Any = _TiledLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden_states[mask],
            weight,
            bias,
            labels[mask],
            frozenset(values),
        )
        per_token = (
            None if x is None else x.new_zeros(mask.shape).masked_scatter(mask, x)
            for x in per_token
        )
        log_probs, entropy, mean_logits, hits = per_token
        total, items, aux = -log_probs.sum(), num_items_in_batch, None
        loss = total / (mask.sum().clamp(min=1) if items is None else items)
        del total
        if balances:
            aux = balancing_loss(parts, outputs, inputs.get("attention_mask"))
            loss = loss + parts.config.router_aux_loss_coef * aux
        return LossOutput(
            loss=loss,
            log_probs=log_probs,
            entropy=entropy,
            mean_logits=mean_logits,
            hits=hits,
            label_mask=mask,
            aux_loss=aux,
        )

    return forward


def _slices(extent: int, size: int) -> Iterator[slice]:
    """An extent in pieces of a size, the last one perhaps smaller."""
    return (slice(start, min(start + size, extent)) for start in range(0, extent, size))


def _token_tiles(rows: int, *, casts: bool) -> Iterator[tuple[slice, bool]]:
    """The tiles of tokens, and whether each is what several are that do what came before.

    Args:
        rows: tokens.
        casts: a tile makes copies, which the next one's replace: two are needed until their places
            repeat, and the last, whose copies live on, may be smaller.
    """
    tiles = list(_slices(rows, _TILE_TOKENS))
    ahead, behind = (2, 1) if casts else (1, 0)
    alike = tiles[ahead : len(tiles) - behind]
    if len(alike) < 2:
        yield from ((tile, False) for tile in tiles)
        return
    yield from ((tile, False) for tile in tiles[:ahead])
    yield slice(alike[0].start, alike[-1].stop), True
    yield from ((tile, False) for tile in tiles[len(tiles) - behind :])


def _casts(hidden_states: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a tile makes copies of what it multiplies."""
    return hidden_states.dtype != dtype or weight.dtype != dtype


def _fill(
    buffer: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The logits of some tokens and some words, in the tile of a buffer that they take."""
    tile = buffer[: part.shape[0], : weight.shape[0]]
    torch.mm(part, weight.to(part.dtype).t(), out=tile)
    if bias is not None:
        tile.add_(bias.to(part.dtype))
    return tile


def _repeated(
    buffer: torch.Tensor, hidden_states: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Words, and what :func:`_fill` takes for them and many tiles of tokens: it is not allocated.

    Every row stands in the buffer's first one, which meta tensors do not mind; copies were made by
    the tiles before.
    """
    space = buffer[:1].expand(hidden_states.shape[0], -1)
    with _disable_current_modes():
        part = hidden_states.to(dtype)
    for columns in _slices(weight.shape[0], _TILE_WORDS):
        with _disable_current_modes():
            words = weight[columns].to(dtype)
        yield columns, space, part, words


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += one @ other`` in fp32, without copies of half operands in fp32."""
    if left.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)  # type: ignore[call-overload]
    else:
        total.addmm_(left.float(), right.float())


def _add_gradients(
    buffer: torch.Tensor,
    part: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    totals: Sequence[torch.Tensor | None],
    tokens: slice,
    words: slice,
) -> torch.Tensor:
    """The tile of some tokens and words, and what it adds to the gradients of all."""
    tile = _fill(buffer, part, weight, None if bias is None else bias[words])
    grad_hidden, grad_weight, grad_bias = totals
    if grad_hidden is not None:
        _add_product(grad_hidden[tokens], tile, weight)
    if grad_weight is not None:
        _add_product(grad_weight[words], tile.t(), part)
    if grad_bias is not None:
        grad_bias[words] += tile.sum(dim=0, dtype=torch.float32)
    return tile


class _TiledLogProbs(torch.autograd.Function):
    """Log-probabilities, entropies, mean logits and hits of N tokens, tile by tile.

    ``forward(hidden_states (N, H), weight (V, H), bias (V) or None, targets (N), values)`` gives
    four vectors of N, of which the first has a gradient that is used; those that are not among the
    values are None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        values: frozenset[str],
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        rows, vocabulary, device = hidden_states.shape[0], weight.shape[0], hidden_states.device
        half = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if half else hidden_states.dtype
        # maximum, sum of exponentials, sum of x exp(x), of squares, of logits, best before the
        # target, the target's logit
        tensors = [torch.zeros((rows,), device=device, dtype=torch.float32) for _ in range(7)]
        highest, sum_exp, x_sum_exp, _, z_sum, before, target_logit = tensors
        buffer = torch.empty((min(rows, _TILE_TOKENS), _TILE_WORDS), device=device, dtype=dtype)
        for tokens, repeats in _token_tiles(rows, casts=_casts(hidden_states, weight, dtype)):
            if repeats:
                alike = _repeated(buffer, hidden_states[tokens], weight, dtype)
                for columns, space, again, words in alike:
                    _fill(space, again, words, None if bias is None else bias[columns])
                continue
            part = hidden_states[tokens].to(dtype)
            for columns in _slices(vocabulary, _TILE_WORDS):
                # bound until the function returns, as there: it goes after the part of the tokens
                tile = _fill(  # noqa: F841
                    buffer, part, weight[columns], None if bias is None else bias[columns]
                )
        log_z = highest + torch.log(sum_exp)
        log_probs = target_logit - log_z
        entropy = log_z - x_sum_exp / sum_exp if "entropy" in values else None
        mean_logits = z_sum / vocabulary if "mean_logits" in values else None
        hits = (target_logit >= highest) & (target_logit > before) if "hits" in values else None
        ctx.save_for_backward(
            hidden_states, weight, bias, targets, log_z, log_z if entropy is None else entropy
        )
        ctx.dtype = dtype
        ctx.mark_non_differentiable(*(x for x in (mean_logits, hits) if x is not None))
        return log_probs, entropy, mean_logits, hits

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden_states, weight, bias, _, _, _ = ctx.saved_tensors
        dtype, needs = ctx.dtype, ctx.needs_input_grad
        rows, vocabulary, device = hidden_states.shape[0], weight.shape[0], hidden_states.device

        def zeros(like: torch.Tensor, needs_grad: bool) -> torch.Tensor | None:
            return (
                torch.zeros(like.shape, device=device, dtype=torch.float32) if needs_grad else None
            )

        grad_hidden, grad_weight = zeros(hidden_states, needs[0]), zeros(weight, needs[1])
        grad_bias = None if bias is None else zeros(bias, needs[2])
        buffer = torch.empty((min(rows, _TILE_TOKENS), _TILE_WORDS), device=device, dtype=dtype)
        float_gradients = [g.float().contiguous() for g in gradients[:2] if g is not None]
        totals = grad_hidden, grad_weight, grad_bias
        for tokens, repeats in _token_tiles(rows, casts=_casts(hidden_states, weight, dtype)):
            if repeats:
                alike = _repeated(buffer, hidden_states[tokens], weight, dtype)
                for columns, space, again, words in alike:
                    _add_gradients(space, again, words, bias, totals, tokens, columns)
                continue
            part = hidden_states[tokens].to(dtype)
            for columns in _slices(vocabulary, _TILE_WORDS):
                cast = weight[columns].to(dtype)
                tile = _add_gradients(  # noqa: F841 - bound, as there
                    buffer, part, cast, bias, totals, tokens, columns
                )
        del float_gradients, totals
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_states.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )
