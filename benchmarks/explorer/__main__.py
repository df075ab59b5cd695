"""The explorer in Chromium: seconds to a verdict, weight of a page, tabs to the question.

    python benchmarks/explorer             measures, prints the table
    python benchmarks/explorer --write     and writes it into docs/explorer.md

Needs the extra ``app``, playwright and a Chromium; Debian's is found by itself. Every figure is the
median of a few rounds on a server that has answered before, but for the first answer of a model
that was never traced.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from app_screenshots import BROWSERS, free_port, serve, settle  # noqa: E402 - of tools/

PAGE = ROOT / "docs" / "explorer.md"
BEGIN, END = "<!-- begin figures -->", "<!-- end figures -->"
ROUNDS = 5
START = "?model=bert-large-uncased&gpu=rtx-4090&batch={batch}"
UNTRACED = (
    "?model=meta-llama/Llama-3.1-8B%3Fintermediate_size%3D14208&gpu=h100&batch=1&seq_len=1024"
    "&precision=bf16"
)
"""A model of 8B parameters that nobody has traced."""
IMPORTS = (
    "import torch, transformers; from transformers import AutoModelForCausalLM;"
    "import transformers.models.llama.modeling_llama"
)
_SEEN = (
    "() => ['.mm-verdict', '.mm-scale', '.mm-peaks']"
    ".map(name => document.querySelector(name)?.innerText).join()"
)
"""What a person reads of the answer."""


def opening(page: Any, url: str) -> float:
    """Seconds until the bar stands on the page."""
    start = time.perf_counter()
    page.goto(url)
    page.wait_for_selector(".mm-bar", timeout=180_000)
    return time.perf_counter() - start


def changing(page: Any, act: Callable[[], Any]) -> float:
    """Seconds from an action until the bar is another one."""
    before = page.evaluate(_SEEN)
    start = time.perf_counter()
    act()
    page.wait_for_function(
        f"before => ({_SEEN})() !== before && document.querySelector('.mm-bar')",
        arg=before,
        timeout=60_000,
    )
    seconds = time.perf_counter() - start
    settle(page)
    return seconds


def fill(page: Any, label: str, value: int) -> None:
    """Type into a field of numbers."""
    field = page.get_by_label(label, exact=True)
    field.fill(str(value))
    field.press("Enter")


def choose_gpu(page: Any, name: str) -> None:
    """Type a card's name and take the first that fits it."""
    box = page.locator(".st-key-gpu input")
    box.click()
    box.fill(name)
    box.press("Enter")


def tabs_to_the_question(page: Any) -> int:
    """How often Tab is pressed until the model is reached."""
    page.evaluate("() => document.activeElement.blur()")
    for count in range(1, 60):
        page.keyboard.press("Tab")
        name = page.evaluate("() => document.activeElement.getAttribute('aria-label') || ''")
        if name == "Model":  # not its help, which comes before it
            return count
    return 60


def weight(browser: Any, url: str) -> tuple[int, int]:
    """Bytes of a first visit, and of a second one of the same browser."""
    context = browser.new_context(viewport={"width": 1280, "height": 720})
    found = []
    for _ in range(2):
        page = context.new_page()
        session = context.new_cdp_session(page)
        session.send("Network.enable")
        sizes: list[int] = []
        session.on(
            "Network.loadingFinished", lambda e, sizes=sizes: sizes.append(e["encodedDataLength"])
        )
        opening(page, url)
        settle(page)
        found.append(int(sum(sizes)))
        page.close()
    context.close()
    return found[0], found[1]


def measure() -> list[tuple[str, str, str]]:
    """Rows of the table: what, the figure, the goal."""
    from playwright.sync_api import sync_playwright

    binary = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    with contextlib.ExitStack() as stack:
        # an empty store, and no calibration of the user's
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ |= {"MEMEST_HOME": folder, "MEMEST_CACHE": f"{folder}/cache"}
        url = f"{stack.enter_context(serve(free_port()))}/"
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 1280, "height": 720}).new_page()
        opening(page, url)
        settle(page)
        warm = statistics.median(opening(page, url) for _ in range(ROUNDS))
        settle(page)
        tabs = tabs_to_the_question(page)
        page.goto(url + START.format(batch=7))
        page.wait_for_selector(".mm-bar")
        settle(page)
        batch = [changing(page, lambda n=n: fill(page, "Batch", n)) for n in range(9, 9 + ROUNDS)]
        length = [
            changing(page, lambda n=n: fill(page, "Length", n)) for n in (128, 256, 384, 512, 128)
        ]
        gpus = ("t4", "3090", "l4", "v100", "h100")
        gpu = [changing(page, lambda g=g: choose_gpu(page, g)) for g in gpus]
        chips = page.locator(".st-key-preset button")
        names = chips.all_inner_texts()
        for name in names:  # each once, so that its profile is read
            chips.get_by_text(name, exact=True).click()
            settle(page)
        preset = [
            changing(page, lambda n=n: chips.get_by_text(n, exact=True).click()) for n in names
        ]
        page.goto(url + START.format(batch=64))
        page.wait_for_selector(".mm-bar")
        settle(page)
        first, later = weight(browser, url)
        imports = _imports()
        untraced = opening(page, url + UNTRACED)
        browser.close()
    return [
        ("first verdict after opening, warm", f"{warm:.2f} s", "1.5 s"),
        ("another batch", f"{statistics.median(batch):.2f} s", "0.3 s"),
        ("another length", f"{statistics.median(length):.2f} s", "0.3 s"),
        ("another GPU, typed", f"{statistics.median(gpu):.2f} s", "0.3 s"),
        ("another example", f"{statistics.median(preset):.2f} s", "0.3 s"),
        (
            "first verdict of an 8B model that was never traced, over the imports of torch",
            f"{untraced:.1f} s, {untraced / imports:.1f} ×",
            "2 ×",
        ),
        ("weight of a first visit", f"{first / 1e6:.1f} MB", ""),
        ("weight of a second visit", f"{later / 1e6:.2f} MB", "3 MB"),
        ("tabs to the model", str(tabs), "5"),
    ]


def _imports() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> int:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="into docs/explorer.md")
    arguments = parser.parse_args()
    rows = measure()
    lines = ["| in Chromium, on two cores | | goal |", "|---|---:|---:|"]
    lines += [f"| {what} | {figure} | {goal} |" for what, figure, goal in rows]
    lines += [
        "",
        f"Measured {dt.datetime.now(tz=dt.UTC):%Y-%m-%d} by `python benchmarks/explorer`.",
    ]
    table = "\n".join(lines)
    print(table)
    if arguments.write:
        text = PAGE.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN, 1)
        after = rest.split(END, 1)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
