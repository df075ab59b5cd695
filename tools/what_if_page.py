"""Write docs/what-if.md: the questions beyond one estimate, with what the commands really print.

python tools/what_if_page.py          # rewrite docs/what-if.md
python tools/what_if_page.py --check  # fail if it has drifted
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from page_sections import write_or_check

PAGE = Path(__file__).parents[1] / "docs" / "what-if.md"
TEXT = """# What if

Written by `tools/what_if_page.py`: the outputs below are what the commands print.

One estimate answers one question. These commands ask many, from the same traces: the first question
about a model is traced, later ones come from formulas in milliseconds (see
[architecture](architecture.md)). Profiles of popular models come with the package; all others are kept
in a cache folder that `memest cache` shows and clears.

## The largest batch

{memest max-batch bert-large-uncased --fp16 --gpu rtx-3090 --effective-batch 64}

"Safe" fits at the upper end of the interval; what "may run" does with the expected CUDA context, retries
of the allocator included. `--quiet` prints the safe one alone. `--of seq-len` looks for the longest
sequence, `--of image-size` for the largest image. Several `--gpu` give one line each. Near the limit memory does not grow evenly (blocks fit or do
not fit into segments), so a batch beside the largest is looked at too, and what does not fit below it
is said.

## What makes it fit

The report of a run that does not fit, or may not, ends with up to three changes that make it fit, each with
what it saves of the device peak and what it costs; `--no-tips` leaves them out. Changes that train the same come
first (micro-batches, checkpointing), then precision, optimizer, adapters and more GPUs; each is what an estimate of the
changed run says. `memest.suggest` is the same in Python, and the explorer has them as buttons.

## Side by side

{memest compare bert-large-uncased --batch 1 --grad-accum 4 --checkpointing --gpu v100 --vs fp16}

`--vs` names what changes: any options, without dashes, several `--vs` are several columns. Several models
are compared under the same options. "Why" is worked out from the two estimates: which categories
make up the difference, which moment was the peak before and is now.

## Plans for an effective batch

{memest advise bert-large-uncased --gpu v100 --effective-batch 64}

Plans that fit come first, ordered by estimated time: arithmetic, launches and memory written are
counted from the trace, checkpointing's recomputation among them, and only ratios are given. The rule
that comes out is the one of Hugging Face's guide: fill the card with the micro-batch first, then
accumulate. Where neither an option nor a file names a precision, fp32 and what the GPU is made for (bf16, or
fp16 on a GPU without bf16) are both tried, and the plan says what that gains and costs. A named one stays unless nothing fits
(`--any-precision` frees it); optimizers that change the training are marked. Where no plan surely fits that trains as asked, adapters, a base of
4 bits and more GPUs that would are told below. Where nothing fits that trains the same, two more changes are
tried: a loss without all logits, if logits are a quarter of the peak or more, and on several GPUs (`--gpu 4xa100-80gb`) FSDP2 in place of DDP. What GPUs send
each other is not in the time.

## Grids

{memest sweep bert-large-uncased --over batch=4:16:x2 --over seq-len=128,256,512,1024 --fp16 --gpu rtx-3060}

Any option can be an axis: values, ranges with both ends (`seq-len=128:512:128`), geometric ones
(`batch=1:64:x2`), switches (`--over bf16`). `--csv`, `--json` and `--jsonl` choose what goes to stdout; `--out`
writes .csv, .json, .jsonl, .html or .png (PNG needs `memest-gpu[plot]`), `--heatmap` a picture besides. A point
without an answer says why and takes no other with it. Several models run in parallel processes
(`--jobs N`), or on a Ray cluster (`--ray`, `memest-gpu[ray]`).

## In Python

```python
import memest

profile = memest.profile("bert-large-uncased", fp16=True)
profile.estimate(batch=16, seq_len=256, gpu="rtx-3090")  # a whole estimate
profile.spot(batch=16, grad_accum=4, gpu="rtx-3090")  # peaks and verdict alone
profile.allocated([{{"batch": b}} for b in range(2, 500)])  # with NumPy, all at once

memest.max_batch("gpt2", gpu="t4", of="seq-len").largest
memest.sweep("gpt2", {{"batch": [1, 2, 4], "seq_len": [128, 256]}}, gpu="t4").save("grid.html")
print(memest.compare("gpt2", ["bf16", "checkpointing=full"], gpu="t4"))
print(memest.advise("gpt2", gpu="t4", effective_batch=64))
print(memest.suggest("gpt2", gpu="t4", batch=256))
```
"""


def real_output(command: str) -> str:
    """What a command prints on a terminal of 100 columns, without colours."""
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [sys.executable, "-m", "memest", *shlex.split(command)[1:]],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    return "\n".join(line.rstrip() for line in process.stdout.rstrip().splitlines())


def page() -> str:
    """The page as it should be."""

    def block(match: re.Match[str]) -> str:
        return f"```text\n$ {match[1]}\n{real_output(match[1])}\n```"

    text = re.sub(r"^\{(memest .*)\}$", block, TEXT, flags=re.MULTILINE)
    return text.replace("{{", "{").replace("}}", "}")


def main() -> int:
    """Rewrite or check the page."""
    return write_or_check(PAGE, page(), sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
