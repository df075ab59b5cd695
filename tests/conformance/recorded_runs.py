"""The recorded runs, traced by memest: model, loop and GPU of each recording."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from unittest import mock

import torch

from memest.events import Phase
from memest.hidden.call import GpuTraits
from memest.profile.stream import Stream, make_stream
from memest.setup import Loop, Precision, Setup
from memest.trace import training
from memest.trace.loops import Run
from memest.trace.training import TracePlan, trace_training
from recorded_models import AdamWByHand, BigModel, SmallModel, cross_entropy_by_hand

H100 = GpuTraits((9, 0), 132, 2048, (2, 6))
# the card of the small runs is not named; its cuBLAS workspace is not the one of Hopper
OTHER = GpuTraits((8, 9), 128, 1536, (2, 6))
BATCH, VOCABULARY = 4, 10_000


@dataclass(frozen=True, slots=True)
class Case:
    """One recording.

    Attributes:
        file: name without suffix.
        length: positions of a sequence.
        big: which of the two models.
        precision: of autocast.
        whole: a whole step was recorded; else the forward alone.
        warm: steps of the same model ran before the recorded one.
        used: another model ran in the same process before; cuBLAS has its workspaces, and the
            weights lie in segments of that run.
    """

    file: str
    length: int
    big: bool
    precision: Precision
    whole: bool
    warm: bool = False
    used: bool = False


CASES = (
    Case("h100_lm3b_fp32_ctx128_fullstep", 128, True, Precision.FP32, True),
    Case("h100_lm3b_fp32_ctx256_fullstep", 256, True, Precision.FP32, True, used=True),
    Case("h100_lm3b_autocast_ctx128_forward", 128, True, Precision.BF16, False),
    Case("small_lm_fp32_fwd_bwd", 128, False, Precision.FP32, False, warm=True),
    Case("small_lm_autocast_bf16_fwd_bwd", 128, False, Precision.BF16, False, warm=True),
)


@functools.cache
def predict(case: Case) -> tuple[Stream, int, int]:
    """The stream of a recorded run, and between which of its events the recording was made."""
    with torch.device("meta"):
        model = (BigModel if case.big else SmallModel)(positions=case.length)
    gpu = H100 if case.big else OTHER
    steps = 2 if case.warm else 1
    setup = Setup(loop=Loop.PLAIN, precision=case.precision, optim="adamw_torch", num_steps=steps)

    def make_batch() -> dict[str, torch.Tensor]:
        return {"ids": torch.empty(BATCH, case.length, dtype=torch.int64, device="meta")}

    def optimizer(model: torch.nn.Module, *_: object) -> AdamWByHand:
        return AdamWByHand(model.parameters())

    with mock.patch.object(training, "make_optimizer", optimizer):
        runner = training.run_steps if case.whole else (_forward if case.big else _inference)
        with mock.patch.object(training, "run_steps", runner):
            trace = trace_training(
                model,
                setup,
                make_batch=make_batch,
                loss_of=lambda logits, batch: cross_entropy_by_hand(logits, batch["ids"]),
                gpu=gpu,
                plan=TracePlan(steps=steps),
            )
    stream = make_stream(trace, gpu, num_steps=steps)
    positions = {
        mark.phase: position
        for mark, position in zip(stream.marks, stream.mark_positions, strict=True)
    }
    end = positions.get(Phase.ZERO_GRAD, len(stream.events))
    return stream, positions[Phase.FORWARD], end


def _forward(run: Run, num_steps: int) -> None:
    """Forward with gradients; the region of autocast ends before the recording does."""
    run.recorder.mark(Phase.BATCH, num_steps)
    batch = run.make_batch()
    run.recorder.mark(Phase.FORWARD, num_steps, 1)
    with _region(run):
        logits = run.model(**batch)
    run.recorder.forget()
    del logits


def _inference(run: Run, num_steps: int) -> None:
    """Forward without gradients, several times on one batch; nothing is kept."""
    run.recorder.mark(Phase.BATCH, 1)
    batch = run.make_batch()
    for step in range(1, num_steps + 1):
        run.recorder.mark(Phase.FORWARD, step, 1)
        _infer(run, batch)
    run.recorder.forget()


def _infer(run: Run, batch: dict[str, torch.Tensor]) -> None:
    with _region(run), torch.no_grad():
        _ = run.model(**batch)["logits"]


def _region(run: Run) -> torch.autocast:
    enabled = run.precision is Precision.BF16
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled)
