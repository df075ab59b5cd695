"""Estimates built by hand, for what shows them."""

from memest.config.setup import Precision, Setup
from memest.events import Category, Phase
from memest.report.result import (
    Estimate,
    GpuFit,
    Interval,
    Layer,
    ModelFacts,
    Peak,
    PeakMoment,
    PeakRanges,
    Row,
    TimePoint,
    Verdict,
)
from memest.units import GIB, KIB, MIB


def _layers():
    rows = [Layer(module="", activation_bytes=3 * MIB, parameter_bytes=0)]
    rows.append(
        Layer(
            module="bert.embeddings.word_embeddings",
            activation_bytes=0,
            parameter_bytes=30522 * 1024 * 4,
        )
    )
    rows.append(
        Layer(module="bert.embeddings.dropout", activation_bytes=20 * MIB, parameter_bytes=0)
    )
    for index in range(24):
        name = f"bert.encoder.layer.{index}"
        # the last layer's dropout is gone when the peak comes
        own = 0 if index == 23 else 20 * MIB
        rows += [
            Layer(
                module=f"{name}.attention.self",
                activation_bytes=128 * MIB,
                parameter_bytes=12 * MIB,
            ),
            Layer(module=f"{name}.intermediate.dense", activation_bytes=32 * MIB,
                  parameter_bytes=16 * MIB),
            Layer(
                module=f"{name}.output.dense",
                activation_bytes=64 * MIB + own,
                parameter_bytes=16 * MIB,
            ),
        ]  # fmt: skip
    rows.append(Layer(module="bert.pooler.dense", activation_bytes=32 * KIB, parameter_bytes=4100))
    rows.append(Layer(module="classifier", activation_bytes=512, parameter_bytes=8200))
    return tuple(rows)


def _timeline(accum):
    points = [
        TimePoint(step=0, micro_step=0, phase=Phase.LOAD, allocated_bytes=1280 * MIB,
                  reserved_bytes=1290 * MIB),
    ]  # fmt: skip
    for step in (1, 2):
        base = 1300 if step == 1 else 3900
        for micro in range(1, accum + 1):
            points += [
                TimePoint(
                    step=step, micro_step=micro, phase=phase, allocated_bytes=(base + more) * MIB,
                    reserved_bytes=(base + more + 300) * MIB,
                )
                for phase, more in (
                    (Phase.BATCH, 4), (Phase.FORWARD, 7000), (Phase.BACKWARD, 8100)
                )
            ]  # fmt: skip
        points += [
            TimePoint(
                step=step, micro_step=accum, phase=phase, allocated_bytes=(base + more) * MIB,
                reserved_bytes=12_300 * MIB,
            )
            for phase, more in ((Phase.CLIP, 1400), (Phase.OPTIMIZER, 3900), (Phase.ZERO_GRAD, 20))
        ]  # fmt: skip
    return tuple(points)


def fit(name, usable, device, verdict, reason=""):
    return GpuFit(
        name=name, usable_bytes=usable, verdict=verdict, headroom_bytes=usable - device,
        device_bytes=device, basis=f"torch's own total of the {name}, as printed on Linux",
        reason=reason,
    )  # fmt: skip


def build(*, gpu=None, common=(), setup=None, **more):
    setup = setup or Setup(batch=8, seq_len=512, precision=Precision.FP16)
    rows = {
        Category.PARAMETERS: 1_340_584_968,
        Category.BUFFERS: 8_192,
        Category.GRADIENTS: 1_340_584_968,
        Category.OPTIMIZER_STATES: 2_681_169_936,
        Category.ACTIVATIONS: 6_030_012_416,
        Category.AUTOCAST_COPIES: 612_368_384,
        Category.TEMPORARIES: 268_435_456,
        Category.WORKSPACES: 8_519_680,
        Category.INPUTS: 98_304,
        Category.ROUNDING: 61_112,
    }
    allocated = sum(rows.values())
    reserved = allocated + 311 * MIB
    device = reserved + 575 * MIB
    values = {
        "model": ModelFacts(
            id="bert-large-uncased", class_name="BertForSequenceClassification",
            parameters=335_143_938, trainable_parameters=335_143_938, buffers=1_024,
            parameter_bytes=1_340_575_752, source="memest's catalogue: the model's config.json",
            task="sequence-classification",
        ),
        "setup": setup,
        "gpu": gpu,
        "peak": Peak(allocated_bytes=allocated, reserved_bytes=reserved, device_bytes=device),
        "interval": Interval(
            level=None, low_bytes=device - 225 * MIB, high_bytes=device + 225 * MIB,
            basis="450 +/- 150 MiB of CUDA context and 50-200 MiB of kernels loaded during the "
            "first step",
        ),
        "ranges": PeakRanges(
            allocated=_around(allocated, 24 * MIB, 16 * MIB),
            reserved=_around(reserved, 60 * MIB, 190 * MIB),
        ),
        "breakdown": tuple(Row(category=c, bytes=b) for c, b in rows.items()),
        "peak_at": PeakMoment(
            phase=Phase.BACKWARD, step=2, micro_step=1,
            module="bert.encoder.layer.23.attention.self", op="aten.bmm",
        ),
        "layers": _layers(),
        "timeline": _timeline(setup.grad_accum),
        "verdict": Verdict.UNKNOWN if gpu is None else gpu.verdict,
        "context_bytes": 575 * MIB,
        "max_batch": None,
        "safe_batch": None,
        "common_gpus": tuple(common),
        "notes": (
            "not modelled: memory of other processes, of NCCL and of libraries with their own.",
        ),
        "assumptions": (
            "512 tokens a sample (nothing was asked for)",
            "loop: trainer, optimizer adamw_torch_fused, 3 steps simulated, torch 2.13",
        ),
    }  # fmt: skip
    return Estimate(**(values | more))


def _around(size, below, above):
    return Interval(
        level=0.9, low_bytes=size - below, high_bytes=size + above, basis="by measured runs"
    )


NEED = build().peak.device_bytes
COMMON = (
    fit("NVIDIA GeForce RTX 3060", int(11.66 * GIB), NEED, Verdict.DOES_NOT_FIT),
    fit("NVIDIA A2", NEED + 12 * MIB, NEED, Verdict.TIGHT, "too close to call"),
    fit("NVIDIA GeForce RTX 4090", 25_393_364_992, NEED, Verdict.FITS),
    fit("NVIDIA H100 80GB HBM3", 85_029_027_840, NEED, Verdict.FITS),
)
ACCUM = Setup(
    batch=2, grad_accum=4, seq_len=512, checkpointing="every_n:2", dtype="bfloat16",
    freeze=("embeddings",), loop="plain",
)  # fmt: skip

SAMPLES = {
    "no_gpu": build(common=COMMON),
    "fits": build(gpu=COMMON[2], max_batch=21, safe_batch=20),
    "tight": build(gpu=COMMON[1], max_batch=8, safe_batch=7, common=COMMON[3:]),
    "does_not_fit": build(gpu=COMMON[0], max_batch=0, safe_batch=0),
    "accum": build(setup=ACCUM),
}
