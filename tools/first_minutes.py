"""Play the README and the examples as a new user would, and time them.

    python tools/first_minutes.py             a clone, a new environment, no home, then no network
    python tools/first_minutes.py --no-torch  what works before torch is there, alone

A clone of this checkout's last commit is made in a temporary folder. The README's first command is
run there as it stands; then every further ``sh`` block of the README and of ``examples/README.md``,
line by line, without a network where this machine can take it away. Commands that serve, test or
need a cluster are left out. The exit code is 1 where a command ended otherwise than the page says.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"# exit code (\d+)$")
_NEEDS = re.compile(r"# needs (\w+)$")
_LEFT_OUT = re.compile(r"memest (app|mcp)|-m pytest|^kubectl|^sbatch|axolotl train|python examples")
_INSTALLS = re.compile(r"pip install")


def lines_of(page: Path) -> Iterator[str]:
    """The command lines of a page's blocks, in order."""
    for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        yield from (line for line in block.splitlines() if line and not line.startswith("#"))


def offline() -> list[str]:
    """What takes the network away from a command, where this machine can."""
    words = ["unshare", "--map-root-user", "--net"]
    try:
        subprocess.run([*words, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return words


def play(line: str, folder: Path, home: Path, prefix: list[str]) -> tuple[int, float, str]:
    """Run a line; its exit code, its seconds and the last line that it wrote."""
    environment = {
        "HOME": str(home),
        "PATH": f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}",
        "LANG": "C.UTF-8",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
    }
    start = time.monotonic()
    done = subprocess.run(
        [*prefix, "bash", "-c", line], cwd=folder, env=environment, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    written = done.stdout.strip().splitlines()
    return done.returncode, time.monotonic() - start, written[-1] if written else ""


def main() -> int:
    """Play all lines; 1 where one ends otherwise than its page says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--no-torch", action="store_true", help="leave out what needs torch")
    with_torch = not parser.parse_args().no_torch
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="memest-first-") as place:
        folder, home = Path(place) / "memest", Path(place) / "home"
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        without_network = offline()
        if not without_network:
            print("the network cannot be taken away on this machine: it stays")
        for page in (folder / "README.md", folder / "examples" / "README.md"):
            for line in lines_of(page):
                installs = _INSTALLS.search(line) is not None
                if _LEFT_OUT.search(line) or (installs and "-e ." not in line and not with_torch):
                    continue
                code, seconds, last = play(line, folder, home, [] if installs else without_network)
                found = _CODE.search(line)
                expected = {int(found[1])} if found else {0}
                # a package that is not there: of code that memest runs, or that it asks itself
                expected |= {1, 6} if _NEEDS.search(line) else set()
                expected |= set() if with_torch else {6}
                is_right = code in expected
                wrong += not is_right
                print(f"{'' if is_right else 'WRONG '}{seconds:6.1f} s  code {code}  {line}")
                if not is_right:
                    print(f"        {last}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
