"""Software of another time: what older transformers did differently inside a step.

Tables of mechanisms, each with the releases it holds for and its source; nothing here is fitted.
What a built model had is in ``legacy/models.py``. Kernels of torch are in ``legacy/torch.py``, what
its loops and optimizers have since 2.0 (``foreach``, ``zero_grad``) where they are made.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from memest.config.release_defaults import release_default
from memest.config.setup import Attention, Setup
from memest.trace.cuda.patching import patch_attributes
from memest.trace.inputs.tensors import TensorPlan
from memest.trace.legacy.changes import Change, Release, changes_of
from memest.trace.recorder import Recorder

__all__ = [
    "attention_of",
    "classes_as_before",
    "family_of",
    "masks_as_before",
    "release_of",
    "transformers_as_before",
]

Patch = AbstractContextManager[Any]

# Families whose attention was written like BERT's: the scores under their own name
_BERT_LIKE = frozenset(
    """bert roberta xlm-roberta camembert electra layoutlm rembert megatron-bert ernie vit deit
    data2vec-text roberta-prelayernorm""".split()
)


def release_of(setup: Setup) -> Release:
    """The declared transformers, or a version later than anything listed here."""
    return setup.software.transformers or (99, 0)


def family_of(model: Any) -> str:
    """The family of a model by its configuration; "" where it has none."""
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def attention_of(model_type: str, setup: Setup) -> Attention:
    """The attention implementation that these releases would have taken."""
    if setup.attn_implementation is not Attention.AUTO:
        return setup.attn_implementation
    return Attention(release_default("attn_implementation", setup.software, model_type).value)


# -- the batch and the model ---------------------------------------------------------------------


def masks_as_before(
    plans: tuple[TensorPlan, ...], model: Any, setup: Setup
) -> tuple[TensorPlan, ...]:
    """Eager encoders always added an extended mask [B, 1, 1, S] in the weights' dtype.

    Added to half-precision scores under autocast, the fp32 mask makes the scores fp32. Source:
    ``get_extended_attention_mask`` in transformers 4.15 to 4.57.
    """
    eager = getattr(getattr(model, "config", None), "_attn_implementation", "") == "eager"
    if release_of(setup) >= (5, 0) or not eager or family_of(model) not in _BERT_LIKE:
        return plans
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return tuple(
        replace(p, shape=(p.shape[0], 1, 1, p.shape[1]), dtype=dtype, fill=None, value=None)
        if p.name == "attention_mask" and len(p.shape) == 2
        else p
        for p in plans
    )


@contextmanager
def classes_as_before(model_type: str, setup: Setup) -> Iterator[None]:
    """Classes that may be asked for what they are not any more, while a model is built."""
    with ExitStack() as stack:
        for change in changes_of(_CLASSES, release_of(setup), model_type):
            stack.enter_context(change.patch(model_type))
        yield


def _sdpa_without_soft_caps(model_type: str) -> Patch:
    """Models whose scores have a soft cap took sdpa all the same, which leaves it out.

    Source: ``_supports_sdpa`` of ``modeling_gemma2.py``, ``modeling_t5gemma.py`` and
    ``modeling_vaultgemma.py``, true until 5.20.
    """
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    base = next(
        value
        for name, value in vars(module).items()
        if name.endswith("PreTrainedModel") and value.__module__ == module.__name__
    )
    return mock.patch.object(base, "_supports_sdpa", True)


# -- functions of the library, for the time of a trace --------------------------------------------


@contextmanager
def transformers_as_before(recorder: Recorder, model_type: str, setup: Setup) -> Iterator[None]:
    """The shared functions of transformers as that release had them."""
    with ExitStack() as stack:
        if "transformers" in sys.modules:
            for change in changes_of(_FUNCTIONS, release_of(setup), model_type):
                stack.enter_context(change.patch(recorder, model_type))
        yield


def _caches_without_copies(*_: Any) -> Patch:
    """A cache's first keys and values were kept as they came, not as a copy.

    What attention saves beside them is then its own copy (matmul of permuted views, contiguous
    operands of sdpa), and the cache keeps the projections alive in addition. Source:
    ``DynamicCache.update`` of 4.36 to 4.53, ``DynamicLayer.update`` of 4.54; a tuple of the tensors
    before. The first update copies by ``cat`` in 4.56.
    """
    from transformers import cache_utils

    layer = cache_utils.DynamicLayer
    original: Callable[..., Any] = layer.update

    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_initialized:
            return original(self, key_states, value_states, *args, **kwargs)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    return mock.patch.object(layer, "update", update)


def _repeated_heads(*_: Any) -> Patch:
    """Grouped keys and values were always repeated for all heads.

    Source: ``sdpa_attention_forward`` of 4.48 to 4.53 and the classes before; ``enable_gqa`` is
    there in 4.54.
    """
    from transformers.integrations import sdpa_attention

    def never(*_: Any, **__: Any) -> bool:
        return False

    return mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", never)


def _contiguous_operands(*_: Any) -> Patch:
    """Queries, keys and values were made contiguous before sdpa: three copies, saved by it.

    Source: ``sdpa_attention_forward`` of 4.48 to 4.54 (for pytorch issue 112577); gone in 4.56.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def forward(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        query = query.contiguous()
        if getattr(module, "num_key_value_groups", 1) == 1:
            key, value = key.contiguous(), value.contiguous()
        return original(module, query, key, value, *args, **kwargs)

    mapping = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    return mock.patch.dict(mapping, {"sdpa": forward})


def _ignored_soft_caps(*_: Any) -> Patch:
    """A cap of the scores was handed to sdpa, which knew nothing of it.

    Source: ``sdpa_attention_forward`` of 4.48 to 5.20; refused from 5.21 on.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def forward(*args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    mapping = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    return mock.patch.dict(mapping, {"sdpa": forward})


def _rotary_of_each_layer(_recorder: Recorder, model_type: str) -> Patch:
    """Every layer looked up, or computed, cosines and sines of its own, which its products save.

    Source: ``cos[position_ids]`` in ``apply_rotary_pos_emb`` of 4.37, ``rotary_emb`` called by each
    attention until ``position_embeddings`` came from the model (4.43 for Llama).
    """
    module = sys.modules.get(f"transformers.models.{model_type}.modeling_{model_type}")
    original = getattr(module, "apply_rotary_pos_emb", None)
    if module is None or original is None:
        return nullcontext()

    def apply(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        return original(q, k, cos.clone(), sin.clone(), *args, **kwargs)

    return mock.patch.object(module, "apply_rotary_pos_emb", apply)


def _float_masks(*_: Any) -> Patch:
    """Masks for sdpa were additive and made once, so all layers save the same one.

    From a bool mask every layer's sdpa makes, and saves, an additive one of its own. Source:
    ``_prepare_4d_causal_attention_mask_with_cache_position`` and
    ``_prepare_4d_causal_attention_mask_for_sdpa`` until 4.52; ``masking_utils`` from 4.53 on.
    """
    from transformers import masking_utils

    mapping = masking_utils.AttentionMaskInterface._global_mapping
    original: Callable[..., Any] = mapping["sdpa"]

    def mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
        bool_mask = original(*args, dtype=dtype, **kwargs)
        if bool_mask is None or bool_mask.dtype != torch.bool:
            return bool_mask
        out = torch.zeros(bool_mask.shape, dtype=dtype, device=bool_mask.device)
        return out.masked_fill_(bool_mask.logical_not(), torch.finfo(dtype).min)

    return mock.patch.dict(mapping, {"sdpa": mask})


def _shifted_logits(*_: Any) -> Patch:
    """The causal loss shifted the logits, a contiguous copy of all but the last position.

    Source: ``ForCausalLMLoss`` of 4.46 to 4.48 and the models' forward before; the labels are
    padded and shifted instead in 4.51.
    """
    from transformers.loss import loss_utils

    def loss(
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | None = None,
        ignore_index: int = -100,
        **_: Any,
    ) -> torch.Tensor:
        logits = logits.float()
        shift_logits = logits[..., :-1, :].contiguous().view(-1, vocab_size)
        shift_labels = labels[..., 1:].contiguous().view(-1)
        reduction = "mean" if num_items_in_batch is None else "sum"
        out = torch.nn.functional.cross_entropy(
            shift_logits, shift_labels, ignore_index=ignore_index, reduction=reduction
        )
        return out if num_items_in_batch is None else out / num_items_in_batch

    return mock.patch.dict(loss_utils.LOSS_MAPPING, {"ForCausalLM": loss})


def _hold_scores(recorder: Recorder, _model_type: str) -> Patch:
    """BERT-like attention kept ``attention_scores`` beside ``attention_probs`` until it returned.

    One more score matrix is alive from the softmax to the end of the attention's forward. Source:
    ``BertSelfAttention.forward`` of transformers 4.15 to 4.57; 5.0 rebinds one name.
    """
    functional = torch.nn.functional
    original: Callable[..., Any] = functional.softmax

    def softmax(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dim() == 4:
            recorder.hold(x)
        return original(x, *args, **kwargs)

    return mock.patch.object(functional, "softmax", softmax)


def _scores_as_cogview(_recorder: Recorder, model_type: str) -> Patch:
    """LayoutLMv3 scaled scores down, less their greatest, and up again, and summed its biases anew.

    Source: ``LayoutLMv3SelfAttention`` until 5.23; from 5.24 on it has the shared functions.
    """
    module = sys.modules.get(f"transformers.models.{model_type}.modeling_{model_type}")
    if module is None or not hasattr(module, "eager_attention_forward"):
        return nullcontext()

    def softmax(scores: torch.Tensor, alpha: int = 32) -> torch.Tensor:
        scaled = scores / alpha
        greatest = scaled.amax(dim=-1).unsqueeze(-1)
        scores = (scaled - greatest) * alpha
        return torch.nn.functional.softmax(scores, dim=-1)

    def attend(
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float = 0.0,
        position_bias: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        root = query.shape[-1] ** 0.5
        scores = torch.matmul(query / root, key.transpose(-1, -2))
        if position_bias is not None:
            scores += (position_bias + position_bias.other) / root
        if mask is not None:
            scores = scores + mask
        probabilities = softmax(scores)
        probabilities = torch.nn.functional.dropout(probabilities, dropout, layer.training)
        out = torch.matmul(probabilities, value)
        return out.permute(0, 2, 1, 3).contiguous(), probabilities

    def biases(self: Any, *args: Any) -> Any:
        bias = original(self, *args)
        if bias is not None:
            bias.other = bias.clone()  # of one axis and of two: each its own until the encoder ends
        return bias

    encoder = module.LayoutLMv3Encoder
    original: Callable[..., Any] = encoder._compute_position_bias
    return patch_attributes(
        (module, "eager_attention_forward", attend), (encoder, "_compute_position_bias", biases)
    )


# -- what holds until when ------------------------------------------------------------------------

_SOFT_CAPS = dict.fromkeys("gemma2 t5gemma vaultgemma".split(), (5, 21))
_CLASSES = (Change(_sdpa_without_soft_caps, _SOFT_CAPS),)

_FUNCTIONS = (
    Change(_caches_without_copies, {"": (4, 56)}),
    Change(_repeated_heads, {"": (4, 54)}),
    Change(_ignored_soft_caps, _SOFT_CAPS),
    Change(_contiguous_operands, {"": (4, 56)}, since={"": (4, 48), "opt": (4, 53)}),
    # two families made their own float masks longer than the rest
    Change(_float_masks, {"": (4, 53), "gpt2": (4, 54), "opt": (5, 1)}),
    Change(_shifted_logits, {"": (4, 49)}),
    # First releases whose layers share cosines and sines (read: 4.37, 4.42, 4.44, 4.45, 4.46)
    Change(
        _rotary_of_each_layer,
        {
            "llama": (4, 43),
            **dict.fromkeys(
                "cohere persimmon phi qwen2 qwen2_moe stablelm starcoder2".split(), (4, 45)
            ),
            **dict.fromkeys("gemma gemma2 mistral mixtral olmo phi3".split(), (4, 47)),
        },
    ),
    Change(_hold_scores, dict.fromkeys(_BERT_LIKE, (5, 0))),
    Change(_scores_as_cogview, {"layoutlmv3": (5, 24)}),
)
