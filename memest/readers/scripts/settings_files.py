"""Files of settings that a script reads: YAML, JSON and TOML as mappings."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from memest.errors import ConfigError
from memest.readers.documents import find_file, read_document
from memest.readers.scripts.things import OpenFile

__all__ = ["AS_MAPPINGS", "READERS", "settings_of"]

READERS = frozenset(
    """yaml.safe_load yaml.load yaml.full_load json.load tomllib.load tomli.load toml.load
    omegaconf.OmegaConf.load""".split()
)
"""Functions that make a mapping of a file, or of its name."""
AS_MAPPINGS = frozenset(
    """omegaconf.OmegaConf.create omegaconf.DictConfig easydict.EasyDict munch.Munch
    munch.munchify box.Box ml_collections.ConfigDict addict.Dict""".split()
)
"""What makes a mapping of a mapping, whose entries are attributes too."""


def settings_of(file: object, folder: Path | None) -> dict[str, Any] | None:
    """The settings in a file that a script reads, None where they cannot be told.

    A file elsewhere than in the folders below, the working one's or the script's, is not looked at.

    Args:
        file: as the script has it, open or by its name.
        folder: of the script.
    """
    name = file.path if isinstance(file, OpenFile) else file
    if not isinstance(name, str) or name.startswith(("/", "~")) or "\\" in name:
        return None
    if ".." in PurePosixPath(name).parts:
        return None
    try:
        return read_document(find_file(name, folder=folder, origin="the script"), name)
    except ConfigError:
        return None
