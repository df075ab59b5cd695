"""Peers that are formulas, written anew from what was published; each names its source."""

from __future__ import annotations

from peers.question import Question

__all__ = ["deepspeed_zero2", "eleuther", "megatron"]


def deepspeed_zero2(q: Question) -> int:
    """``estimate_zero2_model_states_mem_needs`` without offload (DeepSpeed 0.19.8).

    2 bytes a parameter for weights in 16 bit, and 18 shared among the GPUs: gradients in 16 and 32
    bit, weights and two moments in 32 bit. Model states alone; its documentation says that
    activations come on top.
    """
    q.must_be(one_gpu=False)
    return 2 * q.parameters + 18 * q.parameters // q.setup.distributed.num_gpus


def eleuther(q: Question) -> int:
    """EleutherAI's cookbook, ``calc/calc_transformer_mem.py``, with its defaults for one GPU.

    Parameters by its own count (embeddings twice); 12 bytes of optimizer states and 4 of gradients
    each; activations by table 2 of ZeRO (arXiv 1910.02054), at 2 bytes a value in any precision.
    """
    q.must_be()
    s, b = q.length, q.setup.batch or 1
    shape = q.shape()
    h, layers = shape.hidden, shape.layers
    expansion = shape.inner / h if q.config.get("model_type") != "gpt2" else 4.0
    parameters = (
        2 * shape.vocab * h + h * s + 8 * h * layers + 2 * h
        + 4 * layers * h * h + 2 * layers * h * h * expansion
    )  # fmt: skip
    states = parameters * ((2 if q.mixed else 4) + 4 + 12)
    per_token = 16 * 2 + 2
    if not q.checkpointed:
        per_token += (2 * 2 + 1) * shape.heads * s / h
    return round(states + s * b * h * layers * per_token)


def megatron(q: Question) -> int:
    """Korthikanti et al., Reducing Activation Recomputation (arXiv 2205.05198), on one GPU.

    Activations s b h L (34 + 5 a s / h), with full recomputation 2 s b h L; embeddings' dropout,
    last norm, output layer and logits of its section 4.3; 18 bytes a parameter of states in mixed
    precision. The paper is about 16 bit: for fp32 values count 4 bytes and states 16.
    """
    q.must_be()
    s, b = q.length, q.setup.batch or 1
    shape = q.shape()
    h, layers = shape.hidden, shape.layers
    size = 2 if q.mixed else 4
    block = (2 * size + 1) * shape.heads * s / h + 16 * size + 2
    if q.checkpointed:
        activations = s * b * h * layers * size + s * b * h * block
    else:
        activations = s * b * h * layers * block
    ends = s * b * (h + 2 * size * h + 4 * shape.vocab)
    return round(q.parameters * (18 if q.mixed else 16) + activations + ends)
