"""The explorer's frame: pages, the inputs they share, and what stands on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Altair and Streamlit ask whether these two are loaded, and work with what is there: half a module,
# where the thread that looks for an answer is just importing it
import pandas  # noqa: ICN001, F401
import pyarrow  # noqa: ICN001, F401
import streamlit as st

from memest.app.asking import ask
from memest.app.charts import disable_validation
from memest.app.hero import STYLE
from memest.app.link import asked, draw_problems, leaves, open_link, write_link
from memest.app.question import ExplorerQuestion
from memest.app.theme import ICON, PAGE_STYLE
from memest.app.views import (
    accuracy,
    advise,
    calibration,
    compare,
    fit_map,
    how_it_works,
    what_if,
)

__all__ = ["PAGES", "run"]

View = Callable[[ExplorerQuestion], None]

FIRST = "what-if"
PAGES: dict[str, tuple[str, str, View]] = {
    FIRST: ("Will it fit?", ":material/memory:", what_if.show),
    "fit-map": ("Fit map", ":material/grid_on:", fit_map.show),
    "compare": ("Compare", ":material/compare_arrows:", compare.show),
    "advise": ("Advise", ":material/lightbulb:", advise.show),
    "calibration": ("Calibration", ":material/straighten:", calibration.show),
    "accuracy": ("Accuracy", ":material/target:", accuracy.show),
    "how-it-works": ("How it works", ":material/school:", how_it_works.show),
}
"""Title, icon and content of each page, by its path in the URL."""
_ASKS_NOTHING = ("accuracy",)
"""Pages that are about no question."""


def run(default: str = FIRST) -> None:
    """Draw the page that the browser asks for.

    Args:
        default: the page without a path.
    """
    disable_validation()
    st.set_page_config(page_title="memest: will it fit?", page_icon=ICON, layout="wide")
    st.html(f"<style>{PAGE_STYLE}{STYLE}</style>")

    def page(view: View) -> Callable[[], None]:
        return lambda: view(asked())

    pages = [
        st.Page(page(view), title=title, icon=icon, url_path=path, default=path == default)
        for path, (title, icon, view) in PAGES.items()
    ]
    current_page = st.navigation(pages, position="hidden")
    path = current_page.url_path or default
    if leaves() and path != FIRST:
        st.switch_page(pages[0])
    open_link(path)
    if path not in _ASKS_NOTHING:
        ask(with_presets=path == FIRST)
    _menu(pages)
    draw_problems()
    write_link()
    current_page.run()


def _menu(pages: Sequence[st.Page]) -> None:
    """Links to the pages: drawn after the question, that Tab comes to that first; seen on top."""
    with st.container(horizontal=True, wrap=False, gap="xxsmall", key="menu"):
        for page in pages:
            st.page_link(page)
