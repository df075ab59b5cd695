"""Commands of memest as processes, without the seconds that imports take."""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

from support.forked import WARM, start_apart

__all__ = ["check_refused", "run_command", "run_commands"]

WARM.append("support.warm_commands")
_SECONDS = 300
"""After which a command is ended."""


def run_command(words: Sequence[str], environment: Mapping[str, str]) -> CompletedProcess[str]:
    """What :func:`run_commands` does with one, and as text."""
    (process,) = run_commands((words, environment))
    texts = (stream.decode() for stream in (process.stdout, process.stderr))
    return CompletedProcess(process.args, process.returncode, *texts)


def run_commands(
    *commands: tuple[Sequence[str], Mapping[str, str]],
) -> list[CompletedProcess[bytes]]:
    """Run commands of memest in processes of their own, all at the same time.

    They know nothing of the tests, and their streams are files; but torch and transformers are
    there before they begin, with what they read from the environment when they are imported. What
    is proved of imports, of those settings or of the streams themselves needs ``python -m memest``.

    Args:
        commands: the words after the program's name, and all of the environment, of each.

    Returns:
        For each the exit code, negative where a signal ended it, and what was written.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [
            (Path(folder) / f"stdout{number}", Path(folder) / f"stderr{number}")
            for number in range(len(commands))
        ]
        processes = [
            start_apart(_be_command, tuple(words), dict(environment), files)
            for (words, environment), files in zip(commands, streams, strict=True)
        ]
        for process in processes:
            process.join(_SECONDS)
            process.kill()
            process.join()
        return [
            CompletedProcess(words, process.exitcode, *(file.read_bytes() for file in files))
            for (words, _), process, files in zip(commands, processes, streams, strict=True)
        ]


def _be_command(
    words: tuple[str, ...], environment: dict[str, str], streams: tuple[Path, Path]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for stream, file in zip((sys.stdout, sys.stderr), streams, strict=True):
        with file.open("wb") as out:
            os.dup2(out.fileno(), stream.fileno())
    from memest.cli.main import run

    sys.argv = ["memest", *words]
    sys.exit(run())


def check_refused(process, code, *words):
    """A command ended with a code and one paragraph on stderr that has some words."""
    assert process.returncode == code, process.stderr
    error = json.loads(process.stdout)["error"] if process.stdout else None
    assert error is None or error["exit_code"] == code
    assert process.stderr.startswith("memest: ")
    assert process.stderr.count("\n") == 1, "one paragraph"
    assert "Traceback" not in process.stderr
    for word in words:
        assert word in process.stderr
