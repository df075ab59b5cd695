"""Memory that ran out without a message of PyTorch's GPU allocator: who had none, what to do."""

from __future__ import annotations

import re

from memest.files.texts import printable

__all__ = ["no_message", "ran_out_elsewhere"]

_MOST_LINE = 160

_HOST = (
    "the host that had no memory left, not the GPU. `memest fits MODEL ... --host-memory 64GiB` "
    "says what loading and training take of it, with `--with save` what saving does"
)
_MEANINGS = {
    r"MPS backend out of memory": (
        "an Apple GPU, which shares the memory of the host: memest prices CUDA's allocator. What "
        "tensors take is much the same there: `allocated` of `memest estimate MODEL ...`"
    ),
    r"Tried to allocate more than 1EB": (
        "no lack of memory but a size that cannot be, such as a length that was never set or "
        "overflowed: look at the line of the traceback that allocates"
    ),
    r"Allocation on device \S* ?would exceed allowed memory": (
        "the message of backend:cudaMallocAsync, whose memory is CUDA's own to manage: memest "
        "replays PyTorch's. `memest fits MODEL --gpu CARD ...` says whether the run fits with that"
    ),
    r"(?:CUDA|HIP) error: out of memory|cuda runtime error \(2\)|cudaErrorMemoryAllocation"
    r"|CUDA_ERROR_OUT_OF_MEMORY|Cuda failure .{0,20}out of memory|Failed to CUDA calloc"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_\w*ALLOC\w*_FAILED"
    r"|Unable to find a valid cuDNN algorithm": (
        "the card was full when CUDA itself or a library asked (NCCL, cuBLAS, cuDNN), which says "
        "nothing of who had it. Look with nvidia-smi for other processes; `memest fits MODEL --gpu "
        "CARD ...` says whether the run fits alone"
    ),
    r"oom[-_ ]kill|OOMKilled|DefaultCPUAllocator|Cannot allocate memory|: Out Of Memory"
    r"|node running low on memory|\bMemoryError": f"it was {_HOST}",
    r"(?i:signal 9\b|sigkill)|killed by signal: Killed|exit ?code:? -9|(?m:(?:^| )Killed *$)": (
        f"something ended the process from outside; most often it is {_HOST}"
    ),
}
"""What stands in such a log, and what it means."""


def ran_out_elsewhere(text: str) -> tuple[str, str] | None:
    r"""The line of a log that tells of other memory than PyTorch's allocator had, and its meaning.

    Example:
        >>> ran_out_elsewhere("step 3\nRuntimeError: CUDA error: out of memory")[0]
        'RuntimeError: CUDA error: out of memory'
    """
    found = [(match, why) for words, why in _MEANINGS.items() if (match := re.search(words, text))]
    if not found:
        return None
    match, why = min(found, key=lambda each: each[0].start())
    start, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
    line = text[start : end if end > 0 else len(text)].strip()
    if len(line) > _MOST_LINE:
        line = f"{match[0].strip()}..."
    return printable(line), why


def no_message(text: str) -> str:
    """What to say where a text has no message of PyTorch's GPU allocator."""
    elsewhere = ran_out_elsewhere(text)
    if elsewhere is None:
        return (
            "there is no out-of-memory message of PyTorch in this text: it has the words 'CUDA out "
            "of memory. Tried to allocate ...'. Give the log that has them, or paste the message "
            "after `memest explain-oom -`."
        )
    line, why = elsewhere
    return f"{line!r} is no message of PyTorch's GPU allocator, with figures to explain: {why}."
