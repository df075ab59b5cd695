"""Real DeepSpeed on quantised bases under stage 3, recorded: ``recorded/zero_3_qlora*.json``.

    # with DeepSpeed 0.19.8 installed
    DS_BUILD_OPS=0 PYTHONPATH=tests python -m support.quantised_ranks

As ``deepspeed_ranks``, with models that ``from_pretrained`` quantises without ``zero.Init``: they
are whole when DeepSpeed gets them. On a CPU bitsandbytes takes scales and a weight apart before it
multiplies, which a prediction with the CPU's operators has too.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from typing import Any

from support import deepspeed_ranks
from support.deepspeed_ranks import _FOUR, _HALF, _LORA, _SMALL, _TIGHT
from support.paths import IN_TESTS

_IN_BF16 = {**_FOUR, "bnb_4bit_quant_storage": "bfloat16"}
_QLORA = {**_HALF, "adapter": _LORA, "quantization": _FOUR}
_STORED = {**_QLORA, "quantization": _IN_BF16}

CASES: dict[str, dict[str, Any]] = {
    "zero_3_qlora": {
        "model": "llama", "ranks": 2, "setup": _QLORA,
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_qlora_stored": {
        "model": "llama", "ranks": 4, "setup": {**_STORED, "grad_accum": 2},
        "spread": {"zero": 3, "zero_settings": _SMALL},
    },
    "zero_3_qlora_checkpointing": {
        "model": "llama", "ranks": 2, "setup": {**_STORED, "checkpointing": "full"},
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_qlora_reentrant": {
        "model": "llama", "ranks": 2,
        "setup": {**_QLORA, "checkpointing": "full", "use_reentrant": True},
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
    "zero_3_qlora_odd": {
        "model": "llama-gqa", "ranks": 7,
        "setup": {**_QLORA, "quantization": {**_FOUR, "bnb_4bit_use_double_quant": False}},
        "spread": {"zero": 3, "zero_settings": {**_TIGHT, "sub_group_size": 10_000}},
    },
    "zero_3_qlora_offload": {
        "model": "llama", "ranks": 2, "setup": _QLORA,
        "spread": {
            "zero": 3, "offload_optimizer": True, "offload_param": True, "zero_settings": _TIGHT,
        },
    },
}  # fmt: skip
"""Runs on 4-bit bases: bytes and halves as storage, scales quantised and not."""

EVALUATED: dict[str, dict[str, Any]] = {
    "zero_3_qlora_evaluated": {
        "model": "llama", "ranks": 2, "setup": _STORED, "evaluation": [6, True],
        "spread": {"zero": 3, "zero_settings": _TIGHT},
    },
}  # fmt: skip


def _main() -> None:
    if len(sys.argv) > 1:
        os.environ["DS_ACCELERATOR"] = "cpu"
        # an operator that DeepSpeed would compile where it finds ninja; the fake group needs none
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        # a CPU with AVX-512 would pack the weights anew for an evaluation
        importlib.import_module("bitsandbytes.nn.modules").has_avx512bf16 = lambda: False
        deepspeed_ranks._made_in_parts = lambda like, *_: like
        deepspeed_ranks.CASES |= CASES
        deepspeed_ranks.EVALUATED |= EVALUATED
        deepspeed_ranks._record(sys.argv[1])
        return
    for name in (*CASES, *EVALUATED):
        # the profiler remembers addresses: a process for each
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "support.quantised_ranks", name]
            subprocess.run(command, check=True, cwd=folder, env=IN_TESTS)


if __name__ == "__main__":
    _main()
