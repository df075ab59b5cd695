"""What stands on a page of the explorer."""

from __future__ import annotations

import re
from collections.abc import Callable

from streamlit.testing.v1 import AppTest

Open = Callable[..., AppTest]


def texts(app: AppTest) -> str:
    """All that stands on the page in words."""
    kinds = (app.markdown, app.caption, app.error, app.info, app.code, app.warning)
    text = "\n".join(str(element.value) for kind in kinds for element in kind)
    return re.sub(r"\\([\\`*_\[\]<>#|~$!:])", r"\1", text)  # as Markdown shows it


def metrics(app: AppTest) -> dict[str, str]:
    """Label to value."""
    return {metric.label: metric.value for metric in app.metric}
