"""What a GPU makes of a run's dtypes and attention, in words: what runs, and why nothing better.

Sources of the words on bf16: pull request 148322 of pytorch (inputs are shifted and computed in
float32, kernels of cuBLAS are missing) and measurements in public issues: half of float32's rate on
a GTX 1080 (kubeedge/ianvs 888) and on a T4 (openxla/xla 12429).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memest.config.kinds import SDPA
from memest.config.parallelism import Strategy
from memest.config.setup import Dtype, Precision, Setup
from memest.estimation.assumption import Usual
from memest.estimation.gpu_target import TargetGpu
from memest.estimation.run import Run
from memest.events import Weight
from memest.sharding.fsdp_units import stored_dtype
from memest.workspaces.attention_choice import refusals
from memest.workspaces.flops import Arithmetic, arithmetic, counts_flops
from memest.workspaces.gpu_limits import computes_in_bf16

__all__ = ["Emulated", "about_run", "bf16_notes", "trained_dtype"]

_ATTENTION = "attention: "
_WEIGHTS = " weights"
_SLOWEST = "math"
"""The kernel that keeps all scores."""


class Emulated(str):
    """A note on arithmetic that a GPU does not have: searches among runs tell it too."""

    __slots__ = ()


def about_run(about: Iterable[str], run: Run) -> Iterator[str]:
    """What was built, with what the libraries and the GPU of a run make of it.

    Args:
        about: of the model's card.
        run: of that model.
    """
    for line in about:
        if line == f"{_ATTENTION}sdpa":
            reasons = _kernels(run)
            words = "; ".join([line, *map(_kernel_words, reasons.items())])
            is_best = _SLOWEST not in reasons and not any(reasons.values())
            yield Usual(words) if is_best else words
        elif line.endswith(_WEIGHTS) and run.setup.computes_in_half:
            yield Usual(f"{line.partition(' with ')[0]} with {_held_weights(run)}")
        else:
            yield line


def _kernels(run: Run) -> dict[str, dict[str, None]]:
    """The kernels behind ``sdpa``, each with what kept PyTorch from those it prefers."""
    family, setup = run.program.micro_steps, run.setup
    choices = family.choices_at(family.numbers_at(run.point))
    reasons: dict[str, dict[str, None]] = {}
    for call, kernel in choices:
        refused = refusals(call, run.gpu, setup.sdpa_backend)
        reasons.setdefault(kernel, {}).update(dict.fromkeys(refused))
    return reasons


def _kernel_words(kernel: tuple[str, Iterable[str]]) -> str:
    name, whys = kernel
    listed = ", ".join(whys)
    return f"{name} kernel" + (f" ({listed})" if listed else "")


def trained_dtype(weight: Weight, setup: Setup) -> str:
    """The dtype in which an optimizer updates a weight."""
    if setup.computes_in_half and setup.distributed.strategy is Strategy.ZERO:
        return Dtype.FLOAT32.value
    return stored_dtype(weight, setup)


def _held_weights(run: Run) -> str:
    """What FSDP or DeepSpeed hold of the weights, where they compute in half precision."""
    setup = run.setup
    half = Dtype.BFLOAT16 if setup.precision is Precision.BF16 else Dtype.FLOAT16
    if setup.distributed.strategy is Strategy.ZERO:
        where = " in host memory" if setup.distributed.offload_optimizer else ""
        return (
            f"{half} weights to compute with, as DeepSpeed makes them for --{setup.precision}, and "
            f"float32 master copies{where} of what trains, which its optimizer updates"
        )
    trained = {stored_dtype(weight, setup) for weight in run.weights if weight.trains}
    frozen = {stored_dtype(weight, setup) for weight in run.weights if not weight.trains}
    held = f"{' and '.join(sorted(trained))} shards"
    if trained == {Dtype.FLOAT32.value}:
        held += f", to which accelerate upcasts what trains under FSDP with --{setup.precision}"
    if frozen - trained:
        held += f" (what is frozen: {' and '.join(sorted(frozen))})"
    return f"{held}, gathered in {half} to compute with"


def bf16_notes(run: Run, gpu: TargetGpu) -> list[str]:
    """What becomes of bf16 on a GPU that has no arithmetic for it."""
    if computes_in_bf16(run.gpu.capability) or not _multiplies_bf16(run):
        return []
    major, minor = run.gpu.capability
    text = (
        f"bf16 is emulated on {gpu.name}: bf16 arithmetic came with compute capability 8.0, this "
        f"is {major}.{minor}. The run starts, because torch.cuda.is_bf16_supported() counts "
        "emulation and transformers and accelerate ask no more; PyTorch then computes through "
        "float32, no faster than float32 and down to half its speed"
    )
    lost = _lost_kernels(run)
    if lost:
        text += f"; {lost}"
    return [Emulated(f"{text}. Use {_instead(run.setup)}.")]


def _multiplies_bf16(run: Run) -> bool:
    calls = run.program.trace.calls
    return any(counts_flops(call.op) and arithmetic(call) is Arithmetic.BF16 for call in calls)


def _lost_kernels(run: Run) -> str:
    """What bf16 costs there besides speed."""
    lost = []
    if run.setup.attn_implementation in SDPA and run.program.micro_steps.skeleton.attention_choices:
        lost.append("attention has no kernel but math, which keeps all scores")
    if any("convolution" in call.op for call in run.program.trace.calls):
        lost.append("convolutions go without cuDNN, one sample at a time")
    return ", and ".join(lost)


def _instead(setup: Setup) -> str:
    """The options that compute in fp16."""
    if setup.quantization is not None:
        return "--fp16 (and --bnb-4bit-compute-dtype float16) instead"
    if setup.precision is Precision.BF16:
        return "--fp16 instead"
    return "--dtype float32 --fp16 instead"
