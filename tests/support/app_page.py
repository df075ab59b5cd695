"""What stands on a page of the explorer."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape

from streamlit.testing.v1 import AppTest

Open = Callable[..., AppTest]


def texts(app: AppTest) -> str:
    """All that stands on the page in words."""
    kinds = (app.markdown, app.caption, app.error, app.info, app.code, app.warning)
    text = "\n".join(str(element.value) for kind in kinds for element in kind)
    text += f"\n{hero(app)}"
    return re.sub(r"\\([\\`*_\[\]<>#|~$!:])", r"\1", text)  # as Markdown shows it


def metrics(app: AppTest) -> dict[str, str]:
    """Label to value."""
    return {metric.label: metric.value for metric in app.metric}


def hero(app: AppTest) -> str:
    """What stands on the page as HTML of its own, style sheets left out: title, verdict, cards."""
    bodies = [element.proto.body for element in app.get("html")]
    text = " ".join(body for body in bodies if not body.startswith("<style>"))
    return unescape(re.sub(r"<[^>]*>", " ", text))


def verdict(app: AppTest) -> str:
    """The words of the verdict."""
    found = [
        element.proto.body
        for element in app.get("html")
        if 'class="mm-verdict"' in element.proto.body
    ]
    return re.sub(r"<[^>]*>", " ", found[-1]).partition("on ")[0].strip() if found else ""


def set_option(app: AppTest, name: str, kind: str, value: object) -> None:
    """Set an option that has no input of its own: found in the list of all, then given."""
    app.selectbox(key="option").set_value(name).run()
    getattr(app, kind)(key=f"set {name}").set_value(value).run()


def command(app: AppTest) -> str:
    """The question as a command line."""
    return next(code.value for code in app.code if code.value.startswith("memest "))
