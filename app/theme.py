"""How the explorer looks, as options of ``streamlit run``, so that an installed package has it."""

from __future__ import annotations

import json

from memest.app.uploads import MAX_EXPORT_BYTES
from memest.report.parts import COLOURS
from memest.units import MIB

__all__ = [
    "ICON",
    "MAX_MEMORY",
    "MAX_SECONDS",
    "PAGE_STYLE",
    "VERDICT_INKS",
    "launch_options",
]

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    '<rect x="3" y="18" width="6" height="11" fill="#0072b2"/>'
    '<rect x="13" y="10" width="6" height="19" fill="#e69f00"/>'
    '<rect x="23" y="3" width="6" height="26" fill="#d55e00"/></svg>'
)
"""The page's icon; a name of an icon would be fetched from somebody's server."""
VERDICT_INKS = {
    "fits": "light-dark(#0b6b2d, #4cc26a)",
    "fits by releasing cache": "light-dark(#7a4f00, #e3b341)",
    "tight": "light-dark(#7a4f00, #e3b341)",
    "cannot say": "light-dark(#5b30a6, #b794f4)",
    "does not fit": "light-dark(#b3161f, #ff7b72)",
    "no GPU named": "inherit",
}
"""Colours of verdicts as text: AA on the backgrounds of both themes."""
PAGE_STYLE = """
.stMainBlockContainer {padding:4.1rem 2rem 3rem; max-width:84rem}
.stVerticalBlock {gap:.5rem}
[data-testid=stStatusWidget] button {display:none}
[data-testid=stPopoverBody]:has(.st-key-option) {width:min(32rem, 92vw)}
[data-testid=stCaptionContainer] {color:inherit; opacity:.82}
.st-key-chips button {min-height:1.7rem; padding:0 .7rem; border-radius:1rem}
.st-key-chips button p {font-size:.82rem}
h1.mm-title {font-size:1.7rem; font-weight:750; padding:0; margin:0; line-height:1.2}
.mm-trust {margin:0; font-size:.9rem}
.mm-trust a {color:inherit; opacity:.85}
.st-key-question {flex-flow:row wrap; align-items:baseline; gap:.5rem 1.2rem}
.st-key-question > * {flex:1 0 100%; order:3}
.st-key-question > :has(.mm-title) {flex:none; order:0}
.st-key-question > :has(.mm-trust) {flex:1 1 20rem; order:1}
.st-key-question > .st-key-preset {order:2}
.st-key-menu {position:fixed; top:.2rem; left:1rem; width:calc(100% - 5rem); height:3.75rem;
  justify-content:center; z-index:999991; overflow-x:auto; scrollbar-width:none}
[data-testid=stLayoutWrapper]:has(> .st-key-menu) {position:absolute}
.st-key-changes .stButton button {min-height:2.1rem}
.st-key-method [role=radio], .st-key-precision [role=radio] {min-height:2.5rem}
.st-key-changes .stButton button p {white-space:normal; overflow-wrap:break-word}
@media (max-width: 1150px) {
  .st-key-question .stHorizontalBlock, .st-key-tuning .stHorizontalBlock,
  .st-key-axes .stHorizontalBlock, .stHorizontalBlock:has(.stMetric) {flex-wrap:wrap}
  .st-key-question .stColumn {min-width:14rem} .st-key-tuning .stColumn {min-width:11.5rem}
  .st-key-sizes .stColumn {min-width:40%} .st-key-axes .stColumn {min-width:min(22rem, 100%)}
  .stColumn:has(.stMetric) {min-width:10.5rem} [data-testid=stMetricValue] {font-size:1.6rem}}
@media (max-width: 860px) {.st-key-menu {padding-right:3rem;
  mask-image:linear-gradient(to right, #000 calc(100% - 3.5rem), transparent)}}
@media (max-width: 640px) {.stMainBlockContainer {padding:4rem 1rem 2rem}
  [data-testid=stStatusWidget] {display:none}
  .st-key-pin_row > :has(input) {min-width:100%}
  .stColumn:has(.stMetric) {min-width:100%}
  .stHorizontalBlock:has(> .stColumn:nth-child(4)) > .stColumn:has(.stMetric) {min-width:45%}
  [data-testid=stLayoutWrapper]:has(> .st-key-tuning) {order:1}
  [data-testid=stLayoutWrapper]:has(> .st-key-behind) {order:2}}
"""
"""What Streamlit has no option for: less air above the question, a title beside its one line.

Its own Stop leaves half a page, and stands beside the one that ends the work.
"""
MAX_SECONDS = "MEMEST_APP_SECONDS"
"""The environment variable that tells the server how long an answer may take."""
MAX_MEMORY = "MEMEST_APP_MEMORY"
"""The environment variable that tells the server from how many bytes on it refuses questions."""
_LEAST_KEPT_BYTES = 1000
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
    options = [
        f"--server.maxUploadSize={MAX_UPLOAD_MB}",
        "--browser.gatherUsageStats=false",
        # lists of options, styles: what a browser has is not sent again with every change
        f"--global.minCachedMessageSize={_LEAST_KEPT_BYTES}",
    ]
    # lists are JSON on a command line
    options += [
        f"--{name}={json.dumps(value) if isinstance(value, list) else value}"
        for name, value in _OPTIONS.items()
    ]
    return options
