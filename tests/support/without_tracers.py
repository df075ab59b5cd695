"""Answers questions where nothing that traces is installed; run as a program of its own.

Each line of standard input is a question: ``{"model", "gpu", "options"}``, or ``{"words"}`` of a
command line. Each line of standard output is its answer: the exit code, and the peak in bytes and
what was assumed, or what was said.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from functools import cache

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")


class _Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _hide():
    """Let neither imports nor metadata find the packages."""
    sys.meta_path.insert(0, _Absent)
    import memest.config.installed

    real_release = memest.config.installed.release
    memest.config.installed.release = lambda package: (
        None if package in PACKAGES else real_release(package)
    )
    assert "memest.profiles.known_profiles" not in sys.modules, "it has the other one already"


@cache
def _profile(model):
    import memest

    return memest.profile(model)


def _ask(model, gpu, options):
    import memest

    try:
        answer = _profile(model).spot(gpu=gpu, **options)
    except memest.MemestError as error:
        return {"exit": error.exit_code, "said": str(error)}
    return {"exit": 0, "bytes": answer.peak.device_bytes}


def _run_words(words):
    from memest.cli.main import run

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([*words, "--json"])
    if code:
        return {"exit": code, "said": err.getvalue()}
    answer = json.loads(out.getvalue())
    return {
        "exit": 0,
        "bytes": answer["peak"]["device_bytes"],
        "allocated": answer["peak"]["allocated_bytes"],
        "assumptions": answer["assumptions"],
    }


def main():
    _hide()
    with tempfile.TemporaryDirectory() as nobodys:
        os.environ |= {"MEMEST_CACHE": nobodys, "MEMEST_HOME": nobodys}
        for line in sys.stdin:
            question = json.loads(line)
            answer = _run_words(**question) if "words" in question else _ask(**question)
            sys.stdout.write(f"{json.dumps(answer)}\n")
    assert not {*PACKAGES} & set(sys.modules)


if __name__ == "__main__":
    main()
