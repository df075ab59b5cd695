"""The commands of a shell script as words; nothing is run.

What POSIX shells and bash make of quotes, comments, continued lines, variables and arrays
(POSIX.1-2017, Shell Command Language 2.2 to 2.6; bash manual, Arrays). A variable that the script
does not set for certain stays in its word as it was written: ``$LOCAL_RANK``.
"""

from __future__ import annotations

import ast
import operator
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
_CONTINUED = re.compile(r"\\\r?\n")
_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_OPENING = frozenset("if for while until case select {".split())
_CLOSING = frozenset("fi done esac }".split())
_BETWEEN = frozenset("then do else elif !".split())
_SETTERS = frozenset("export declare local readonly typeset".split())
_MAX_WORDS = 20_000
_MAX_LENGTH = 100_000
"""Of a value, in characters."""

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
    variables: dict[str, Value] = dict(environment)
    variables |= {str(number): word for number, word in enumerate(arguments, 1)}
    variables |= {"@": list(arguments), "*": list(arguments), "#": str(len(arguments))}
    exported = dict(environment)
    commands: list[ShellCommand] = []
    depth, conditional = 0, False
    for line, words, separator in _simple_commands(text.replace("\r\n", "\n"), label):
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
            if sum(map(len, value or ())) > _MAX_LENGTH:
                raise ConfigError(f"{label}, line {line}: {match[1]} grows too long to follow.")
            alone = all(_ASSIGNMENT.match(_plain(word)) for word in rest)
            if not alone and not is_setter:
                prefix[match[1]] = value if isinstance(value, str) else ""
                continue
            if certain:
                variables[match[1]] = value
            else:
                # what is given in front is what somebody says of it
                variables[match[1]] = environment.get(match[1])
                exported.pop(match[1], None)
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
        elif text.startswith("$((", dollar) and (end := text.find("))", dollar)) > 0:
            out.append(_sum(text[dollar + 3 : end], variables))
            at = end + 2
        elif after == "{" and (end := _brace_end(text, dollar)) > 0:
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


def _sum(text: str, variables: Mapping[str, Value]) -> str:
    """The value of whole numbers and variables added, multiplied and divided (2.6.4)."""
    parts: list[str] = []
    tokens = re.findall(r"\$?\{?[A-Za-z_]\w*\}?|\d+|[-+*/%()]", text)
    if "".join(tokens) != text or "**" in text or "//" in text:
        return "$(...)"
    for part in tokens:
        name = part.strip("${}")
        value = name if name.isdigit() or not name[:1].isidentifier() else variables.get(name)
        if not isinstance(value, str) or (name[:1].isidentifier() and not value.isdecimal()):
            return f"${{{name}}}"
        parts.append(value)
    expression = "".join(parts).replace("/", "//")
    if len(expression) > _MAX_SUM:
        return "$(...)"
    try:
        return str(_whole(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
        return "$(...)"


def _whole(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return int(_OPERATORS[type(node.op)](_whole(node.left), _whole(node.right)))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(ast.dump(node))


_MAX_SUM = 100
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _braced(inside: str, variables: Mapping[str, Value]) -> str:
    """``${NAME}``, ``${NAME:-word}``, ``${NAME[1]}``; other expansions stay as they are."""
    if element := re.fullmatch(r"([A-Za-z_]\w*)\[([^@*\]]+)\]", inside):
        items, place = variables.get(element[1]), _replaced(element[2], variables)
        if not (place.isascii() and place.isdigit()):
            return place if place.startswith("$") else f"${{{place}}}"
        if isinstance(items, list) and int(place[:6]) < len(items):
            return items[int(place[:6])]
        return f"${{{element[1]}}}"
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
    for line, token in _Tokens(text, label):
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


class _Tokens:
    """Takes a text apart: words, and the operators and ends of lines between commands.

    Inside of an array lines do not end a command, and its bracket at the end is a word.
    """

    def __init__(self, text: str, label: str) -> None:
        self._text = text
        self._label = label
        self._at = 0
        self._line = 1
        self._word: _Word | None = None
        self._in_array = False
        self._here_documents: list[str] = []

    def __iter__(self) -> Iterator[tuple[int, _Word | str]]:
        while self._at < len(self._text):
            char = self._text[self._at]
            if self._is_skipped(char):
                continue
            if char == "&" and self._word is not None and _plain(self._word).endswith(("<", ">")):
                self._word.add(char)  # 2>&1
                self._at += 1
            elif char not in " \t\r\n;&|()":
                self._word = self._word or _Word()
                before, place = self._at, f"{self._label}, line {self._line}"
                self._at = _piece(self._text, before, self._word, place)
                self._line += self._text.count("\n", before, self._at)
            else:
                yield from self._between(char)
        if self._word is not None:
            yield self._line, self._word

    def _is_skipped(self, char: str) -> bool:
        """Go on behind a line that is continued, a comment, or the start of a here-document."""
        text, at = self._text, self._at
        if match := _CONTINUED.match(text, at):
            self._at, self._line = match.end(), self._line + 1
        elif char == "#" and self._word is None:
            end = text.find("\n", at)
            self._at = len(text) if end < 0 else end
        elif match := _HERE_DOCUMENT.match(text, at):
            self._here_documents.append(match[2])
            self._at = match.end()
        else:
            return False
        return True

    def _between(self, char: str) -> Iterator[tuple[int, _Word | str]]:
        """What stands between words, and the text of here-documents behind the line."""
        opens = char == "(" and self._word is not None and _opens(self._word)
        if self._word is not None:
            if opens:
                self._word.add("(")
                self._in_array = True
            yield self._line, self._word
            self._word = None
        size = 1
        if char == ")" and self._in_array:
            closing = _Word()
            closing.add(")")
            yield self._line, closing
            self._in_array = False
        elif char not in " \t\r" and not self._in_array and not opens:
            size = 2 if char in "&|" and self._text.startswith(char * 2, self._at) else 1
            yield self._line, char * size
        self._at += size
        if char == "\n":
            self._line += 1
            for name in self._here_documents:
                self._pass_over(name)
            self._here_documents = []

    def _pass_over(self, name: str) -> None:
        """Go on behind the line that ends a here-document."""
        match = re.compile(rf"^\t*{name}$", re.MULTILINE).search(self._text, self._at)
        end = len(self._text) if match is None else match.end()
        self._line += self._text.count("\n", self._at, end)
        self._at = end


def _opens(word: _Word) -> bool:
    """Whether a bracket behind this makes an array of it: ``NAME=(``."""
    match = _ASSIGNMENT.match(_plain(word))
    return match is not None and match.end() == len(_plain(word))


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
        end = _substitution(text, at)
        word.add(_sum_or_mark(text[at:end]))
        return end
    if text.startswith("${", at) and (end := _brace_end(text, at)) > 0:
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
            end = _substitution(text, at)
            piece.append(_sum_or_mark(text[at:end]))
            at = end
        else:
            piece.append(text[at])
            at += 1
    if at >= len(text):
        raise ConfigError(f"{place}: a quote does not end.")
    word.add("".join(piece), quoted=True)
    return at + 1


def _brace_end(text: str, at: int) -> int:
    """The place of the brace that ends ``${...}``, others inside of it; -1 where none does.

    Example:
        >>> _brace_end('${A:-"${B}/x"}/y', 0)
        13
    """
    depth = 0
    for place in range(at, len(text)):
        depth += text.startswith("${", place)
        if text[place] == "}":
            depth -= 1
            if depth == 0:
                return place
    return -1


def _sum_or_mark(text: str) -> str:
    """``$((A * B))``, and ``$(expr A / B)`` as it, without blanks; a mark for other commands."""
    if text.startswith("$((") and text.endswith("))"):
        return "".join(text.split())
    if match := re.fullmatch(r"[$`]\(?\s*expr\s(.*?)[)`]", text, re.DOTALL):
        return f"$(({''.join(match[1].replace(chr(92), '').split())}))"
    return "$(...)"


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
