"""Which releases are installed, without importing them."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

from memest.config.software import Software

__all__ = [
    "DISTRIBUTION",
    "VERIFIED",
    "bitsandbytes_version",
    "build_of",
    "full_release",
    "installed_version",
    "release",
    "unverified_note",
]

DISTRIBUTION = "memest-gpu"
"""The name to install memest by; ``memest`` on the package index is another project."""

_NEWEST_BITSANDBYTES = (0, 50)
VERIFIED: dict[str, tuple[str, ...]] = {
    "torch": ("2.11", "2.13", "2.14", "2.15"),
    "transformers": ("5.17", "5.23", "5.24"),
}
"""Releases whose real steps on the CPU were compared with their traces; docs/compatibility.md."""


def release(package: str) -> str | None:
    """The release of an installed package; builds of one release trace alike."""
    number = full_release(package)
    return None if number is None else number.partition("+")[0]


@cache
def full_release(package: str) -> str | None:
    """The release of an installed package, with the build where its index names that: ``+cpu``."""
    number = _release_by_folder(package)
    if number is None:
        # loads a parser of e-mail: only where the usual place does not tell
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(package)
        except PackageNotFoundError:
            return None
    return number


def build_of(module: str) -> str:
    """What an installed package was built for, ``cpu`` or ``cu130``; empty where it does not say.

    PyTorch's packages say it in ``version.py``, those of PyPI as well, whose releases do not.
    """
    for entry in sys.path:
        try:
            text = (Path(entry or ".") / module / "version.py").read_text()
        except (OSError, ValueError):
            continue
        match = _VERSION.search(text)
        return "" if match is None else match["build"] or ""
    return ""


_VERSION = re.compile(
    r"^__version__\s*=\s*['\"][^'\"+]*(?:\+(?P<build>[^'\"]+))?['\"]", re.MULTILINE
)


def _release_by_folder(package: str) -> str | None:
    """The release that the name of the folder of a package's metadata tells."""
    stem = package.replace("-", "_")
    for entry in sys.path:
        try:
            names = [path.name for path in Path(entry or ".").glob(f"{stem}-*.dist-info")]
        except OSError:
            continue
        if len(names) == 1:
            return names[0].removeprefix(f"{stem}-").removesuffix(".dist-info")
    return None


def installed_version(package: str) -> tuple[int, int] | None:
    """(major, minor) of an installed package without importing it, None if it is not there."""
    text = release(package)
    if text is None:
        return None
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def bitsandbytes_version(software: Software) -> tuple[int, int]:
    """(major, minor) of the bitsandbytes that will train: declared, installed, else the newest."""
    return software.bitsandbytes or installed_version("bitsandbytes") or _NEWEST_BITSANDBYTES


def unverified_note() -> str:
    """What to say where an installed release was not compared with its traces; empty otherwise."""
    releases_text = []
    for package, releases in VERIFIED.items():
        version = installed_version(package)
        if version is not None and ".".join(map(str, version)) not in releases:
            releases_text.append(
                f"{package} {version[0]}.{version[1]} (verified: {', '.join(releases)})"
            )
    if not releases_text:
        return ""
    return (
        f"traces were not verified with {' and '.join(releases_text)}: `memest selftest --full` "
        "compares them with real steps here"
    )
