"""A worked example of a calibration: runs that nobody measured, drawn to show what a fit does.

What moves with the kernels is larger on the card of the example than predicted; it holds more
beside its tensors than the table says, and keeps more in its cache than the replay does. All three
are planted, and a fit finds them again. Whoever shows any of it says that it is simulated.
"""

from __future__ import annotations

import random

from memest.calibration.case import case_from_dict
from memest.calibration.fitting.prediction import Pair, Prediction
from memest.calibration.measurement import Environment, Measurement, Status, StepReading
from memest.estimation.run_facts import RunFacts
from memest.units import GIB, MIB

__all__ = ["EXAMPLE_GPU", "FACTOR", "MODELS", "RUNS", "example_pairs"]

EXAMPLE_GPU = "Simulated card"
_SEED = 7
MODELS, RUNS = 16, 4
FACTOR = 1.06
"""By how much its activations and temporaries are larger."""
_CONTEXT_BYTES = 700 * MIB
"""What the card of the example holds; the table expects 125 MiB less."""
_CACHE_BYTES = 220 * MIB
"""What its allocator keeps beyond the replay."""
_NOISE, _SPREAD_BYTES = 0.004, 4 * MIB
"""Relative spread of what the allocator keeps; spread of what the process holds beside it."""


def example_pairs() -> tuple[Pair, ...]:
    """Simulated measurements beside simulated predictions; the same at every call."""
    rng = random.Random(_SEED)  # noqa: S311 - an example, no secret
    pairs = []
    for model in range(MODELS):
        weights = rng.randrange(200, 1600) * MIB
        kernels = rng.randrange(30, 80)
        pairs += [_pair(rng, model, run, weights, kernels) for run in range(RUNS)]
    return tuple(pairs)


def _pair(rng: random.Random, model: int, run: int, weights: int, kernels: int) -> Pair:
    parts = {
        "parameters": weights,
        "gradients": weights,
        "optimizer states": 2 * weights,
        "activations": round(weights * (run + 1) * rng.uniform(0.4, 0.8)),
        "temporaries": round(weights * rng.uniform(0.05, 0.3)),
        "workspaces": 8 * MIB,
        "rounding": rng.randrange(1, 8) * MIB,
    }
    allocated = sum(parts.values())
    reserved = allocated + rng.randrange(20, 200) * MIB
    precision = ("fp32", "bf16")[run % 2]
    prediction = Prediction(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        parts=parts,
        kernels=kernels,
        context_low_bytes=350 * MIB,
        context_expected_bytes=575 * MIB,
        context_high_bytes=800 * MIB,
        family=f"family {model % 4}",
        sm_count=100,
        facts=RunFacts(
            kernels=kernels,
            precision=precision,
            dtype="float32",
            attention="sdpa",
            optimizer="adamw_torch_fused",
            loop="trainer",
            checkpointing="none",
        ),
    )
    more = round((FACTOR - 1) * (parts["activations"] + parts["temporaries"]))
    allocated, reserved = allocated + more, reserved + more
    read = reserved + _CACHE_BYTES + round(allocated * rng.gauss(0, _NOISE))
    held = _CONTEXT_BYTES + round(rng.gauss(0, _SPREAD_BYTES))
    return Pair(_measurement(model, run, precision, allocated, read, held), prediction)


def _measurement(
    model: int, run: int, precision: str, allocated: int, reserved: int, held: int
) -> Measurement:
    setup = {"batch": 2**run, "seq_len": 512, "precision": precision}
    step = StepReading(
        seconds=0.1,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        reserved_now_bytes=reserved,
        process_bytes=reserved + held,
        retries=0,
    )
    environment = Environment(
        gpu=EXAMPLE_GPU,
        total_bytes=24 * GIB,
        capability=(8, 0),
        sm_count=100,
        torch="2.13.0",
        transformers="5.23.0",
        meter="process",
    )
    return Measurement(
        run=f"example-{model}-{run}",
        case=case_from_dict({"model": f"model {model + 1}", "setup": setup}),
        status=Status.OK,
        environment=environment,
        started="2026-01-01T00:00:00Z",
        seconds=1.0,
        readings=(),
        steps=(step,),
    )
