"""Models of timm and torchvision as scripts make them, ``timm.create_model("resnet50")``.

Priced is memest's ``timm/NAME`` and ``torchvision/NAME``, with the loss of such scripts, a cross
entropy.
"""

from __future__ import annotations

from collections.abc import Iterable

from memest.readers.scripts.document import MODEL_KEY, CallDocument
from memest.readers.scripts.things import Call, Unknown, Value, known
from memest.readers.values import Bounded

__all__ = ["HEADS", "is_vision_load", "put_image_size", "put_vision_model"]

HEADS = frozenset(("fc", "head", "classifier", "heads"))
"""Where these models have their last layer, which scripts replace for classes of their own."""
_MAKERS = ("create_model", "get_model")
"""Functions that take the name of a model."""
_IGNORED = frozenset(
    """pretrained pretrained_cfg checkpoint_path weights progress drop_rate drop_path_rate
    drop_block_rate scriptable exportable weights_backbone""".split()
)
"""What they are given that changes no size but that of masks."""
_GROUPS = ("segmentation", "detection", "video", "optical_flow", "quantization", "resnet", "vgg")
_CROPS = ("RandomResizedCrop", "CenterCrop", "RandomCrop")
_RESIZES = ("Resize",)
_OWN_SIZE = ("create_transform", "resolve_data_config", "resolve_model_data_config", "transforms")
"""Functions that make transforms of the model's own size."""
_HUB = ("hf-hub:timm/", "hf_hub:timm/", "timm/")


def is_vision_load(call: Call) -> bool:
    """Whether a call makes a model of timm or torchvision."""
    parts = call.path.split(".")
    if parts[0] == "timm":
        return parts[-1] == "create_model"
    if parts[:2] != ["torchvision", "models"] or not set(parts[2:-1]) <= set(_GROUPS):
        return False
    name = parts[-1]
    return name == "get_model" or (name.islower() and not name.startswith(("get_", "list_")))


def put_vision_model(document: CallDocument, load: Call, head: Call | None) -> None:
    """Put down which model it is, and how many classes it has.

    Args:
        document: it is put into.
        load: for which :func:`is_vision_load` holds.
        head: the layer that the script puts in the place of the last one, if it does.
    """
    library = load.path.partition(".")[0]
    name = Value(load.name)
    if load.name in _MAKERS:
        name = load.argument(0, "model_name", "name") or Value(Unknown("no name", load.line))
    if isinstance(name.data, str):
        short = name.data
        for start in _HUB:
            short = short.removeprefix(start)
        name = name.with_data(f"{library}/{short}")
    document.put(MODEL_KEY, name, load)
    for key, value in load.keywords.items():
        data = known(value.data)
        if key in _IGNORED or key in ("model_name", "name"):
            continue
        if key == "num_classes":
            _classes(document, value, load)
        elif key in ("img_size", "image_size"):
            document.put("image_size", value, load)
        elif isinstance(data, (bool, int, float, str)):
            document.entries[key] = data
        elif data is not None:
            document.miss(load.line, key, "an argument of the model that cannot be told")
    if head is not None:
        _classes(document, head.argument(1, "out_features") or Value(None), head)


def put_image_size(document: CallDocument, load: Call, calls: Iterable[Call]) -> None:
    """Put down how large images are, as the transforms make them: the largest crop, else resize."""
    if "image_size" in document:
        return
    made = [call for call in calls if call.name in (*_CROPS, *_RESIZES, *_OWN_SIZE)]
    if any(call.name in _OWN_SIZE for call in made):
        return  # of the model itself
    for names in (_CROPS, _RESIZES):
        sizes = [
            (call, value)
            for call in made
            for value in [call.argument(0, "size", "height") if call.name in names else None]
            if value is not None
        ]
        sides = [(call, value, _side(value.data)) for call, value in sizes]
        if sides and all(side for *_, side in sides):
            call, value, side = max(sides, key=lambda each: each[2])
            document.put("image_size", value.with_data(side), Call(call.path, call.line))
            return
        if sides:
            break
    why = "nothing that can be told names it: the model's own is taken; --image-size says it"
    document.miss(load.line, "size of images", why)


def _side(data: object) -> int:
    """The side of a square; 0 for what is none, or cannot be told."""
    if isinstance(data, list) and data and all(each == data[0] for each in data):
        data = data[0]
    return data if isinstance(data, int) and not isinstance(data, bool) else 0


def _classes(document: CallDocument, value: Value, call: Call) -> None:
    if isinstance(value.data, int):
        document.put("num_labels", value, call)
    else:
        why = "it cannot be told: the head is the model's own; --num-labels says it"
        document.miss(call.line, "number of classes", Bounded(why))
