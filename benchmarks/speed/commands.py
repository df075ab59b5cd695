"""Cases: whole processes, from the shell's start to the last line."""

from __future__ import annotations

import os
import tempfile

from speed.case import Bench, Case, Work
from speed.timing import run_command

BERT = ("estimate", "bert-large-uncased", "--batch", "8", "--fp16", "--json")
LARGEST = (
    "estimate", "meta-llama/Llama-3.1-405B", "--batch", "1", "--seq-len", "4096",
    "--checkpointing", "--gpu", "h200", "--json",
)  # fmt: skip


def warm_command(*words: str) -> Work:
    """A command that has run once: bytecode is there, and its answer needs no trace."""
    run_command(*words)
    return lambda: run_command(*words)


def first_estimate() -> int:
    """An empty cache and a question that no shipped profile answers: everything is traced."""
    with tempfile.TemporaryDirectory() as folder:
        cache = os.environ["MEMEST_CACHE"]
        os.environ["MEMEST_CACHE"] = folder
        try:
            return run_command(*BERT[:4], "--bf16", "--padded", "--json")
        finally:
            os.environ["MEMEST_CACHE"] = cache


def first(bench: Bench) -> Work:
    first_estimate()  # for bytecode
    return first_estimate


CASES = (
    Case("help", "`memest --help`", "process-1", lambda _: warm_command("--help")),
    Case("command", "`memest estimate bert-large-uncased` from a stored trace",
         "process-1", lambda _: warm_command(*BERT)),
    Case("command-gpu", "the same for a GPU, with its largest batch",
         "process-1", lambda _: warm_command(*BERT, "--gpu", "rtx-3090")),
    Case("command-first", "a first estimate of bert-large: torch is loaded, the model traced",
         "process-1", first),
    Case("command-405b", "`memest estimate` of a 405B Llama from its stored trace",
         "process-1", lambda _: warm_command(*LARGEST), long=True),
)  # fmt: skip
