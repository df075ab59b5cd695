"""Context parallelism as torch and accelerate do it, on one rank that talks to nobody.

``torch.distributed.tensor.experimental.context_parallel`` runs as it is, on a mesh of PyTorch's
fake process group: it cuts the batch along the sequence, and its ring attention, called where the
model calls ``scaled_dot_product_attention``, allocates on meta what it allocates on a GPU. Around
it stands what accelerate (``Accelerator._prepare_cp``, ``maybe_context_parallel``) and the Trainer
(``_prepare_context_parallel_inputs``) do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from memest.config.setup import Attention, Loop, Setup
from memest.errors import ConfigError
from memest.trace.parallel.collectives import IGNORED, with_positions
from memest.trace.parallel.tensor_parallel import fake_group, quiet_shapes

__all__ = ["Split", "collate", "sequence_split"]

Batch = dict[str, torch.Tensor]
Split = Callable[[Batch], Any]


def check_attends_fully(model: Any) -> None:
    """Ring attention knows no mask but the causal one: ``_attach_context_parallel_hooks``.

    Raises:
        ConfigError: a model that attends otherwise, or not by ``sdpa``.
    """
    config: Any = getattr(model, "config", None)
    attention = str(getattr(config, "_attn_implementation", "") or "none by that name")
    if attention != Attention.SDPA.value:
        raise ConfigError(
            f"--cp needs scaled_dot_product_attention, and the attention of this model is "
            f"{attention}: write --attn-implementation sdpa."
        )
    if not any(name.endswith("self_attn") for name, _ in model.named_modules()):
        raise ConfigError(
            f"--cp: {type(model).__name__} has no modules named self_attn, from which accelerate "
            "takes the mask, as llama, mistral, qwen3 and other decoders have. Leave --cp out; "
            "--fsdp full_shard shards any model."
        )
    if getattr(model, "loss_type", None) != "ForCausalLM":
        raise ConfigError(
            f"--cp: {type(model).__name__} is not trained as a causal language model, and ring "
            "attention knows no other mask. Leave --cp out; --fsdp full_shard shards any model."
        )
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(config, "layer_types", None)
    slides = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    other = (
        slides if layers is None else sorted({str(kind) for kind in layers} - {"full_attention"})
    )
    if other:
        raise ConfigError(
            f"--cp: accelerate refuses layers of type {', '.join(other)}, as "
            f"{type(model).__name__} has them: ring attention is causal and sees all before. Leave "
            "--cp out; --fsdp full_shard shards any model."
        )


@contextmanager
def remove_masks(model: Any) -> Iterator[None]:
    """The hooks of ``_attach_context_parallel_hooks``: attention gets no mask and is causal."""

    def before(_module: Any, args: Any, kwargs: Any) -> Any:
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = None
            kwargs["is_causal"] = True
        return args, kwargs

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.endswith("self_attn"):
                hook = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
                stack.enter_context(hook)
        yield


def split_of(mesh: Any, setup: Setup) -> Split:
    """What a loop enters around forward and backward of a micro-batch."""
    from torch.distributed.tensor.experimental import _attention

    _attention.set_rotate_method(setup.distributed.cp_rotate.value)
    adds = setup.loop is Loop.TRAINER

    def split(inputs: Batch) -> Any:
        # a script's are all of its batch, as accelerate's example has it
        buffers = _prepare_buffers(inputs) if adds else list(inputs.values())
        return _attention.context_parallel(
            mesh,
            buffers=buffers,
            buffer_seq_dims=[1] * len(buffers),
            no_restore_buffers=set(buffers),
        )

    return split


def _prepare_buffers(inputs: Batch) -> list[torch.Tensor]:
    """``Trainer._prepare_context_parallel_inputs``: what it adds stays in the batch."""
    if "shift_labels" not in inputs and "labels" in inputs:
        labels = torch.nn.functional.pad(inputs["labels"], (0, 1), value=IGNORED)
        inputs["shift_labels"] = labels[:, 1:].contiguous()
    if "position_ids" not in inputs:
        ids = inputs["input_ids"]
        inputs["position_ids"] = torch.arange(ids.size(1), device=ids.device).expand(
            ids.size(0), -1
        )
    names = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")
    return [inputs[name] for name in names if name in inputs]


def collate(batch: Batch) -> Batch:
    """A script's collator shifts the labels and counts the positions before anything is split."""
    if "labels" in batch and "shift_labels" not in batch:
        batch["shift_labels"] = torch.empty_like(batch["labels"])
    return with_positions(batch)


def fullest_rank(ranks: int) -> int:
    """Whose steps are traced: the last but one, which needs as much as any other.

    A rank has the keys of those before it to attend to with all its queries, and of those behind
    it with half of them, whose results are joined to what is there (``_partial_update``). The last
    one never joins; the last but one does both, where there are three or more.
    """
    return max(ranks - 2, 0)


@contextmanager
def sequence_split(model: Any, setup: Setup) -> Iterator[Split | None]:
    """What a loop enters around a micro-batch; None where no sequence is shared.

    Raises:
        ConfigError: a model that cannot share sequences, or a process of a distributed run.
    """
    if setup.distributed.cp == 1:
        yield None
        return
    from torch.distributed.device_mesh import init_device_mesh

    check_attends_fully(model)
    ranks = setup.distributed.cp
    with fake_group(ranks, "--cp", fullest_rank(ranks)), quiet_shapes(), remove_masks(model):
        yield split_of(init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), setup)
