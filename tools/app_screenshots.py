"""Pictures of every page of the explorer, in both themes, on a laptop, a tablet and a phone.

    python tools/app_screenshots.py shots                 all of them
    python tools/app_screenshots.py shots --only compare  one page
    python tools/app_screenshots.py --docs                those of docs/explorer.md, and its film

Needs the extra ``app``, playwright and a Chromium; Debian's is found by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

SCREENS = {"laptop": (1280, 720), "tablet": (820, 1180), "phone": (390, 844)}
THEMES = ("light", "dark")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BERT = "model=bert-large-uncased"
SHOTS = {
    "what-if": "",
    "what-if-no": f"?{BERT}&gpu=t4&batch=64&precision=fp16",
    "what-if-tight": f"?{BERT}&gpu=rtx-3060&batch=9",
    "what-if-error": "?model=no-such-model&gpu=t4",
    "what-if-link": f"?{BERT}&gpu=t4&batch=-5",
    "what-if-link-tab": f"?{BERT}&gpu=t4&tab=Timelime",
    "what-if-no-gpu": f"?{BERT}&gpu=none",
    "what-if-pinned": f"?{BERT}&gpu=rtx-3090&batch=16&pin=bert-large-uncased+batch%3D8+fp16",
    "what-if-timeline": f"?{BERT}&gpu=rtx-3090&batch=16&tab=Timeline",
    "what-if-layers": "?tab=Layers",
    "what-if-calibration": f"?{BERT}&gpu=rtx-3090&batch=16&tab=Calibration",
    "what-if-calibrated": f"?{BERT}&gpu=h100&tab=Calibration",
    "what-if-options": "",
    "fit-map": f"fit-map?{BERT}&gpu=t4&gpu=rtx-3090&precision=fp16",
    "compare": f"compare?{BERT}&gpu=t4&batch=32",
    "advise": f"advise?{BERT}&gpu=rtx-4090",
    "accuracy": "accuracy",
    "accuracy-campaigns": "accuracy?runs=Measured+campaigns",
    "calibration": f"calibration?{BERT}&gpu=t4",
    "calibration-profiles": "calibration?do=Profiles",
    "calibration-measure": "calibration?do=Measure&campaign=standard",
    "calibration-fit": "calibration?do=Fit+a+profile&fit_from=this+machine%27s+store",
    "how-it-works": f"how-it-works?{BERT}&gpu=rtx-4090&phase=2.1+backward",
    "waiting": f"?{BERT}&gpu=rtx-4090",
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
    ("waiting", "laptop", "light"): "explorer-waiting.png",
}
"""Those of docs/explorer.md: shot, screen and theme of each."""
AS_SEEN = {"explorer-what-if.png", "explorer-no.png", "explorer-waiting.png"}
"""As a screen has them, not as high as the content."""
FILM = "explorer.webp"
POINTER = """([x, y]) => {
  const dot = document.createElement('div');
  dot.id = 'pointer';
  dot.style = 'position:fixed; z-index:9999999; width:26px; height:26px; margin:-13px 0 0 -13px;'
    + 'border-radius:50%; background:rgba(207,34,46,.35); border:2px solid #cf222e;'
    + `pointer-events:none; left:${x}px; top:${y}px`;
  document.body.append(dot);
}"""
"""Shows where the next click goes."""


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


def ask_untraced(page: Any) -> None:
    """Ask about a model that nobody has traced, and wait until its trace tells how far it is."""
    width = 128 * random.randrange(60, 108)  # noqa: S311 - another model each time
    box = page.locator(".st-key-model input")
    box.click()
    model = f"meta-llama/Llama-3.1-8B?intermediate_size={width}"
    box.fill(model)
    page.get_by_role("option").filter(has_text=model).wait_for()
    box.press("Enter")
    page.wait_for_function(
        "() => document.querySelector('.stExpander')?.innerText.includes('s left')",
        timeout=180_000,
        polling=20,
    )


def open_options(page: Any) -> None:
    """Open the list of all options."""
    page.get_by_role("button", name="All options").click()
    page.get_by_label("Find an option").click()
    page.get_by_role("option").first.wait_for()


ACTIONS = {"waiting": ask_untraced, "what-if-options": open_options}
"""What is done before some of the pictures are taken."""


def film(page: Any, url: str, target: Path) -> None:
    """Ten seconds of the explorer: an example, more than fits, what makes it fit, a link to it."""
    frames: list[tuple[Any, float]] = []

    def take(seconds: float) -> None:
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        frames.append((picture, seconds))

    def click(place: Any, seconds: float = 0.6) -> None:
        box = place.bounding_box()
        page.evaluate(POINTER, [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2])
        take(seconds)
        place.click()
        page.evaluate("() => document.querySelector('#pointer').remove()")

    page.goto(url)
    settle(page)
    take(1.2)
    click(page.locator(".st-key-preset button").get_by_text("bert-large, T4, fp16"))
    settle(page)
    take(1.2)
    batch = page.get_by_label("Batch", exact=True)
    click(batch)
    batch.fill("64")
    batch.press("Enter")
    page.get_by_text("Does not fit", exact=True).wait_for()
    settle(page)
    take(1.6)
    click(page.locator(".st-key-changes button").first)
    page.locator(".mm-verdict b").get_by_text("Fits", exact=True).wait_for()
    settle(page)
    take(1.6)
    click(page.get_by_role("button", name="Share"))
    page.get_by_text("Link to this question").wait_for()
    page.wait_for_timeout(1000)
    take(2.6)
    (first, _), *rest = frames
    first.save(
        target,
        save_all=True,
        append_images=[picture for picture, _ in rest],
        duration=[round(1000 * seconds) for _, seconds in frames],
        loop=0,
        quality=80,
        method=6,
    )


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
                    if name in ACTIONS:
                        ACTIONS[name](page)
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
        if arguments.docs:
            page = browser.new_page(viewport={"width": 1280, "height": 720}, color_scheme="light")
            film(page, url, arguments.folder / FILM)
            print(arguments.folder / FILM, flush=True)
        browser.close()
    if arguments.docs:
        from campaigns import record

        record("pictures", f"{len(IN_DOCS)} pictures, and a film")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
