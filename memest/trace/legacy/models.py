"""Software of another time: what models had when older transformers had built them."""

from __future__ import annotations

from typing import Any

import torch

from memest.config.setup import Setup
from memest.trace.legacy.changes import Change, Release, changes_of
from memest.trace.legacy.transformers import release_of

__all__ = ["model_as_before"]


def model_as_before(model: torch.nn.Module, model_type: str, setup: Setup) -> None:
    """Give a freshly built model what its class of that time had."""
    release = release_of(setup)
    for change in changes_of(_MODELS, release, model_type):
        change.patch(model, release)


def _rotary_tables(model: torch.nn.Module, _release: Release) -> None:
    """Every layer held cosines and sines of all positions, in the dtype of the weights.

    Source: ``LlamaRotaryEmbedding._set_cos_sin_cache`` of 4.36 to 4.40 and its copies.
    """
    config: Any = model.config
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    for module in model.modules():
        head = getattr(module, "head_dim", None)
        if not type(module).__name__.endswith("Attention") or head is None:
            continue
        share = getattr(config, "partial_rotary_factor", None)
        share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", share)
        shape = (int(config.max_position_embeddings), int(head * (share or 1)))
        for name in ("cos_cached", "sin_cached"):
            table = torch.empty(shape, dtype=dtype, device="meta")
            module.register_buffer(name, table, persistent=False)


def _float_logits(model: torch.nn.Module, _release: Release) -> None:
    """Logits were cast to float32 by the model itself, with labels or without.

    In half precision a script that keeps ``outputs`` keeps them at four bytes an element. Source:
    ``LlamaForCausalLM.forward`` of 4.37 to 4.45 and its copies; from then on the loss casts.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if head is not None and type(model).__name__.endswith("ForCausalLM"):
        head.register_forward_hook(lambda _module, _inputs, logits: logits.float())


def _causal_buffers(model: torch.nn.Module, release: Release) -> None:
    """GPT-2 kept a causal mask of all positions in every layer, one byte an element.

    Source: ``GPT2Attention.__init__`` of 4.18 to 5.0 (``bias``; ``masked_bias`` until 4.57).
    """
    for module in model.modules():
        if type(module).__name__ != "GPT2Attention" or hasattr(module, "bias"):
            continue
        size = int(module.config.max_position_embeddings)
        bias = torch.empty((1, 1, size, size), dtype=torch.bool, device="meta")
        module.register_buffer("bias", bias, persistent=False)
        if release < (5, 0):
            masked_bias = torch.empty((), dtype=torch.float32, device="meta")
            module.register_buffer("masked_bias", masked_bias, persistent=False)


def _sinusoids_of_layers(model: torch.nn.Module, _release: Release) -> None:
    """Every layer but the first kept a table of positions beside the one that is the model's now.

    Source: ``embed_positions`` of ``GPTJAttention`` and ``CodeGenAttention`` until 5.23, of their
    rotary modules in 5.24.
    """
    modules = [m for m in model.modules() if type(m).__name__.startswith(("GPTJ", "CodeGen"))]
    tables = [m.embed_positions for m in modules if hasattr(m, "embed_positions")]
    layers = [m for m in modules if type(m).__name__.endswith("Attention")]
    if len(tables) == 1:
        for layer in layers[1:]:
            layer.register_buffer("embed_positions", tables[0].clone(), persistent=False)


class _NoScaling:
    """Stands for a factor that is applied later: multiplying by it returns the tensor itself."""

    def __rmul__(self, other: Any) -> Any:
        return other


def _skip_query_scaling(model: torch.nn.Module, _release: Release) -> None:
    """OPT left the scaling of the queries to sdpa, so no scaled copy of them was made.

    Source: ``OPTSdpaAttention.forward`` of 4.46 to 4.52; from 4.53 on the shared attention function
    is called with scaled queries.
    """
    if getattr(model.config, "_attn_implementation", "") != "sdpa":
        return
    for module in model.modules():
        if type(module).__name__ == "OPTAttention":
            module.scaling = _NoScaling()


# -- until when ------------------------------------------------------------------------------------

_MODELS = (
    Change(_causal_buffers, {"gpt2": (5, 1)}),
    Change(_sinusoids_of_layers, dict.fromkeys(("codegen", "gptj"), (5, 24))),
    Change(_skip_query_scaling, {"opt": (4, 53)}),
    # First releases whose causal forward returned logits in the dtype of the head: all of these
    # said ``logits = logits.float()`` in every release before that could use sdpa (read: 4.37,
    # 4.42, 4.44, 4.45, 4.46)
    Change(
        _float_logits,
        {
            **dict.fromkeys(
                """cohere gemma gemma2 jamba llama mixtral nemotron olmo olmoe phi phi3 qwen2
                qwen2_moe""".split(),
                (4, 46),
            ),
            **dict.fromkeys("granite mistral starcoder2".split(), (4, 47)),
        },
    ),
    # Until when each attention kept tables of its own (read: 4.37, 4.38, 4.40 and 4.42)
    Change(
        _rotary_tables,
        {
            **dict.fromkeys("llama mistral".split(), (4, 41)),
            **dict.fromkeys(
                "mixtral persimmon phi qwen2 qwen2_moe stablelm starcoder2".split(), (4, 43)
            ),
        },
    ),
)
