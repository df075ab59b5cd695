"""Fixed workloads that every figure is divided by.

A machine is never twice as fast as it was: other work, other clocks, other machines. What a case
takes is therefore told as a multiple of work of its own kind that was done beside it in the same
run. **A workload that has a name is never changed**, or old figures would mean something else: make
a new one with the next number, and give the cases that use it a new version. A test knows the
digest of each function's text.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable


def python_1() -> int:
    """Plain Python: what any replay must do at least, 400,000 times."""
    state, alive, allocated, peak = 12345, {}, 0, 0
    for event in range(400_000):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        if state & 1 or not alive:
            alive[event] = size = (state & 0xFFFFF) + 511 & -512
            allocated += size
            peak = max(peak, allocated)
        else:
            allocated -= alive.popitem()[1]
    return peak


def meta_1() -> int:
    """PyTorch on meta: four steps of a small network under a mode that counts operators."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        operators = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operators += 1
            return func(*args, **(kwargs or {}))

    with torch.device("meta"):
        layers = [
            torch.nn.Sequential(
                torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64),
                torch.nn.LayerNorm(64), torch.nn.Dropout(0.1),
            )
            for _ in range(40)
        ]  # fmt: skip
        model = torch.nn.Sequential(*layers)
        with Counting() as counting:
            for _ in range(4):
                model(torch.empty(8, 64)).sum().backward()
                model.zero_grad()
    return counting.operators


def process_1() -> int:
    """A process: the interpreter starts, and loads forty-odd modules of its own library."""
    names = (
        "argparse, asyncio, bz2, calendar, cmd, configparser, csv, dataclasses, decimal, difflib, "
        "email.message, enum, fileinput, fractions, ftplib, gzip, html.parser, http.client, "
        "inspect, json, logging.config, lzma, mailbox, optparse, pathlib, pdb, pickle, plistlib, "
        "pprint, random, smtplib, sqlite3, statistics, tarfile, tempfile, tokenize, typing, "
        "unittest, urllib.request, uuid, xml.dom.minidom, zipfile"
    )
    command = [sys.executable, "-I", "-S", "-c", f"import {names}"]
    return subprocess.run(command, check=True).returncode


def imports_1() -> int:
    """A process: torch is imported, and the code of one model, which no trace can spare."""
    code = "import torch; from transformers.models.qwen3 import modeling_qwen3"
    return subprocess.run([sys.executable, "-c", code], check=True).returncode


REFERENCES: dict[str, Callable[[], int]] = {
    "python-1": python_1,
    "meta-1": meta_1,
    "process-1": process_1,
    "imports-1": imports_1,
}
