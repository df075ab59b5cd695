"""From a Trainer's arguments and its first batch to the question that memest is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memest.config.options import setup_from_options
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.trace.isolation import keep_random_states

__all__ = ["first_batch", "setup_of_arguments", "unseen_of"]

_SAME = tuple(
    """optim_args optim_target_modules weight_decay max_grad_norm bf16 fp16
    gradient_accumulation_steps use_liger_kernel""".split()
)
"""Arguments whose names and values are options of an estimate as they are."""
_DDP = ("ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph")


def setup_of_arguments(args: Any, *, batch: int | None = None, seq_len: int | None = None) -> Setup:
    """The training setup of ``TrainingArguments``.

    Args:
        args: of the Trainer.
        batch: samples of the first real batch; None = as the arguments say.
        seq_len: tokens of a sample, where no real batch says it.

    Raises:
        ConfigError: something in them that memest does not price.
    """
    options: dict[str, Any] = {name: getattr(args, name, None) for name in _SAME}
    options = {name: value for name, value in options.items() if value not in (None, "", ())}
    options |= {"loop": "trainer", "batch": batch or args.per_device_train_batch_size}
    options["optim"] = _text(args.optim)
    if seq_len is not None:
        options["seq_len"] = seq_len
    recompute = getattr(args, "activation_checkpointing", None)
    if recompute is None:
        recompute = getattr(args, "gradient_checkpointing", False)
    if recompute:
        options["checkpointing"] = "full"
        kwargs = getattr(args, "activation_checkpointing_kwargs", None) or getattr(
            args, "gradient_checkpointing_kwargs", None
        )
        if kwargs:
            options["gradient_checkpointing_kwargs"] = dict(kwargs)
    if _text(getattr(args, "eval_strategy", "no")) != "no":
        options["eval_batch"] = args.per_device_eval_batch_size
        if getattr(args, "eval_accumulation_steps", None):
            options["eval_accumulation_steps"] = args.eval_accumulation_steps
    options |= _several_gpus(args)
    return setup_from_options(**options)


def _several_gpus(args: Any) -> dict[str, Any]:
    """How the run is spread.

    Raises:
        ConfigError: in a way that is not read from arguments.
    """
    world = int(getattr(args, "world_size", 1) or 1)
    if world <= 1:
        if int(getattr(args, "n_gpu", 0) or 0) > 1:
            raise ConfigError(
                "the Trainer uses nn.DataParallel, which memest does not price: launch one process "
                "a GPU (torchrun), or set CUDA_VISIBLE_DEVICES."
            )
        return {}
    options: dict[str, Any] = {"num_gpus": world}
    if getattr(args, "deepspeed", None):
        return options | {"zero_settings": args.deepspeed}
    if getattr(args, "fsdp", None):
        fsdp = getattr(args, "fsdp_config", None) or {}
        options["fsdp"] = "full_shard"
        wrap = fsdp.get("transformer_layer_cls_to_wrap")
        if wrap:
            options["transformer_layer_cls_to_wrap"] = wrap
        return options
    ddp = {name: getattr(args, name, None) for name in _DDP}
    return options | {name: value for name, value in ddp.items() if value is not None}


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def unseen_of(args: Any, trainer: Any = None) -> list[str]:
    """What of a Trainer's run no prediction covers, in words."""
    remarks = []
    for name, text in (
        ("torch_compile", "torch_compile: eager execution is priced"),
        ("label_smoothing_factor", "label smoothing: the model's own loss is priced"),
        ("neftune_noise_alpha", "NEFTune noise is not priced"),
        ("auto_find_batch_size", "auto_find_batch_size: the first batch size is priced"),
        ("torch_empty_cache_steps", "torch_empty_cache_steps is not priced"),
    ):
        if getattr(args, name, None):
            remarks.append(text)
    if getattr(trainer, "compute_loss_func", None) is not None:
        remarks.append("compute_loss_func: the model's own loss is priced")
    return remarks


@keep_random_states
def first_batch(loader: Any) -> dict[str, Any] | None:
    """The first batch of a loader as its collator makes it, without moving the loader.

    Samples are taken by the loader's own sampler and random generators are put back, so training
    begins with the same batch.

    Returns:
        Tensors by name; None where the loader has no sampler to ask (a stream), or makes batches
        that are no dicts of tensors.
    """
    import torch

    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    collate = getattr(loader, "collate_fn", None)
    stream = isinstance(dataset, torch.utils.data.IterableDataset)
    if stream or dataset is None or sampler is None or collate is None:
        return None
    generators = [
        g
        for s in (loader, sampler, getattr(sampler, "sampler", None))
        if isinstance(g := getattr(s, "generator", None), torch.Generator)
    ]
    states = [g.get_state() for g in generators]
    try:
        indices = next(iter(sampler), None)
        if not indices:
            return None
        many = getattr(dataset, "__getitems__", None)
        samples = many(indices) if callable(many) else [dataset[i] for i in indices]
        batch = collate(samples)
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
    if not isinstance(batch, Mapping):
        return None
    tensors = {str(name): value for name, value in batch.items() if value is not None}
    return tensors if all(isinstance(v, torch.Tensor) for v in tensors.values()) else None
