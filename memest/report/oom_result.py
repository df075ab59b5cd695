"""What became of a run that ran out of memory: frozen results, printable, with a JSON document."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from memest.report.answer import SCHEMA_VERSION, Answer, Document, document
from memest.report.oom_account import Account
from memest.report.result import Peak, PeakMoment

__all__ = ["Change", "Match", "MessageMatch", "OomExplanation"]


class Match(enum.StrEnum):
    """Whether a message can be of the run that was predicted."""

    YES = "yes"
    NO = "no"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Document):
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
        return Document.to_dict(self) | {"options": dict(self.options)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageMatch(Document):
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
    belongs: Match
    sentences: tuple[str, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "model": self.model,
            "gpu": self.gpu,
            "peak": self.peak.to_dict(),
            "limit_bytes": self.limit_bytes,
            "belongs": self.belongs.value,
            "stopped_at": _moment(self.stopped_at, self.stopped_allocated_bytes),
            "allocated_reached_at": _moment(self.reached_at, None),
            "out_of_memory_at": _moment(self.out_at, self.out_allocated_bytes),
            "sentences": list(self.sentences),
            "changes": document(self.changes),
            "notes": list(self.notes),
        }


def _moment(at: PeakMoment | None, allocated_bytes: int | None) -> dict[str, Any] | None:
    if at is None:
        return None
    figures = {} if allocated_bytes is None else {"allocated_bytes": allocated_bytes}
    return at.to_dict() | figures


@dataclass(frozen=True, slots=True, kw_only=True)
class OomExplanation(Answer):
    """All messages of a log, and the first one beside a prediction if one was asked for.

    Attributes:
        accounts: of the messages, the first one first.
        relation: of the first one; None without a model.
    """

    accounts: tuple[Account, ...]
    relation: MessageMatch | None

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
                    "limit": document(account.limit),
                    "fragmented": account.fragmented,
                    "other_processes": document(account.others),
                    "sentences": list(account.sentences),
                }
                for account in self.accounts
            ],
            "run": document(self.relation),
        }
