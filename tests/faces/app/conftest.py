import pytest

pytest.importorskip("streamlit")

from collections.abc import Callable
from pathlib import Path

from streamlit.testing.v1 import AppTest

from memest.app.main import PAGES

Open = Callable[..., AppTest]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile, store or upload of the user's takes part; step profiles are those of the run."""
    monkeypatch.setenv("MEMEST_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MEMEST_STORE", raising=False)
    monkeypatch.delenv("MEMEST_REFERENCE", raising=False)


@pytest.fixture
def open_page() -> Open:
    """Opens a page with inputs in its URL, runs it, and sees to it that nothing is raised."""

    def start(page: str = "what-if", **inputs: str | list[str]) -> AppTest:
        assert page in PAGES
        app = AppTest.from_string(
            f"from memest.app.main import run\nrun({page!r})", default_timeout=120
        )
        for name, value in inputs.items():
            app.query_params[name] = value
        app.run()
        assert not app.exception
        return app

    return start
