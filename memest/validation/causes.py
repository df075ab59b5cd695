"""Likely causes of a miss: what is known of the run that could explain it, strongest first.

None of these is proof. Each rule looks at facts of the record and of the prediction alone; where
no rule applies the cause is not known, and is said to be so.
"""

from __future__ import annotations

from collections.abc import Callable

from memest.units import MIB, format_size
from memest.validation.predict import Outcome

__all__ = ["likely_cause"]

_SMALL_BATCH = 10
"""Batches of texts from which on the longest row surely has the full length."""
_FULL = 0.98
"""Share of a limit from which on the allocator surely gave cache back."""


def likely_cause(outcome: Outcome) -> str:
    """What may explain the error of an outcome, in words; empty where there is no error."""
    if outcome.failure:
        return outcome.failure
    if not outcome.error:
        return _runs_out(outcome)
    for rule in _RULES:
        said = rule(outcome)
        if said:
            return said
    return "not known"


def _missed(outcome: Outcome) -> int:
    return (outcome.predicted_bytes or 0) - (outcome.record.measured_bytes or 0)


def _runs_out(outcome: Outcome) -> str:
    if outcome.runs_out and not outcome.record.oom:
        return "predicted to go out of memory on this GPU, and did not"
    return ""


def _full(outcome: Outcome) -> str:
    limit, measured = outcome.limit_bytes, outcome.record.measured_bytes or 0
    if outcome.record.metric == "allocated" or limit is None:
        return ""
    if outcome.retries or measured - outcome.context_bytes >= _FULL * limit:
        return (
            "the GPU was full: what stays reserved then depends on when the allocator gave its "
            "cache back"
        )
    return ""


def _context(outcome: Outcome) -> str:
    if outcome.record.metric != "device" or outcome.context_read:
        return ""
    floor, bound = outcome.floor_bytes, outcome.bound_bytes
    measured = outcome.record.measured_bytes or 0
    if floor is not None and bound is not None and floor <= measured <= bound:
        return (
            "context and kernels of this GPU were not read: the figure lies in the range that they "
            f"leave open ({format_size(floor)} to {format_size(bound)})"
        )
    return ""


def _lengths(outcome: Outcome) -> str:
    setup = outcome.record.setup
    batch = setup.get("batch")
    if setup.get("padded") and isinstance(batch, int) and batch < _SMALL_BATCH:
        return (
            "few samples padded to the longest of each batch: the longest may never have had the "
            "length that was predicted"
        )
    return ""


def _workspaces(outcome: Outcome) -> str:
    slack = outcome.slack_bytes
    if slack >= MIB and -slack <= _missed(outcome) < 0:
        return f"libraries pick their own workspace: up to {format_size(slack)} are left open"
    return ""


def _fragments(outcome: Outcome) -> str:
    pad = bool(outcome.record.setup.get("padded"))
    share = outcome.fragmentation_bytes / max(outcome.predicted_bytes or 1, 1)
    if outcome.record.metric == "allocated":
        return ""
    if pad and _missed(outcome) < 0:
        return (
            "batches of several lengths: segments made for one do not always serve the next, and "
            "the prediction has batches of one length"
        )
    if share > 0.1:
        return (
            f"a tenth and more of it is cached blocks ({format_size(outcome.fragmentation_bytes)}),"
            " which depend on the order of every allocation"
        )
    return ""


def _taken(outcome: Outcome) -> str:
    named = [name for name in ("attn_implementation", "loop") if name in outcome.record.taken]
    if named:
        return f"the record does not say {' and '.join(named)}: defaults were taken"
    return ""


_RULES: tuple[Callable[[Outcome], str], ...] = (
    _runs_out, _full, _context, _lengths, _workspaces, _fragments, _taken,
)  # fmt: skip
