"""Losses that apply a model's head to one piece after the other, written anew operator by operator.

=====================  =====================================  =================================
loss                   the head's pieces                      kept for backward
=====================  =====================================  =================================
``trl-fused``          4,096 tokens by 32,768 words in one    hidden states; each is computed
                       buffer                                 anew, gradients are summed in fp32
``trl-chunked``        256 tokens                             hidden states (checkpointed)
``torchtune-chunked``  N of each sample, all logits at once   fp32 log-probabilities
``torchtune-linear``   N of all tokens that count             fp32 log-probabilities
=====================  =====================================  =================================

What they allocate is born and dies in the order of their source; what their Triton kernels write is
not computed, as a trace has no numbers.

Source: transformers ``get_decoder``, ``get_output_embeddings``, ``base_model``; ``get_text_config``
for what the logits go through. TRL 1.16 ``kernels/chunked_logprob.py``, ``trainer/utils.py``
(``add_fused_lm_head``), ``trainer/sft_trainer.py`` (``compute_loss``); TRL 1.13
``trainer/sft_trainer.py``. torchtune 0.6.1 ``modules/loss/ce_chunked_output_loss.py``,
``modules/transformer.py`` (``chunked_output``), ``recipes/full_finetune_single_device.py``;
torchtune at April 2026 ``modules/loss/cross_entropy_loss.py``,
``models/gemma2/_component_builders.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from memest.errors import ConfigError
from memest.trace.cuda.known_values import attach

__all__ = ["Parts", "parts_of", "torchtune_chunked", "torchtune_linear", "trl_chunked", "trl_fused"]

_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


@dataclass(frozen=True, slots=True)
class Parts:
    """A causal language model, taken apart.

    Attributes:
        config: of its text part.
        backbone: everything but the head; gives the last hidden states.
        head: the module that makes logits of them.
        softcap: by which ``tanh`` caps the logits; None for none.
        scale: name of the setting that scales the logits; "" where none does.
    """

    config: Any
    backbone: Any
    head: Any
    softcap: float | None
    scale: str


def parts_of(
    model: Any, loss: str, *, kinds: Sequence[str] = ("ForCausalLM",), scales: Sequence[str] = ()
) -> Parts:
    """Take a model apart for a loss.

    Args:
        model: of transformers, without wrappers.
        loss: name of the loss, for errors.
        kinds: how the names of classes end that it goes with.
        scales: settings of scaled logits that it knows.

    Raises:
        ConfigError: the model is none that generates text from left to right, or its logits are
            scaled in a way that the loss does not know.
    """
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    reason = ""
    if not name.endswith(tuple(kinds)) or getattr(config, "is_encoder_decoder", False):
        reason = "it replaces head and loss of causal language models"
    has_vision = len(kinds) > 1 and hasattr(config, "vision_config")
    backbone = None if reason else model.base_model if has_vision else model.get_decoder()
    head: Any = None if reason else model.get_output_embeddings()
    scale = next((s for s in _SCALES if getattr(text, s, None) not in (None, 1, 1.0)), "")
    if not reason and (backbone is None or backbone is model):
        reason = "its decoder cannot be told from the rest"
    if not reason and getattr(head, "weight", None) is None:
        reason = f"its head is a {type(head).__name__}, which has no weight of its own"
    if not reason and scale and scale not in scales:
        reason = f"its logits are scaled ({scale}), which this loss does not do"
    if reason:
        raise ConfigError(f"--fused-loss {loss} does not go with {name}: {reason}. Leave it out.")
    return Parts(text, backbone, head, getattr(text, "final_logit_softcapping", None), scale)


# -- torchtune: what is padded, and the last of each sample, has labels of -100 --------------------


_IGNORED = -100


def _outputs(parts: Parts, inputs: dict[str, Any]) -> torch.Tensor:
    """The last hidden states; torchtune caps them, and not the logits, where a model caps."""
    hidden_states: torch.Tensor = parts.backbone(**{**inputs, "use_cache": False}).last_hidden_state
    if parts.softcap is not None:
        hidden_states = hidden_states / parts.softcap
        hidden_states = torch.tanh(hidden_states)
        hidden_states = hidden_states * parts.softcap
    return hidden_states


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits.float(), labels, ignore_index=_IGNORED, reduction="sum"
    )


def torchtune_chunked(model: Any, chunks: int) -> Callable[..., Any]:
    """The forward of a model with ``CEWithChunkedOutputLoss``; 0.6 shifts labels on the GPU.

    Args:
        model: of transformers.
        chunks: ``num_output_chunks``: pieces of the tokens of each sample.

    Raises:
        ConfigError: the model is no causal language model.
    """
    parts = parts_of(model, "torchtune-chunked")

    def unembed(inputs: dict[str, Any]) -> list[torch.Tensor]:
        hidden_states = _outputs(parts, inputs)
        return [parts.head(piece) for piece in hidden_states.chunk(chunks, dim=1)]

    def loss_of(logits: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        count = (labels != _IGNORED).sum()
        targets = [piece.reshape(-1) for piece in labels.chunk(chunks, dim=1)]
        flat = [piece.reshape(-1, piece.size(-1)) for piece in logits]
        total: Any = 0.0
        for piece, target in zip(flat, targets, strict=True):
            total += _cross_entropy(piece, target)
        loss: torch.Tensor = total / count
        return loss

    def forward(labels: Any = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        logits = unembed(inputs)
        ignored_shape = (labels.shape[0], 1)
        labels = torch.hstack(
            (labels[..., 1:], torch.full(ignored_shape, _IGNORED, device=labels.device))
        )
        return CausalLMOutputWithPast(loss=loss_of(logits, labels))

    return forward


def torchtune_linear(model: Any, chunks: int) -> Callable[..., Any]:
    """The forward of a model with ``LinearCrossEntropyLoss``.

    Args:
        model: of transformers.
        chunks: ``num_output_chunks``: pieces of all tokens that are not ignored.

    Raises:
        ConfigError: the model is no causal language model.
    """
    parts = parts_of(model, "torchtune-linear")

    def drop_ignored(
        hidden_states: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.where(labels != _IGNORED)[0]
        hidden_states = hidden_states.index_select(0, indices)
        return hidden_states, labels.index_select(0, indices)

    def loss_of(hidden_states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count = torch.where(labels != _IGNORED)[0].numel()
        labels = labels.reshape(-1)
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        hidden_states, labels = drop_ignored(hidden_states, labels)
        pieces = hidden_states.tensor_split(chunks, dim=0)
        targets = labels.tensor_split(chunks, dim=0)
        total = torch.tensor(0.0, device=labels.device)
        for piece, target in zip(pieces, targets, strict=True):
            loss = _cross_entropy(parts.head(piece), target)
            total += loss
        return total / count

    def forward(labels: Any = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        hidden_states = _outputs(parts, inputs)
        # the host has shifted them: the last of each sample counts no more
        shifted_labels = torch.zeros(labels.shape, dtype=labels.dtype)
        shifted_labels[:, -1] = _IGNORED
        attach(labels, shifted_labels)
        return CausalLMOutputWithPast(loss=loss_of(hidden_states, labels))

    return forward


# -- TRL -------------------------------------------------------------------------------------------


_KINDS = ("ForCausalLM", "ForConditionalGeneration")
_TILE_TOKENS = 4096  # TOKEN_CHUNK_SIZE
_TILE_WORDS = 32768  # _CHUNKED_LOGPROB_CHUNK_SIZE
_CHUNK_TOKENS = 256  # _CHUNKED_LM_HEAD_CHUNK_SIZE


@dataclass
class _LossOutput(ModelOutput):  # type: ignore[misc]
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


def _balancing_loss(parts: Parts, outputs: Any, attention_mask: Any) -> torch.Tensor:
    from transformers.models.mixtral import modeling_mixtral

    loss = modeling_mixtral.load_balancing_loss_func(
        outputs.router_logits,
        parts.config.num_experts,
        parts.config.num_experts_per_tok,
        attention_mask,
    )
    return cast("torch.Tensor", loss)


# -- TRL 1.15 and later ---------------------------------------------------------------------------


def trl_fused(model: Any) -> Callable[..., Any]:
    """The forward of a model under SFTTrainer of TRL 1.15 and later.

    Raises:
        ConfigError: SFTTrainer does not train such a model.
    """
    parts = _parts(model, "trl-fused", _SCALES)

    def score(labels: Any, num_items_in_batch: Any, inputs: dict[str, Any]) -> _LossOutput:
        """The model's forward, which ``add_fused_lm_head`` replaces."""
        outputs, balances = _backbone(parts, inputs)
        hidden_states, labels = outputs.last_hidden_state[:, :-1], labels[:, 1:]
        mask = labels != _IGNORED
        scores: Any = _TiledLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden_states[mask], parts.head.weight, getattr(parts.head, "bias", None), labels[mask]
        )
        scores = (x.new_zeros(mask.shape).masked_scatter(mask, x) for x in scores)
        log_probs, entropy, hits = scores
        total, items, aux = -log_probs.sum(), num_items_in_batch, None
        loss = total / (mask.sum().clamp(min=1) if items is None else items)
        del total
        if balances:
            aux = _balancing_loss(parts, outputs, inputs.get("attention_mask"))
            loss = loss + parts.config.router_aux_loss_coef * aux
        return _LossOutput(
            loss=loss,
            log_probs=log_probs,
            entropy=entropy,
            hits=hits,
            label_mask=mask,
            aux_loss=aux,
        )

    def forward(labels: Any = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        """As ``SFTTrainer.compute_loss``, whose loss comes from the values of the tokens."""
        outputs = score(labels, num_items_in_batch, inputs)
        assert outputs.log_probs is not None
        assert outputs.label_mask is not None
        losses = -outputs.log_probs
        items = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch
        loss = losses.sum() / torch.as_tensor(items).clamp(min=1)
        if outputs.aux_loss is not None:
            weighted_aux = parts.config.router_aux_loss_coef * outputs.aux_loss
            loss = loss + weighted_aux / 1  # by the number of micro-steps; no size depends on it
        outputs.own_loss, outputs.loss = outputs.loss, loss
        return outputs

    return forward


def _slices(extent: int, size: int) -> Iterator[slice]:
    """An extent in pieces of a size, the last one perhaps smaller."""
    return (slice(start, min(start + size, extent)) for start in range(0, extent, size))


def _fill(
    buffer: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The logits of some tokens and some words, in the tile of a buffer that they take."""
    tile = buffer[: part.shape[0], : weight.shape[0]]
    torch.mm(part, weight.to(part.dtype).t(), out=tile)
    if bias is not None:
        tile.add_(bias.to(part.dtype))
    return tile


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += one @ other`` in fp32, without copies of half operands in fp32."""
    if left.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)  # type: ignore[call-overload]
    else:
        total.addmm_(left.float(), right.float())


class _TiledLogProbs(torch.autograd.Function):
    """Log-probabilities, entropies and hits of N tokens, tile by tile.

    ``forward(hidden_states (N, H), weight (V, H), bias (V) or None, targets (N))`` gives three
    vectors of N, of which the first has a gradient that is used.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        rows, vocabulary, device = hidden_states.shape[0], weight.shape[0], hidden_states.device
        half = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if half else hidden_states.dtype
        # maximum, sum of exponentials, sum of x exp(x), of squares, of logits, best before the
        # target, the target's logit
        tensors = [torch.zeros((rows,), device=device, dtype=torch.float32) for _ in range(7)]
        highest, sum_exp, x_sum_exp, _, _, before, target_logit = tensors
        buffer = torch.empty((min(rows, _TILE_TOKENS), _TILE_WORDS), device=device, dtype=dtype)
        for tokens in _slices(rows, _TILE_TOKENS):
            part = hidden_states[tokens].to(dtype)
            for columns in _slices(vocabulary, _TILE_WORDS):
                _fill(buffer, part, weight[columns], None if bias is None else bias[columns])
        log_z = highest + torch.log(sum_exp)
        log_probs = target_logit - log_z
        entropy = log_z - x_sum_exp / sum_exp
        hits = (target_logit >= highest) & (target_logit > before)
        ctx.save_for_backward(hidden_states, weight, bias, targets, log_z, entropy)
        ctx.dtype = dtype
        ctx.mark_non_differentiable(hits)
        return log_probs, entropy, hits

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
        for tokens in _slices(rows, _TILE_TOKENS):
            part = hidden_states[tokens].to(dtype)
            for columns in _slices(vocabulary, _TILE_WORDS):
                cast = weight[columns].to(dtype)
                tile = _fill(buffer, part, cast, None if bias is None else bias[columns])
                if grad_hidden is not None:
                    _add_product(grad_hidden[tokens], tile, cast)
                if grad_weight is not None:
                    _add_product(grad_weight[columns], tile.t(), part)
                if grad_bias is not None:
                    grad_bias[columns] += tile.sum(dim=0, dtype=torch.float32)
        del float_gradients
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_states.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
        )


# -- TRL 1.4 to 1.14 ------------------------------------------------------------------------------


def trl_chunked(model: Any) -> Callable[..., Any]:
    """The forward of a model under SFTTrainer of TRL 1.4 to 1.14 with ``chunked_nll``.

    Raises:
        ConfigError: SFTTrainer does not train such a model.
    """
    parts = _parts(model, "trl-chunked", ("logit_scale", "output_multiplier"))
    scales_logits, softcap = bool(parts.scale), parts.softcap

    def chunk(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Loss, hits and entropy of some tokens."""
        logits = (hidden_states @ weight.to(hidden_states.dtype).t()).float()
        if bias is not None:
            logits = logits + bias.float()
        if scales_logits:
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
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        items: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Loss, hits, entropy and number of the tokens that count."""
        hidden_states = hidden_states[..., :-1, :].reshape(-1, hidden_states.size(-1))
        labels = labels[..., 1:].reshape(-1)
        valid = labels != _IGNORED
        count = valid.sum()
        hits = hidden_states.new_zeros((), dtype=torch.float32)
        entropy = hidden_states.new_zeros((), dtype=torch.float32)
        # tokens that count come first; chunks of others are left out
        order = valid.to(torch.int8).argsort(descending=True, stable=True)
        hidden_states = hidden_states[order]
        labels = labels[order]
        padded_count = (count / _CHUNK_TOKENS).ceil().clamp(min=1).to(torch.int64) * _CHUNK_TOKENS
        loss = hidden_states.new_zeros((), dtype=torch.float32)
        for start in range(0, int(padded_count), _CHUNK_TOKENS):
            chunk_loss, chunk_hits, chunk_entropy = torch.utils.checkpoint.checkpoint(
                chunk,
                hidden_states[start : start + _CHUNK_TOKENS],
                weight,
                bias,
                labels[start : start + _CHUNK_TOKENS],
                use_reentrant=False,
            )
            loss = loss + chunk_loss
            hits = hits + chunk_hits
            entropy = entropy + chunk_entropy
        loss = loss / (count.clamp(min=1) if items is None else items)
        return loss, hits, entropy, count

    def forward(labels: Any = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        outputs, balances = _backbone(parts, inputs)
        hidden_states, bias = outputs.last_hidden_state, getattr(parts.head, "bias", None)
        loss, hits, entropy, count = cross_entropy(
            hidden_states, parts.head.weight, bias, labels, num_items_in_batch
        )
        aux = None
        if balances:
            aux = _balancing_loss(parts, outputs, inputs.get("attention_mask"))
            loss = loss + parts.config.router_aux_loss_coef * aux
        return _LossOutput(loss=loss, entropy=entropy, hits=hits, label_mask=count, aux_loss=aux)

    return forward
