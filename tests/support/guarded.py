"""Commands in a process in which torch and transformers are there, and importing them fails.

Run as a program of its own. Each line of standard input is a question, ``{"words", "absent"}``: the
words of a command line, and packages that are not installed. Each line of standard output is the
exit code and what was said.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import json
import os
import sys
import tempfile

GUARDED = ("torch", "transformers", "peft", "bitsandbytes")
_absent: set[str] = set()


class _Guard:
    """Finds the packages, and lets none of them in."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in _absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name not in GUARDED:
            return None
        spec = importlib.machinery.ModuleSpec(name, cls, is_package=True)
        real = importlib.machinery.PathFinder.find_spec(name)  # whose sources may be read
        spec.submodule_search_locations = real.submodule_search_locations if real else []
        return spec

    @staticmethod
    def create_module(spec):
        raise AssertionError(f"{spec.name} was imported")

    @staticmethod
    def exec_module(module):
        raise AssertionError


def main():
    sys.meta_path.insert(0, _Guard)
    from memest.cli.main import run

    with tempfile.TemporaryDirectory() as nobodys:
        os.environ |= {"MEMEST_CACHE": nobodys, "MEMEST_HOME": nobodys, "HF_HUB_OFFLINE": "1"}
        for line in sys.stdin:
            question = json.loads(line)
            _absent.clear()
            _absent.update(question["absent"])
            said = io.StringIO()
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                code = run(question["words"])
            sys.stdout.write(f"{json.dumps({'exit': code, 'said': said.getvalue()})}\n")
    assert not {*GUARDED} & set(sys.modules)


if __name__ == "__main__":
    main()
