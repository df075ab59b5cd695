"""Files that a user uploads: limited in size, parsed as data, never run."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from memest.app.question import ExplorerQuestion
from memest.catalog.config_file import check_config, read_config
from memest.catalog.resolve import leads_to_file, resolve_model
from memest.config.option_table import OWN_MODULE_NAMES
from memest.config.options import find_option
from memest.config.spelling import read_scenario
from memest.errors import ConfigError, ModelLoadError, UnknownModelError
from memest.estimation.gpu_target import NO_CALIBRATION, calibration_folders
from memest.files.folders import user_folder
from memest.files.texts import write_text
from memest.units import MIB, format_size

__all__ = [
    "MAX_CONFIG_BYTES",
    "MAX_EXPORT_BYTES",
    "calibration_files",
    "check_question",
    "keep_config",
    "temporary",
]

MAX_CONFIG_BYTES = MIB
MAX_EXPORT_BYTES = 16 * MIB
"""Of an export of measurements: a campaign of some hundred runs has one or two MiB."""
_FOLDER = "uploaded_configs"


def _folder() -> Path:
    return user_folder() / _FOLDER


@contextmanager
def temporary(name: str, content: bytes, limit: int) -> Iterator[Path]:
    """An uploaded file on disk for as long as it is read.

    Args:
        name: of the file: it tells the format, and stands in messages.
        content: its bytes.
        limit: bytes that it may have.

    Raises:
        ConfigError: it is larger.
    """
    if len(content) > limit:
        raise ConfigError(
            f"{name} has {format_size(len(content))}: such a file may have at most "
            f"{format_size(limit)}."
        )
    # what messages name is the user's file; of its name only the end that tells the format is used
    suffix = "".join(
        end for end in (".json", ".jsonl", ".gz") if name.lower().rstrip().endswith(end)
    )
    suffix = ".jsonl.gz" if suffix == ".gz" else suffix
    with tempfile.TemporaryDirectory(prefix="memest-upload-") as folder:
        path = Path(folder) / f"upload{suffix}"
        path.write_bytes(content)
        yield path


def keep_config(name: str, content: bytes) -> str:
    """Check an uploaded ``config.json`` and keep it where estimates can name it.

    Args:
        name: of the file, for messages.
        content: its bytes.

    Returns:
        The model's reference: the path of the copy, named by its digest.

    Raises:
        MemestError: too large, not JSON, not a model's configuration, or with code of its own.
    """
    with temporary(name, content, MAX_CONFIG_BYTES) as path:
        config, _ = check_config(read_config(path, label=name), label=name, trust_remote_code=False)
    text = json.dumps(config, indent=2, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    kind = re.sub(r"[^A-Za-z0-9_-]", "", str(config["model_type"]))[:40]
    target = _folder() / f"{kind or 'model'}-{digest}.json"
    if not target.is_file():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_text(target, text)
        except OSError as error:
            raise ModelLoadError(
                f"{name} cannot be kept in {target.parent}: {error.strerror or error}."
            ) from error
    return str(target)


def check_question(question: ExplorerQuestion, scenarios: Iterable[str] = ()) -> None:
    """Refuse what a link must not name: code, and files of this machine that were not uploaded.

    Args:
        question: what is asked.
        scenarios: texts of what changes it.

    Raises:
        MemestError: a name that leads nowhere, or somewhere it must not.
    """
    _check_model(question.model)
    changes = [dict(question.options), *(read_scenario(text) for text in scenarios)]
    for options in changes:
        if options.get("trust_remote_code"):
            raise ConfigError(
                "the explorer runs no code of a model's repository: use the command line, memest "
                "estimate --trust-remote-code."
            )
        own_names = OWN_MODULE_NAMES.intersection(options)
        if own_names:
            flag = find_option(min(own_names)).flags[0]
            raise ConfigError(
                f"{flag}: the explorer runs no code of yours: use the command line, memest "
                "estimate."
            )
        for name, value in options.items():
            if name == "calibration" or not find_option(name).names_file:
                continue
            if not str(value).lstrip().startswith("{"):
                flag = find_option(name).flags[0]
                raise ConfigError(
                    f"{flag} {value}: the explorer reads no files of this machine: give the JSON "
                    "itself, or use the command line."
                )
        profile = options.get("calibration")
        if profile not in (None, NO_CALIBRATION) and Path(profile) not in calibration_files():
            raise ConfigError(
                f"{profile} is no calibration that the explorer knows: put it into "
                f"{calibration_folders()[0]}, or name it on the command line."
            )


def calibration_files() -> list[Path]:
    """The calibrations of this machine."""
    return [
        path
        for folder in calibration_folders()
        if folder.is_dir()
        for path in sorted(folder.glob("*.json"))
    ]


def _check_model(model: str) -> None:
    if not model.strip():
        raise UnknownModelError("no model was named: choose one, for example bert-base-uncased")
    if "\0" in model:
        raise UnknownModelError("the name of the model has a null byte in it: choose another")
    ref = model.partition("?")[0].strip()
    if leads_to_file(ref):
        # before anything is opened: a name may lead to a device, or to somebody's secrets
        if Path(ref).resolve().parent != _folder().resolve():
            raise ConfigError(
                f"{model} reads as a path, and the explorer opens no file of this machine: upload "
                "its config.json to ask about it here."
            )
        return
    if resolve_model(ref).kind == "factory":
        raise ConfigError(
            f"{model} names Python code: the explorer runs none. Use the command line, memest "
            "estimate, for package.module:factory."
        )
