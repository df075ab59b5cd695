"""The links to the pages: a landmark that says which page is open.

Streamlit's own page links lie in no ``<nav>`` and tell with their colour alone which one is open;
its top navigation has both, but Tab would come to it before the question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import streamlit as st

__all__ = ["menu"]

_NAME = "memest.menu"
_HTML = '<nav aria-label="Pages"></nav>'
_CSS = """
nav {display:flex; gap:.25rem; align-items:center; height:100%}
a {display:flex; gap:.5rem; align-items:center; padding:0 .5rem; border-radius:.5rem;
  line-height:2; white-space:nowrap; color:inherit; text-decoration:none}
a:hover, a:focus-visible, a[aria-current] {background:color-mix(in srgb, currentColor 12%, #0000)}
a:focus-visible {outline:2px solid var(--st-primary-color); outline-offset:-2px}
a[aria-current] {font-weight:600}
span {font:400 1.25rem/1 'Material Symbols Rounded'; user-select:none}
@media (max-width: 860px) {span {display:none}}
"""
_JS = """
export default function ({ data, parentElement, setTriggerValue }) {
  const nav = parentElement.querySelector("nav");
  if (!nav.childElementCount)
    for (const [path, title, icon, href] of data.pages) {
      const link = document.createElement("a"), mark = document.createElement("span");
      link.dataset.path = path;
      link.href = href;
      mark.ariaHidden = "true";
      mark.translate = false;
      mark.textContent = icon;
      link.append(mark, title);
      nav.append(link);
    }
  for (const link of nav.children) {
    const isOpen = link.dataset.path === data.current;
    if (isOpen && !link.ariaCurrent)  // on a phone there are more links than fit
      link.scrollIntoView({ block: "nearest", inline: "center" });
    link.ariaCurrent = isOpen ? "page" : null;
    link.onclick = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;  // a tab or window of its own
      event.preventDefault();
      setTriggerValue("path", link.dataset.path);
    };
  }
}
"""


def menu(
    pages: Mapping[str, tuple[str, str]],
    current: str,
    default: str,
    go: Callable[[str], None],
) -> None:
    """Draw the links.

    Args:
        pages: title and name of the icon of each page, by its path.
        current: path of the page that is open.
        default: path of the page without one.
        go: told the path of the page to open.
    """

    def take() -> None:
        go(st.session_state[_NAME].path)

    # each time: the registry is the server's, and this module may outlive one
    draw = st.components.v2.component(_NAME, html=_HTML, css=_CSS, js=_JS)
    draw(
        key=_NAME,
        data={
            "pages": [
                (path, title, icon, "./" if path == default else path)
                for path, (title, icon) in pages.items()
            ],
            "current": current,
        },
        on_path_change=take,
    )
