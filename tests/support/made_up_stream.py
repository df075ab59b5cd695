"""A small stream of a run that nobody traced: layers, two steps, marks, modules, operators."""

from __future__ import annotations

from memest.events import Mark, Phase
from memest.profiles.stream import Stream

LAYERS, STEPS = 6, 2


def made_up_stream(*, layers: int = LAYERS, steps: int = STEPS) -> Stream:
    """Weights, then steps: forward keeps two results of each layer, backward drops them."""
    stream = Stream(module_names=["", *(f"encoder.layer.{i}.mlp" for i in range(layers))])

    def birth(label: str, module: int, size: int) -> int:
        number = len(stream.sizes)
        if label not in stream.label_names:
            stream.label_names.append(label)
        stream.labels.append(stream.label_names.index(label))
        stream.modules.append(module)
        stream.categories.append(0)
        stream.places.append(number)
        stream.sizes.append(size)
        stream.events.append(number)
        return number

    def mark(phase: Phase, step: int, micro: int = 0) -> None:
        stream.marks.append(Mark(phase, step, micro))
        stream.mark_positions.append(len(stream.events))

    mark(Phase.LOAD, 0)
    for layer in range(layers):
        birth("load", layer + 1, 3_000_000)
        birth("load", layer + 1, 4096)
    for step in range(1, steps + 1):
        mark(Phase.BATCH, step)
        batch = birth("batch", 0, 8192)
        mark(Phase.FORWARD, step, 1)
        saved_results = []
        for layer in range(1, layers + 1):
            product = birth("aten.addmm.default", layer, 1_500_000)
            scratch = birth("aten.addmm.default: scratch", layer, 70_000)
            result = birth("aten.gelu.default", layer, 1_600_000)
            stream.events.append(~scratch)
            saved_results.append((product, result))
        mark(Phase.BACKWARD, step, 1)
        gradients = []
        for layer in range(layers, 0, -1):
            product, result = saved_results.pop()
            inner = birth("aten.gelu_backward.default", layer, 1_600_000)
            stream.events.append(~result)
            gradients.append(birth("aten.mm.default", layer, 3_000_000))
            stream.events.extend((~inner, ~product))
        mark(Phase.OPTIMIZER, step)
        for layer in range(1, layers + 1):
            if step == 1:
                birth("aten.zeros_like.default", layer, 3_000_000)
            root = birth("aten.sqrt.default", layer, 3_100_000)
            stream.events.append(~root)
        mark(Phase.ZERO_GRAD, step)
        stream.events.extend(~number for number in gradients)
        stream.events.append(~batch)
    return stream
