"""A predicted snapshot in the page of PyTorch's memory_viz, in a real browser.

The page that ``_memory_viz.py trace_plot`` writes loads its JavaScript from the network, and no
package index has it. Where ``MEMEST_MEMORY_VIZ`` names a folder with ``MemoryViz.js`` (PyTorch's
``torch/utils/viz``) and ``d3.min.js`` (npm's ``d3``), the browser is given these instead.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.paths import SHARED

playwright = pytest.importorskip("playwright.sync_api")
FOLDER = Path(os.environ.get("MEMEST_MEMORY_VIZ", SHARED / "memory_viz"))
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"),
    pytest.mark.skipif(
        not (FOLDER / "MemoryViz.js").is_file(),
        reason="the page's JavaScript is not here: MEMEST_MEMORY_VIZ names its folder",
    ),
]


def _shim(page, library):
    """An ES module with every name of d3, which comes as a plain script."""
    page.add_script_tag(content=library)
    names = page.evaluate("Object.keys(d3).filter(name => name !== 'default')")
    return f"{library}\nconst d3 = globalThis.d3;\n" + "\n".join(
        f"const _{name} = d3.{name}; export {{_{name} as {name}}};" for name in names
    )


@pytest.fixture
def page():
    with playwright.sync_playwright() as runner:
        browser = runner.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        found = browser.new_page(viewport={"width": 1280, "height": 900})
        scripts = {
            "MemoryViz.js": (FOLDER / "MemoryViz.js").read_text(encoding="utf-8"),
            "d3": _shim(found, (FOLDER / "d3.min.js").read_text(encoding="utf-8")),
        }

        def answer(route):
            name = "MemoryViz.js" if route.request.url.endswith("MemoryViz.js") else "d3"
            route.fulfill(
                body=scripts[name], content_type="text/javascript",
                headers={"Access-Control-Allow-Origin": "*"},
            )  # fmt: skip

        found.route(re.compile("^https://"), answer)
        yield found
        browser.close()


@pytest.mark.parametrize("name", ["plain", "expandable"])
@pytest.mark.parametrize("kind", ["trace_plot", "segment_plot"])
def test_the_page_draws_it(written, page, tmp_path, name, kind):
    run = written(name)
    html = tmp_path / "page.html"
    tool = Path(find_spec("torch").origin).parent / "cuda/_memory_viz.py"
    subprocess.run(
        [sys.executable, str(tool), kind, str(run.pickle), "-o", str(html)], check=True,
        timeout=300,
    )  # fmt: skip
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(html.as_uri())
    shape = "polygon" if kind == "trace_plot" else "rect"
    while not errors and not page.locator(f"svg {shape}").count():
        page.wait_for_timeout(100)

    assert not errors
    (trace,) = run.content["device_traces"]
    if kind == "trace_plot":
        allocations = [entry for entry in trace if entry["action"] == "alloc"]
        # every allocation, what is summarised, and the line of the small map
        assert page.locator("svg polygon").count() >= len(allocations)
        legend = page.locator("svg text").all_text_contents()
        assert {"parameters", "gradients", "optimizer states", "activations"} <= set(legend)
    else:
        assert page.locator("pre", has_text="alloc").count() > 0
