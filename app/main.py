"""The explorer's frame: pages, the inputs they share, and what stands on all of them."""

from __future__ import annotations

from collections.abc import Callable

# Altair and Streamlit ask whether these two are loaded, and work with what is there: half a module,
# where the thread that looks for an answer is just importing it
import pandas  # noqa: ICN001, F401
import pyarrow  # noqa: ICN001, F401
import streamlit as st

from memest.app.charts import disable_validation
from memest.app.question import ExplorerQuestion
from memest.app.sidebar import ask
from memest.app.theme import ICON
from memest.app.views import (
    accuracy,
    advise,
    calibration,
    compare,
    fit_map,
    how_it_works,
    what_if,
)
from memest.config.option_table import OPTIONS

__all__ = ["PAGES", "run"]

View = Callable[[ExplorerQuestion], None]

PAGES: dict[str, tuple[str, str, View]] = {
    "what-if": ("What-if", ":material/tune:", what_if.show),
    "fit-map": ("Fit map", ":material/grid_on:", fit_map.show),
    "compare": ("Compare", ":material/compare_arrows:", compare.show),
    "advise": ("Advise", ":material/lightbulb:", advise.show),
    "accuracy": ("Accuracy", ":material/target:", accuracy.show),
    "calibration": ("Calibration", ":material/straighten:", calibration.show),
    "how-it-works": ("How it works", ":material/school:", how_it_works.show),
}
"""Title, icon and content of each page, by its path in the URL."""


def run(default: str = "what-if") -> None:
    """Draw the page that the browser asks for.

    Args:
        default: the page without a path.
    """
    disable_validation()
    st.set_page_config(page_title="memest", page_icon=ICON, layout="wide")
    questions: list[ExplorerQuestion] = []

    def page(view: View) -> Callable[[], None]:
        def draw() -> None:
            view(questions[0])

        return draw

    pages = [
        st.Page(page(view), title=title, icon=icon, url_path=path, default=path == default)
        for path, (title, icon, view) in PAGES.items()
    ]
    current_page = st.navigation(pages, position="top")
    _keep_link(current_page.url_path)
    questions.append(ask())
    current_page.run()


def _keep_link(path: str) -> None:
    """Write the shared inputs into the URL again when another page is opened: links have none."""
    before = st.session_state.get("page_before")
    st.session_state.page_before = path
    if before in (None, path):
        return
    for option in OPTIONS:
        if option.name in st.session_state:
            st.session_state[option.name] = st.session_state[option.name]
    if "model" in st.session_state:
        st.session_state.model = st.session_state.model
