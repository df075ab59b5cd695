"""Sequence parallelism beside tensor parallelism, as torch's parallel styles do it.

Between the sharded layers every rank has its part of the tokens: ``RowwiseParallel`` scatters what
it reduces along the sequence, norms run on that part (``SequenceParallel``), and what goes into
attention and MLP is gathered again (``PrepareModuleInput``). The plan is the one that torchtitan
had for transformers' models while it used these styles (``apply_non_moe_tp`` of
``transformers_modeling_backend/parallelize.py``, until July 2026), which is that of its Llama
(``apply_tp``, until April) by other names. ``parallelize_module`` shards the model by it, so what
is gathered, scattered, copied to be contiguous and saved is torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from memest.config.parallelism import Distributed
from memest.errors import ConfigError
from memest.trace.inputs.batch import TensorPlan
from memest.trace.recorder import local
from memest.units import format_size

__all__ = [
    "MODELS",
    "drop_attention_mask",
    "loss_parallelism",
    "shard_sequences",
    "uncounted_notes",
]

MODELS = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers have the names and the order of the plan."""


def drop_attention_mask(
    plans: Sequence[TensorPlan], distributed: Distributed
) -> tuple[TensorPlan, ...]:
    """What the model is fed: no mask, which it would make for a rank's part of the tokens.

    transformers takes the length of its causal mask from the embeddings' output, and attention
    gets the whole sequence: with a mask the first forward stops, without one attention is causal.
    """
    if not distributed.tp_sequence_parallel:
        return tuple(plans)
    return tuple(plan for plan in plans if plan.name != "attention_mask")


def shard_sequences(model: Any, mesh: Any, distributed: Distributed) -> None:
    """Shard a model by the plan, and have it count the positions of whole sequences.

    Args:
        model: of transformers, on any device; embeddings and head are not tied.
        mesh: of the ranks that share its layers.
        distributed: says whether the loss is computed on shards of the vocabulary.

    Raises:
        ConfigError: a model that the plan does not fit, or widths that do not divide.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    _check_fits(model, mesh.size())
    outer, layer = _plans(shares_loss=distributed.tp_loss_parallel)
    parallelize_module(model, mesh, outer)
    for block in model.model.layers:
        norms = {name: style for name, style in _head_norms().items() if _has(block, name)}
        parallelize_module(block, mesh, {**layer(), **norms})
    model.register_forward_pre_hook(partial(_add_positions, mesh.size()), with_kwargs=True)


def _plans(*, shares_loss: bool) -> tuple[dict[str, Any], Any]:
    """The styles of what is around the layers, and what makes those of one layer."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    outer = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if shares_loss else Replicate(),
            use_local_output=not shares_loss,
        ),
    }

    def layer() -> dict[str, Any]:
        return {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }

    return outer, layer


def _head_norms() -> dict[str, Any]:
    """Norms of heads, which each rank has of its own heads: their sequence is the third side."""
    from torch.distributed.tensor.parallel import SequenceParallel

    return {
        f"self_attn.{name}": SequenceParallel(sequence_dim=2, use_local_output=True)
        for name in ("q_norm", "k_norm")
    }


def _has(module: torch.nn.Module, name: str) -> bool:
    return any(own == name for own, _ in module.named_modules())


def _add_positions(ranks: int, _model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``HFTransformerModel.forward`` of torchtitan: positions are those of the whole sequence.

    Left to itself the model would count the tokens that a rank has.

    Raises:
        ConfigError: no tokens, or as many as cannot be shared.
    """
    ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0] if args else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise ConfigError(
            "--tp-sequence-parallel: the model is not fed input_ids of batch and length, whose "
            "embeddings are cut along the sequence: name them among the inputs, or leave it out."
        )
    if ids.shape[1] % ranks:
        raise ConfigError(
            f"--tp-sequence-parallel: --tp {ranks} does not divide the {ids.shape[1]} tokens of a "
            "sequence, and torch's styles take equal parts: give a length that it divides."
        )
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    return args, kwargs


def _check_fits(model: Any, ranks: int) -> None:
    """Whether the model is one whose layers the plan names, in sizes that go by so many ranks."""
    config = model.config.get_text_config()
    kind = str(getattr(model.config, "model_type", ""))
    if kind not in MODELS or getattr(model, "loss_type", None) != "ForCausalLM":
        raise ConfigError(
            f"--tp-sequence-parallel knows the layers of causal language models of "
            f"{', '.join(MODELS)}, and this is {type(model).__name__}: with "
            f"--no-tp-sequence-parallel --tp {ranks} goes by transformers' own plan."
        )
    width = config.intermediate_size
    if width % ranks:
        # what comes out of gate and up is taken for equal parts (DTensor.from_local)
        raise ConfigError(
            f"--tp {ranks} does not divide the {width} columns of this model's MLP "
            "(intermediate_size), and torch's RowwiseParallel takes equal parts. Choose a --tp "
            "that does, or leave --tp-sequence-parallel out."
        )
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if slides or (kind == "mistral" and config.sliding_window is not None):
        raise ConfigError(
            f"--tp-sequence-parallel: {type(model).__name__} has layers with a sliding window "
            f"({config.sliding_window}), whose mask it would make of the tokens that one rank has. "
            f"With --no-tp-sequence-parallel --tp {ranks} goes by transformers' own plan."
        )


def uncounted_notes(model: Any) -> list[str]:
    """What of such a run is not counted, in sentences.

    A lookup's gradient is replicated (``embedding_dense_backward`` of DTensor's strategies) and
    those of norms are partial sums; an operator that takes them beside their parameters lays them
    out as these are first (``Redistribute``), and so does FSDP. Updates are traced on plain shards.
    With the head's weight tied to it, backward itself lays out the gradient of the table.

    Args:
        model: as a rank has it.
    """
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if head is table:
        return []
    part = local(table)
    note = (
        "the gradient of the embedding table is whole on each GPU, and torch copies the part that "
        f"belongs to it ({format_size(part.numel() * part.element_size())}) in the update, or "
        "under FSDP, where it is counted, before it is reduced: that copy in the update and the "
        "sums of the norms' gradients are not counted."
    )
    return [note]


def loss_parallelism(distributed: Distributed) -> AbstractContextManager[None]:
    """``loss_parallel`` around forward and backward, where logits stay shards of the vocabulary."""
    if not (distributed.tp_sequence_parallel and distributed.tp_loss_parallel):
        return nullcontext()
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()
