"""What ``memest estimate`` and ``memest fits`` do, whoever read the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memest.cli.console import Output, write_out
from memest.cli.exit_codes import ExitCode
from memest.config.options import no_gpu, read_size, read_whole
from memest.config.setup import choose
from memest.errors import ConfigError, MemestError, UnknownGpuError
from memest.units import MIB, parse_size

if TYPE_CHECKING:
    from memest.readers.run_config import RunConfig
    from memest.report.max_batch_result import Largest
    from memest.report.result import Estimate, GpuFit, Verdict
    from memest.report.suggestions import Suggestions
    from memest.report.text import TableChoice

__all__ = ["check_sizes", "exit_code", "find_tips", "run_estimate", "run_fits", "within"]

_EXIT_CODES = {
    "fits": ExitCode.DONE,
    "fits by releasing cache": ExitCode.TIGHT,
    "tight": ExitCode.TIGHT,
    "cannot say": ExitCode.CANNOT_SAY,
    "does not fit": ExitCode.DOES_NOT_FIT,
}
"""By verdict; the later ones count more where there are several."""


def exit_code(*verdicts: Verdict) -> int:
    """The exit code of verdicts: that of the worst."""
    named = {verdict.value for verdict in verdicts}
    return [code for verdict, code in _EXIT_CODES.items() if verdict in named][-1]


def check_sizes(options: Mapping[str, Any]) -> None:
    """Refuse what can be wrong with the words themselves, before anything slow.

    Raises:
        ConfigError: what is to be a size is none.
    """
    for name in ("gpu_memory", "device_context"):
        if name in options:
            read_size(name, options[name])


def _answer(
    model: str,
    options: dict[str, Any],
    output: Output,
    *,
    max_batch: bool,
    snapshot: str | None = None,
    alternatives: bool = False,
    run: RunConfig | None = None,
) -> Estimate:
    check_sizes(options)
    from memest.estimation.estimate import estimate as predict

    with output.working() as progress:
        answer = predict(
            model,
            max_batch=max_batch,
            snapshot=snapshot,
            alternatives=alternatives,
            progress=progress,
            **options,
        )
    if run is None:
        return answer
    from memest.readers.origins import origins_of

    return replace(
        answer,
        notes=(*answer.notes, *run.notes),
        assumptions=(*answer.assumptions, *filter(None, [run.sources_note])),
        origins=origins_of(run, answer.setup, answer.model.family),
    )


def _depth(text: str | None, by: TableChoice | None) -> int | None:
    if text is None:
        return None
    depth = read_whole("--depth", text)
    if depth < 1:
        raise ConfigError(f"--depth {depth} is out of range: it must be at least 1.")
    if by is None or by.value != "layer":
        raise ConfigError("--depth is the depth of the tree of modules: add --by layer.")
    return depth


def _target(out: str) -> Path:
    """The file to write besides, checked before anything slow."""
    from memest.files.texts import check_target
    from memest.report.result import SUFFIXES

    path = Path(out).expanduser()
    if check_target(path, SUFFIXES) == ".png":
        from memest.report.plots import check_matplotlib

        check_matplotlib("An estimate")
    return path


def run_estimate(
    model: str,
    options: dict[str, Any],
    output: Output,
    *,
    run: RunConfig | None = None,
    explain: bool = False,
    by: str | None = None,
    depth: str | None = None,
    out: str | None = None,
    snapshot: str | None = None,
    tips: bool = True,
) -> int:
    """Predict and show; returns the exit code.

    Raises:
        MemestError: with one paragraph that says what to do.
    """
    table: TableChoice | None = None
    if by is not None:
        from memest.report.text import TableChoice

        table = choose("--by", by, TableChoice)
    levels = _depth(depth, table)
    shows_all = table is None and not output.as_json and not output.quiet
    target = None if out is None else _target(out)
    write_error: OSError | None = None  # told when the answer is out: a full disk takes no answer
    try:
        answer = _answer(
            model,
            options,
            output,
            max_batch=True,
            snapshot=snapshot,
            alternatives=shows_all,
            run=run,
        )
    except OSError as error:
        if snapshot is None or error.filename != str(Path(snapshot).expanduser()):
            raise
        write_error = error
        answer = _answer(model, options, output, max_batch=True, alternatives=shows_all, run=run)
    if target is not None:
        try:
            answer.save(target)
        except OSError as error:
            write_error = write_error or error
    from memest.report.words import render_origins, verdict_sentences

    def tips_of_answer() -> Suggestions | None:
        from memest.search.suggest import effort_for

        return find_tips(model, options, output, answer.named_gpus, effort_for(answer))

    output.put(
        answer,
        lambda: verdict_sentences(answer),
        by=table,
        depth=levels,
        tips=tips_of_answer if tips else None,
        explain=explain,
    )
    if explain and answer.traced and not output.as_json:
        write_out(f"\nTraced: {answer.traced}.\n")
    if explain and run is not None and not output.as_json:
        ignored_keys, missing_keys = map(str, run.ignored), map(str, run.not_modelled)
        write_out(render_origins(answer.origins, tuple(ignored_keys), tuple(missing_keys)))
    if write_error is not None:
        raise write_error
    return 0


def find_tips(
    model: str,
    options: Mapping[str, Any],
    output: Output,
    cards: Sequence[GpuFit | Largest],
    effort: Mapping[str, Any] | None,
) -> Suggestions | None:
    """What would make a run fit that does not, or may not.

    Args:
        model: as it was named.
        options: of the run.
        output: shows what is being done.
        cards: the answers for the GPUs of the options, in their order. It is to fit the one where
            its verdict is worst, the smallest of several: the others mostly follow.
        effort: how thoroughly to look, as arguments of ``suggest``; None: not at all.
    """
    from memest.report.result import Verdict
    from memest.search.suggest import suggest

    wanting = [
        (number, card)
        for number, card in enumerate(cards)
        if card.verdict in (Verdict.DOES_NOT_FIT, Verdict.TIGHT, Verdict.RELEASES_CACHE)
    ]
    if effort is None or not wanting:
        return None
    number, _ = max(wanting, key=lambda each: (each[1].verdict.rank, -each[1].usable_bytes))
    gpus = options.get("gpu")
    gpu = gpus if isinstance(gpus, str) or not gpus else gpus[number]
    try:
        with output.working() as progress:
            found = suggest(model, progress=progress, **effort, **{**options, "gpu": gpu})
    except MemestError:
        return None  # the answer holds without them
    return found if found.changes or found.closest is not None else None


def _say_what_was_taken(model: str, options: Mapping[str, Any], output: Output) -> None:
    """What names were taken for: of a mirror its original, of GPUs what left a choice."""
    from memest.catalog.changes import split_changes
    from memest.catalog.gpus import find_gpu
    from memest.catalog.mirrors import mirror_note
    from memest.catalog.models import lookup
    from memest.catalog.resolve import leads_to_file

    name, _ = split_changes(model)
    entry = None if leads_to_file(name) else lookup(name)
    if entry is not None and (note := mirror_note(name, entry)):
        output.note(note)
    gpus = options.get("gpu") or ()
    for name in [gpus] if isinstance(gpus, str) else gpus:
        with suppress(UnknownGpuError):  # local: it was read
            if note := find_gpu(name).match_note:
                output.note(note)


def _budget(text: str) -> int:
    try:
        budget = parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"--fail-over: {error}") from None
    if budget < MIB:
        raise ConfigError(
            f"--fail-over {text} is {budget} bytes, and no run takes so little: write for example "
            "--fail-over 22GiB."
        )
    return budget


def within(answer: Estimate, budget: int) -> Verdict:
    """Whether the device peak keeps to a number of bytes, by its range."""
    from memest.report.result import Verdict

    if answer.interval.low_bytes > budget:
        return Verdict.CANNOT_SAY if answer.setup.overpriced else Verdict.DOES_NOT_FIT
    if answer.setup.unpriced:
        return Verdict.CANNOT_SAY
    return Verdict.FITS if answer.interval.high_bytes <= budget else Verdict.TIGHT


@dataclass(frozen=True, slots=True)
class _Limit:
    """A GPU, or a budget, that a run is to keep to, and whether it does. Sizes are bytes."""

    of: str
    free: int
    required: int
    low: int
    high: int
    verdict: Verdict
    reason: str
    sentence: str

    def document(self) -> dict[str, Any]:
        """What a caller needs of it, and no more."""
        return {
            "of": self.of,
            "free_bytes": self.free,
            "required_bytes": self.required,
            "required_low_bytes": self.low,
            "required_high_bytes": self.high,
            "margin_bytes": self.free - self.required,
            "safe_margin_bytes": self.free - self.high,
            "verdict": self.verdict.value,
            "reason": self.reason,
            "sentence": self.sentence,
        }


def run_fits(
    model: str,
    options: dict[str, Any],
    output: Output,
    *,
    run: RunConfig | None = None,
    fail_over: str | None = None,
) -> int:
    """Say whether a run fits; returns the exit code, the worst of all GPUs named.

    Raises:
        MemestError: with one paragraph that says what to do.
    """
    budget = None if fail_over is None else _budget(fail_over)
    places = ("gpu", "gpu_memory", "host_memory")
    if budget is None and not any(options.get(name) for name in places):
        if Path(model).is_file():
            from memest.catalog.resolve import resolve_model

            resolve_model(model)  # a log, or another file that is no model, is told as what it is
        raise no_gpu("fits")
    from memest.config.idle_options import IdleNote
    from memest.estimation.kernel_notes import Emulated
    from memest.readers.values import NOT_HERE
    from memest.report.result import Verdict
    from memest.report.words import budget_sentence, trainer_words, verdict_sentences

    answer = _answer(model, options, output, max_batch=False, run=run)
    limits: list[_Limit] = []
    for fit, sentence in zip(answer.named_gpus, verdict_sentences(answer), strict=False):
        sizes = fit.usable_bytes, fit.device_bytes, fit.low_bytes, fit.high_bytes
        limits.append(_Limit(fit.name, *sizes, fit.verdict, fit.reason, sentence))
    if budget is not None:
        verdict = within(answer, budget)
        peak, between = answer.peak.device_bytes, answer.interval
        sizes = budget, peak, between.low_bytes, between.high_bytes
        sentence = budget_sentence(answer, budget, verdict)
        limits.append(_Limit("--fail-over", *sizes, verdict, "", sentence))
    verdicts = [limit.verdict for limit in limits]
    life = answer.life
    if life is not None and life.budget_bytes is not None:
        verdict = Verdict(life.verdict.value)
        # a GPU's verdict stays as it is unless the host stops the run
        if verdict is Verdict.DOES_NOT_FIT or not verdicts:
            verdicts.append(verdict)
        need = life.node_bytes
        sizes = life.budget_bytes, need, need, need
        limits.append(_Limit("host memory", *sizes, verdict, life.reason, life.sentence))
    code = exit_code(*verdicts)
    if output.as_json:
        document = answer.to_dict()
        if budget is not None:
            document["fail_over"] = {"bytes": budget, "verdict": within(answer, budget).value}
        document |= {"limits": [limit.document() for limit in limits], "exit_code": int(code)}
        output.document(document)
        return code
    # the worst first, whose exit code it is
    worst_first = sorted(limits, key=lambda limit: -limit.verdict.rank)
    sentences = [limit.sentence for limit in worst_first]
    if life is not None and life.budget_bytes is None and life.is_wanted:
        sentences.append(life.sentence)
    write_out("".join(f"{sentence}\n" for sentence in sentences))
    if not output.quiet:
        _say_what_was_taken(model, options, output)
        if not options.get("log_probs") and (words := trainer_words(answer.setup)):
            output.note(words)
        for remark in () if run is None else run.not_modelled:
            if NOT_HERE in remark.why:  # all of the run's own code is what was not seen
                output.note(str(remark))
        for text in () if life is None else life.gpu:
            output.note(f"GPU: {text}")
        for text in (*answer.notes, *answer.assumptions):
            if isinstance(text, (IdleNote, Emulated)) or "has no effect" in text:
                output.note(text)
    return code
