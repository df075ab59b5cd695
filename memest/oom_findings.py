"""What became of a run that ran out of memory: frozen results, printable, with a JSON document."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any

from memest.oom_account import Account
from memest.result import SCHEMA_VERSION, Peak, PeakMoment

__all__ = ["Belongs", "Change", "OomExplanation", "Relation"]


class Belongs(enum.StrEnum):
    """Whether a message can be of the run that was predicted."""

    YES = "yes"
    NO = "no"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of the command, and what the run needs with it.

    Attributes:
        options: what is given in addition or in place, by the options' keywords.
        words: as the command line spells it.
        changes_training: what makes the training another one; empty where nothing does.
        allocated_bytes: peak.
        reserved_bytes: peak, with as much memory as there is.
        fits: whether it completes in the memory that the message tells of.
    """

    options: tuple[tuple[str, Any], ...]
    words: str
    changes_training: str
    allocated_bytes: int
    reserved_bytes: int
    fits: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "options": dict(self.options),
            "words": self.words,
            "changes_training": self.changes_training,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A message beside the prediction of a command.

    Attributes:
        model: its reference.
        gpu: whose kernels were taken.
        peak: what the prediction needs, with as much memory as it takes.
        limit_bytes: what the allocator could have, by the message: the least that is compatible.
        stopped_at: where the prediction asks for what the message says was asked for, with the
            allocated memory nearest to the message's; None where it never asks for so much.
        stopped_allocated_bytes: the prediction's allocated memory there.
        reached_at: where it first has as much allocated as the message says; None if never.
        out_at: where it runs out of memory in that limit; None if it does not.
        out_allocated_bytes: its allocated memory there.
        belongs: whether the two are of one run.
        sentences: all that in words.
        changes: of the command, one at a time: those that fit first, and of them those that keep
            the training.
        notes: what the user should know besides.
    """

    model: str
    gpu: str
    peak: Peak
    limit_bytes: int | None
    stopped_at: PeakMoment | None
    stopped_allocated_bytes: int
    reached_at: PeakMoment | None
    out_at: PeakMoment | None
    out_allocated_bytes: int
    belongs: Belongs
    sentences: tuple[str, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "model": self.model,
            "gpu": self.gpu,
            "peak": {
                "allocated_bytes": self.peak.allocated_bytes,
                "reserved_bytes": self.peak.reserved_bytes,
                "device_bytes": self.peak.device_bytes,
            },
            "limit_bytes": self.limit_bytes,
            "belongs": self.belongs.value,
            "stopped_at": _moment(self.stopped_at, self.stopped_allocated_bytes),
            "allocated_reached_at": _moment(self.reached_at, None),
            "out_of_memory_at": _moment(self.out_at, self.out_allocated_bytes),
            "sentences": list(self.sentences),
            "changes": [change.to_dict() for change in self.changes],
            "notes": list(self.notes),
        }


def _moment(at: PeakMoment | None, allocated: int | None) -> dict[str, Any] | None:
    if at is None:
        return None
    known = {} if allocated is None else {"allocated_bytes": allocated}
    return {
        "phase": at.phase.value,
        "step": at.step,
        "micro_step": at.micro_step,
        "module": at.module,
        "op": at.op,
        **known,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class OomExplanation:
    """All messages of a log, and the first one beside a prediction if one was asked for.

    Attributes:
        accounts: of the messages, the first one first.
        relation: of the first one; None without a model.
    """

    accounts: tuple[Account, ...]
    relation: Relation | None

    def to_dict(self) -> dict[str, Any]:
        """The document that ``memest explain-oom --json`` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "messages": [
                {
                    **account.message.to_dict(),
                    "shares": [
                        {"name": share.name, **share.size.to_dict()} for share in account.shares
                    ],
                    "gpus": [spec.name for spec in account.cards],
                    "limit": None if account.limit is None else account.limit.to_dict(),
                    "fragmented": account.fragmented,
                    "other_processes": (
                        None if account.others is None else account.others.to_dict()
                    ),
                    "sentences": list(account.sentences),
                }
                for account in self.accounts
            ],
            "run": None if self.relation is None else self.relation.to_dict(),
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as text, keys in order, two spaces of indent."""
        return json.dumps(self.to_dict(), indent=2)

    def to_frame(self) -> Any:
        """A ``pandas.DataFrame``: a row a share of the memory in each message, in bytes.

        Raises:
            MissingDependencyError: without pandas.
        """
        from memest.report.notebook import frame_of

        columns = ("message", "share", "low_bytes", "high_bytes")
        return frame_of(
            ({"message": number, "share": share.name, **share.size.to_dict()}
             for number, account in enumerate(self.accounts, 1) for share in account.shares),
            columns,
        )  # fmt: skip

    def _repr_html_(self) -> str:
        from memest.report.notebook import text_as_html

        return text_as_html(str(self))

    def __str__(self) -> str:
        from memest.report.oom import render_oom

        return render_oom(self)
