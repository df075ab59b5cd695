"""A server for strangers: limits hold, and the container's steps lead to a page that answers."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

st = pytest.importorskip("streamlit")

from memest.cli.main import run
from memest.estimation.tracer import KNOWN_ALONE
from support.app_page import Open, texts, verdict
from support.paths import ROOT

HOSTING = ROOT / "app" / "hosting"
SMALL = "prajjwal1/bert-tiny"
NOBODY = 65534


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """A server reads its limits when it starts: what other tests keep has none."""
    st.cache_resource.clear()
    st.cache_data.clear()
    yield
    st.cache_resource.clear()
    st.cache_data.clear()


def test_what_is_known_is_answered_for_strangers(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KNOWN_ALONE, "1")
    app = open_page()
    assert verdict(app) == "Fits"
    assert not app.error


@pytest.mark.parametrize("page", ["what-if", "fit-map", "compare", "advise"])
def test_nothing_is_traced_for_strangers(
    open_page: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: str
) -> None:
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path))
    monkeypatch.setenv(KNOWN_ALONE, "1")
    app = open_page(page, model=SMALL, gpu="t4")
    said = texts(app)
    assert "answers what it knows without a trace" in said
    assert "memest" in said
    assert not list(tmp_path.rglob("*.json.gz"))


def test_an_upload_of_a_stranger_is_not_traced(
    open_page: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path))
    monkeypatch.setenv(KNOWN_ALONE, "1")
    app = open_page(model="bert-large-uncased", gpu="t4")
    config = json.dumps({"model_type": "bert", "hidden_size": 96, "num_attention_heads": 3})
    app.file_uploader(key="config_file").set_value(("a.json", config.encode(), "application/json"))
    app.run()
    assert app.selectbox(key="model").value == "a.json"
    assert "answers what it knows without a trace" in texts(app)


def test_an_answer_that_takes_too_long_is_given_up(
    open_page: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path))
    monkeypatch.setenv("MEMEST_APP_SECONDS", "0.000001")
    app = open_page(model="prajjwal1/bert-mini", batch="3", seq_len="24", gpu="t4")
    assert "longer than this server allows" in texts(app)


def test_a_server_that_holds_too_much_refuses(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMEST_APP_MEMORY", str(1 << 20))
    assert "no memory left" in texts(open_page())
    monkeypatch.setenv("MEMEST_APP_MEMORY", str(1 << 40))
    assert verdict(open_page()) == "Fits"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-seconds", "0"], "no time at all"),
        (["--max-memory", "1MiB"], "too little to start"),
        (["--max-memory", "much"], "much"),
    ],
)
def test_limits_that_cannot_be_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["app", *words]) == 2
    assert said in capsys.readouterr().err


# -- the container --------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, continued lines joined."""
    text = (HOSTING / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    words = [line.split(None, 1) for line in lines if not line.startswith("#")]
    return [(name, " ".join(rest.split())) for name, rest in words]


def test_the_container_is_not_root_and_tells_its_health() -> None:
    steps = instructions()
    names = [name for name, _ in steps]
    last_user = [rest for name, rest in steps if name == "USER"][-1]
    assert last_user not in ("root", "0")
    assert names.index("USER") < names.index("CMD")
    assert "HEALTHCHECK" in names
    installs = " ".join(rest for name, rest in steps if name == "RUN")
    assert "torch" not in installs
    assert "[hosted]" in installs
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert not any("torch" in need for need in extras["hosted"] + extras["plot"])
    assert "memest-gpu[torch,hosted]" in extras["app"]
    command = json.loads(dict(steps)["CMD"])
    assert "--public" in command
    front = (HOSTING / "README.md").read_text().split("---")[1]
    port = re.search(r"^app_port: (\d+)$", front, re.MULTILINE)
    assert port is not None
    assert port[1] == dict(steps)["EXPOSE"] == command[command.index("--port") + 1]


@pytest.fixture(scope="module")
def container() -> Iterator[Path]:
    """The second stage of the image in a folder: the wheel with its extra, without PyTorch."""
    pytest.importorskip("build")
    folder = Path(tempfile.mkdtemp(prefix="memest-image-"))
    folder.chmod(0o755)
    try:
        python = [sys.executable, "-P", "-m"]
        build = [*python, "build", "--wheel", "--outdir", str(folder / "wheels"), str(ROOT)]
        subprocess.run(build, check=True, capture_output=True)
        subprocess.run([*python, "venv", str(folder / "bare")], check=True)
        wheel = next((folder / "wheels").glob("memest_gpu-*.whl"))
        install = [str(folder / "bare/bin/python"), "-m", "pip", "install", "-q"]
        install += ["-c", str(ROOT / "constraints.txt"), f"{wheel}[hosted]"]
        subprocess.run(install, check=True, capture_output=True)
        assert not list(folder.glob("bare/lib/python*/site-packages/torch"))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def as_nobody() -> None:
    """Give up root, where another user could run this Python at all."""
    base = Path(sys.base_prefix).resolve()
    if os.getuid() == 0 and not base.is_relative_to("/root"):
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@pytest.mark.slow
def test_the_steps_of_the_image_lead_to_a_page_that_answers(container: Path) -> None:
    home = container / "tmp"
    home.mkdir(mode=0o777)
    home.chmod(0o777)
    steps = dict(instructions())
    given = dict(word.split("=", 1) for word in steps["ENV"].split())
    environment = {name: value.replace("/tmp", str(home)) for name, value in given.items()}
    command = [*json.loads(steps["CMD"])]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command[command.index("--port") + 1] = port
    command[command.index("--host") + 1] = "127.0.0.1"
    server = subprocess.Popen(
        [str(container / "bare/bin" / command[0]), *command[1:]],
        cwd=home,
        env={"PATH": os.environ["PATH"], **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        preexec_fn=as_nobody,
    )
    try:
        for _ in range(120):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health") as reply:
                    assert reply.status == 200
                break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail("the server did not start")
        playwright_api = pytest.importorskip("playwright.sync_api")
        browser = shutil.which("chromium") or shutil.which("chromium-browser")
        if browser is None:
            pytest.skip("no chromium on this machine")
        with playwright_api.sync_playwright() as playwright:
            found = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
            page = found.new_page()
            page.goto(f"http://127.0.0.1:{port}")
            page.locator(".mm-verdict b").get_by_text("Fits", exact=True).wait_for(timeout=60_000)
            page.goto(f"http://127.0.0.1:{port}/calibration")
            page.get_by_text("A simulated example").wait_for(timeout=60_000)
            page.get_by_text("beyond the replayed cache").wait_for(timeout=60_000)
            page.goto(f"http://127.0.0.1:{port}/?model={SMALL}&gpu=t4")
            page.get_by_test_id("stAlert").get_by_text("without a trace").wait_for(timeout=60_000)
            found.close()
    finally:
        server.terminate()
        server.wait(30)
