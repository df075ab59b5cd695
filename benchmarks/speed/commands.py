"""Cases: whole processes, from the shell's start to the last line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

from speed.case import Bench, Case, Work
from speed.timing import run_command

BERT = ("estimate", "bert-large-uncased", "--batch", "8", "--fp16", "--json")
LARGEST = (
    "estimate", "meta-llama/Llama-3.1-405B", "--batch", "1", "--seq-len", "4096",
    "--checkpointing", "--gpu", "h200", "--json",
)  # fmt: skip


OWN = "?initializer_range=0.03"
"""Makes a model one of one's own: profiles of those that are asked for most come with memest."""
BIG = ("--seq-len", "4096", "--bf16", "--checkpointing", "--json")
QLORA = (
    "estimate", f"meta-llama/Llama-3.1-8B{OWN}", "--qlora", "--lora-r", "16", "--bf16",
    "--checkpointing",
    "--gpu", "rtx-4090", "--json",
)  # fmt: skip


def warm_command(*words: str) -> Work:
    """A command that has run once: bytecode is there, and its answer needs no trace."""
    run_command(*words)
    return lambda: run_command(*words)


def first(*words: str) -> Callable[[Bench], Work]:
    """A command with an empty cache: what no shipped profile answers is traced."""

    def estimate() -> int:
        with tempfile.TemporaryDirectory() as folder:
            cache = os.environ["MEMEST_CACHE"]
            os.environ["MEMEST_CACHE"] = folder
            try:
                return run_command(*words)
            finally:
                os.environ["MEMEST_CACHE"] = cache

    def prepare(bench: Bench) -> Work:
        estimate()  # for bytecode
        return estimate

    return prepare


def another_size(bench: Bench) -> Work:
    """A question about a model that was traced, at another batch and length."""
    run_command(*QLORA, "--batch", "1", "--seq-len", "2048")
    return lambda: run_command(*QLORA, "--batch", "2", "--seq-len", "1024")


CASES = (
    Case("help", "`memest --help`", "process-1", lambda _: warm_command("--help")),
    Case("command", "`memest estimate bert-large-uncased` from a stored trace",
         "process-1", lambda _: warm_command(*BERT)),
    Case("command-gpu", "the same for a GPU, with its largest batch",
         "process-1", lambda _: warm_command(*BERT, "--gpu", "rtx-3090")),
    Case("command-first", "a first estimate of bert-large: torch is loaded, the model traced",
         "process-1", first(*BERT[:4], "--bf16", "--padded", "--json")),
    Case("first-8b", "a first estimate of a model of 8B, with its largest batch",
         "imports-1", first("estimate", f"Qwen/Qwen3-8B{OWN}", "--batch", "1", "--gpu", "h100",
                            *BIG),
         long=True),
    Case("shipped-8b", "the same, of a model whose profile comes with memest",
         "process-1", first("estimate", "Qwen/Qwen3-8B", "--batch", "1", "--gpu", "h100", *BIG)),
    Case("first-405b", "a first estimate of a model of 405B under FSDP2 on 64 GPUs",
         "imports-1", first("estimate", f"meta-llama/Llama-3.1-405B{OWN}", "--batch", "1", "--fsdp",
                            "full_shard", "--num-gpus", "64", *BIG), long=True),
    Case("first-qlora", "a first estimate of QLoRA of a model of 8B, with its largest batch",
         "imports-1", first(*QLORA, "--batch", "1", "--seq-len", "2048"), long=True),
    Case("another-qlora", "the same at another batch and length, from the store",
         "process-1", another_size, long=True),
    Case("first-max-batch", "the largest batch of a model of 8B that was not traced before",
         "imports-1", first("max-batch", f"Qwen/Qwen3-8B{OWN}", "--gpu", "h100", *BIG), long=True),
    Case("command-405b", "`memest estimate` of a 405B Llama from its stored trace",
         "process-1", lambda _: warm_command(*LARGEST), long=True),
)  # fmt: skip
