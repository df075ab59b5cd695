"""The recorded runs, traced by memest: model, loop and GPU of each recording."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from unittest import mock

import torch

from memest.config.setup import Loop, Precision, Setup
from memest.events import Phase
from memest.profiles.stream import Stream
from memest.trace import training
from memest.trace.loop_model import TrainingLoop
from memest.trace.training import TracePlan, trace_training
from memest.workspaces.operator_call import GpuTraits
from support.recorded_medium import AdamWOutOfPlace, MediumModel, cross_entropy_by_gather
from support.recorded_models import AdamWByHand, BigModel, SmallModel, cross_entropy_by_hand
from support.streams import make_stream

H100 = GpuTraits((9, 0), 132, 2048, (2, 6))
# the cards of the other runs are not named; their cuBLAS workspace is not the one of Hopper
OTHER = GpuTraits((8, 9), 128, 1536, (2, 6))
BATCH, WARM_UPS = 4, 5


class Script(enum.Enum):
    """What was run, and which part of it was recorded."""

    STEP = "one step of the big model"
    FORWARD = "one forward of the big model"
    INFERENCE = "a forward of the small model without gradients, after others"
    WARM_STEP = "a step of the medium model after five others"


@dataclass(frozen=True, slots=True)
class Case:
    """One recording.

    Attributes:
        file: name without suffix.
        length: positions of a sequence.
        script: what was run.
        precision: of autocast.
        used: another model ran in the same process before; cuBLAS has its workspaces, and the
            weights lie in segments of that run.
        off: predicted minus recorded peaks from an empty allocator: allocated and reserved.
        unordered_end: the last deaths are autocast's cache, which is a hash table of addresses.
    """

    file: str
    length: int
    script: Script
    precision: Precision
    used: bool = False
    off: tuple[int, int] = (0, 0)
    unordered_end: bool = False


F32, BF16 = Precision.FP32, Precision.BF16
CASES = (
    Case("h100_lm3b_fp32_ctx128_fullstep", 128, Script.STEP, F32),
    Case(
        "h100_lm3b_fp32_ctx256_fullstep", 256, Script.STEP, F32, used=True,
        off=(360_448, -23_068_672),
    ),
    Case("h100_lm3b_autocast_ctx128_forward", 128, Script.FORWARD, BF16),
    Case("small_lm_fp32_fwd_bwd", 128, Script.INFERENCE, F32),
    Case(
        "small_lm_autocast_bf16_fwd_bwd", 128, Script.INFERENCE, BF16, off=(1 << 19, 0),
        unordered_end=True,
    ),
    # by the names that their authors gave them
    Case("memory_ctx512_fullstep_", 512, Script.STEP, F32, used=True, off=(0, 304_087_040)),
    Case("memory_ctx512_forward_mixed", 512, Script.FORWARD, BF16, used=True),
    Case("medium_128_training_memory_snapshot", 128, Script.WARM_STEP, F32),
    Case("medium_256_training_memory_snapshot", 256, Script.WARM_STEP, F32, off=(512, -41_943_040)),
    Case("medium_512_training_memory_snapshot", 512, Script.WARM_STEP, BF16, off=(2_949_120, 0)),
    Case("medium_1024_training_memory_snapshot", 1024, Script.WARM_STEP, BF16, off=(1_343_488, 0)),
)  # fmt: skip


@functools.cache
def predict(case: Case) -> tuple[Stream, int, int]:
    """The stream of a recorded run, and between which of its events the recording was made."""
    make_model, make_optimizer, runner = {
        Script.STEP: (BigModel, AdamWByHand, training.run_steps),
        Script.FORWARD: (BigModel, AdamWByHand, _forward),
        Script.INFERENCE: (SmallModel, AdamWByHand, _inference),
        Script.WARM_STEP: (MediumModel, AdamWOutOfPlace, _warm_step),
    }[case.script]
    with torch.device("meta"):
        model = make_model(positions=case.length)
    gpu = H100 if make_model is BigModel else OTHER
    steps = {Script.INFERENCE: 2, Script.WARM_STEP: WARM_UPS + 1}.get(case.script, 1)
    setup = Setup(loop=Loop.PLAIN, precision=case.precision, num_steps=steps)
    with (
        mock.patch.object(training, "make_optimizer", lambda m, *_: make_optimizer(m.parameters())),
        mock.patch.object(training, "run_steps", runner),
    ):
        trace = trace_training(
            model,
            setup,
            make_batch=lambda: {"ids": ids(case.length)},
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


def ids(length: int, *batches: int) -> torch.Tensor:
    return torch.empty(*batches, BATCH, length, dtype=torch.int64, device="meta")


def _region(run: TrainingLoop) -> torch.autocast:
    enabled = run.setup.precision is Precision.BF16
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled)


def _forward(run: TrainingLoop) -> None:
    """Forward with gradients; the region of autocast ends before the recording does."""
    num_steps = len(run.micro_steps)
    run.recorder.mark(Phase.BATCH, num_steps)
    batch = run.make_batch()
    run.recorder.mark(Phase.FORWARD, num_steps, 1)
    with _region(run):
        logits = run.model(**batch)
    run.recorder.forget()
    del logits


def _inference(run: TrainingLoop) -> None:
    """Forward without gradients, several times on one batch; nothing is kept."""
    num_steps = len(run.micro_steps)
    run.recorder.mark(Phase.BATCH, 1)
    batch = run.make_batch()
    for step in range(1, num_steps + 1):
        run.recorder.mark(Phase.FORWARD, step, 1)
        _infer(run, batch)
    run.recorder.forget()


def _infer(run: TrainingLoop, batch: dict[str, torch.Tensor]) -> None:
    with _region(run), torch.no_grad():
        _ = run.model(**batch)["logits"]


def _warm_step(run: TrainingLoop) -> None:
    """Steps on batches that are all there from the start; the last step ends without zero_grad."""
    num_steps = len(run.micro_steps)
    run.recorder.mark(Phase.BATCH, 1)
    length = run.make_batch()["ids"].shape[-1]
    warm, last = ids(length, num_steps - 1), ids(length, 1)
    warm_targets, last_targets = ids(length, num_steps - 1), ids(length, 1)
    logits = loss = None
    for step in range(1, num_steps):
        run.recorder.mark(Phase.FORWARD, step, 1)
        with _region(run):
            logits = run.model(warm[step - 1])
            loss = cross_entropy_by_gather(logits, warm_targets[step - 1])
        run.recorder.mark(Phase.BACKWARD, step, 1)
        loss.backward()
        run.recorder.mark(Phase.OPTIMIZER, step)
        run.optimizer.step()
        run.optimizer.zero_grad()
    del logits, loss
    run.recorder.mark(Phase.FORWARD, num_steps, 1)
    with _region(run):
        logits = run.model(last[0])
        loss = cross_entropy_by_gather(logits, last_targets[0])
    run.recorder.mark(Phase.BACKWARD, num_steps, 1)
    loss.backward()
    run.recorder.mark(Phase.OPTIMIZER, num_steps)
    run.optimizer.step()
    run.recorder.forget()
