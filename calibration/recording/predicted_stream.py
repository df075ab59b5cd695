"""What memest predicts today for a run whose history was kept."""

from __future__ import annotations

from dataclasses import replace

from memest.calibration.case import case_from_dict
from memest.calibration.device import LATEST_TORCH, Device, software_of
from memest.calibration.recording.recorded import History
from memest.errors import ConfigError
from memest.steps.stream import Stream
from memest.tracing import Tracer

__all__ = ["predict_stream"]


def predict_stream(history: History, tracer: Tracer | None = None) -> Stream:
    """The stream of the whole run, for its GPU and with its software.

    Args:
        history: names case and device.
        tracer: of the case's model, if there is one already.

    Raises:
        MemestError: the history does not say what ran, or that cannot be traced.
    """
    if not history.case:
        raise ConfigError("the history does not say what ran: its header has no case")
    case = case_from_dict(history.case)
    if case.processes > 1:
        raise ConfigError(f"{case.processes} processes with {case.parallel}: not modelled yet")
    device = history.device
    software = software_of(device.torch, device.transformers, device.cuda)
    setup = replace(case.setup, software=software)
    tracer = Tracer.of(case.model) if tracer is None else tracer
    gpu = Device(
        name=device.name, total_bytes=device.total_bytes, capability=device.capability,
        sm_count=device.sm_count, max_threads_per_sm=device.max_threads_per_sm,
    )  # fmt: skip
    return tracer.find_once(setup, gpu.traits(software.torch or LATEST_TORCH)).stream
