"""Simulated measurements: made-up models on made-up GPUs, with planted factors and constants.

Nothing here was measured. A run's breakdown is drawn at random; what a meter would have read
follows from planted factors, a planted gap, a planted process part and noise.
"""

from __future__ import annotations

import random

from memest.calibration.case import case_from_dict
from memest.calibration.fitting.prediction import Pair, Prediction
from memest.calibration.measurement import (
    CPU,
    Environment,
    Failure,
    Measurement,
    MemoryReading,
    Status,
    StepReading,
)
from memest.estimation.run_facts import RunFacts
from memest.units import GIB, MIB

MOVING = ("activations", "temporaries", "workspaces")
PARTS = (
    "parameters", "gradients", "optimizer states", "activations", "temporaries", "workspaces",
    "inputs", "rounding",
)  # fmt: skip


def simulate(
    *, models=12, each=5, seed=0, factors=None, factor=1.0, gap=0, constant=500 * MIB,
    per_kernel=0.0, precision=None, noise=0.0, process_noise=0.0, outliers=0,
    gpus=("NVIDIA Simulated 1",), capability=(8, 0), sm_count=100, total=24 * GIB, shared=0,
    first_model=0, measured=True,
):  # fmt: skip
    """Pairs of simulated measurements and predictions."""
    rng = random.Random(seed)
    pairs = []
    for number in range(first_model, first_model + models):
        weights = rng.randrange(200, 2000) * MIB
        kernels = rng.randrange(30, 80)
        for case in range(each):
            gpu = gpus[(number + case) % len(gpus)]
            kind = ("fp32", "bf16")[case % 2]
            parts = _parts(rng, weights)
            predicted = sum(parts.values())
            raw_gap = rng.randrange(20, 200) * MIB
            prediction = Prediction(
                allocated_bytes=predicted,
                reserved_bytes=None if gpu == CPU else predicted + raw_gap,
                parts=parts,
                kernels=kernels,
                context_low_bytes=300 * MIB,
                context_expected_bytes=575 * MIB,
                context_high_bytes=800 * MIB,
                family=f"family{number % 4}",
                sm_count=None if gpu == CPU else sm_count,
                facts=_facts(kind, kernels),
            )
            planted_factors = factors or dict.fromkeys(PARTS, factor)
            true = sum(size * planted_factors.get(name, 1.0) for name, size in parts.items())
            allocated = round(true * (1 + rng.gauss(0, noise)))
            reserved = allocated + raw_gap + gap
            process_bytes = constant[gpu] if isinstance(constant, dict) else constant
            process_bytes += per_kernel * kernels + (precision or {}).get(kind, 0)
            process_bytes = max(round(process_bytes + rng.gauss(0, process_noise)), 0)
            if outliers and len(pairs) % outliers == outliers - 1:
                allocated, reserved, process_bytes = allocated * 3, reserved * 3, process_bytes * 4
            pairs.append(
                Pair(
                    measurement(
                        number=number, case=case, precision=kind, allocated=allocated,
                        reserved=None if gpu == CPU else reserved,
                        device=reserved + process_bytes if measured and gpu != CPU else None,
                        environment=environment(
                            gpu, capability, sm_count, total,
                            meter="device delta" if len(pairs) < shared else "process",
                        ),
                        others=1 if len(pairs) < shared else 0,
                    ),
                    prediction,
                )
            )  # fmt: skip
    return pairs


def _parts(rng, weights):
    share = rng.choice((0.1, 0.5, 1.0, 3.0))
    return {
        "parameters": weights,
        "gradients": weights,
        "optimizer states": 2 * weights,
        "activations": round(weights * share * rng.uniform(1, 4)),
        "temporaries": round(weights * rng.uniform(0.05, 0.5)),
        "workspaces": 8 * MIB,
        "inputs": rng.randrange(1, 64) * 1024,
        "rounding": rng.randrange(1, 8) * MIB,
    }


def _facts(kind, kernels):
    return RunFacts(
        kernels=kernels, precision=kind, dtype="float32", attention="sdpa",
        optimizer="adamw_torch_fused", loop="trainer", checkpointing="none",
    )  # fmt: skip


def environment(
    gpu="NVIDIA Simulated 1", capability=(8, 0), sm_count=100, total=24 * GIB, meter="process",
):  # fmt: skip
    if gpu == CPU:
        return Environment(gpu=CPU, torch="2.13.0+cpu", transformers="5.23.0")
    return Environment(
        gpu=gpu, total_bytes=total, capability=capability, sm_count=sm_count, driver="570.1",
        cuda="12.8", torch="2.13.0+cu128", transformers="5.23.0", meter=meter,
    )  # fmt: skip


def measurement(
    *, number=0, case=0, precision="fp32", status=Status.OK, allocated=GIB, reserved=None,
    device=None, environment=None, others=0, **more,
):  # fmt: skip
    steps = (
        StepReading(
            seconds=0.1, allocated_bytes=allocated, reserved_bytes=reserved,
            reserved_now_bytes=reserved, process_bytes=device, retries=0,
        ),
    )  # fmt: skip
    document = {
        "model": f"simulated-{number:03}",
        "setup": {"batch": case + 1, "seq_len": 128, "precision": precision},
    }
    return Measurement(
        run=f"{number:03}-{case:03}-{environment.gpu if environment else ''}-{more.get('run', '')}",
        case=case_from_dict(document),
        status=status,
        environment=environment,
        started=more.get("started", "2026-11-20T10:00:00Z"),
        seconds=1.0,
        readings=(MemoryReading(name="start", other_processes=others),),
        steps=steps if status is Status.OK else (),
        failure=more.get("failure"),
    )


def ended_run(status=Status.OOM, number=0, case=50):
    failure = Failure(kind="OutOfMemoryError", message="tried to allocate | 2 GiB", phase="forward")
    run = measurement(
        number=number, case=case, status=status, environment=environment(), failure=failure
    )
    return Pair(run, None, "")
