"""``memest app``: the explorer in a browser."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from memest.cli.console import emit
from memest.cli.exit_codes import ExitCode
from memest.cli.flags import debuggable, switch, value_flag
from memest.errors import ConfigError, MissingDependencyError
from memest.units import GIB, format_size, parse_size

__all__ = ["app"]

_LEAST_MEMORY = GIB
_PATIENCE_SECONDS = 2


@debuggable
def app(
    *,
    port: Annotated[int, value_flag("--port", "PORT", "Where to listen.", default=True)] = 8501,
    host: Annotated[
        str,
        value_flag(
            "--host",
            "ADDRESS",
            "Which of this machine's addresses; 0.0.0.0 lets others in.",
            default=True,
        ),
    ] = "127.0.0.1",
    no_browser: Annotated[bool, switch("--no-browser", "Open no browser window.")] = False,
    public: Annotated[
        bool,
        switch(
            "--public",
            "For strangers: what is known is answered, nothing is traced, uploads neither.",
        ),
    ] = False,
    max_seconds: Annotated[
        int | None,
        value_flag("--max-seconds", "N", "Give up an answer that takes longer than so long."),
    ] = None,
    max_memory: Annotated[
        str | None,
        value_flag(
            "--max-memory",
            "SIZE",
            "Memory of the host from which on the server forgets what it keeps, then refuses.",
        ),
    ] = None,
) -> int:
    """Open the explorer: change a run and see at once what fits. Ctrl-C ends it.

    For example: memest app --port 8600 --no-browser
    """
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port {port} is out of range: it must be 1 to 65535.")
    if find_spec("streamlit") is None:
        raise MissingDependencyError(
            "the explorer needs streamlit, which is not installed: pip install 'memest-gpu[app]'"
        )
    if max_seconds is not None and max_seconds < 1:
        raise ConfigError(f"--max-seconds {max_seconds} is no time at all: write for example 120.")
    from memest.app.theme import MAX_MEMORY, MAX_SECONDS
    from memest.estimation.tracer import KNOWN_ALONE

    limits = {
        MAX_MEMORY: "" if max_memory is None else str(_memory(max_memory)),
        KNOWN_ALONE: "1" if public else "",
        MAX_SECONDS: "" if max_seconds is None else str(max_seconds),
    }
    emit(f"memest: the explorer is at http://{host}:{port}; Ctrl-C ends it.")
    return _serve(_command(port, host, no_browser=no_browser), limits)


def _memory(text: str) -> int:
    """Bytes of the host that are enough to begin with."""
    memory = parse_size(text)
    if memory < _LEAST_MEMORY:
        raise ConfigError(
            f"--max-memory {text} is too little to start: {format_size(_LEAST_MEMORY)} is least."
        )
    return memory


def _command(port: int, host: str, *, no_browser: bool) -> list[str]:
    """What starts the server."""
    import memest.app
    from memest.app.theme import launch_options

    script = Path(memest.app.__path__[0]) / "streamlit_app.py"
    return [
        sys.executable,
        "-m",
        "streamlit",
        "run",
        str(script),
        f"--server.port={port}",
        f"--server.address={host}",
        f"--browser.serverAddress={host}",
        f"--server.headless={'true' if no_browser else 'false'}",
        "--server.fileWatcherType=none",
        "--client.toolbarMode=viewer",
        "--client.showErrorDetails=none",
        # a widget's default is for those who come without a link, and what a page kept goes first
        "--global.disableWidgetStateDuplicationWarning=true",
        *launch_options(),
    ]


def _serve(command: Sequence[str], limits: Mapping[str, str]) -> int:
    """Run the server until it ends or is interrupted; returns the exit code."""
    # without a terminal streamlit would ask for an e-mail address
    given = {name: text for name, text in limits.items() if text}
    settings = {**os.environ, "STREAMLIT_SERVER_SHOW_EMAIL_PROMPT": "false", **given}
    server = subprocess.Popen(command, env=settings)  # noqa: S603
    before = signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    try:
        return server.wait()
    except KeyboardInterrupt:
        _stop(server)
        return ExitCode.INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server: a terminal sends Ctrl-C to both, ``kill`` to this process alone."""
    for attempt in range(3):
        if attempt:
            server.send_signal(signal.SIGINT if attempt == 1 else signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_PATIENCE_SECONDS)
            return
    server.kill()
