"""How the explorer looks, as options of ``streamlit run``, so that an installed package has it."""

from __future__ import annotations

import json

from memest.app.uploads import MAX_EXPORT_BYTES
from memest.report.parts import COLOURS
from memest.units import MIB

__all__ = ["ICON", "VERDICT_COLOURS", "VERDICT_ICONS", "launch_options"]

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    '<rect x="3" y="18" width="6" height="11" fill="#0072b2"/>'
    '<rect x="13" y="10" width="6" height="19" fill="#e69f00"/>'
    '<rect x="23" y="3" width="6" height="26" fill="#d55e00"/></svg>'
)
"""The page's icon; a name of an icon would be fetched from somebody's server."""
VERDICT_COLOURS = {
    "fits": "green",
    "fits by releasing cache": "orange",
    "tight": "orange",
    "cannot say": "violet",
    "does not fit": "red",
    "no GPU named": "gray",
}
VERDICT_ICONS = {
    "fits": ":material/check_circle:",
    "fits by releasing cache": ":material/warning:",
    "tight": ":material/warning:",
    "cannot say": ":material/help:",
    "does not fit": ":material/cancel:",
    "no GPU named": ":material/help:",
}
MAX_UPLOAD_MB = MAX_EXPORT_BYTES // MIB

_OPTIONS = {
    "theme.light.primaryColor": "#0b5cad",
    "theme.light.backgroundColor": "#ffffff",
    "theme.light.secondaryBackgroundColor": "#f3f5f8",
    "theme.light.textColor": "#1c2430",
    "theme.dark.primaryColor": "#5aa9f5",
    "theme.dark.backgroundColor": "#11161d",
    "theme.dark.secondaryBackgroundColor": "#1b232d",
    "theme.dark.textColor": "#e6ebf1",
    "theme.chartCategoricalColors": list(COLOURS.values()),
}


def launch_options() -> list[str]:
    """Theme and limits as ``--name=value`` for ``streamlit run``."""
    options = [f"--server.maxUploadSize={MAX_UPLOAD_MB}", "--browser.gatherUsageStats=false"]
    # lists are JSON on a command line
    options += [
        f"--{name}={json.dumps(value) if isinstance(value, list) else value}"
        for name, value in _OPTIONS.items()
    ]
    return options
