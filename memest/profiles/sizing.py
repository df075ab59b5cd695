"""From the sizes that were asked for to the sizes that are taken, without the model at hand.

A model caps lengths, gives targets the length of the source, rounds images to patches, and says so
in notes. What it answered for some sizes is kept; between them it is written as a rule, the numbers
in the notes included, where one rule fits all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memest.profiles.formula import Formula, NoFormulaError, find, monomials

__all__ = ["SIZES", "Rule", "SizeAnswer", "Sizing", "asked_sizes", "milliseconds"]

SIZES = ("seq_len", "target_len", "image_size", "audio_seconds")
_NUMBER = re.compile(r"\d+")
_MAX_MS = 1 << 40

NamedSizes = tuple[tuple[str, float], ...]


def asked_sizes(setup: Any) -> NamedSizes:
    """The sizes that a setup names, by field."""
    return tuple((name, v) for name in SIZES if (v := getattr(setup, name)) is not None)


def milliseconds(seconds: float) -> int | None:
    """Whole milliseconds, None where it takes a fraction of one."""
    exact = seconds * 1000
    whole = round(exact)
    return whole if abs(exact - whole) < 1e-9 and whole < _MAX_MS else None


@dataclass(frozen=True, slots=True)
class SizeAnswer:
    """What a model makes of sizes.

    Attributes:
        batch_sizes: the sizes that its batch has, by field of the setup.
        notes: what there is to say.
    """

    batch_sizes: Mapping[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """Answers to a range of sizes.

    Attributes:
        names: the sizes that are asked for.
        lows: the least of each that was tried.
        highs: the greatest.
        moduli: sizes keep the remainder of ``lows`` by these.
        size_formulas: the sizes taken, each with its formula; audio in milliseconds.
        texts: the notes, with ``{}`` for every number.
        numbers: formulas of those numbers, for each note.
    """

    names: tuple[str, ...]
    lows: tuple[int, ...]
    highs: tuple[int, ...]
    moduli: tuple[int, ...]
    size_formulas: tuple[tuple[str, Formula], ...]
    texts: tuple[str, ...]
    numbers: tuple[tuple[Formula, ...], ...]

    def answer(self, point: tuple[int, ...]) -> SizeAnswer | None:
        """The answer for the named sizes, None outside the range."""
        for size, low, high, modulus in zip(point, self.lows, self.highs, self.moduli, strict=True):
            if not low <= size <= high or (size - low) % modulus:
                return None
        try:
            batch_sizes: dict[str, Any] = {
                name: _field(name, formula.at(point)) for name, formula in self.size_formulas
            }
            notes = tuple(
                text.format(*(formula.at(point) for formula in formulas))
                for text, formulas in zip(self.texts, self.numbers, strict=True)
            )
        except NoFormulaError:
            return None
        return SizeAnswer(batch_sizes, notes)


@dataclass(slots=True)
class Sizing:
    """All that is known of one model's sizes.

    Attributes:
        exact: answers that were given.
        rules: what follows from them.
    """

    exact: dict[NamedSizes, SizeAnswer] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)

    def find(self, sizes: NamedSizes) -> SizeAnswer | None:
        """The answer for sizes, None where the model must be asked."""
        exact_answer = self.exact.get(sizes)
        if exact_answer is not None:
            return exact_answer
        names, point = _as_point(sizes)
        if point is None:
            return None
        for rule in self.rules:
            if rule.names == names and (answer := rule.answer(point)) is not None:
                return answer
        return None

    def learn(self, answers: Mapping[NamedSizes, SizeAnswer], moduli: Mapping[str, int]) -> bool:
        """Keep answers, and find the rule behind them if there is one.

        Args:
            answers: for the same named sizes; all in the class of ``moduli``.
            moduli: 1 where a size is not in it.

        Returns:
            Whether there is a rule.
        """
        self.exact.update(answers)
        rule = _rule(answers, moduli)
        if rule is not None:
            self.rules = [r for r in self.rules if r.names != rule.names or r.lows != rule.lows]
            self.rules.append(rule)
        return rule is not None


def _as_point(sizes: NamedSizes) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    names = tuple(name for name, _ in sizes)
    point = []
    for name, value in sizes:
        whole = milliseconds(value) if name == "audio_seconds" else int(value)
        if whole is None:
            return names, None
        point.append(whole)
    return names, tuple(point)


def _field(name: str, value: int) -> float:
    return value / 1000 if name == "audio_seconds" else value


def _rule(answers: Mapping[NamedSizes, SizeAnswer], moduli: Mapping[str, int]) -> Rule | None:
    points = []
    names: tuple[str, ...] = ()
    for sizes in answers:
        names, point = _as_point(sizes)
        if point is None:
            return None
        points.append(point)
    if len(points) < 3 or not names:
        return None
    answer_list = list(answers.values())
    first = answer_list[0]
    texts = tuple(_escape(note) for note in first.notes)
    if any(tuple(_escape(n) for n in a.notes) != texts for a in answer_list):
        return None
    if any(list(a.batch_sizes) != list(first.batch_sizes) for a in answer_list):
        return None
    # an image takes tokens by its area
    basis = monomials([2 if name == "image_size" else 1 for name in names])
    try:
        size_formulas = tuple(
            (name, find(_numbers_of(name, answer_list), points, basis))
            for name in first.batch_sizes
        )
        numbers = tuple(
            tuple(
                find(values, points, basis)
                for values in zip(*(_integers(a.notes[i]) for a in answer_list), strict=True)
            )
            for i in range(len(texts))
        )
    except (NoFormulaError, ValueError):
        return None
    columns = list(zip(*points, strict=True))
    return Rule(
        names,
        tuple(map(min, columns)),
        tuple(map(max, columns)),
        tuple(moduli.get(name, 1) for name in names),
        size_formulas,
        texts,
        numbers,
    )


def _numbers_of(name: str, answers: Sequence[SizeAnswer]) -> list[int]:
    values = [a.batch_sizes[name] for a in answers]
    if name != "audio_seconds":
        return [int(v) for v in values]
    whole = [milliseconds(v) for v in values]
    if None in whole:
        raise ValueError(name)
    return [v for v in whole if v is not None]


def _escape(note: str) -> str:
    return _NUMBER.sub("{}", note.replace("{", "{{").replace("}", "}}"))


def _integers(note: str) -> list[int]:
    return [int(text) for text in _NUMBER.findall(note)]
