"""Loops of a script's own, plain, on accelerate or Lightning: what their calls say of a step."""

from __future__ import annotations

from memest.readers.mapping import KeyTable, read_table
from memest.readers.scripts.calling import root_of
from memest.readers.scripts.calls import optimizer_name, updated_part
from memest.readers.scripts.document import CallDocument
from memest.readers.scripts.found import Found
from memest.readers.scripts.lengths import put_lengths
from memest.readers.scripts.lightning import (
    LightningRun,
    lightning_of,
    put_gpus,
    put_precision,
)
from memest.readers.scripts.loop_body import read_body
from memest.readers.scripts.sharding import (
    DEEPSPEED_KEY,
    FSDP_KEY,
    put_ddp,
    put_own_sharding,
    put_plugins,
    put_strategy,
    with_deepspeeds_optimizer,
)
from memest.readers.scripts.things import Call, Symbol, Unknown, Value
from memest.readers.scripts.validation import read_validation
from memest.readers.scripts.vision import is_vision_load
from memest.readers.sharding import read_deepspeed_value, read_fsdp
from memest.readers.training_arguments import NO_LENGTH
from memest.readers.values import LENGTH, Bounded, DocumentReading, Either, Saving

__all__ = ["read_loop"]

_PLUGINS = {
    "gradient_accumulation_plugin": "how gradients add up; --grad-accum says it",
    "dynamo_plugin": Bounded("compilation; --torch-compile says it"),
    "kwargs_handlers": "",
}
_TIMM = "create_loader"
"""timm's function that makes a loader."""
_SAMPLES = 1
"""``batch_size`` of torch's DataLoader where it is not named."""


def read_loop(found: Found) -> tuple[DocumentReading, set[str]]:
    """A loop by its calls.

    Raises:
        ConfigError: a value that cannot be.
    """
    lightning = lightning_of(found)
    title = "a loop of its own" if lightning is None else "Lightning"
    document = CallDocument(found.source, "transformers", title)
    _accelerator(document, found)
    sharded = False
    for call in [each for each in found.named("Fabric") if each.receiver is None][:1]:
        put_precision(document, call, found)
        put_gpus(document, call)
        sharded = put_strategy(document, call)
    _batch(document, found, None if lightning is None else lightning.loader)
    put_lengths(document, found)
    _precision(document, found)
    _optimizer(document, found)
    _steps(document, found)
    if lightning is None:
        _zero_grad(document, found)
        read_body(document, found)
    else:
        lightning.read(document)
        sharded = put_strategy(document, lightning.trainer)
    loop, line = _whose(found, lightning)
    if loop == "accelerate":
        put_ddp(document, found)
    if loop == "plain" and not sharded:
        put_own_sharding(document, found)
    elif loop == "lightning" and sharded:
        # a script of the same calls, where gradients of the step before are alive until backward
        loop = "plain"
        why = "outputs are gone before backward: priced is a script's loop, which keeps them"
        document.miss(line, "training_step", Bounded(why))
        document.say("del_outputs", True, line)
        document.say("zero_grad_at", "before-backward", line)
    keys = document.keys()
    read_deepspeed_value(keys, DEEPSPEED_KEY, keys.take(DEEPSPEED_KEY))
    if FSDP_KEY in keys.document:
        # FullyShardedDataParallelPlugin: FSDP1 and NO_WRAP unless it says otherwise
        part = keys.part(FSDP_KEY)
        read_fsdp(keys, part, True, FSDP_KEY, version=1, wraps=False)
    keys.set_at("loop", loop, document.origin(line))
    read_table(keys, KeyTable(own_names=True))
    takes_text = found.load is None or not is_vision_load(found.load)
    if takes_text and keys.value_of("seq_len") is None and not document.has_missed("seq_len"):
        document.miss(_line_of_loop(found), LENGTH, NO_LENGTH)
    return document.reading(keys), document.used


def _whose(found: Found, lightning: LightningRun | None) -> tuple[str, int]:
    """The loop, and the line where it is made."""
    if lightning is not None:
        return "lightning", lightning.trainer.line
    accelerator = next(found.named("Accelerator"), None)
    if accelerator is not None:
        return "accelerate", accelerator.line
    return "plain", _line_of_loop(found)


def _line_of_loop(found: Found) -> int:
    """Where the first step of the loop is."""
    return next((call.line for call in found.named("backward", "step")), 0)


def _accelerator(document: CallDocument, found: Found) -> None:
    calls = [call for call in found.named("Accelerator") if call.receiver is None]
    for call in calls[:1]:
        mixed = call.keywords.get("mixed_precision")
        if mixed is not None and mixed.data is not None:
            off = mixed.data in ("no", False)
            document.put("precision", mixed.with_data("fp32") if off else mixed, call)
        steps = call.keywords.get("gradient_accumulation_steps")
        if steps is not None and any(found.named("accumulate")):
            document.put("grad_accum", steps, call)
        put_plugins(document, call)
        for key, why in _PLUGINS.items():
            value = call.keywords.get(key)
            if why and value is not None and value.data is not None:
                document.miss(call.line, key, why)


def _batch(document: CallDocument, found: Found, loader: Call | Unknown | None) -> None:
    """The batch of the loader that trains.

    Args:
        document: it is put into.
        found: the script.
        loader: that trains, where whoever trains is given it; None where nobody is.
    """
    if isinstance(loader, Unknown):
        document.miss_unknown("batch", loader, loader.line)
        return
    loaders = [call for call in found.named("DataLoader", _TIMM) if call.receiver is None]
    shuffling = [
        call
        for call in loaders
        if "sampler" in call.keywords
        or "batch_sampler" in call.keywords
        or (call.keywords.get("shuffle") or Value(None)).data is True
        or (call.keywords.get("is_training") or Value(None)).data is True
    ]
    # what the loop around the backward goes over; if that cannot be told, what shuffles
    steps = [call.loaders[-1:] for call in found.named("backward", "step") if call.loaders]
    training = [*steps[0]] if steps else shuffling
    training = training if loader is None else [loader]
    for call in (training or loaders)[:1]:
        value = call.argument(2 if call.name == _TIMM else 1, "batch_size")
        if call.name == _TIMM and call.keywords.get("use_prefetcher", Value(True)).data:
            document.miss(
                call.line, "use_prefetcher", "the next batch, which is on the GPU already"
            )
        if "batch_sampler" in call.keywords:
            document.miss_unknown("batch", Unknown("a batch sampler"), call.line)
        elif value is None:
            document.say("batch", _SAMPLES, call.line)
        else:
            document.put("batch", value, call.unconditional())
    read_validation(document, found, [call for call in loaders if call not in training])
    if not loaders:
        document.miss(
            0,
            "batch",
            Either("nothing that can be told makes batches: 8 samples are taken; --batch says it"),
        )


def _precision(document: CallDocument, found: Found) -> None:
    """``torch.autocast``: float16 on CUDA unless a dtype is named."""
    calls = [call for call in found.named("autocast") if call.library == "torch"]
    for call in calls:
        device = call.argument(0, "device_type")
        is_cuda_amp = "cuda" in call.path
        enabled = call.keywords.get("enabled")
        off = enabled is not None and enabled.data is False
        if off or (device is not None and device.data == "cpu"):
            continue
        place = 1 if not is_cuda_amp else -1
        dtype = call.argument(place, "dtype") or Value(Symbol("torch.float16"))
        names = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
        data = names.get(dtype.data.name) if isinstance(dtype.data, Symbol) else None
        data = data or names.get(str(dtype.data))
        if enabled is not None and not isinstance(enabled.data, bool):
            document.put("precision", enabled, call)
        elif data is None:
            document.put("precision", dtype.with_data(Unknown("the dtype of autocast")), call)
        else:
            value = dtype.with_data(data)
            document.put("precision", value if enabled is None else value.beside(enabled), call)
        return


def _optimizer(document: CallDocument, found: Found) -> None:
    for call in found.optimizers[:1]:
        name = optimizer_name(call)
        if name is None:
            why = "memest does not know it: torch's AdamW is priced; --optim says it"
            document.miss(call.line, call.path, why)
            document.say("optim", "adamw_torch", call.line)
        else:
            document.say("optim", name, call.line)
        decay = call.keywords.get("weight_decay")
        if decay is not None:
            document.put("weight_decay", decay, call.unconditional())
        part = updated_part(call)
        if part:
            document.miss(call.line, call.name, Saving(part))
        amsgrad = call.keywords.get("amsgrad")
        if amsgrad is not None and amsgrad.data is not False:
            document.miss(call.line, "amsgrad", "a further state")
    for call in found.optimizers[1:]:
        document.miss(call.line, call.name, "a further optimizer: priced is the first")
    if not found.optimizers and with_deepspeeds_optimizer(found):
        document.say("optim", "adamw_torch", _line_of_loop(found))
    elif not found.optimizers:
        line = _line_of_loop(found)
        why = "it cannot be told: torch's AdamW is priced; --optim says it"
        document.miss(line, "optimizer", Either(why))
        document.say("optim", "adamw_torch", line)


def _steps(document: CallDocument, found: Found) -> None:
    """Accumulation by ``if step % N == 0``, and clipping."""
    for call in found.named("step"):
        if "grad_accum" in document or not call.loops or call.every is None:
            continue
        if not _is_scheduler(call) and call.every.data is not None:
            document.put("grad_accum", call.every, call.unconditional())
    for call in found.named("clip_grad_norm_", "clip_gradients"):
        value = call.argument(1 if call.name == "clip_grad_norm_" else -1, "max_norm")
        if value is not None:
            document.put("max_grad_norm", value, call.unconditional())


def _is_scheduler(call: Call) -> bool:
    root = root_of(call.receiver)
    words = root.path if isinstance(root, Call) else getattr(root, "why", "")
    return "sched" in words.lower()


def _zero_grad(document: CallDocument, found: Found) -> None:
    """Where gradients are given back: behind the step, or before what comes next."""
    calls = found.calls
    backwards = [place for place, call in enumerate(calls) if call.name == "backward"]
    for place, call in enumerate(calls):
        if call.name != "zero_grad" or not call.loops or not backwards:
            continue
        flag = call.argument(0, "set_to_none")
        if flag is not None and flag.data is False:
            document.say("zero_grad", "zero", call.line)
        if place < backwards[0]:
            forwards = [
                at
                for at, each in enumerate(calls)
                if each.path in ("()", "?.model") and each.loops == call.loops and at < backwards[0]
            ]
            late = any(at < place for at in forwards)
            document.say("zero_grad_at", "before-backward" if late else "before-forward", call.line)
        return
