"""A checkout: its files, and what differs from a commit of its history."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Checkout:
    """A working tree of git."""

    root: Path

    def files(self) -> set[str]:
        """Everything that is there and not ignored, as paths from the root."""
        names = self._names("ls-files", "--cached", "--others", "--exclude-standard", "-z")
        return {name for name in names if (self.root / name).is_file()}

    def changed_since(self, commit: str) -> set[str]:
        """Paths whose contents differ: edited, new, gone, under another name, not committed."""
        names = self._names("diff", "--name-only", "--no-renames", "-z", commit)
        return names | self._names("ls-files", "--others", "--exclude-standard", "-z")

    def text(self, name: str) -> str:
        """What a file says now; nothing if there is none."""
        path = self.root / name
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def text_at(self, commit: str, name: str) -> str:
        """What a file said; nothing if there was none."""
        process = self._git("show", f"{commit}:{name}")
        return process.stdout.decode("utf-8") if process.returncode == 0 else ""

    def descends_from(self, commit: str) -> bool:
        """Whether a commit is here, and one that the present one came from."""
        return self._git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0

    def head(self) -> str:
        """The present commit.

        Raises:
            subprocess.CalledProcessError: there is none.
        """
        process = self._git("rev-parse", "HEAD")
        process.check_returncode()
        return process.stdout.decode().strip()

    def _names(self, *words: str) -> set[str]:
        process = self._git(*words)
        process.check_returncode()
        return set(filter(None, process.stdout.decode("utf-8").split("\0")))

    def _git(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["git", *words], cwd=self.root, capture_output=True, check=False
        )  # fmt: skip
