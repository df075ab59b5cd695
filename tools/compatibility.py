"""Check traces against real CPU steps under several releases, and write docs/compatibility.md.

    python tools/compatibility.py --install "torch==2.13.0 transformers==5.23.0"   # a fresh venv
    python tools/compatibility.py --python /path/to/venv/bin/python                # what is there
    python tools/compatibility.py --dry ...                                         # print only

Each set of releases gets an environment of its own, side by side, with this checkout's package in
it, and runs `memest selftest --full`. A set that differs makes the exit code 1; its row says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
OTHER_REQUIREMENTS = ("accelerate", "sentencepiece", "protobuf", "pillow")


def main() -> int:
    """Check every environment that is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--install", action="append", default=[], metavar="REQUIREMENTS")
    parser.add_argument("--python", action="append", default=[], metavar="PATH")
    parser.add_argument("--dry", action="store_true", help="do not write the page")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="memest-releases-") as folder:
        package = Path(folder) / "package"
        run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", package, ROOT)
        pythons = [Path(p) for p in options.python]
        for number, requirements in enumerate(options.install):
            home = Path(folder) / f"venv{number}"
            venv.create(home, with_pip=True)
            python = home / "bin" / "python"
            run(python, "-m", "pip", "install", "-q", *requirements.split(), *own_requirements())
            pythons.append(python)
        results = [check(python, package) for python in pythons]
    rows = [row(result) for result in results]
    text = "\n".join([
        "| torch | transformers | cases | worst error | |", "|---|---|---:|---:|---|", *rows,
    ])  # fmt: skip
    sys.stdout.write(f"{text}\n")
    if not options.dry:
        write(text)
        from campaigns import record

        num_drifted = sum(bool(result["drift"]) for result in results)
        record("releases", f"{len(results) - num_drifted} of {len(results)} environments hold")
    return int(any(result["drift"] for result in results))


def run(*command: object) -> str:
    """Run a command; its output."""
    process = subprocess.run(
        [str(part) for part in command], check=True, text=True, stdout=subprocess.PIPE
    )
    return process.stdout


def own_requirements() -> list[str]:
    """What memest itself needs, torch and transformers apart."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *OTHER_REQUIREMENTS]


def check(python: Path, package: Path) -> dict[str, Any]:
    """``memest selftest --full`` in an environment, with the package of this checkout."""
    settings = {**os.environ, "PYTHONPATH": str(package)}
    with tempfile.TemporaryDirectory(prefix="memest-cache-") as cache:
        settings["MEMEST_CACHE"] = cache
        process = subprocess.run(
            [str(python), "-m", "memest", "selftest", "--full", "--json"],
            check=False, text=True, stdout=subprocess.PIPE, env=settings, cwd=cache,
        )  # fmt: skip
    return json.loads(process.stdout)["drift"]


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    errors = [abs(c["error"]) for c in result["cases"] if c["error"] is not None]
    worst = f"{max(errors):.3%}" if errors else "-"
    drifting_cases = [c["case"] for c in result["cases"] if not c["agrees"]]
    note = f"differs: {', '.join(drifting_cases)}" if drifting_cases else "traces hold"
    count = f"{len(result['cases']) - len(drifting_cases)} of {len(result['cases'])}"
    torch, transformers = result["torch"].partition("+")[0], result["transformers"]
    return f"| {torch} | {transformers} | {count} | {worst} | {note} |"


def write(table: str) -> None:
    """Put the table between its markers in the page."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- begin releases -->", "<!-- end releases -->"
    head, rest = text.split(begin, 1)
    PAGE.write_text(f"{head}{begin}\n{table}\n{end}{rest.split(end, 1)[1]}", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
