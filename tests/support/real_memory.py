"""Traced runs in the form in which runs on the CPU are measured, and the two side by side."""

from __future__ import annotations

from memest.calibration.running.cpu_memory import CpuRun, MemoryEvent, PhaseBytes
from memest.events import ALLOC, FREE, MARK, Phase, Trace


def run_of_trace(trace: Trace) -> CpuRun:
    """A trace in the same form, bytes counted from the end of the load phase on."""
    run = CpuRun()
    now = peak = alive = 0
    phase: str | None = None
    for kind, index in trace.decode():
        if kind == MARK:
            mark = trace.marks[index]
            if mark.phase is Phase.LOAD:
                continue
            if phase is None:
                now = 0
            else:
                run.phases.append(PhaseBytes(phase, alive, peak))
            phase = f"{mark.phase} {mark.step} {mark.micro_step}"
            alive = peak = now
        elif kind in (ALLOC, FREE):
            size = trace.sizes[index] * (1 if kind == ALLOC else -1)
            now += size
            peak = max(peak, now)
            if phase is not None:
                module = trace.module_names[trace.modules[index]]
                op = trace.op_names[trace.ops[index]]
                run.events.append(MemoryEvent(size, f"{module}/{op}", phase, index))
    if phase is not None:
        run.phases.append(PhaseBytes(phase, alive, peak))
    return run


def differences(real: CpuRun, trace: CpuRun, at_least: int = 4096) -> list[str]:
    """The two streams side by side, what only one of them has (for finding a mechanism)."""
    import difflib

    lines = [
        [f"{e.nbytes}|{e.phase}" for e in r.events if abs(e.nbytes) >= at_least]
        for r in (real, trace)
    ]
    events = [[e for e in r.events if abs(e.nbytes) >= at_least] for r in (real, trace)]
    matcher = difflib.SequenceMatcher(None, *lines, autojunk=False)
    out = []
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            continue
        out += [f"real  {e.phase:16} {e.nbytes:>10} {e.op[-120:]}" for e in events[0][a:b]]
        out += [f"trace {e.phase:16} {e.nbytes:>10} {e.op[-120:]}" for e in events[1][c:d]]
        out.append("--")
    return out
