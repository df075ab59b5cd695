"""Pictures of every page of the explorer, in both themes, on a laptop and on a phone.

    python tools/app_screenshots.py shots                 all of them
    python tools/app_screenshots.py shots --only compare  one page
    python tools/app_screenshots.py --docs                those of docs/explorer.md, there

Needs the extra ``app``, playwright and a Chromium; Debian's is found by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCREENS = {"laptop": (1280, 720), "wide": (1680, 1050), "phone": (390, 844)}
THEMES = ("light", "dark")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BERT = "model=bert-large-uncased"
SHOTS = {
    "what-if": "",
    "what-if-no": f"?{BERT}&gpu=t4&batch=64&precision=fp16",
    "what-if-tight": f"?{BERT}&gpu=rtx-3060&batch=9",
    "what-if-error": "?model=no-such-model&gpu=t4",
    "what-if-link": f"?{BERT}&gpu=t4&batch=-5",
    "what-if-no-gpu": f"?{BERT}&gpu=none",
    "what-if-pinned": f"?{BERT}&gpu=rtx-3090&batch=16&pin=bert-large-uncased+batch%3D8+fp16",
    "what-if-timeline": f"?{BERT}&gpu=rtx-3090&batch=16&tab=Timeline",
    "what-if-layers": "?tab=Layers",
    "what-if-calibration": f"?{BERT}&gpu=rtx-3090&batch=16&tab=Calibration",
    "fit-map": f"fit-map?{BERT}&gpu=t4&gpu=rtx-3090&precision=fp16",
    "compare": f"compare?{BERT}&gpu=t4&batch=32",
    "advise": f"advise?{BERT}&gpu=rtx-4090",
    "accuracy": "accuracy",
    "accuracy-campaigns": "accuracy?runs=Measured+campaigns",
    "calibration": f"calibration?{BERT}&gpu=t4",
    "calibration-profiles": "calibration?do=Profiles",
    "calibration-fit": "calibration?do=Fit+a+profile&fit_from=this+machine%27s+store",
    "how-it-works": f"how-it-works?{BERT}&gpu=rtx-4090&phase=2.1+backward",
}
"""Paths of what is shown, by the pictures' names."""
IMAGES = Path(__file__).parents[1] / "docs" / "images"
IN_DOCS = {
    ("what-if", "laptop", "light"): "explorer-what-if.png",
    ("what-if-no", "laptop", "dark"): "explorer-no.png",
    ("fit-map", "laptop", "light"): "explorer-fit-map.png",
    ("compare", "laptop", "dark"): "explorer-compare.png",
    ("calibration", "laptop", "light"): "explorer-calibration.png",
    ("what-if", "phone", "light"): "explorer-phone.png",
}
"""Those of docs/explorer.md: shot, screen and theme of each."""
AS_SEEN = {"explorer-what-if.png", "explorer-no.png"}
"""As a screen has them, not as high as the content."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serve(port: int) -> Iterator[str]:
    """The explorer for as long as it is needed."""
    server = subprocess.Popen(
        [sys.executable, "-m", "memest", "app", "--no-browser", "--port", str(port)],
        stdout=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/_stcore/health"):  # noqa: S310
                break
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait()


def settle(page: Any) -> None:
    """Wait until the page is drawn."""
    page.wait_for_selector("[data-testid=stMainBlockContainer]", timeout=60_000)
    page.wait_for_timeout(1500)
    page.wait_for_function(
        "() => !document.querySelector('[data-testid=stStatusWidget]')"
        " && !document.querySelector('[data-stale=true]')"
        " && !document.querySelector('[data-testid=stSkeleton]')",
        timeout=120_000,
    )
    page.wait_for_timeout(1200)


def whole_height(page: Any) -> int:
    """Pixels that the page's content takes."""
    height = page.evaluate(
        "() => { const e = document.querySelector('[data-testid=stMain]');"
        " return e ? e.scrollHeight : document.body.scrollHeight; }"
    )
    return int(height)


def main(argv: list[str] | None = None) -> int:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=IMAGES)
    parser.add_argument("--only", choices=list(SHOTS), action="append")
    parser.add_argument("--url", help="of an explorer that runs already")
    parser.add_argument("--whole", action="store_true", help="as high as the content, not a screen")
    parser.add_argument("--docs", action="store_true", help="those that docs/explorer.md shows")
    arguments = parser.parse_args(argv)
    if not arguments.docs and arguments.folder == IMAGES:
        parser.error("name a folder for the pictures, or --docs")
    from playwright.sync_api import sync_playwright

    binary = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    running = contextlib.nullcontext(arguments.url) if arguments.url else serve(free_port())
    with running as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        for theme in THEMES:
            for screen, (width, height) in SCREENS.items():
                context = browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme=theme
                )
                page = context.new_page()
                for name in arguments.only or SHOTS:
                    if arguments.docs and (name, screen, theme) not in IN_DOCS:
                        continue
                    page.set_viewport_size({"width": width, "height": height})
                    page.goto(f"{url}/{SHOTS[name]}")
                    settle(page)
                    in_docs = IN_DOCS.get((name, screen, theme))
                    if arguments.whole or (arguments.docs and in_docs not in AS_SEEN):
                        page.set_viewport_size(
                            {"width": width, "height": min(whole_height(page) + 80, 6000)}
                        )
                        page.wait_for_timeout(1500)
                    usual = f"{name}-{screen}-{theme}.png"
                    target = arguments.folder / (
                        IN_DOCS[name, screen, theme] if arguments.docs else usual
                    )
                    page.screenshot(path=str(target))
                    print(target, flush=True)
                context.close()
        browser.close()
    if arguments.docs:
        from campaigns import record

        record("pictures", f"{len(IN_DOCS)} pictures")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
