"""Losses of TRL's SFTTrainer that never hold all logits: ``trl-fused`` and ``trl-chunked``.

Both run the model without its head and multiply by the head's weight themselves. ``trl-fused``
(TRL 1.15 and later, whatever ``loss_type``) works on tiles of tokens and words in one buffer, by an
autograd function that recomputes each tile in backward and sums gradients in fp32. ``trl-chunked``
(``chunked_nll`` of TRL 1.4 to 1.14) takes 256 tokens at a time and checkpoints them. What they
allocate is written here anew, in the order in which it is born and dies; what their Triton kernels
write is not computed, as a trace has no numbers.

Source: TRL 1.16 ``kernels/chunked_logprob.py``, ``trainer/utils.py`` (``add_fused_lm_head``),
``trainer/sft_trainer.py`` (``compute_loss``); TRL 1.13 ``trainer/sft_trainer.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers.utils import ModelOutput

from memest.errors import ConfigError
from memest.trace.head_and_loss import Parts, parts_of

__all__ = ["trl_chunked", "trl_fused"]

_KINDS = ("ForCausalLM", "ForConditionalGeneration")
_IGNORED = -100
_TILE_TOKENS = 4096  # TOKEN_CHUNK_SIZE
_TILE_WORDS = 32768  # _CHUNKED_LOGPROB_CHUNK_SIZE
_CHUNK_TOKENS = 256  # _CHUNKED_LM_HEAD_CHUNK_SIZE


@dataclass
class _Scored(ModelOutput):  # type: ignore[misc]
    """What is alive until SFTTrainer's ``compute_loss`` returns."""

    loss: torch.Tensor | None = None
    own_loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    hits: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


def _parts(model: Any, loss: str, scales: tuple[str, ...]) -> Parts:
    """A model that SFTTrainer takes.

    Raises:
        ConfigError: another one, or an adapter on its head: SFTTrainer multiplies by the head's
            weight, so the adapter would never be trained.
    """
    parts = parts_of(model, loss, kinds=_KINDS, scales=scales)
    if hasattr(parts.head, "base_layer"):
        raise ConfigError(
            f"--fused-loss {loss} does not go with an adapter on the head: SFTTrainer refuses it, "
            "because the loss multiplies by the head's own weight. Leave the head out of "
            "--lora-target-modules."
        )
    return parts


def _backbone(parts: Parts, inputs: dict[str, Any]) -> tuple[Any, bool]:
    """The backbone's outputs, and whether a load-balancing loss is added.

    SFTTrainer asks for the router's logits wherever the configuration has a coefficient for them.
    """
    coefficient = getattr(parts.config, "router_aux_loss_coef", 0.0) or 0.0
    balances = hasattr(parts.config, "output_router_logits") and coefficient != 0.0
    inputs = {**inputs, "use_cache": False}
    if balances:
        inputs["output_router_logits"] = True
    return parts.backbone(**inputs), balances


def _balance(parts: Parts, outputs: Any, attention_mask: Any) -> torch.Tensor:
    from transformers.models.mixtral import modeling_mixtral

    found = modeling_mixtral.load_balancing_loss_func(
        outputs.router_logits, parts.config.num_experts, parts.config.num_experts_per_tok,
        attention_mask,
    )  # fmt: skip
    return cast("torch.Tensor", found)


# -- TRL 1.15 and later ---------------------------------------------------------------------------


def trl_fused(model: Any) -> Callable[..., Any]:
    """The forward of a model under SFTTrainer of TRL 1.15 and later.

    Raises:
        ConfigError: SFTTrainer does not train such a model.
    """
    scales = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
    parts = _parts(model, "trl-fused", scales)

    def scored(labels: Any, num_items_in_batch: Any, inputs: dict[str, Any]) -> _Scored:
        """The model's forward, which ``add_fused_lm_head`` replaces."""
        outputs, balances = _backbone(parts, inputs)
        hidden, labels = outputs.last_hidden_state[:, :-1], labels[:, 1:]
        mask = labels != _IGNORED
        scores: Any = _TiledLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden[mask], parts.head.weight, getattr(parts.head, "bias", None), labels[mask]
        )
        scores = (x.new_zeros(mask.shape).masked_scatter(mask, x) for x in scores)
        log_probs, entropy, hits = scores
        total, items, aux = -log_probs.sum(), num_items_in_batch, None
        loss = total / (mask.sum().clamp(min=1) if items is None else items)
        del total
        if balances:
            aux = _balance(parts, outputs, inputs.get("attention_mask"))
            loss = loss + parts.config.router_aux_loss_coef * aux
        return _Scored(
            loss=loss, log_probs=log_probs, entropy=entropy, hits=hits, label_mask=mask,
            aux_loss=aux,
        )  # fmt: skip

    def forward(labels: Any = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        """As ``SFTTrainer.compute_loss``, whose loss comes from the values of the tokens."""
        outputs = scored(labels, num_items_in_batch, inputs)
        assert outputs.log_probs is not None
        assert outputs.label_mask is not None
        losses = -outputs.log_probs
        items = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch
        loss = losses.sum() / torch.as_tensor(items).clamp(min=1)
        if outputs.aux_loss is not None:
            weighted = parts.config.router_aux_loss_coef * outputs.aux_loss
            loss = loss + weighted / 1  # by the number of micro-steps; no size depends on it
        outputs.own_loss, outputs.loss = outputs.loss, loss
        return outputs

    return forward


def _add_product(total: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    """``total += one @ other`` in fp32, without copies of half operands in fp32."""
    if one.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, one, other, out_dtype=torch.float32, out=total)  # type: ignore[call-overload]
    else:
        total.addmm_(one.float(), other.float())


class _TiledLogProbs(torch.autograd.Function):
    """Log-probabilities, entropies and hits of N tokens, tile by tile.

    ``forward(hidden (N, H), weight (V, H), bias (V) or None, targets (N))`` gives three vectors of
    N, of which the first has a gradient that is used.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        targets: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        rows, words, device = hidden.shape[0], weight.shape[0], hidden.device
        half = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if half else hidden.dtype
        # maximum, sum of exponentials, sum of x exp(x), of squares, of logits, best before the
        # target, the target's logit
        found = [torch.zeros((rows,), device=device, dtype=torch.float32) for _ in range(7)]
        highest, sum_exp, x_sum_exp, _, _, before, of_target = found
        buffer = torch.empty((min(rows, _TILE_TOKENS), _TILE_WORDS), device=device, dtype=dtype)
        for start in range(0, rows, _TILE_TOKENS):
            part = hidden[start : start + _TILE_TOKENS].to(dtype)
            for word in range(0, words, _TILE_WORDS):
                end = min(word + _TILE_WORDS, words)
                tile = buffer[: part.shape[0], : end - word]
                torch.mm(part, weight[word:end].to(dtype).t(), out=tile)
                if bias is not None:
                    tile.add_(bias[word:end].to(dtype))
        log_z = highest + torch.log(sum_exp)
        log_probs = of_target - log_z
        entropy = log_z - x_sum_exp / sum_exp
        hits = (of_target >= highest) & (of_target > before)
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
        ctx.dtype = dtype
        ctx.mark_non_differentiable(hits)
        return log_probs, entropy, hits

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight, bias, _, _, _ = ctx.saved_tensors
        dtype, needs = ctx.dtype, ctx.needs_input_grad
        rows, words, device = hidden.shape[0], weight.shape[0], hidden.device

        def zeros(like: torch.Tensor, wanted: bool) -> torch.Tensor | None:
            return torch.zeros(like.shape, device=device, dtype=torch.float32) if wanted else None

        of_hidden, of_weight = zeros(hidden, needs[0]), zeros(weight, needs[1])
        of_bias = None if bias is None else zeros(bias, needs[2])
        buffer = torch.empty((min(rows, _TILE_TOKENS), _TILE_WORDS), device=device, dtype=dtype)
        kept = [g.float().contiguous() for g in gradients[:2] if g is not None]
        for start in range(0, rows, _TILE_TOKENS):
            part = hidden[start : start + _TILE_TOKENS].to(dtype)
            for word in range(0, words, _TILE_WORDS):
                end = min(word + _TILE_WORDS, words)
                some = weight[word:end].to(dtype)
                tile = buffer[: part.shape[0], : end - word]
                torch.mm(part, some.t(), out=tile)
                if bias is not None:
                    tile.add_(bias[word:end].to(dtype))
                if of_hidden is not None:
                    _add_product(of_hidden[start : start + _TILE_TOKENS], tile, some)
                if of_weight is not None:
                    _add_product(of_weight[word:end], tile.t(), part)
                if of_bias is not None:
                    of_bias[word:end] += tile.sum(dim=0, dtype=torch.float32)
        del kept
        return (
            None if of_hidden is None else of_hidden.to(hidden.dtype),
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            None,
        )


# -- TRL 1.4 to 1.14 ------------------------------------------------------------------------------


def trl_chunked(model: Any) -> Callable[..., Any]:
    """The forward of a model under SFTTrainer of TRL 1.4 to 1.14 with ``chunked_nll``.

    Raises:
        ConfigError: SFTTrainer does not train such a model.
    """
    parts = _parts(model, "trl-chunked", ("logit_scale", "output_multiplier"))
    scaled, softcap = bool(parts.scale), parts.softcap

    def chunk(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Loss, hits and entropy of some tokens."""
        logits = (hidden @ weight.to(hidden.dtype).t()).float()
        if bias is not None:
            logits = logits + bias.float()
        if scaled:
            logits = logits * 1.5  # any number but 1: no size depends on it
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        log_p = torch.nn.functional.log_softmax(logits, dim=-1)
        loss = torch.nn.functional.nll_loss(log_p, labels, ignore_index=_IGNORED, reduction="sum")
        valid = labels != _IGNORED
        hits = ((logits.argmax(dim=-1) == labels) & valid).sum().float()
        entropy = (-(log_p.exp() * log_p).sum(dim=-1) * valid).sum()
        return loss, hits, entropy

    def cross_entropy(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        labels: torch.Tensor, items: Any,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Loss, hits, entropy and number of the tokens that count."""
        hidden = hidden[..., :-1, :].reshape(-1, hidden.size(-1))
        labels = labels[..., 1:].reshape(-1)
        valid = labels != _IGNORED
        count = valid.sum()
        hits = hidden.new_zeros((), dtype=torch.float32)
        entropy = hidden.new_zeros((), dtype=torch.float32)
        # tokens that count come first; chunks of others are left out
        order = valid.to(torch.int8).argsort(descending=True, stable=True)
        hidden = hidden[order]
        labels = labels[order]
        padded = (count / _CHUNK_TOKENS).ceil().clamp(min=1).to(torch.int64) * _CHUNK_TOKENS
        loss = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, int(padded), _CHUNK_TOKENS):
            of_some, hits_of_some, entropy_of_some = torch.utils.checkpoint.checkpoint(
                chunk, hidden[start : start + _CHUNK_TOKENS], weight, bias,
                labels[start : start + _CHUNK_TOKENS], use_reentrant=False,
            )  # fmt: skip
            loss = loss + of_some
            hits = hits + hits_of_some
            entropy = entropy + entropy_of_some
        loss = loss / (count.clamp(min=1) if items is None else items)
        return loss, hits, entropy, count

    def forward(labels: Any = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        outputs, balances = _backbone(parts, inputs)
        hidden, bias = outputs.last_hidden_state, getattr(parts.head, "bias", None)
        loss, hits, entropy, count = cross_entropy(
            hidden, parts.head.weight, bias, labels, num_items_in_batch
        )
        aux = None
        if balances:
            aux = _balance(parts, outputs, inputs.get("attention_mask"))
            loss = loss + parts.config.router_aux_loss_coef * aux
        return _Scored(loss=loss, entropy=entropy, hits=hits, label_mask=count, aux_loss=aux)

    return forward
