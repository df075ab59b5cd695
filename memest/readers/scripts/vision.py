"""Models of timm and torchvision as scripts make them, ``timm.create_model("resnet50")``.

Priced is memest's ``timm/NAME`` and ``torchvision/NAME``, with the loss of such scripts, a cross
entropy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from memest.readers.scripts.document import MODEL_KEY, CallDocument
from memest.readers.scripts.things import Call, Unknown, Value, known
from memest.readers.values import Bounded, Either

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
_SIZED = ("RandomResizedCrop", "RandomCrop", "CenterCrop", "Resize")
"""Transforms that make images of a size."""
_OWN_SIZE = ("create_transform", "resolve_data_config", "resolve_model_data_config", "transforms")
"""Functions that make transforms of the model's own size."""
_PROCESSORS = ("ImageProcessor", "ImageProcessorFast", "FeatureExtractor", "AutoProcessor")
_OF_MODEL = re.compile(r"(?i)processor|extractor|config|pretrained_cfg|\.(crop_)?size\b")
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
            document.miss(load.line, key, Either("an argument of the model that cannot be told"))
    if head is not None:
        _classes(document, head.argument(1, "out_features") or Value(None), head)


def put_image_size(document: CallDocument, load: Call, calls: Sequence[Call]) -> None:
    """Put down how large images are, where all transforms that train make them of one size."""
    if "image_size" in document or any(call.name in _OWN_SIZE for call in calls):
        return
    for call in calls:
        if call.library == "timm" and call.name == "create_loader":
            given = call.argument(1, "input_size") or Value(None)
            sides = given.data[-2:] if isinstance(given.data, list) else given.data
            _put_side(document, given.with_data(sides), call)
            return
    processors = [call for call in calls if call.maker.endswith(_PROCESSORS)]
    for call in processors:
        if (size := call.keywords.get("size")) is not None:
            _put_side(document, size, call)
            return
    composed = [_composed(call) for call in calls if call.name == "Compose"]
    inside = [step for steps in composed for step in steps]
    loose = [[call] for call in calls if call.name in _SIZED and call not in inside]
    pipelines = [*composed, *loose]
    training = [steps for steps in pipelines if any(s.name.startswith("Random") for s in steps)]
    sized = [[step for step in steps if step.name in _SIZED] for steps in training or pipelines]
    last = [steps[-1] for steps in sized if steps]  # what comes last decides
    sizes = [call.argument(0, "size", "height") for call in last]
    if processors and (not last or any(_is_of_processor(size) for size in sizes)):
        return  # of the model's own size, which its processor makes
    if not last and not is_vision_load(load):
        return
    resized = any(call.path == "()" and call.receiver in processors for call in calls)
    first = last[0] if len({_side(size) for size in sizes}) == 1 and not resized else load
    _put_side(document, sizes[0] if first is not load else None, first)


def _put_side(document: CallDocument, size: Value | None, call: Call) -> None:
    if side := _side(size):
        document.put("image_size", Value(side), Call(call.path, call.line))
    else:
        why = "nothing that can be told names one: the model's own is taken; --image-size says it"
        document.miss(call.line, "size of images", Either(why))


def _is_of_processor(size: Value | None) -> bool:
    """Whether a size is what a processor or a model says: ``processor.size["height"]``."""
    why = size.data.why if size is not None and isinstance(size.data, Unknown) else ""
    return bool(_OF_MODEL.search(why))


def _composed(call: Call) -> list[Call]:
    """The transforms of a ``Compose([...])``."""
    steps = call.argument(0, "transforms")
    parts = steps.data if steps is not None and isinstance(steps.data, list) else []
    return [part for part in parts if isinstance(part, Call)]


def _side(size: Value | None) -> int:
    """The side of a square; 0 for what is none, or cannot be told."""
    data = None if size is None else size.data
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, list) and data and all(each == data[0] for each in data):
        data = data[0]
    return data if isinstance(data, int) and not isinstance(data, bool) else 0


def _classes(document: CallDocument, value: Value, call: Call) -> None:
    if isinstance(value.data, int):
        document.put("num_labels", value, call)
    else:
        why = "it cannot be told: the head is the model's own; --num-labels says it"
        document.miss(call.line, "number of classes", Bounded(why))
