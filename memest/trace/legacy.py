"""Software of another time: what older transformers did differently inside a step.

A short list of mechanisms, each with the versions it holds for and its source; nothing here is
fitted. Those of torch itself live where the operator is decided (``cuda_ops``: softmax before
1.11; ``optimizers``: foreach from 2.0; ``training``: zero_grad from 2.0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from memest.setup import Attention, Setup
from memest.trace.plans import TensorPlan
from memest.trace.recorder import Recorder

__all__ = ["attention_of", "masks_as_before", "scores_kept"]

# Families whose attention was written like BERT's: the scores under their own name
_BERT_LIKE = frozenset(
    """bert roberta xlm-roberta camembert electra layoutlm rembert megatron-bert ernie vit deit
    data2vec-text roberta-prelayernorm""".split()
)
# First transformers whose class could use sdpa (training_semantics: model files of each version)
_SDPA_SINCE = {
    "llama": (4, 36), "mistral": (4, 36), "gemma": (4, 38), "gemma2": (4, 42), "phi": (4, 39),
    "qwen2": (4, 37), "falcon": (4, 36), "whisper": (4, 36), "bart": (4, 36), "bert": (4, 41),
    "vit": (4, 41), "deit": (4, 41), "roberta": (4, 48), "xlm-roberta": (4, 48),
    "camembert": (4, 48), "gpt2": (4, 44), "distilbert": (4, 45), "opt": (4, 46),
    "gpt_neox": (4, 45), "wav2vec2": (4, 36), "hubert": (4, 36), "gpt_bigcode": (4, 36),
    "starcoder2": (4, 39), "clip": (4, 46), "siglip": (4, 46), "dinov2": (4, 46),
}  # fmt: skip


def attention_of(model_type: str, setup: Setup) -> Attention:
    """The attention implementation that this transformers would have taken."""
    version = setup.software.transformers
    if setup.attn_implementation is not Attention.AUTO:
        return setup.attn_implementation
    if setup.software.torch is not None and setup.software.torch < (2, 0):
        return Attention.EAGER
    if version is None or version >= (5, 0):
        return Attention.AUTO
    since = _SDPA_SINCE.get(model_type)
    if since is None or version < since:
        return Attention.EAGER
    return Attention.AUTO


def masks_as_before(
    plans: tuple[TensorPlan, ...], model_type: str, attention: str, setup: Setup
) -> tuple[TensorPlan, ...]:
    """Eager encoders always added an extended mask [B, 1, 1, S] in the weights' dtype.

    Added to half-precision scores under autocast, the fp32 mask makes the scores fp32. Source:
    ``get_extended_attention_mask`` in transformers 4.15 to 4.57.
    """
    version = setup.software.transformers
    old = version is not None and version < (5, 0)
    if not old or attention != "eager" or model_type not in _BERT_LIKE:
        return plans
    return tuple(
        replace(p, shape=(p.shape[0], 1, 1, p.shape[1]), dtype=torch.float32, fill=None, value=None)
        if p.name == "attention_mask" and len(p.shape) == 2
        else p
        for p in plans
    )


@contextmanager
def scores_kept(recorder: Recorder, model_type: str, setup: Setup) -> Iterator[None]:
    """BERT-like attention kept ``attention_scores`` beside ``attention_probs`` until it returned.

    One more score matrix is alive from the softmax to the end of the attention's forward. Source:
    ``BertSelfAttention.forward`` of transformers 4.15 to 4.57; 5.0 rebinds one name.
    """
    version = setup.software.transformers
    if version is None or version >= (5, 0) or model_type not in _BERT_LIKE:
        yield
        return
    functional = torch.nn.functional
    original: Callable[..., Any] = functional.softmax

    def softmax(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dim() == 4:
            recorder.hold(x)
        return original(x, *args, **kwargs)

    with mock.patch.object(functional, "softmax", softmax):
        yield
