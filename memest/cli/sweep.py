"""``memest sweep``: a grid of options as a table, CSV, JSON or a heat map."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from memest.cli.console import Output, emit, silence, write_out
from memest.cli.flags import OUTPUT, argument, shows, switch, value_flag
from memest.cli.parameters import with_options
from memest.errors import ConfigError
from memest.files.texts import check_target

if TYPE_CHECKING:
    from memest.search.points import Sweep, SweepPoint
    from memest.search.sweep import SweepPlan

__all__ = ["sweep"]

_GRID, _RUN = "Grid", "Processes"


def _axes(texts: list[str]) -> dict[str, Any]:
    from memest.search.axes import parse_axis

    axes: dict[str, Any] = {}
    for text in texts:
        name, values = parse_axis(text)
        # an option that is named twice has the values of both
        axes[name] = (*axes.get(name, ()), *values)
    return axes


class _Files:
    """Where answers go besides stdout; JSON lines are written as they come."""

    def __init__(
        self, out: Path | None, heatmap: Path | None, plan: SweepPlan, metric: str
    ) -> None:
        from memest.report.heatmap import check_picture
        from memest.search.points import SUFFIXES

        self.metric = metric
        self.late: list[Path] = []
        self.lines: Path | None = None
        self.write_error: OSError | None = None
        for path, legal in ((out, SUFFIXES), (heatmap, (".html", ".png"))):
            if path is None:
                continue
            suffix = check_target(path, legal)
            if suffix == ".png":
                check_picture(plan.num_points)
            if suffix == ".jsonl":
                self.lines = path
            else:
                self.late.append(path)

    def write(self, answers: Sweep) -> OSError | None:
        """Write what needs every answer; what could not be written is told after the answers."""
        for path in self.late:
            try:
                answers.save(path, self.metric)
            except OSError as error:
                self.write_error = self.write_error or error
        return self.write_error

    @contextlib.contextmanager
    def line_by_line(self) -> Iterator[Callable[[str], None]]:
        """Write lines as they come: whoever ends this process leaves whole lines, each of them.

        A line that the disk has no room for ends the file, not the sweep.
        """
        if self.lines is None:
            yield lambda _: None
            return
        with self.lines.open("wb", buffering=0) as file:  # a line is one write

            def write(line: str) -> None:
                if self.write_error is not None:
                    return
                raw, end = line.encode("utf-8", errors="backslashreplace"), file.tell()
                try:
                    num_written = file.write(raw)
                    while num_written < len(raw):  # the disk took a part: the next write says why
                        num_written += file.write(raw[num_written:])
                except OSError as error:
                    error.filename = str(self.lines)
                    self.write_error = error
                    with contextlib.suppress(OSError):
                        file.truncate(end)

            yield write


class Interruption:
    """Ctrl-C, kept in mind: one inside a callback of torch gets lost on its way up."""

    def __init__(self) -> None:
        self._requested = False
        self._waits = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Stop on Ctrl-C, unless whoever calls this has made something else of it."""
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def between_points(self) -> Iterator[None]:
        """Stop before this or after it, not within: a point is kept and counted, or neither."""
        self._waits = True
        try:
            self._stop_if_requested()
            yield
        finally:
            self._waits = False
        self._stop_if_requested()

    def _stop(self, *_: object) -> None:
        self._requested = True
        if not self._waits:
            raise KeyboardInterrupt

    def _stop_if_requested(self) -> None:
        if self._requested:
            raise KeyboardInterrupt


def _answers(plan: SweepPlan, files: _Files, output: Output, *, stream: bool) -> Sweep:
    """Answer every point, streaming JSON lines on the way."""
    sweep_points: list[SweepPoint] = []
    with contextlib.ExitStack() as stack:
        interruption = Interruption()
        stack.enter_context(interruption.watch())
        write_line = stack.enter_context(files.line_by_line())
        # a line for each point shows as much
        hidden = stream and sys.stdout.isatty()
        show = None if hidden else stack.enter_context(output.progress())
        points = stack.enter_context(contextlib.closing(plan.points()))
        try:
            for point in points:
                line = f"{point.to_json()}\n"
                with interruption.between_points():
                    write_line(line)
                    sweep_points.append(point)
                if stream:  # a reader who does not read must not keep Ctrl-C waiting
                    write_out(line)
                if show is not None:
                    show(f"{len(sweep_points)} of {plan.num_points}: {point.model}")
        except KeyboardInterrupt:
            note = "" if files.lines is None else f"; {files.lines} keeps them"
            emit(
                f"memest: interrupted after {len(sweep_points)} of {plan.num_points} points{note}."
            )
            raise
    return plan.collect(sweep_points)


def _one_format(**formats: bool) -> str:
    names = [name for name, is_on in formats.items() if is_on]
    if len(names) > 1:
        raise ConfigError(
            f"--{names[0]} and --{names[1]} exclude each other: stdout has one format. Drop one, "
            f"or write the other to a file with --out grid.{names[1]}."
        )
    return names[0] if names else ""


@with_options
@shows(quiet="The summary alone.")
def sweep(
    models: Annotated[
        list[str],
        argument("MODEL...", "One model or several, each as for `memest estimate`."),
    ],
    *,
    options: dict[str, Any],
    output: Output,
    over: Annotated[
        list[str] | None,
        value_flag(
            "--over",
            "OPTION=VALUES",
            "An option and its values: batch=1,2,4. A range is FROM:TO:STEP, both ends included "
            "(seq-len=128:512:128), or FROM:TO:xFACTOR (batch=1:64:x2). A switch alone is off and "
            "on: bf16. Values that hold commas are parted by semicolons. Repeatable: every "
            "combination is answered, the last axis runs fastest. Several --gpu are an axis too.",
            panel=_GRID,
        ),
    ] = None,
    metric: Annotated[
        str,
        value_flag(
            "--metric",
            "NAME",
            "What is shown: device, allocated, reserved, headroom. In bars and heat maps. Default: "
            "device.",
            panel=OUTPUT,
        ),
    ] = "device",
    csv: Annotated[
        bool,
        switch("--csv", "CSV on stdout.", panel=OUTPUT),
    ] = False,
    jsonl: Annotated[
        bool,
        switch(
            "--jsonl",
            "A line of JSON for each point on stdout, as soon as it is answered.",
            panel=OUTPUT,
        ),
    ] = False,
    out: Annotated[
        Path | None,
        value_flag(
            "--out",
            "FILE",
            "Write a file: .csv, .jsonl, .json, .html or .png. JSON lines are written one by one, "
            "so Ctrl-C keeps what was answered; HTML and PNG are heat maps.",
            panel=OUTPUT,
        ),
    ] = None,
    heatmap: Annotated[
        Path | None,
        value_flag("--heatmap", "FILE", "Write a heat map besides: .html or .png.", panel=OUTPUT),
    ] = None,
    jobs: Annotated[
        str | None,
        value_flag(
            "--jobs",
            "N",
            "Processes of this machine; left out, one a model as far as there are cores. With "
            "--ray, tasks of the cluster.",
            panel=_RUN,
        ),
    ] = None,
    ray: Annotated[
        str | None,
        value_flag(
            "--ray",
            "ADDRESS",
            "Answer on a Ray cluster: without an address the one this machine is part of, or "
            "HOST:PORT, or local to start one here. Every node needs memest, torch and ray.",
            panel=_RUN,
        ),
    ] = None,
) -> int:
    """Estimate models over a grid of options: table, CSV or heat map.

    For example: memest sweep bert-base-uncased --over batch=1:64:x2 --over seq-len=128:512:128
    --gpu rtx-3090 --fp16 --heatmap grid.html

    A point without an answer says why and takes no other with it. Exit code 1: none has one.
    """
    from memest.search.sweep import plan as make_plan
    from memest.search.view import check_metric, failure_notes, summary

    stdout_format = _one_format(csv=csv, json=output.as_json, jsonl=jsonl)
    check_metric(metric, has_gpu=True)
    plan = make_plan(models, _axes(over or []), jobs=jobs, ray=ray, **options)
    if plan.num_points == 1:
        raise ConfigError(
            "a sweep needs something that varies: add --over batch=1,2,4 or another option, or "
            f"name several models. One answer: memest estimate {models[0]}."
        )
    check_metric(metric, has_gpu=plan.grid.has_gpu)
    files = _Files(out, heatmap, plan, metric)
    with silence(debug=output.debug):
        answers = _answers(plan, files, output, stream=stdout_format == "jsonl")
    write_error = files.write(answers)
    if output.quiet:
        write_out(f"{summary(answers)}\n")
    elif stdout_format in ("csv", "json"):
        write_out(answers.to_csv() if stdout_format == "csv" else f"{answers.to_json()}\n")
    elif not stdout_format and (out is None or write_error is not None):
        output.report(answers, metric=metric)
    if write_error is not None:
        raise write_error
    failures, total = len(answers.failures), len(answers.points)
    if failures and (not output.quiet or failures == total):
        emit(f"memest: {failures} of {total} points have no answer. {failure_notes(answers)[0]}")
    return 1 if failures == total else 0
