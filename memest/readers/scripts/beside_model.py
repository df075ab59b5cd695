"""What a script has on the GPU beside its model, and what it tells PyTorch: all of it is named."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from memest.readers.scripts.calling import innermost, root_of
from memest.readers.scripts.document import CallDocument
from memest.readers.scripts.found import Found
from memest.readers.scripts.lightning import lightning_of
from memest.readers.scripts.things import Call, Function, Value
from memest.readers.values import Either, Saving

__all__ = ["read_beside"]

_HOOKS = frozenset(
    """register_forward_hook register_forward_pre_hook register_module_forward_hook
    register_full_backward_hook register_hook""".split()
)
_KERNELS = frozenset(
    """enable_flash_sdp enable_mem_efficient_sdp enable_math_sdp enable_cudnn_sdp
    sdp_kernel sdpa_kernel""".split()
)
_MAKERS = frozenset("zeros ones empty full rand randn randint arange eye".split())
_LARGE = 1 << 20
"""Elements below which a tensor of a script's own is no matter."""
_NO_WEIGHTS = ("Loss", "Dropout", "ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "Softmax", "Identity")
_MODELS_OF_OTHERS = ("clip.load", "timm.create_model", "torch.hub.load")
"""Functions that make models, beside classes."""
_NO_MODELS = ("torch", "torchmetrics", "torchvision", "numpy", "accelerate")
_SMALL = ("Loss", "Criterion", "Metric", "Meter", "Accuracy", "Processor", "Tokenizer", "Scheduler")
"""Ends of names of classes that hold hardly a weight."""
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "Module", "ModuleList", "Sequential")


def read_beside(document: CallDocument, found: Found) -> None:
    """Name it."""
    document.miss_each((call.line, what, why) for call, what, why in _besides(found))


def _besides(found: Found) -> Iterator[tuple[Call, str, str]]:
    is_lightning = lightning_of(found) is not None
    for call in found.early(found.calls):
        name = call.name
        if name == "DistributedDataParallel" and not is_lightning:
            why = "buckets of gradients beside them on every GPU: priced is one; --num-gpus says it"
            yield call, name, why
        elif name in _HOOKS and not _wants_gradients(call):
            yield call, name, Either("what a hook keeps is not read: priced without")
        elif name == "register_post_accumulate_grad_hook":
            why = "gradients may be used up one by one: all are priced at once"
            yield call, name, Saving(why)
        elif name in _KERNELS and call.library == "torch":
            why = "which kernel attention has is not read; --sdpa-backend says it"
            yield call, name, Either(why)
        elif name in _MAKERS and call.library == "torch" and not call.loops:
            if _is_on_gpu(call) and _elements(call) >= _LARGE:
                yield call, call.path, "a tensor of the script's own on the GPU"
        elif (beside := _moved_beside(call, found)) is not None:
            is_copy = beside.path == "copy.deepcopy"
            what = "copies of the weights" if is_copy else "a further model in memory"
            name = beside.kind if beside.kind[:1].isupper() else beside.path
            yield beside, name, f"{what}, on the GPU: priced without"
        elif _is_further_module(call, found):
            yield call, call.path, "a module of the script's own beside the model: priced without"


def _moved_beside(call: Call, found: Found) -> Call | None:
    """What makes a module that is moved to a device and is not the one that trains."""
    made = root_of(call.receiver) if call.name in ("to", "cuda") else None
    if not isinstance(made, Call) or call.loops or found.model is None:
        return None
    if made in (root_of(found.model), innermost(found.model), found.load) or made in found.loads:
        return None
    if made.path == "copy.deepcopy":
        given = made.argument(0, "x")
        copied = None if given is None else root_of(given.data)
        of_model = isinstance(copied, Call) and copied in (root_of(found.model), found.load)
        return None if of_model else made  # what is copied of the model is named as a change
    if made.path in _MODELS_OF_OTHERS:
        return made
    is_class = made.kind[:1].isupper() and made.library not in _NO_MODELS
    return made if is_class and not made.kind.endswith(_SMALL) else None


def _wants_gradients(call: Call) -> bool:
    """Whether a hook is the usual one, which makes what a layer takes require gradients."""
    hook = call.argument(0, "hook")
    node = hook.data.node if hook is not None and isinstance(hook.data, Function) else None
    return "require" in getattr(node, "name", "")


def _is_on_gpu(call: Call) -> bool:
    device = call.keywords.get("device")
    data = None if device is None else device.data
    if isinstance(data, Call):  # torch.device("cuda")
        first = data.argument(0, "device")
        data = None if first is None else first.data
    return not (data is None or (isinstance(data, str) and data.startswith("cpu")))


def _elements(call: Call) -> int:
    """Elements of a tensor, as many as it takes where they cannot be told."""
    sizes: list[object] = []
    for value in call.arguments:
        sizes += value.data if isinstance(value.data, list) else [value.data]
    numbers = [size for size in sizes if isinstance(size, int)]
    return prod(numbers) if len(numbers) == len(sizes) else _LARGE


def _is_further_module(call: Call, found: Found) -> bool:
    """Whether a call makes layers that are no part of the model that is loaded."""
    if not call.path.startswith("torch.nn.") or not call.name[:1].isupper() or call.owner:
        return False
    if call.path.startswith(("torch.nn.utils.", "torch.nn.parallel.", "torch.nn.attention.")):
        return False
    if call.name in _WRAPPERS or call.name.endswith(_NO_WEIGHTS) or found.load is None:
        return False
    # what is put into the model is named as a change of it
    return not any(
        each.path.startswith("=") and any(_is(value, call) for value in each.arguments)
        for each in found.calls
    )


def _is(value: Value, call: Call) -> bool:
    return root_of(value.data) is call
