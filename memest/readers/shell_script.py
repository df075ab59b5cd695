"""Shell scripts and batch files: the launch command in them, read and never run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memest.errors import ConfigError
from memest.readers.command_words import (
    PROCESS_STARTERS,
    Command,
    split_command,
    starts_program,
)
from memest.readers.documents import read_source
from memest.readers.shell_words import UNSET, commands_of
from memest.readers.training_arguments import IGNORED_KEYS
from memest.readers.verl_keys import is_of_driver

__all__ = ["find_launch", "launch_among"]

_STARTERS = frozenset(
    """nohup exec eval time env sudo numactl nsys bash sh zsh uv poetry pixi
    conda micromamba apptainer singularity stdbuf timeout nice""".split()
).union(PROCESS_STARTERS)
"""What stands in front of a command that it starts."""
_NO_TRAINING = frozenset("pip venv ensurepip nltk spacy wandb setup.py".split())
"""What Python runs to prepare a machine."""
_PLACES = frozenset(
    """master_addr master_port node_rank machine_rank main_process_ip main_process_port rdzv_id
    rdzv_endpoint rdzv_backend rdzv_conf hostfile log_dir local_rank""".split()
)
"""Arguments of launchers that say where processes meet and write."""


def find_launch(
    path: Path,
    label: str,
    *,
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> Command:
    """The one launch command of a shell script, with the variables that the script sets.

    Args:
        path: of the script.
        label: how messages call it.
        environment: variables that it is started with.
        arguments: that it is given, ``$1`` and on.

    Raises:
        ConfigError: there is none, or several, or a variable that the script does not set matters.
    """
    text = read_source(path, label)
    variables = {**_slurm_variables(text), **(environment or {})}
    how = f"bash {path.name}"
    found = launch_among(text, label, variables, arguments, how=how, place="line {}".format)
    if found is None:
        raise ConfigError(
            f"{label} starts no training that memest can see. Give the command that it runs: "
            "memest read -- accelerate launch train.py ..."
        )
    return found


def launch_among(
    text: str,
    label: str,
    variables: Mapping[str, str],
    arguments: Sequence[str] = (),
    *,
    how: str,
    place: Callable[[int], str],
) -> Command | None:
    """The one launch command among the commands of a text, None where there is none.

    Args:
        text: of a shell script, or of a notebook's commands.
        label: how messages call it.
        variables: that it is started with.
        arguments: that it is given, ``$1`` and on.
        how: it is started; empty where nobody starts it by itself.
        place: what a line of it is called.

    Raises:
        ConfigError: there are several, or a variable that is not set matters.
    """
    launches: list[tuple[int, Command]] = []
    refusal: ConfigError | None = None
    for each in commands_of(text, label, variables, arguments):
        words = _started(each.words)
        if not words:
            continue
        starters = [word for word in each.words[:1] if word in PROCESS_STARTERS]
        words = [*starters, *words]
        try:
            command = split_command(words)
        except ConfigError as error:
            refusal = refusal or error
            continue
        command = replace(command, environment=each.environment | command.environment)
        if command.program not in _NO_TRAINING and command not in [c for _, c in launches]:
            launches.append((each.line, command))
    launched = [(line, command) for line, command in launches if _is_launched(command)]
    launches = launched or launches
    if not launches and refusal is not None:
        raise refusal
    if not launches:
        return None
    if len(launches) > 1:
        lines = "; ".join(place(line) for line, _ in launches)
        lines = f"lines {lines.replace('line ', '').replace(';', ',')}" if how else lines
        raise ConfigError(
            f"{label} starts several commands that may train ({lines}). Give the one that is "
            "meant: memest read -- COMMAND."
        )
    [(line, command)] = launches
    _check_variables(command, f"{label}, {place(line)}", how)
    return command


def _slurm_variables(text: str) -> dict[str, str]:
    """What Slurm sets of a job by the directives in its batch file (sbatch(1), environment)."""
    variables: dict[str, str] = {}
    for line in re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE):
        for pattern, names in _SLURM:
            if match := pattern.match(line):
                variables |= dict.fromkeys(names.split(), match[1])
    return variables


_UNSET_HERE = re.compile(rf"{UNSET.pattern}|\{{[^{{}}]*\}}")
"""In a notebook what Python makes, too: ``{config.batch}``."""
_SLURM = (
    (re.compile(r"(?:-N|--nodes)[= ]?(\d+)\s*(?:#|$)"), "SLURM_NNODES SLURM_JOB_NUM_NODES"),
    (
        re.compile(r"(?:--gres[= ]gpu:|--gpus-per-node[= ])(?:[A-Za-z]\w*:)?(\d+)"),
        "SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE",
    ),
    (re.compile(r"--ntasks-per-node[= ](\d+)"), "SLURM_NTASKS_PER_NODE"),
)
"""Directives, and the variables that have their number."""


def _started(words: Sequence[str]) -> list[str]:
    """The words of a command from its launcher or program on; none where it starts neither."""
    queue = list(words)
    while queue and not starts_program(queue):
        if queue[0].rpartition("/")[2] not in _STARTERS:
            return []
        if queue[0] == "eval":
            queue = ["", *_parted(" ".join(queue[1:]))]
        at = next(
            (
                place
                for place, word in enumerate(queue[1:], 1)
                if starts_program(queue[place:])
                or word.rpartition("/")[2] in _STARTERS
                or word == "-c"
            ),
            len(queue),
        )
        queue = queue[at:]
        if queue[:1] == ["-c"]:
            queue = _parted(" ".join(queue[1:2]))
    return queue


def _parted(text: str) -> list[str]:
    """The words of a command that is one word of another: ``bash -c "python train.py"``."""
    try:
        return shlex.split(text)
    except ValueError:
        return []


def _is_launched(command: Command) -> bool:
    """Whether a launcher or a framework's own command starts it."""
    return bool(command.launchers) or " " in command.program


def _check_variables(command: Command, place: str, start: str) -> None:
    """Refuse a variable that the script does not set, where what it stands for matters.

    Raises:
        ConfigError: one does; the message says how to give it.
    """
    words: list[tuple[str, Any]] = [("", command.program)]
    for launcher in command.launchers:
        words += launcher.values.items()
    flag = ""
    for word in command.words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            flag = name.lstrip("-")
            words.append((flag, value))
        else:
            words.append((name, value) if equals else (flag, word))
            # a word that is a variable may hold further arguments
            flag = "" if flag and not equals else flag
    for name, value in words:
        match = (UNSET if start else _UNSET_HERE).search(str(value))
        key = name.replace("-", "_")
        if match is None or key in IGNORED_KEYS or key in _PLACES or is_of_driver(name):
            continue
        variable = match[0].strip("${}").partition(":")[0]
        if match[0] == "$(...)":
            how = "what another command prints. Write the launch command out: memest read -- ..."
        elif start and (variable.isdigit() or variable in "@*#"):
            how = f"what it is given. Write it behind: memest read -- {start} ..."
        elif not variable.isidentifier() or not start:
            who = "script" if start else "notebook"
            how = f"what the {who} computes. Write the launch command out: memest read -- ..."
        else:
            how = (
                "not set in it for certain. Write it in front: memest read -- "
                f"{variable}=... {start}"
            )
        shown = f"--{name} {value}" if name else str(value)
        raise ConfigError(f"{place}: {shown} is {how}.")
