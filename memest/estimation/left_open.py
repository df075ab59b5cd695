"""What a question leaves open, and what another choice would change: run, not judged.

Only choices whose steps are known already are run, so that an answer waits for no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memest.config.parallelism import ONE_GPU
from memest.config.positions import assumed_length
from memest.config.setup import Dtype, Setup
from memest.errors import MemestError
from memest.estimation.gpu_target import TargetGpus
from memest.report.result import Estimate, GpuFit, OpenChoice

__all__ = ["Alternatives", "gpu_words", "left_open"]

_HALF_BYTES = 2
_MATTERS = 0.01
"""Of the device peak: what changes less is not told."""
_SMALL_STATES = "adamw_bnb_8bit"


@dataclass(frozen=True, slots=True)
class Alternatives:
    """What another choice comes to.

    Attributes:
        request: the setup as it was asked for.
        device_bytes: the expected device peak of a setup; raises MemestError where that is not
            known without a trace, or cannot be.
    """

    request: Setup
    device_bytes: Callable[[Setup], int]

    def choice(self, text: str, other: Any, device: int, **changes: Any) -> OpenChoice | None:
        """What another choice changes; None where that is not known.

        Args:
            text: what was assumed.
            other: the choice, as it is shown.
            device: the device peak of the question.
            changes: of the request.
        """
        try:
            changed = self.device_bytes(replace(self.request, **changes))
        except MemestError:
            return None
        return OpenChoice(text=text, instead=f"with {other}", change_bytes=changed - device)


def gpu_words(targets: TargetGpus) -> str:
    """What is said of kernels where no GPU of the catalogue is named; else empty."""
    main = targets.main
    if targets.named_gpus and main.name == main.spec.name:
        return ""
    return f"kernels and workspaces as on {main.spec.name} (name a GPU with --gpu)"


def left_open(estimate: Estimate, targets: TargetGpus, others: Alternatives) -> Estimate:
    """The estimate with what its question leaves open, what changes most first.

    Args:
        estimate: of the question.
        targets: the GPUs it is about.
        others: what other choices come to.
    """
    device = estimate.peak.device_bytes
    found = (
        *_lengths(estimate, others, device),
        *_weights(estimate, others),
        *_optimizers(estimate, others, device),
        *_gpus(estimate.common_gpus, targets, device),
    )
    choices = [each for each in found if abs(each.change_bytes) >= _MATTERS * device]
    choices.sort(key=lambda each: -abs(each.change_bytes))
    return replace(estimate, left_open=tuple(choices))


def _lengths(estimate: Estimate, others: Alternatives, device: int) -> Iterator[OpenChoice]:
    """Twice the length, or half of it where the model ends before."""
    length = estimate.setup.seq_len
    if length is None or others.request.seq_len is not None:
        return
    text = assumed_length(length)
    for other in (2 * length, length // 2):
        if found := others.choice(text, other, device, seq_len=other):
            yield found
            return


def _weights(estimate: Estimate, others: Alternatives) -> Iterator[OpenChoice]:
    """Float32 in place of the half precision that a configuration names."""
    model, setup = estimate.model, estimate.setup
    words = f"{model.class_name} with "
    half = [
        text
        for text in estimate.assumptions
        if text in (f"{words}bfloat16 weights", f"{words}float16 weights")
    ]
    if not half or others.request.loaded_dtype is not Dtype.AUTO or setup.quantization is not None:
        return
    if setup.distributed == ONE_GPU:  # else a GPU has a part of them
        # adapters are float32 whatever the base is
        counted = model.trainable_parameters if setup.adapter is not None else 0
        yield OpenChoice(
            text=half[0],
            instead="with --dtype float32, for the weights alone",
            change_bytes=_HALF_BYTES * (model.parameters - counted),
        )


def _optimizers(estimate: Estimate, others: Alternatives, device: int) -> Iterator[OpenChoice]:
    """States of 8 bits in place of the default's."""
    setup = estimate.setup
    if setup.optim != Setup().optim or setup.adapter is not None:
        return  # named, or with states that are small anyway
    text = f"optimizer {setup.optimizer} (--optim)"
    if found := others.choice(text, _SMALL_STATES, device, optim=_SMALL_STATES):
        yield found


def _gpus(fits: Sequence[GpuFit], targets: TargetGpus, device: int) -> Iterator[OpenChoice]:
    """The GPU, of those that people have, on which the run takes the most or the least."""
    words = gpu_words(targets)
    if not words or targets.named_gpus or not fits:
        return
    other = max(fits, key=lambda fit: abs(fit.device_bytes - device))
    yield OpenChoice(
        text=words, instead=f"on {other.name}", change_bytes=other.device_bytes - device
    )
