import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from memest.cli import app as command
from memest.cli.main import run


def test_without_streamlit_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert run(["app"]) == 6
    assert "pip install 'memest-gpu[app]'" in capsys.readouterr().err


def test_a_port_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["app", "--port", "70000"]) == 2
    assert "--port 70000" in capsys.readouterr().err


@pytest.mark.slow
def test_what_charts_ask_for_is_loaded_before_a_thread_can_be_at_it() -> None:
    """Half a module breaks them: Altair asks ``sys.modules``, and what it finds for its types."""
    code = "import memest.app.main, sys; sys.exit(not {'pandas', 'pyarrow'} <= sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("words", ["import memest", "import memest.cli.commands"])
def test_nothing_else_loads_streamlit(words: str) -> None:
    code = f"{words}; import sys; sys.exit('streamlit' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_the_server_starts_and_ends(stop: signal.Signals) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "memest", "app", "--no-browser", "--port", str(port)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}/_stcore/health"
    try:
        for _ in range(120):
            try:
                with urllib.request.urlopen(url) as reply:
                    assert reply.status == 200
                break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail("the server did not start")
        server.send_signal(stop)
        assert server.wait(30) in (130, 0, -15, 143)
    finally:
        server.kill()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url)
