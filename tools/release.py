"""Makes a release ready: builds it, tries what was built, and says what is left to do by hand.

    python tools/release.py            build, check, the tag's text, the commands that publish it
    python tools/release.py --draft    the same of a tree with changes, and nothing to publish

Nothing leaves this machine: the last two commands, which push the tag and upload, are printed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUESTION = ("estimate", "bert-large-uncased", "--batch", "8", "--fp16")
UNRELEASED = "## Unreleased"


def stop(reason: str) -> None:
    """Ends with a sentence and exit code 1."""
    raise SystemExit(f"no release: {reason}")


def project() -> dict[str, str]:
    """The distribution's name and version."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"name": table["name"], "version": table["version"]}


def notes(version: str, changelog: str) -> str:
    """What the changelog says of a version: the text of its tag.

    Raises:
        SystemExit: if it has no section with a date, or an empty one.
    """
    heading = re.compile(rf"^## {re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)$", re.MULTILINE)
    found = heading.search(changelog)
    if not found:
        today = dt.datetime.now(tz=dt.UTC).date()
        stop(
            f"CHANGELOG.md has no section of {version}: what stands under '{UNRELEASED}' gets the "
            f"heading '## {version} ({today})', and an empty '{UNRELEASED}' goes above it"
        )
    assert found
    text = changelog[found.end() :].partition("\n## ")[0].strip()
    if not text:
        stop(f"CHANGELOG.md says nothing of {version}")
    return text


def checked_versions(version: str) -> None:
    """The version is the same wherever it stands, and no tag has it yet."""
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    if f"\nversion: {version}\n" not in cited:
        stop(f"CITATION.cff names another version than {version} of pyproject.toml")
    if _output("git", "tag", "--list", f"v{version}"):
        stop(f"there is a tag v{version} already: raise the version in pyproject.toml")


def built(folder: Path) -> list[Path]:
    """An sdist, and the wheel that it builds, whose metadata an index takes."""
    print("building", flush=True)
    _output(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT))
    made = sorted(folder.iterdir())
    print(
        _output(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, made))
    )
    return made


def tried(wheel: Path, version: str, folder: Path) -> None:
    """The wheel in an environment of its own, without torch, answers a shipped question."""
    venv.create(folder / "alone", with_pip=True)
    scripts = folder / "alone" / ("Scripts" if os.name == "nt" else "bin")
    _output(str(scripts / "python"), "-P", "-m", "pip", "install", "--quiet", str(wheel))
    command = str(scripts / "memest")
    if _output(command, "--version") != f"memest {version}":
        stop(f"the wheel's memest is not {version}")
    environment = {**os.environ, "MEMEST_CACHE": str(folder / "cache")}
    answer = _output(command, *QUESTION, environment=environment)
    print(answer.splitlines()[0])


def _output(*command: str, environment: dict[str, str] | None = None) -> str:
    """What a command prints, from the root of the tree; where it fails, no release."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    if done.returncode:
        stop(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def main() -> None:
    """Build, check, try, and print what is left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--draft", action="store_true", help="of a tree as it is, nothing released")
    draft = parser.parse_args().draft
    name, version = project()["name"], project()["version"]
    checked_versions(version)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if draft:
        text = changelog.partition(UNRELEASED)[2].partition("\n## ")[0].strip()
    elif _output("git", "status", "--porcelain"):
        stop("the tree has changes: commit them, or try with --draft")
    else:
        text = notes(version, changelog)

    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    made = built(dist)
    with tempfile.TemporaryDirectory() as folder:
        tried(next(path for path in made if path.suffix == ".whl"), version, Path(folder))

    message = dist / f"v{version}.txt"
    message.write_text(f"{name} {version}\n\n{text}\n", encoding="utf-8")
    names = " ".join(f"dist/{path.name}" for path in made)
    print(f"\nThe tag's text: dist/{message.name}. {'A draft ends here.' if draft else 'Publish:'}")
    if not draft:
        print(f"  git tag -a v{version} -F dist/{message.name} && git push origin v{version}")
        print(f"  python -m twine upload {names}")


if __name__ == "__main__":
    main()
