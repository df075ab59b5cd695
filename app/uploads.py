"""Files that a user uploads: limited in size, parsed as data, never run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from memest.app.question import ExplorerQuestion
from memest.catalog.config_file import check_config, read_config
from memest.catalog.resolve import leads_to_file, resolve_model
from memest.config.option_table import OWN_MODULE_NAMES
from memest.config.options import find_option
from memest.config.spelling import read_scenario
from memest.errors import ConfigError, MemestError, ModelLoadError, UnknownModelError
from memest.estimation.gpu_target import NO_CALIBRATION, calibration_folders
from memest.files.folders import user_folder
from memest.files.texts import write_text
from memest.units import MIB, format_size

__all__ = [
    "MAX_CONFIG_BYTES",
    "MAX_EXPORT_BYTES",
    "calibration_files",
    "calibration_name",
    "check_question",
    "config_from_link",
    "config_to_link",
    "keep_config",
    "kept_config",
    "temporary",
]

MAX_CONFIG_BYTES = MIB
MAX_EXPORT_BYTES = 16 * MIB
"""Of an export of measurements: a campaign of some hundred runs has one or two MiB."""
_FOLDER = "uploaded_configs"
_COPY = re.compile(r"[A-Za-z0-9_-]+-[0-9a-f]{16}\.json")
_LONGEST_IN_LINK = 1500
"""Characters of a configuration that a link may hold."""


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
    """Check an uploaded ``config.json`` and keep a copy.

    Args:
        name: of the file, for messages.
        content: its bytes.

    Returns:
        The name of the copy, with its digest in it: :func:`kept_config` leads there.

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
                f"{name} cannot be kept on the server: {error.strerror or error}."
            ) from error
    return target.name


def kept_config(upload: str) -> Path:
    """The copy of an upload.

    Raises:
        UnknownModelError: there is none of this name.
    """
    path = _folder() / upload
    if not _COPY.fullmatch(upload) or not path.is_file():
        raise UnknownModelError(
            "the uploaded configuration is not on this server any more: upload it again"
        )
    return path


def config_to_link(upload: str) -> str:
    """What a link says of an upload: all of it where it is small, else the name of its copy."""
    try:
        config = json.loads(kept_config(upload).read_text(encoding="utf-8"))
    except (MemestError, OSError):
        return upload
    packed = zlib.compress(json.dumps(config, separators=(",", ":")).encode(), 9)
    text = base64.urlsafe_b64encode(packed).decode().rstrip("=")
    return text if len(text) <= _LONGEST_IN_LINK else upload


def config_from_link(name: str, text: str) -> str:
    """The name of the copy of what :func:`config_to_link` wrote.

    Args:
        name: of the file, for messages.
        text: what the link says.

    Raises:
        MemestError: no configuration, or one that is on another server.
    """
    if _COPY.fullmatch(text):
        return kept_config(text).name
    unpacker = zlib.decompressobj()
    try:
        packed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        content = unpacker.decompress(packed, MAX_CONFIG_BYTES)
    except (ValueError, zlib.error):
        raise ModelLoadError(f"{name}: what the link holds is no configuration.") from None
    if unpacker.unconsumed_tail:
        raise ModelLoadError(f"{name} has more than {format_size(MAX_CONFIG_BYTES)}.")
    return keep_config(name, content)


def check_question(question: ExplorerQuestion, scenarios: Iterable[str] = ()) -> None:
    """Refuse what a link must not name: code, and files of this machine that were not uploaded.

    Args:
        question: what is asked.
        scenarios: texts of what changes it.

    Raises:
        MemestError: a name that leads nowhere, or somewhere it must not.
    """
    if question.upload:
        kept_config(question.upload)
    else:
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
                f"{profile} is no calibration that the explorer knows: choose one under All "
                "options, or name it on the command line."
            )


def calibration_files() -> list[Path]:
    """The calibrations of this machine."""
    return [
        path
        for folder in calibration_folders()
        if folder.is_dir()
        for path in sorted(folder.glob("*.json"))
    ]


def calibration_name(path: Path) -> str:
    """What a calibration is called on a page, which tells no path of its server."""
    return f"{path.name} of the package" if path.parent == calibration_folders()[1] else path.name


def _check_model(model: str) -> None:
    if not model.strip():
        raise UnknownModelError("no model was named: choose one, for example bert-base-uncased")
    if "\0" in model:
        raise UnknownModelError("the name of the model has a null byte in it: choose another")
    ref = model.partition("?")[0].strip()
    if leads_to_file(ref):
        # nothing is opened: a name may lead to a device, or to somebody's secrets
        raise ConfigError(
            f"{model} reads as a path, and the explorer opens no file of this machine: upload "
            "its config.json to ask about it here."
        )
    if resolve_model(ref).kind == "factory":
        raise ConfigError(
            f"{model} names Python code: the explorer runs none. Use the command line, memest "
            "estimate, for package.module:factory."
        )
