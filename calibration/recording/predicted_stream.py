"""What memest predicts today for a run whose history was kept."""

from __future__ import annotations

from dataclasses import replace

from memest.calibration.case import case_from_dict
from memest.calibration.measurement import release_of
from memest.calibration.recording.recorded import History, RecordedDevice
from memest.errors import ConfigError
from memest.hardware.catalogue import find_gpu, traits
from memest.hidden.call import GpuTraits
from memest.setup import Software
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
    software = Software(
        torch=release_of(device.torch),
        transformers=release_of(device.transformers),
        cuda=release_of(device.cuda),
    )
    setup = replace(case.setup, software=software)
    tracer = Tracer.of(case.model) if tracer is None else tracer
    return tracer.find_once(setup, _traits(device)).stream


def _traits(device: RecordedDevice) -> GpuTraits:
    torch = release_of(device.torch) or (2, 13)
    if device.capability is not None and device.sm_count and device.max_threads_per_sm:
        return GpuTraits(device.capability, device.sm_count, device.max_threads_per_sm, torch)
    return traits(find_gpu(device.name, total_bytes=device.total_bytes), torch)
