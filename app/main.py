"""The explorer's frame: pages, the inputs they share, and what stands on all of them."""

from __future__ import annotations

from collections.abc import Callable

# Altair and Streamlit ask whether these two are loaded, and work with what is there: half a module,
# where the thread that looks for an answer is just importing it
import pandas  # noqa: ICN001, F401
import pyarrow  # noqa: ICN001, F401
import streamlit as st

from memest.app.asking import Inputs, take_upload
from memest.app.charts import disable_validation
from memest.app.hero import STYLE
from memest.app.link import (
    FIRST_PAGE,
    asked,
    draw_problems,
    go,
    link_to,
    open_link,
    page_to_open,
    write_link,
)
from memest.app.menu import menu
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

View = Callable[..., None]
"""Draws a page about a question; the first one draws the inputs, too."""

PAGES: dict[str, tuple[str, str, View]] = {
    FIRST_PAGE: ("Will it fit?", "memory", what_if.show),
    "fit-map": ("Fit map", "grid_on", fit_map.show),
    "compare": ("Compare", "compare_arrows", compare.show),
    "advise": ("Advise", "lightbulb", advise.show),
    "calibration": ("Calibration", "straighten", calibration.show),
    "accuracy": ("Accuracy", "target", accuracy.show),
    "how-it-works": ("How it works", "school", how_it_works.show),
}
"""Title, Material icon and content of each page, by its path in the URL."""
_ASKS_NOTHING = ("accuracy",)
"""Pages that are about no question."""
_DRAWN = "page drawn"


def run(default: str = FIRST_PAGE) -> None:
    """Draw the page that the browser asks for.

    Args:
        default: the page without a path.
    """
    disable_validation()
    st.set_page_config(page_title="memest: will it fit?", page_icon=ICON, layout="wide")
    st.html(f"<style>{PAGE_STYLE}{STYLE}</style>")

    def page(path: str, view: View) -> Callable[[], None]:
        if path != FIRST_PAGE:
            return lambda: view(asked())

        def verdict_first() -> None:
            # not where the inputs do not stand yet: the verdict would move
            if st.session_state.get(_DRAWN) != path:
                inputs.draw()
            view(asked(), inputs.draw)

        return verdict_first

    pages = {
        path: st.Page(
            page(path, view),
            title=title,
            icon=f":material/{icon}:",
            url_path=path,
            default=path == default,
        )
        for path, (title, icon, view) in PAGES.items()
    }
    current_page = st.navigation(list(pages.values()), position="hidden")
    path = current_page.url_path or default
    if (to_open := page_to_open()) not in ("", path):
        # with the URL that it will have: with any other, Back would lead to pages that nobody saw
        st.switch_page(pages[to_open], query_params=link_to(to_open))
    open_link(path)
    if path not in _ASKS_NOTHING:
        take_upload()
        inputs = Inputs(with_presets=path == FIRST_PAGE)
        # the first page does so itself: not now and then here, a widget's identity hangs on where
        if path != FIRST_PAGE:
            inputs.draw()
    # after the question, that Tab comes to that first; seen on top
    with st.container(key="menu"):
        menu({path: words[:2] for path, words in PAGES.items()}, path, default, go)
    draw_problems()
    write_link()
    current_page.run()
    st.session_state[_DRAWN] = path
