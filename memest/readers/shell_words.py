"""The commands of a shell script as words; nothing is run.

What POSIX shells and bash make of quotes, comments, continued lines, variables and arrays
(POSIX.1-2017, Shell Command Language 2.2 to 2.6; bash manual, Arrays). A variable that the script
does not set for certain stays in its word as it was written: ``$LOCAL_RANK``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memest.errors import ConfigError

__all__ = ["UNSET", "ShellCommand", "commands_of"]

UNSET = re.compile(r"\$(\(\.\.\.\)|\{[^}]*\}|[A-Za-z_]\w*|[0-9@*#?])")
"""What is left in a word of a variable or a command whose value the script does not tell."""
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?]")
_BRACED = re.compile(r"([A-Za-z_]\w*|[0-9]|[@*#])(?:\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_OPENING = frozenset("if for while until case select".split())
_CLOSING = frozenset("fi done esac".split())
_BETWEEN = frozenset("then do else elif ! { }".split())
_SETTERS = frozenset("export declare local readonly typeset".split())
_MAX_WORDS = 20_000

Value = str | list[str] | None
"""Of a variable: a text, an array, or none that can be told."""


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A simple command.

    Attributes:
        line: of the script, from 1.
        words: with variables that are known in place.
        environment: assignments before it, and what was exported above.
    """

    line: int
    words: tuple[str, ...]
    environment: dict[str, str]


@dataclass(slots=True)
class _Word:
    """A word as written: pieces of text, and whether a quote is around each."""

    pieces: list[tuple[str, bool]] = field(default_factory=list)

    def add(self, text: str, *, quoted: bool = False, plain: bool = False) -> None:
        # what is not to be looked at again for variables has its dollar signs doubled
        self.pieces.append((text.replace("$", "$$") if plain else text, quoted))


def commands_of(
    text: str, label: str, environment: Mapping[str, str], arguments: Sequence[str]
) -> list[ShellCommand]:
    """The commands of a script, in its order, those of every branch among them.

    Args:
        text: of the script.
        label: how messages call it.
        environment: variables that it is started with; what the script gives them under a
            condition does not count.
        arguments: ``$1`` and on.

    Raises:
        ConfigError: a quote that does not end.
    """
    given = frozenset(environment)
    variables: dict[str, Value] = dict(environment)
    variables |= {str(number): word for number, word in enumerate(arguments, 1)}
    variables |= {"@": list(arguments), "*": list(arguments), "#": str(len(arguments))}
    exported = dict(environment)
    commands: list[ShellCommand] = []
    depth, conditional = 0, False
    for line, words, separator in _simple_commands(text, label):
        prefix: dict[str, str] = {}
        rest = words
        while rest and _plain(rest[0]) in _OPENING | _CLOSING | _BETWEEN:
            word = _plain(rest[0])
            depth += (word in _OPENING) - (word in _CLOSING)
            if word in ("for", "select") and len(rest) > 1:
                variables[_plain(rest[1])] = None
                rest = []
            rest = rest[1:]
        is_setter = bool(rest) and _plain(rest[0]) in _SETTERS
        if is_setter:
            rest = [word for word in rest[1:] if not _plain(word).startswith("-")]
        certain = depth == 0 and not conditional
        while rest and (match := _ASSIGNMENT.match(_plain(rest[0]))):
            value, rest = _assigned(rest, match, variables)
            if rest and not is_setter:
                prefix[match[1]] = value if isinstance(value, str) else ""
                continue
            if certain or match[1] not in given:
                variables[match[1]] = value if certain else None
            if isinstance(value, str) and certain and (is_setter or match[1] in exported):
                exported[match[1]] = value
        if is_setter:
            exported |= {
                name: value
                for name in map(_plain, rest)
                if isinstance(value := variables.get(name), str)
            }
        elif rest:
            evaluated = tuple(part for word in rest for part in _values(word, variables))
            if evaluated:
                commands.append(ShellCommand(line, evaluated, exported | prefix))
        conditional = separator in ("&&", "||")
    return commands


def _plain(word: _Word) -> str:
    return "".join(text for text, _ in word.pieces)


def _assigned(
    words: list[_Word], match: re.Match[str], variables: Mapping[str, Value]
) -> tuple[Value, list[_Word]]:
    """The value of the assignment that words start with, and what is behind it."""
    word, before = words[0], variables.get(match[1], "")
    text, quoted = word.pieces[0]
    first = _Word([(text[match.end() :], quoted), *word.pieces[1:]])
    if _plain(first) == "(":
        end = next((i for i, each in enumerate(words) if _plain(each) == ")"), len(words))
        items = [part for each in words[1:end] for part in _values(each, variables)]
        if match[2]:
            if before is None:
                return None, words[end + 1 :]
            items = [*([before] if isinstance(before, str) and before else before), *items]
        return items, words[end + 1 :]
    # no word of an assignment is split at blanks (2.9.1)
    value = "".join(_replaced(each, variables) for each, _ in first.pieces)
    if match[2]:
        return (before + value if isinstance(before, str) else None), words[1:]
    return value, words[1:]


def _values(word: _Word, variables: Mapping[str, Value]) -> list[str]:
    """The words that a word becomes: a variable without quotes is parted at blanks (2.6.5)."""
    whole = _plain(word)
    match = re.fullmatch(r"\$\{?([A-Za-z_]\w*|[@*])(\[[@*]\])?\}?", whole)
    if match is not None and isinstance(items := variables.get(match[1]), list):
        return list(items) if match[2] or match[1] in "@*" else items[:1]
    out: list[str] = []
    open_word = False
    for text, quoted in word.pieces:
        value = _replaced(text, variables)
        parts = [value] if quoted or "$" not in text else value.split()
        if not parts:
            continue
        if open_word:
            out[-1] += parts[0]
            parts = parts[1:]
        out += parts
        open_word = True
    return out


def _replaced(text: str, variables: Mapping[str, Value]) -> str:
    """A piece of a word with what is known in place of its variables."""
    out: list[str] = []
    at = 0
    while at < len(text):
        dollar = text.find("$", at)
        if dollar < 0 or dollar + 1 >= len(text):
            break
        out.append(text[at:dollar])
        after = text[dollar + 1]
        if after == "$":
            # a dollar sign that quotes or a backslash keep
            out.append("$")
            at = dollar + 2
        elif after == "{" and (end := text.find("}", dollar)) > 0:
            out.append(_braced(text[dollar + 2 : end], variables))
            at = end + 1
        elif match := _NAME.match(text, dollar + 1):
            value = variables.get(match[0])
            out.append(_joined(value, f"${match[0]}"))
            at = match.end()
        else:
            out.append("$")
            at = dollar + 1
    return "".join(out) + text[at:]


def _braced(inside: str, variables: Mapping[str, Value]) -> str:
    """``${NAME}``, ``${NAME:-word}``; other expansions stay as they are."""
    match = _BRACED.fullmatch(inside)
    if match is None:
        return f"${{{inside}}}"
    name, operator, word = match[1], match[2], match[3]
    value = variables.get(name)
    missing = name not in variables or ((operator or "").startswith(":") and value == "")
    if operator and missing:
        return _replaced(word.strip("\"'"), variables)
    return _joined(value, f"${{{name}}}")


def _joined(value: Value, written: str) -> str:
    if value is None:
        return written
    return value if isinstance(value, str) else " ".join(value)


def _simple_commands(text: str, label: str) -> Iterator[tuple[int, list[_Word], str]]:
    """Line, words and what ends each simple command of a text."""
    words: list[_Word] = []
    first_line = 0
    count = 0
    for line, token in _tokens(text, label):
        count += 1
        if count > _MAX_WORDS:
            raise ConfigError(f"{label} has more than {_MAX_WORDS:,} words.")
        if isinstance(token, str):
            if words:
                yield first_line, words, token
            words = []
            continue
        first_line = first_line if words else line
        words.append(token)
    if words:
        yield first_line, words, ""


def _tokens(text: str, label: str) -> Iterator[tuple[int, _Word | str]]:
    """Words, and the operators and ends of lines between commands, but not inside of an array."""
    at, line, array = 0, 1, False
    word: _Word | None = None
    waiting: list[str] = []
    while at < len(text):
        char = text[at]
        if text.startswith(("\\\n", "\\\r\n"), at):
            at, line = text.index("\n", at) + 1, line + 1
            continue
        joins = char == "&" and word is not None and _plain(word).endswith(("<", ">"))
        joins = joins or (char == "(" and word is not None and not _opens(word))
        if char in " \t\r\n;&|()" and not joins:
            if char == "(" and word is not None:
                word.add("(")
                array = True
            if word is not None:
                yield line, word
                word = None
            if char == ")" and array:
                end = _Word()
                end.add(")")
                yield line, end
                array = False
            elif char not in " \t\r" and not array:
                operator = char * 2 if text.startswith(char * 2, at) and char in "&|" else char
                yield line, operator
                at += len(operator) - 1
            if char == "\n":
                line += 1
                for name in waiting:
                    at, line = _behind(text, at, line, name)
                waiting = []
            at += 1
            continue
        if char == "#" and word is None:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        if match := _HERE_DOCUMENT.match(text, at):
            waiting.append(match[2])
            at = match.end()
            continue
        word = word or _Word()
        if joins:
            word.add(char)
            at += 1
            continue
        began = at
        at = _piece(text, at, word, f"{label}, line {line}")
        line += text.count("\n", began, at)
    if word is not None:
        yield line, word


def _opens(word: _Word) -> bool:
    """Whether a bracket behind this makes an array of it: ``NAME=(``."""
    match = _ASSIGNMENT.match(_plain(word))
    return match is not None and match.end() == len(_plain(word))


def _behind(text: str, at: int, line: int, name: str) -> tuple[int, int]:
    """The place of the end of a here-document, and its line."""
    match = re.compile(rf"^\t*{name}$", re.MULTILINE).search(text, at + 1)
    end = len(text) - 1 if match is None else match.end()
    return end, line + text.count("\n", at + 1, end + 1)


def _piece(text: str, at: int, word: _Word, place: str) -> int:
    """Take a quoted or a plain piece of a word; returns the place behind it.

    Raises:
        ConfigError: a quote that does not end.
    """
    char = text[at]
    if char == "'":
        end = text.find("'", at + 1)
        if end < 0:
            raise ConfigError(f"{place}: a quote does not end.")
        word.add(text[at + 1 : end], quoted=True, plain=True)
        return end + 1
    if char == '"':
        return _double_quoted(text, at + 1, word, place)
    if char == "\\":
        word.add(text[at + 1 : at + 2], quoted=True, plain=True)
        return at + 2
    if text.startswith("$(", at) or char == "`":
        word.add("$(...)")
        return _substitution(text, at)
    if text.startswith("${", at) and (end := text.find("}", at)) > 0:
        word.add(text[at : end + 1])
        return end + 1
    end = at + 1
    while end < len(text) and text[end] not in " \t\r\n;&|()'\"\\`$":
        end += 1
    word.add(text[at:end])
    return end


def _double_quoted(text: str, at: int, word: _Word, place: str) -> int:
    piece: list[str] = []
    while at < len(text) and text[at] != '"':
        if text.startswith("\\\n", at):
            at += 2
        elif text[at] == "\\" and text[at + 1 : at + 2] in ("$", "`", '"', "\\"):
            piece.append("$$" if text[at + 1] == "$" else text[at + 1])
            at += 2
        elif text.startswith("$(", at) or text[at] == "`":
            piece.append("$(...)")
            at = _substitution(text, at)
        else:
            piece.append(text[at])
            at += 1
    if at >= len(text):
        raise ConfigError(f"{place}: a quote does not end.")
    word.add("".join(piece), quoted=True)
    return at + 1


def _substitution(text: str, at: int) -> int:
    """The place behind a command substitution or arithmetic."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return len(text) if end < 0 else end + 1
    depth = 0
    for place in range(at + 1, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place + 1
    return len(text)
