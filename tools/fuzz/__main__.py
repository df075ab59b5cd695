"""Fuzz everything that reads what somebody else wrote.

    python tools/fuzz                            # 100,000 inputs over all targets, table on stdout
    python tools/fuzz --only snapshots           # one target
    python tools/fuzz --inputs 5000 --seed 7     # fewer, others
    python tools/fuzz --write                    # and the table into docs/hostile-input.md

Each target runs in a process of its own, held to 2 GiB of memory (beyond what its modules map) and
5 seconds for an input, in a folder of its own, under a guard that hears the interpreter's audit
events.
An input that brings about anything but an answer or one of memest's own errors is kept under
`fuzz-findings/` with what happened. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from guard import Finding, Guard, TooSlowError
from mutate import mutate
from targets import TARGETS, Target, load

from memest.errors import MemestError
from memest.units import GIB, MIB

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "hostile-input.md"
FINDINGS = ROOT / "fuzz-findings"
SECONDS = 5.0
MEMORY = 2 * GIB
INPUTS = 100_000
MOST_FINDINGS = 20


def one(target: Target, content: bytes, guard: Guard, folder: Path) -> tuple[str, list[Finding]]:
    """Read one input; ``accepted`` or ``refused``, and what should not have happened."""
    before = set(os.listdir(folder))
    findings: list[Finding] = []
    outcome = "refused"
    quiet = contextlib.redirect_stderr(io.StringIO())
    with warnings.catch_warnings(), quiet:
        warnings.simplefilter("ignore")
        try:
            with guard.watching():
                target.check(content, folder)
            outcome = "accepted"
        except MemestError as error:
            if not str(error).strip():
                findings.append(Finding("an empty message", type(error).__name__))
        except TooSlowError:
            findings.append(Finding("too slow", f"more than {guard.seconds:g} s"))
        except MemoryError as error:
            findings.append(Finding("too much memory", repr(error)))
        except BaseException as error:  # noqa: BLE001 - whatever comes out is the finding
            findings.append(Finding("crashed", f"{type(error).__name__}: {error}"[:300]))
    findings += guard.findings
    findings += [
        Finding("executed", name) for name in set(os.listdir(folder)) - before if "PWNED" in name
    ]
    return outcome, findings


def fuzz(target: Target, inputs: int, seed: int) -> dict[str, Any]:
    """All inputs of a target, in this process."""
    logging.disable(logging.CRITICAL)
    chance = random.Random(f"{target.name} {seed}")
    work = Path(tempfile.mkdtemp(prefix="memest-fuzz-"))
    os.environ |= {"MEMEST_CACHE": str(work / "cache"), "XDG_DATA_HOME": str(work / "data"),
                   "HOME": str(work), "TMPDIR": str(work), "HF_HUB_OFFLINE": "1",
                   "NO_COLOR": "1"}  # fmt: skip
    tempfile.tempdir = str(work)
    os.chdir(work)
    seeds = load(target, chance)
    guard = Guard(work, SECONDS)
    counts = {"accepted": 0, "refused": 0}
    findings: list[dict[str, str]] = []
    slowest = 0.0
    guard.listen()
    # good inputs first: a target that refuses its own seeds tests nothing
    for content in seeds:
        one(target, content, guard, _folder(work))
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    guard.hold(mapped_bytes + MEMORY)
    num_accepted = sum(
        one(target, content, guard, _folder(work))[0] == "accepted" for content in seeds
    )
    start = time.perf_counter()
    for _ in range(inputs):
        content = mutate(seeds, chance)
        folder = _folder(work)
        began = time.perf_counter()
        outcome, new_findings = one(target, content, guard, folder)
        slowest = max(slowest, time.perf_counter() - began)
        counts[outcome] += 1
        if new_findings:
            findings += [keep(target, content, finding) for finding in new_findings[:3]]
            if len(findings) >= MOST_FINDINGS:
                break
    shutil.rmtree(work, ignore_errors=True)
    return {
        "target": target.name, "seeds": len(seeds), "seeds_accepted": num_accepted,
        "inputs": sum(counts.values()), **counts, "slowest_s": round(slowest, 3),
        "seconds": round(time.perf_counter() - start, 1),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "findings": findings,
    }  # fmt: skip


def _folder(work: Path) -> Path:
    folder = work / "input"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def keep(target: Target, content: bytes, finding: Finding) -> dict[str, str]:
    """Write an input down for whoever mends it."""
    name = f"{target.name.replace(' ', '-')}-{hashlib.sha256(content).hexdigest()[:12]}"
    FINDINGS.mkdir(exist_ok=True)
    (FINDINGS / name).write_bytes(content)
    return {"input": name, "what": finding.what, "detail": finding.detail}


def table(results: list[dict[str, Any]]) -> str:
    """The campaign as Markdown."""
    rows = [
        "| what is read | inputs | refused | accepted | slowest | peak memory | findings |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        rows.append(
            f"| {r['target']} | {r['inputs']:,} | {r['refused']:,} | {r['accepted']:,} | "
            f"{r['slowest_s']:.2f} s | {r['peak_rss_mib']:,} MiB | {len(r['findings'])} |"
        )
    total = sum(r["inputs"] for r in results)
    num_findings = sum(len(r["findings"]) for r in results)
    rows.append(f"| **together** | **{total:,}** | | | | | **{num_findings}** |")
    return "\n".join(rows)


def write(body: str) -> None:
    """Put the table between its markers in the page."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- begin campaign -->", "<!-- end campaign -->"
    head, rest = text.split(begin, 1)
    PAGE.write_text(f"{head}{begin}\n{body}\n{end}{rest.split(end, 1)[1]}", encoding="utf-8")


def main() -> int:
    """Run a campaign; one process for each target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=INPUTS, help="over all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="targets whose name contains this")
    parser.add_argument("--write", action="store_true", help="write docs/hostile-input.md")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        target = next(t for t in TARGETS if t.name == options.inside)
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        json.dump(fuzz(target, options.inputs, options.seed), out)
        out.close()
        return 0
    targets = [t for t in TARGETS if options.only in t.name]
    shares = sum(t.share for t in targets)
    results = []
    for target in targets:
        count = -(-options.inputs * target.share // shares)
        command = [sys.executable, __file__, "--inside", target.name, "--inputs", str(count),
                   "--seed", str(options.seed)]  # fmt: skip
        process = subprocess.run(command, text=True, capture_output=True, check=False)
        if process.returncode or not process.stdout:
            last_lines = process.stderr.strip().splitlines()[-1:] or [
                f"exit code {process.returncode}"
            ]
            died = {"input": "?", "what": "the process died", "detail": last_lines[0][:300]}
            results.append({"target": target.name, "inputs": 0, "refused": 0, "accepted": 0,
                            "slowest_s": 0.0, "peak_rss_mib": 0, "findings": [died]})  # fmt: skip
        else:
            results.append(json.loads(process.stdout))
        last = results[-1]
        sys.stderr.write(f"{target.name}: {last['inputs']} inputs, {last.get('seconds')} s\n")
        for finding in last["findings"]:
            sys.stderr.write(f"  {finding['what']}: {finding['detail']} ({finding['input']})\n")
    body = table(results)
    sys.stdout.write(f"{body}\n")
    sys.stderr.write(f"at most {MEMORY // MIB} MiB and {SECONDS:g} s were allowed\n")
    if options.write:
        write(body)
    if options.write and not options.only:
        sys.path.insert(0, str(ROOT / "tools"))
        from campaigns import record

        inputs = sum(r["inputs"] for r in results)
        findings = sum(len(r["findings"]) for r in results)
        record("hostile input", f"{inputs:,} inputs, {findings} findings")
    return int(any(r["findings"] for r in results))


if __name__ == "__main__":
    raise SystemExit(main())
