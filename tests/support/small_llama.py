"""A small Llama for losses that never make all logits, and what of its trace is alive where."""

from __future__ import annotations

from typing import Any

from memest.catalog.resolve import ModelSource
from memest.config.setup import Setup
from memest.events import ALLOC, FREE, MARK, Phase
from memest.trace.meta_model import build
from memest.trace.session import trace_built
from memest.trace.training import TracePlan
from memest.workspaces.operator_call import GpuTraits

GPU = GpuTraits(capability=(8, 0), sm_count=108, max_threads_per_sm=2048)
HIDDEN, VOCABULARY, BATCH, LENGTH = 128, 8000, 4, 96
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 384, "vocab_size": VOCABULARY, "max_position_embeddings": 256,
    "pad_token_id": 0,
}  # fmt: skip


def trace_small(config: dict[str, Any] | None = None, **options: Any) -> Any:
    """One step of it without an optimizer, in bfloat16."""
    setup = Setup(
        **{"batch": BATCH, "seq_len": LENGTH, "dtype": "bfloat16", "optim": "none", **options}
    )
    source = ModelSource(kind="file", id="small", config=config or LLAMA, provenance="test")
    run = build(setup, source, None, None, None)
    return trace_built(run, setup, GPU, TracePlan(steps=1))


def kept_between(trace: Any, first: Phase, last: Phase) -> list[int]:
    """Sizes of what is born from one phase on and alive when another one begins."""
    alive: dict[int, int] = {}
    inside = False
    for kind, index in trace.decode():
        if kind == MARK:
            if trace.marks[index].phase is last:
                break
            inside = inside or trace.marks[index].phase is first
        elif kind == ALLOC and inside:
            alive[index] = trace.sizes[index]
        elif kind == FREE:
            alive.pop(index, None)
    return list(alive.values())


def peak_of(trace: Any) -> int:
    """The most bytes that are alive at a time."""
    now = most = 0
    for kind, index in trace.decode():
        if kind in (ALLOC, FREE):
            now += trace.sizes[index] * (1 if kind == ALLOC else -1)
            most = max(most, now)
    return most
