"""Lengths of samples from files: histograms, lists, and datasets counted with a tokenizer."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memest.config.lengths import Lengths
from memest.errors import ConfigError, MissingDependencyError, closest

__all__ = ["lengths_of_dataset", "read_lengths"]

_TEXT_COLUMNS = ("text", "content", "prompt", "messages", "conversations", "input_ids")
_LENGTHS = tuple(
    "length lengths len tokens num_tokens n_tokens token_count input_length seq_len "
    "sequence_length".split()
)
_COUNTS = ("count", "counts", "samples", "n", "frequency", "freq")
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")


def read_lengths(path: str | Path) -> Lengths:
    """Read a histogram (``length,count`` as CSV, or JSON), or one length a line.

    JSON is an object of counts by length, a list of lengths, or a list of pairs.

    Raises:
        ConfigError: the file cannot be read or holds something else; the line is named.
    """
    if re.fullmatch(r"\d+(?:[,\s]+\d+)*", str(path).strip()) and not Path(path).exists():
        raise ConfigError(
            f"--lengths {str(path)!r} is no file: write the lengths into one, a line each. Samples "
            "that are all as long are --seq-len 512."
        )
    text = _text(path, "--lengths")
    start = text.lstrip()[:1]
    if start in ("{", "["):
        return _from_json(text, path)
    counts: Counter[int] = Counter()
    columns: list[int] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        parts = [part.strip("\"' ") for part in re.split(r"[,;\s]+", line.strip().strip(",;"))]
        if not any(parts):
            continue
        if number == 1 and parts[0][:1].isalpha():
            columns = _named_columns([part.lower() for part in parts], path)
            continue
        try:
            kept = parts if columns is None else [parts[column] for column in columns]
            length, count = (int(part) for part in (*kept, "1")[: max(len(kept), 2)])
        except (ValueError, IndexError):
            raise ConfigError(
                f"--lengths {str(path)!r}, line {number}: {line.strip()!r} is no length. Write one "
                "length a line, or length,count."
            ) from None
        if length < 1 or count < 0:
            raise ConfigError(
                f"--lengths {str(path)!r}, line {number}: {line.strip()!r}: a length is 1 or more, "
                "a count 0 or more."
            )
        counts[length] += count
    return _lengths_of(counts, path)


def _named_columns(names: list[str], path: str | Path) -> list[int]:
    """Places of the length and of the count among the names of a first line.

    Raises:
        ConfigError: several names, and none of a length.
    """
    length = next((names.index(name) for name in _LENGTHS if name in names), None)
    if length is None and len(names) > 1:
        raise ConfigError(
            f"--lengths {str(path)!r}: which column is the length? It has {', '.join(names[:6])}: "
            "call it length, and how many samples have it count."
        )
    count = next((names.index(name) for name in _COUNTS if name in names), None)
    return [length or 0, *([] if count is None else [count])]


def _from_json(text: str, path: str | Path) -> Lengths:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--lengths {str(path)!r} is no JSON ({error.msg}, line {error.lineno})."
        ) from None
    counts: Counter[int] = Counter()
    pairs = values.items() if isinstance(values, dict) else values
    try:
        for item in pairs:
            if isinstance(item, dict):
                counts[_whole(item["length"])] += _whole(item["count"])
            elif isinstance(item, (list, tuple)):
                length, count = item
                counts[_whole(length)] += _whole(count)
            else:
                counts[_whole(item)] += 1
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"--lengths {str(path)!r} holds {json.dumps(item)[:60]}, which is no length: write "
            '{"128": 40, "512": 3}, [128, 512] or [[128, 40], [512, 3]].'
        ) from None
    return _lengths_of(counts, path)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return int(value)


def _lengths_of(histogram: Counter[int], path: str | Path) -> Lengths:
    counts = tuple(sorted((n, c) for n, c in histogram.items() if c))
    if not counts:
        raise ConfigError(f"--lengths {str(path)!r} has no samples: write one length a line.")
    return Lengths(counts)


def _text(path: str | Path, option: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{option} {str(path)!r} is not text.") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{option} {str(path)!r} cannot be read ({why}): name a file with one "
            "length a line, or length,count."
        ) from None


# -- datasets -------------------------------------------------------------------------------------


def lengths_of_dataset(path: str | Path, tokenizer: str | None, column: str | None) -> Lengths:
    """Count the tokens of a dataset's samples.

    Args:
        path: jsonl, json, csv, parquet, or txt with a sample a line.
        tokenizer: a ``tokenizer.json`` or a folder that holds one; not needed where the samples
            are token ids already.
        column: with the text, or the ids; None = the first of the usual names.

    Raises:
        ConfigError: no tokenizer, an unknown format, or no such column.
        MissingDependencyError: a package that reads it is not installed.
    """
    rows = _rows(Path(path))
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"--dataset {str(path)!r} has no samples.")
    name = _column(first, column, path)
    count = _counter(first[name], tokenizer, path)
    counts = Counter([count(first[name])])
    for number, row in enumerate(rows, start=2):
        value = row.get(name)
        if value is None:
            raise ConfigError(f"--dataset {str(path)!r}, sample {number} has no {name!r}.")
        counts[count(value)] += 1
    counts.pop(0, None)  # empty samples have nothing to train on
    return Lengths(tuple(sorted(counts.items())))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    suffix = path.suffix.lower()
    if not suffix and not path.exists():
        raise ConfigError(
            f"--dataset {str(path)!r} is no file here, and nothing is fetched: save it "
            f"(datasets.load_dataset({str(path)!r}, split='train').to_json('train.jsonl')) and "
            "name that file, or give the lengths themselves, --lengths."
        )
    if suffix not in _SUFFIXES:
        matches = closest(suffix, _SUFFIXES)
        hint = f" Did you mean {matches[0]}?" if matches else ""
        raise ConfigError(
            f"--dataset {str(path)!r}: the suffix {suffix!r} does not say what it is.{hint} Legal: "
            f"{', '.join(_SUFFIXES)}. Or give the lengths themselves, --lengths."
        )
    if suffix == ".parquet":
        yield from _parquet(path)
        return
    text = _text(path, "--dataset")
    if suffix == ".txt":
        yield from ({"text": line} for line in text.splitlines() if line.strip())
    elif suffix == ".csv":
        yield from csv.DictReader(io.StringIO(text))
    elif suffix == ".json":
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--dataset {str(path)!r} is no JSON ({error.msg}).") from None
        yield from (rows if isinstance(rows, list) else [rows])
    else:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ConfigError(
                        f"--dataset {str(path)!r}, line {number} is no JSON ({error.msg})."
                    ) from None


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingDependencyError(
            "Parquet files are read by pyarrow, which is not installed: pip install pyarrow, or "
            "give the lengths themselves, --lengths."
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dataset {str(path)!r} cannot be read: {error}") from None
    for group in file.iter_batches():
        yield from group.to_pylist()


def _column(row: Any, column: str | None, path: str | Path) -> str:
    if not isinstance(row, dict):
        raise ConfigError(f"--dataset {str(path)!r}: a sample is no object with columns.")
    if column is not None and column in row:
        return column
    default = next((name for name in _TEXT_COLUMNS if name in row), None)
    if column is not None or default is None:
        columns = ", ".join(map(repr, row))
        lack = f"no column {column!r}" if column else "no column of text by a usual name"
        raise ConfigError(
            f"--dataset {str(path)!r} has {lack}, it has {columns}: say --dataset-column NAME."
        )
    return default


def _counter(sample: Any, tokenizer: str | None, path: str | Path) -> Any:
    """What counts the tokens of a sample."""
    if isinstance(sample, list) and all(isinstance(v, int) for v in sample):
        return len
    if not isinstance(sample, str):
        raise ConfigError(
            f"--dataset {str(path)!r} holds conversations, whose tokens depend on a chat template: "
            "apply it and count, then give the lengths (--lengths FILE, one a line)."
        )
    if tokenizer is None:
        raise ConfigError(
            f"--dataset {str(path)!r} is text, and words are not tokens: add --tokenizer with a "
            "tokenizer.json (or the folder of a model that is here). Or write the lengths that "
            "your own code sees, one a line, and give them: --lengths FILE."
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependencyError(
            "Counting tokens needs the tokenizers package: pip install 'memest-gpu[torch]'."
        ) from error
    file = Path(tokenizer)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(
            f"--tokenizer {tokenizer!r}: there is no {file}. Name a tokenizer.json, or the folder "
            "of a model that holds one."
        )
    try:
        encoder = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises a bare one
        raise ConfigError(f"--tokenizer {tokenizer!r} cannot be read: {error}") from None
    encoder.no_truncation()
    encoder.no_padding()
    return lambda text: len(encoder.encode(str(text)).ids)
