"""The explorer as a server of its own, and a browser to open it with."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import memest
from memest.cli.app import _command

BROWSER = next(
    (path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None
)
PATIENCE_MS = 90_000


@contextmanager
def served(folder: Path, script: Path | None = None) -> Iterator[str]:
    """Its address; none of its errors may blame our code.

    Args:
        folder: of what it keeps.
        script: that Streamlit runs in place of the explorer's own.
    """
    said = folder / "stderr.txt"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "memest", "app", "--no-browser", "--port", str(port)]
    if script is not None:
        command = _command(port, "127.0.0.1", no_browser=True)
        command[4] = str(script)
    server = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=said.open("w"),
        env={**os.environ, "MEMEST_HOME": str(folder), "MEMEST_CACHE": str(folder / "cache")},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                with urllib.request.urlopen(f"{url}/_stcore/health"):
                    break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait(30)
    # Streamlit tells of a socket that its browser closed while it was opened: no fault of ours
    ours = Path(memest.__file__).parent
    told = said.read_text()
    frames = [line for line in told.splitlines() if line.lstrip().startswith("File ")]
    blamed = [line for line in frames if f'"{ours}/' in line or f'"{ours.parent}/app/' in line]
    assert not blamed, told


@contextmanager
def opened_browser() -> Iterator[Any]:
    """A Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


def reads(page: Any, text: str) -> None:
    """Wait for a text of the page's main part."""
    main = page.get_by_test_id("stMain")
    main.get_by_text(text).first.wait_for(timeout=PATIENCE_MS)


def rests(page: Any) -> None:
    """Wait until a page is drawn: one that is being drawn may take back what is typed into it."""
    page.locator('[data-test-script-state="notRunning"]').first.wait_for(timeout=PATIENCE_MS)


def type_batch(page: Any, batch: int) -> None:
    """Type another batch."""
    rests(page)
    field = page.get_by_label("Batch", exact=True)
    field.fill(str(batch))
    field.press("Enter")
