"""Every batch size from two traces: sizes are linear in the batch.

At fixed sequence length the shape of every tensor of a batch has the batch in at most one
extent, or (flattened with the sequence) as a factor of one, so the size of every allocation is
``c0 + c1 * batch``. Two traces give both numbers for every allocation and every operator call, and
must agree in everything but sizes. Whether the line holds further out is for the caller to see, by
a trace made there (``fit.largest_batch``).
"""

from __future__ import annotations

from dataclasses import replace

from memest.events import Trace
from memest.hidden.call import OpCall, TensorSpec, Value

__all__ = ["BatchLine"]


class NotLinearError(Exception):
    """The traces differ in more than sizes, or a size is not on a line."""


class BatchLine:
    """A family of traces, one for each batch size.

    Args:
        low: trace at ``low_batch``.
        high: trace at ``high_batch``, of the same setup otherwise.
    """

    def __init__(self, low: Trace, low_batch: int, high: Trace, high_batch: int) -> None:
        if low.events != high.events or low.ops != high.ops or len(low.sizes) != len(high.sizes):
            raise NotLinearError
        calls = [
            (low.calls[a], high.calls[b])
            for a, b in zip(low.call_of_site, high.call_of_site, strict=True)
        ]
        if any(a.op != b.op for a, b in calls):
            raise NotLinearError
        self._low, self._low_batch = low, low_batch
        self._span = high_batch - low_batch
        self._slopes = []
        for a, b in zip(low.sizes, high.sizes, strict=True):
            slope, rest = divmod(b - a, self._span)
            if rest:
                raise NotLinearError
            self._slopes.append(slope)
        self._pairs = dict.fromkeys(calls)
        self._order = {pair: n for n, pair in enumerate(self._pairs)}
        self._sites = [self._order[pair] for pair in calls]

    def at(self, batch: int) -> Trace:
        """The trace at another batch size.

        Raises:
            NotLinearError: an extent of an operator call is not on a line.
        """
        steps = batch - self._low_batch
        low = self._low
        trace = replace(low)
        trace.sizes = [s + slope * steps for s, slope in zip(low.sizes, self._slopes, strict=True)]
        if trace.sizes and min(trace.sizes) < 0:
            raise NotLinearError
        trace.calls = [self._call(a, b, steps) for a, b in self._pairs]
        trace.call_of_site = type(low.call_of_site)("l", self._sites)
        return trace

    def _call(self, a: OpCall, b: OpCall, steps: int) -> OpCall:
        if a == b:
            return a
        args = self._value(a.args, b.args, steps)
        kwargs = self._value(a.kwargs, b.kwargs, steps)
        outputs = self._value(a.outputs, b.outputs, steps)
        return replace(a, args=args, kwargs=kwargs, outputs=outputs)  # type: ignore[arg-type]

    def _value(self, a: Value, b: Value, steps: int) -> Value:
        if a == b:
            return a
        if isinstance(a, TensorSpec) and isinstance(b, TensorSpec) and a.dtype == b.dtype:
            return TensorSpec(
                self._value(a.shape, b.shape, steps),  # type: ignore[arg-type]
                self._value(a.stride, b.stride, steps),  # type: ignore[arg-type]
                a.dtype,
                a.on_host,
            )
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(self._value(x, y, steps) for x, y in zip(a, b, strict=True))
        if isinstance(a, int) and isinstance(b, int):
            slope, rest = divmod(b - a, self._span)
            if not rest:
                return a + slope * steps
        if isinstance(a, float) and isinstance(b, float):
            return a  # scales and learning rates do not size anything
        raise NotLinearError
