"""``memest.explain_oom``: a message of PyTorch beside the prediction of the run it came from.

The message gives what the allocator could have (reserved and free at that moment). The predicted
stream is replayed under that limit, so the context of the process and whatever else was on the card
cancel out. Which request failed is looked for by what was asked of the driver and by the allocated
memory at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memest.catalog.gpus import REFERENCE_GPU, common_gpus, gpu_names
from memest.config.setup import Precision, Setup
from memest.config.spelling import command_words
from memest.errors import ConfigError, MemestError
from memest.estimation.breakdown import moment_at
from memest.files.texts import read_small
from memest.profiles.stream import Stream
from memest.replay.conf import AllocatorConf, parse_alloc_conf
from memest.replay.replay import Replay, replay
from memest.replay.sizes import alloc_size, round_size
from memest.report.oom_account import Account, account_of, whole_board_gib
from memest.report.oom_elsewhere import no_message
from memest.report.oom_message import OomMessage, read_oom_messages
from memest.report.oom_result import Change, Match, MessageMatch, OomExplanation
from memest.report.words import place_text
from memest.search.combos import LIGHTER, implementations
from memest.search.profile import Profile
from memest.search.profile import profile as make_profile
from memest.units import MIB, format_size

if TYPE_CHECKING:
    import torch

__all__ = ["explain_oom", "read_log"]

Progress = Callable[[str], None]

_NEAR = 0.03
"""How far allocated memory may be off for a message to be of the predicted run: the most that
predictions of current software may miss by (docs/accuracy.md)."""
_MOST_LOG = 256 * MIB


def read_log(path: str | Path) -> str:
    """The text of a log.

    Raises:
        ConfigError: it cannot be read.
    """
    file = Path(path).expanduser()
    try:
        return read_small(file, _MOST_LOG, utf_16=True)
    except UnicodeDecodeError:
        return file.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read the log {path}: {error.strerror or error}.") from error


def explain_oom(
    text: str,
    model: str | torch.nn.Module | None = None,
    setup: Setup | None = None,
    *,
    gpu: str | Sequence[str] | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> OomExplanation:
    """Explain why a run ran out of GPU memory.

    Args:
        text: the message of PyTorch, or a log that holds one or several.
        model: what was trained, as for :func:`memest.estimate`; None to explain the message alone.
        setup: how it was trained; ``options`` are another way to give it.
        gpu: the card; left out, the card of the catalogue with so much memory.
        trust_remote_code: run code that the model's repository brings.
        progress: called with one line for each longer thing done.
        **options: the options that the run was started with, ``inputs`` and ``loss`` of a module
            of one's own among them.

    Raises:
        ConfigError: there is no such message in the text, or options without a model.
        MemestError: as for :func:`memest.estimate`.
    """
    messages = read_oom_messages(text)
    if not messages:
        raise ConfigError(no_message(text))
    if model is None:
        if setup is not None or options or gpu:
            names = ", ".join([*options, *(["gpu"] if gpu else [])]) or "a setup"
            raise ConfigError(
                f"{names} without a model: name what was trained, for example memest explain-oom "
                "run.log gpt2 --batch 8."
            )
        return OomExplanation(accounts=tuple(map(account_of, messages)), relation=None)
    profile = make_profile(
        model,
        setup,
        trust_remote_code=trust_remote_code,
        progress=progress,
        **options,
    )
    conf = parse_alloc_conf(profile.setup_for(None).alloc_conf)
    accounts = tuple(
        account_of(message, expandable=conf.expandable_segments) for message in messages
    )
    card, note = _card(accounts[0], gpu)
    return OomExplanation(
        accounts=accounts, relation=_MessageMatcher(accounts[0], profile, card, note).relation()
    )


def _card(account: Account, gpu: str | Sequence[str] | None) -> tuple[str, str]:
    """The card whose kernels are taken: the one named, else the one that most people have.

    Of those whose memory the message's total can be; where none of them is common, the nearest.

    Returns:
        its name, and what to say of the choice where the message does not make it.

    Raises:
        ConfigError: several are named.
    """
    names = gpu_names(gpu)
    if len(names) > 1:
        raise ConfigError(f"--gpu names {len(names)} cards: the message is of one, name that.")
    if names:
        return names[0], ""
    message = account.message
    slugs = [spec.slug for spec in account.cards if spec.backend == "cuda"]
    common = {spec.slug for spec in common_gpus()}
    first = slugs[0] if slugs else REFERENCE_GPU
    card = next((slug for slug in slugs if slug in common), first)
    board = None if message.total is None else whole_board_gib(message.total, message.backend)
    if len(slugs) == 1 and board is None:
        return card, ""
    which = f"which of {len(slugs)} cards it is of" if len(slugs) > 1 else "the card"
    note = f"the message does not tell {which}: kernels of {card} are taken, --gpu names another."
    return card, note


@dataclass(frozen=True, slots=True)
class _Run:
    """A predicted run: its stream, and its replay with all the memory it takes."""

    setup: Setup
    stream: Stream
    conf: AllocatorConf
    result: Replay

    def under(self, limit: int) -> Replay:
        """Its replay with so many bytes for the allocator."""
        if self.result.peak_reserved_bytes <= limit:
            return self.result
        return replay(
            self.stream.events,
            self.stream.sizes,
            self.conf,
            limit_bytes=limit,
            curve=True,
            streams=self.stream.on_streams,
        )

    def driver_request(self, number: int) -> int:
        """What the allocator asks the driver for, for an allocation that no free block serves."""
        size = round_size(self.stream.sizes[number], self.conf.roundup_power2_divisions)
        return alloc_size(size, self.conf.large_segment_size)


class _MessageMatcher:
    """Sets one message beside one command."""

    def __init__(self, account: Account, profile: Profile, card: str, note: str) -> None:
        self._account = account
        self._message: OomMessage = account.message
        self._profile = profile
        self._card = card
        self._notes: dict[str, None] = {}
        if note:
            self._notes[note] = None

    def relation(self) -> MessageMatch:
        """The relation of the message to the prediction."""
        run = self._run()
        spot = self._profile.spot(gpu=self._card)
        limit = None if self._account.limit is None else self._account.limit.low_bytes
        stop = self._nearest_request(run)
        crossing = self._first_crossing(run)
        limited_replay = None if limit is None else run.under(limit)
        oom_index = None if limited_replay is None else limited_replay.oom_index
        belongs, sentences = self._judge(run, stop, limited_replay)
        changes: tuple[Change, ...] = ()
        if limit is not None and belongs is not Match.NO:
            gains = list(self._changes(run, limit))
            changes = tuple(
                sorted(gains, key=lambda change: (not change.fits, bool(change.changes_training)))
            )
            if not any(change.fits for change in changes):
                samples = run.setup.effective_batch
                self._notes[
                    "no single change is enough: memest advise with --gpu-memory "
                    f"{limit // MIB}MiB --effective-batch {samples} looks for several together."
                ] = None
        return MessageMatch(
            model=self._profile.estimate(common=False).model.id,
            gpu=self._card,
            peak=spot.peak,
            limit_bytes=limit,
            stopped_at=None if stop is None else moment_at(run.stream, stop[0]),
            stopped_allocated_bytes=0 if stop is None else stop[1],
            reached_at=None if crossing is None else moment_at(run.stream, crossing),
            out_at=None if oom_index is None else moment_at(run.stream, oom_index),
            out_allocated_bytes=_allocated_before(limited_replay, oom_index),
            belongs=belongs,
            sentences=tuple(sentences),
            changes=changes,
            notes=tuple(self._notes),
        )

    def _run(self, **changes: Any) -> _Run:
        run = self._profile.run(gpu=self._card, **changes)
        conf = parse_alloc_conf(run.setup.alloc_conf)
        stream = run.stream
        result = replay(
            stream.events,
            stream.sizes,
            conf,
            curve=True,
            chains=stream.chains,
            streams=stream.on_streams,
        )
        return _Run(run.setup, stream, conf, result)

    def _nearest_request(self, run: _Run) -> tuple[int, int] | None:
        """The event that asks for what the message names, with the allocated memory nearest to it.

        Returns:
            (index of the event, allocated before it), None where nothing asks for so much.
        """
        tried, allocated = self._message.tried, self._message.allocated
        if allocated is None or run.result.allocated_curve is None:
            return None
        curve = run.result.allocated_curve
        nearest: tuple[int, int, int] | None = None
        for index, event in enumerate(run.stream.events):
            if event < 0 or not run.stream.sizes[event]:
                continue
            if not tried.low_bytes <= run.driver_request(event) <= tried.high_bytes:
                continue
            before = curve[index - 1] if index else 0
            distance = max(allocated.low_bytes - before, before - allocated.high_bytes, 0)
            if nearest is None or distance < nearest[0]:
                nearest = distance, index, before
        return None if nearest is None else (nearest[1], nearest[2])

    def _first_crossing(self, run: _Run) -> int | None:
        """The first event after which as much is allocated as the message says."""
        allocated, curve = self._message.allocated, run.result.allocated_curve
        if allocated is None or curve is None:
            return None
        return next((i for i, size in enumerate(curve) if size >= allocated.low_bytes), None)

    def _judge(
        self, run: _Run, stop: tuple[int, int] | None, limited_replay: Replay | None
    ) -> tuple[Match, list[str]]:
        """Whether message and command are of one run, and what is to be said of them."""
        allocated, tried = self._message.allocated, self._message.tried
        if allocated is None:
            return Match.UNCLEAR, ["the message does not say how much was allocated."]
        peak, accum = run.result.peak_allocated_bytes, run.setup.grad_accum
        sentences = []
        if allocated.low_bytes > peak * (1 + _NEAR):
            sentences.append(
                f"this run does not look like that command: {allocated.text} were allocated when "
                f"memory ran out, and the command never allocates more than {format_size(peak)}. "
                "Look for what is not in the command: a larger batch or length, a second model, "
                "other weights' dtype, tensors that a loop keeps."
            )
            return Match.NO, sentences
        near = stop is not None and _is_near(stop[1], allocated.bytes)
        if stop is not None and near:
            moment = moment_at(run.stream, stop[0])
            sentences.append(
                f"the prediction asks for {tried.text} with {format_size(stop[1])} allocated "
                f"{place_text(moment, accum)}: that is where the run stopped."
            )
        oom_index = None if limited_replay is None else limited_replay.oom_index
        if limited_replay is not None and oom_index is not None:
            before = _allocated_before(limited_replay, oom_index)
            moment = moment_at(run.stream, oom_index)
            sentences.append(
                f"with what the allocator had, the prediction runs out of memory "
                f"{place_text(moment, accum)}, with {format_size(before)} allocated (the message: "
                f"{allocated.text})."
            )
            if near or _is_near(before, allocated.bytes):
                return Match.YES, sentences
        elif limited_replay is not None:
            sentences.append(
                f"the prediction needs {format_size(limited_replay.peak_reserved_bytes)} reserved "
                "at most and completes in what the allocator had: the run used more than the "
                "command says. Look for what is not in the command, or for longer inputs than "
                "predicted."
            )
        if near:
            return Match.UNCLEAR if oom_index is None else Match.YES, sentences
        if stop is None:
            sentences.append(
                f"this run does not look like that command: nothing in it asks the driver for "
                f"{tried.text}."
            )
            return Match.NO, sentences
        sentences.append(
            f"nothing in the command asks for {tried.text} with about {allocated.text} allocated "
            f"(the nearest has {format_size(stop[1])}): its options may not be all of the run's."
        )
        return Match.UNCLEAR, sentences

    def _changes(self, run: _Run, limit: int) -> Iterator[Change]:
        """Single changes, as far as they were possible, the smallest first."""
        for options, training in self._candidates(run, limit):
            try:
                variant = self._run(**options)
            except MemestError as error:
                self._notes[f"left out {_options_text(options)}: {error}"] = None
                continue
            yield Change(
                options=tuple(options.items()),
                words=_options_text(options),
                changes_training=training,
                allocated_bytes=variant.result.peak_allocated_bytes,
                reserved_bytes=variant.result.peak_reserved_bytes,
                fits=variant.under(limit).num_ooms == 0,
            )

    def _candidates(self, run: _Run, limit: int) -> Iterator[tuple[dict[str, Any], str]]:
        setup = run.setup
        if not run.conf.expandable_segments:
            text = ",".join(filter(None, (setup.alloc_conf, "expandable_segments:True")))
            yield {"alloc_conf": text}, ""
        for options in implementations(setup):
            yield options, ""
        batch = self._largest_batch(setup, limit)
        if batch:
            accum = setup.grad_accum * -(-setup.batch // batch)
            samples = replace(setup, batch=batch, grad_accum=accum).effective_batch
            in_place = f"{samples} samples a step in place of {setup.effective_batch}"
            options = {"batch": batch, "grad_accum": accum}
            yield options, "" if samples == setup.effective_batch else in_place
        if setup.checkpointing == "none":
            yield {"checkpointing": "full"}, ""
        if setup.precision is Precision.FP32:
            yield {"precision": Precision.BF16.value}, "bf16 in place of fp32"
        for optim in LIGHTER:
            if setup.optimizer != optim:
                yield {"optim": optim}, f"{optim} in place of {setup.optimizer}"
        if setup.seq_len is not None and setup.seq_len > 1:
            yield {"seq_len": setup.seq_len // 2}, "sequences of half the length"

    def _largest_batch(self, setup: Setup, limit: int) -> int:
        """The largest divisor of the batch, below it, that completes; 0 where none does."""
        divisors = [size for size in range(setup.batch - 1, 0, -1) if setup.batch % size == 0]
        if len(divisors) > 2:
            self._profile.spot(
                gpu=self._card, vary=("batch",)
            )  # formulas for the sizes that follow
        for size in divisors:
            accum = setup.grad_accum * (setup.batch // size)
            if self._run(batch=size, grad_accum=accum).under(limit).num_ooms == 0:
                return size
        return 0


def _allocated_before(result: Replay | None, index: int | None) -> int:
    """What was allocated when an event came that failed."""
    if result is None or index is None or result.allocated_curve is None or not index:
        return 0
    return result.allocated_curve[index - 1]


def _options_text(options: Mapping[str, Any]) -> str:
    """Options as they are added to a command line."""
    return " ".join(command_words("estimate", "MODEL", options)[3:])


def _is_near(predicted: int, actual: int) -> bool:
    return abs(predicted - actual) <= _NEAR * actual
