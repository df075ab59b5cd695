"""Readers under changed inputs, and the guard under inputs that do what none may do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

TOOL = ROOT / "tools" / "fuzz"


def _targets():
    sys.path.insert(0, str(TOOL))
    try:
        spec = importlib.util.spec_from_file_location("fuzz_targets", TOOL / "targets.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["fuzz_targets"] = module
        spec.loader.exec_module(module)
        return module.TARGETS
    finally:
        sys.path.remove(str(TOOL))


NAMES = [target.name for target in _targets()]


def _fuzzed(name, inputs, tmp_path, seed=3):
    command = [sys.executable, str(TOOL), "--inside", name, "--inputs", str(inputs)]
    done = subprocess.run(
        [*command, "--seed", str(seed)], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow(
    "cache",
    "configurations of other tools",
    "command lines",
    "explorer uploads",
    "explorer links",
    "case records",
    "model configurations",
)
@pytest.mark.parametrize("name", NAMES)
def test_changed_inputs_bring_about_answers_or_errors_of_our_own(name, tmp_path):
    result = _fuzzed(name, 40 if name == "command lines" else 150, tmp_path)
    assert result["findings"] == []
    assert result["inputs"] >= 40
    assert result["seeds_accepted"] > 0, "a target that refuses good inputs tests nothing"


PLANTED = {
    "crashed": "raise RuntimeError('planted')",
    "too slow": "exec('while True: pass')",
    "too much memory": "bytearray(64 << 30)",
    "wrote outside": "open(__import__('os').path.dirname(str(folder.parent)) + '/planted', 'w')",
    "called": "__import__('subprocess').run(['true'])",
    "unpickled a global": "__import__('pickle').loads(b'cos\\nsystem\\n.')",
    "changed files outside": "__import__('os').mkdir('/tmp/planted-by-the-fuzz-test')",
    "stuck in C": "any(iter(int, 1))",
    "executed": "(folder / 'PWNED').touch()",
}


@pytest.mark.slow("stuck in C", "too slow")
@pytest.mark.parametrize("what", PLANTED)
def test_the_guard_sees_what_it_is_there_to_see(what, tmp_path):
    """One planted fault in a process of its own: the guard cannot be taken off again."""
    code = f"""
import json, sys, tempfile
from pathlib import Path
sys.path.insert(0, {str(TOOL)!r})
import guard as guards
import importlib.util
spec = importlib.util.spec_from_file_location("campaign", {str(TOOL / "__main__.py")!r})
campaign = importlib.util.module_from_spec(spec)
spec.loader.exec_module(campaign)
work = Path(tempfile.mkdtemp(dir={str(tmp_path)!r}))
guard = guards.Guard(work, 0.5)
guard.listen()
guard.hold(8 << 30)
def check(content, folder):
    {PLANTED[what]}
target = campaign.Target("planted", lambda: [], check)
folder = work / "input"
folder.mkdir()
outcome, found = campaign.one(target, b"", guard, folder)
print(json.dumps([f.what for f in found]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if what == "stuck in C":
        assert done.returncode == 1
        assert "Timeout" in done.stderr
        return
    Path("/tmp/planted-by-the-fuzz-test").rmdir() if what == "changed files outside" else None
    assert done.returncode == 0, done.stderr[-2000:]
    assert what in json.loads(done.stdout)
