"""Real ranks of FSDP against predicted ones, in order.

FSDP2's ``fully_shard`` runs under the fake process group, FSDP1's ``FullyShardedDataParallel`` too.
Losses that read the head's weight leave the head uncalled: those of TRL are run as they are written
for traces, and so is Liger's own Python, whose kernels launch nothing. Everything that they
allocate on a CPU they allocate on CUDA.
"""

from __future__ import annotations

import pytest

from memest.replay.replay import check_events
from memest.sharding import rank
from memest.sharding.fsdp1 import Fsdp1
from support.phases import check_phases
from support.ranks import as_run, freed_from_before, of_steps, predicted_rank, real_rank
from support.real_memory import differences

HOST = 6144
"""Step counters and numbers wrapped as tensors, which a CPU run cannot tell from the device's."""
RNG = 5056
"""What a CPU keeps of its generator for each checkpoint."""
FULL, GRAD = {"fsdp": "full_shard"}, {"fsdp": "shard_grad_op"}
ONE = {"fsdp": "full_shard", "fsdp_version": 1}


def case(model="llama", ranks=2, fsdp="full_shard", setup=(), **spread):
    return {
        "model": model, "ranks": ranks, "setup": {"loop": "plain", **dict(setup)},
        "spread": {"fsdp": fsdp, "fsdp_version": 1, **spread},
    }  # fmt: skip


LORA = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
FOUR = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "prepare": False,
}  # fmt: skip
FEW = {"batch": 2}
"""Half the samples, where products in bfloat16 take a CPU twenty times as long."""
HALVES = {
    "loop": "accelerate", "precision": "bf16", "dtype": "bfloat16", "adapter": {**LORA, "r": 16},
    **FEW,
}  # fmt: skip


FOUR_IN_FULL = {
    "loop": "plain", "precision": "fp32", "dtype": "float32", "adapter": LORA, "batch": 4,
}  # fmt: skip


def four_bits(storage, compute="bfloat16", **more):
    dtypes = {"bnb_4bit_quant_storage": storage, "bnb_4bit_compute_dtype": compute}
    return {**HALVES, "quantization": {**FOUR, **dtypes}, **more}


FSDP2 = [
    ("llama", {"loop": "plain"}, FULL, 2),
    ("llama", {"loop": "plain"}, GRAD, 3),
    ("llama", {"loop": "plain"}, FULL, 1),
    ("llama", {"loop": "plain", "grad_accum": 2}, FULL, 4),
    ("llama", {"loop": "plain", "grad_accum": 2, "zero_grad": "zero"}, FULL, 2),
    ("llama", {"loop": "plain", "checkpointing": "full"}, FULL, 8),
    ("llama", {"loop": "plain", "checkpointing": "full", "use_reentrant": True}, FULL, 2),
    ("llama", {"loop": "plain", "freeze": ["embed", "layers.0"]}, FULL, 2),
    ("bert", {"loop": "plain"}, FULL, 8),
    ("gpt2", {"loop": "plain"}, FULL, 4),
    ("t5", {"loop": "plain"}, FULL, 2),
    ("vit", {"loop": "plain"}, FULL, 2),
    ("mixtral", {"loop": "plain", "dtype": "bfloat16", **FEW}, FULL, 2),
    ("llama", {"loop": "plain"}, {**FULL, "fsdp_shard_size": 2}, 4),
    ("llama", {"loop": "plain", "grad_accum": 2}, {**FULL, "fsdp_shard_size": 4}, 8),
    (
        "llama",
        {"loop": "accelerate", "precision": "bf16", **FEW, "grad_accum": 2},
        {**FULL, "fsdp_shard_size": 2},
        6,
    ),
    ("llama", {"loop": "accelerate"}, FULL, 2),
    ("llama", {"loop": "accelerate", "precision": "bf16", **FEW}, FULL, 2),
    ("llama", {"loop": "accelerate", "precision": "bf16", **FEW, "grad_accum": 2}, FULL, 4),
    (
        "llama-tied",
        {"loop": "accelerate", "precision": "bf16", **FEW, "checkpointing": "full"},
        GRAD,
        2,
    ),
    ("llama", {"loop": "plain", "adapter": LORA}, FULL, 2),
    ("llama", {"loop": "accelerate", "adapter": {**LORA, "modules_to_save": ["lm_head"]}}, FULL, 2),
    ("llama", HALVES, FULL, 2),
    ("llama", {**HALVES, "checkpointing": "full", "grad_accum": 2}, FULL, 3),
    ("llama", four_bits("bfloat16"), FULL, 2),
    ("llama", four_bits("bfloat16", checkpointing="full"), GRAD, 4),
    ("llama", four_bits("uint8", grad_accum=2), FULL, 2),
    (
        "llama",
        four_bits("float32", "float32", **FOUR_IN_FULL),
        FULL,
        2,
    ),
]
SAME_KERNELS = ("llama", "llama-tied")
"""Models whose operators the CPU takes as a trace with its choices does, one by one."""

ACCELERATE = {"loop": "accelerate", "precision": "bf16", **FEW}
FSDP1 = {
    "tutorial": case(),
    "accelerate": case(ranks=4, setup=ACCELERATE),
    "accelerate accumulates": case(setup={**ACCELERATE, "grad_accum": 2}),
    "script accumulates": case("llama-tied", setup={"grad_accum": 2}),
    "parameters for the optimizer, odd ranks": case("llama-gqa", 3, fsdp_use_orig_params=True),
    "kept, gathered behind": case(
        "gpt_neox", 3, "shard_grad_op", fsdp_backward_prefetch="backward_post"
    ),
    "kept, accumulates": case(
        ranks=2, fsdp="shard_grad_op", setup={"loop": "accelerate", "grad_accum": 3}
    ),
    "gathered behind": case("gpt_neox", 3, fsdp_backward_prefetch="backward_post"),
    "nothing ahead": case(fsdp_backward_prefetch="no_prefetch"),
    "recomputation": case(setup={"checkpointing": "full"}),
    "autocast, recomputation": case(setup={"precision": "bf16", "checkpointing": "full", **FEW}),
    "half by a script": case(setup={"precision": "bf16", **FEW}, fsdp_mixed_precision=True),
    "half by Lightning's strategy": case(
        ranks=4,
        setup={
            "precision": "bf16",
            "zero_grad_at": "before-backward",
            "grad_accum": 2,
            **FEW,
        },
        fsdp_mixed_precision=True,
        fsdp_use_orig_params=True,
    ),
    "whole": case(fsdp="no_shard"),
    "whole, accumulates": case(fsdp="no_shard", setup={"grad_accum": 2}),
    "whole, parameters for the optimizer": case(
        "llama-gqa", 3, "no_shard", setup=ACCELERATE, fsdp_use_orig_params=True
    ),
    "whole, accelerate accumulates": case(fsdp="no_shard", setup={**ACCELERATE, "grad_accum": 2}),
    "one rank": case(ranks=1),
    "adapters": case(setup={"adapter": LORA}),
    "adapters, gathered behind": case(
        setup={"adapter": LORA}, fsdp_backward_prefetch="backward_post"
    ),
    "adapters, accelerate": case(ranks=4, setup=HALVES),
    "adapters, accelerate accumulates": case(ranks=3, setup={**HALVES, "grad_accum": 2}),
    "adapters, parameters for the optimizer": case(
        ranks=3, setup=HALVES, fsdp_use_orig_params=True
    ),
    "adapters, kept": case(fsdp="shard_grad_op", setup={**HALVES, "grad_accum": 2}),
    "adapters, recomputation": case(setup={**HALVES, "checkpointing": "full"}),
    "adapters, reentrant recomputation": case(
        setup={
            **HALVES,
            "loop": "plain",
            "precision": "fp32",
            "checkpointing": "full",
            "use_reentrant": True,
        },
    ),
    "adapters, nothing cut": case(fsdp="no_shard", setup={"adapter": LORA, "dtype": "bfloat16"}),
    "adapters on 4 bits": case(setup=four_bits("bfloat16")),
    "adapters on 4 bits, recomputation": case(
        ranks=4, fsdp="shard_grad_op", setup=four_bits("bfloat16", checkpointing="full")
    ),
    "adapters on 4 bits, a script": case(
        setup=four_bits(
            "bfloat16", loop="plain", precision="fp32", checkpointing="full", use_reentrant=True
        ),
        fsdp_use_orig_params=False,
    ),
    "adapters on 4 bits, float32": case(setup=four_bits("float32", "float32", **FOUR_IN_FULL)),
}


HALF = {"loop": "accelerate", "precision": "bf16", "batch": 2}
"""Few samples: a CPU's products in bfloat16 take twenty times as long."""
LIGER = {"use_liger_kernel": True}
CHUNKED, FUSED = {"fused_loss": "trl-chunked"}, {"fused_loss": "trl-fused"}
AGAIN = {"checkpointing": "full"}

READ = [
    ("llama", {**HALF, **CHUNKED, "grad_accum": 2}, FULL, 4),
    ("llama-tied", {"loop": "accelerate", **FUSED, **AGAIN}, {"fsdp": "shard_grad_op"}, 2),
    ("llama", {"loop": "plain", **CHUNKED}, FULL, 3),
    ("llama", {"loop": "plain", **FUSED, "adapter": LORA}, FULL, 2),
    ("llama", {"loop": "accelerate", **FUSED, "adapter": LORA, **FEW, "grad_accum": 2}, FULL, 4),
    ("llama", {**HALF, **LIGER, "grad_accum": 2}, FULL, 2),
    ("llama", {"loop": "accelerate", **LIGER}, {**FULL, "fsdp_shard_size": 2}, 4),
    ("llama", {"loop": "plain", **LIGER}, FULL, 3),
    ("llama", {**HALF, **CHUNKED, "grad_accum": 2}, ONE, 2),
    ("llama", {**HALF, **LIGER, "dtype": "bfloat16", "adapter": {**LORA, "r": 16}}, ONE, 2),
    ("llama-tied", {**HALF, **LIGER}, ONE, 3),
    ("llama-gqa", {"loop": "plain", **LIGER, **AGAIN, "grad_accum": 2},
     {"fsdp": "shard_grad_op", "fsdp_version": 1}, 2),
]  # fmt: skip


def run_both(case, fewest, *, compares=True, checkpoints=3):
    """Every phase; where kernels are the same, the events of the steps that differ.

    Args:
        case: of :func:`support.ranks.real_rank`.
        fewest: allocations from 8 KiB on that there must be.
        compares: the CPU takes the operators that a trace with its choices does, one by one.
        checkpoints: whose generators' states lie in the host's memory.
    """
    stream = predicted_rank(case)
    check_events(stream.events, stream.sizes)
    predicted, real = as_run(stream), real_rank(case)
    measured = {phase.name: phase for phase in real.phases}
    host = HOST + (checkpoints * RNG if "checkpointing" in case["setup"] else 0)
    steps = [phase for phase in predicted.phases if not phase.name.startswith("load")]
    assert len(steps) > 10
    # the file that a quantized base was read from on a CPU goes with the last whole weight
    gone = freed_from_before(real) if "quantization" in case["setup"] else 0
    for phase in steps:
        same = measured[phase.name]
        assert abs(phase.alive - same.alive - gone) <= host, f"alive when {phase.name} begins"
        assert abs(phase.peak - same.peak - gone) <= host + 0.005 * real.peak, phase.name
    if not compares:
        return []
    assert len(predicted.allocations(at_least=8192)) > fewest
    return differences(of_steps(real), of_steps(predicted), at_least=8192)


@pytest.mark.slow(
    but=(
        "llama-setup2-spread2-1",
        "llama-setup7-spread7-2",
    )
)
@pytest.mark.parametrize(("model", "setup", "spread", "ranks"), FSDP2)
def test_a_rank_allocates_what_fully_shard_does(model, setup, spread, ranks):
    """Shards, gathers, copies, reductions: every allocation and free of the steps, in order."""
    case = {"model": model, "ranks": ranks, "setup": setup, "spread": spread}
    same_kernels = model in ("llama", "llama-tied")
    assert run_both(case, 300, compares=same_kernels, checkpoints=8) == []


MOVED = ("fsdp: shard in half precision", "_post_forward")
"""Under NO_SHARD the root lets go of its half-precision copy where its forward returns; a stream
has that place at the end of the phase."""


@pytest.mark.slow(
    but=(
        "kept, gathered behind",
        "one rank",
    )
)
@pytest.mark.parametrize("name", FSDP1)
def test_a_rank_allocates_what_fsdp1_does(name):
    """Every phase, and every allocation and free of the steps, in order."""
    run = FSDP1[name]
    left = run_both(run, 150)
    if run["spread"]["fsdp"] == "no_shard" and run["setup"]["loop"] == "accelerate":
        left = [line for line in left if line != "--" and not line.endswith(MOVED)]
    assert left == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        case(ranks=3, setup={"precision": "bf16", **FEW}, fsdp_mixed_precision=True),
        case(setup={"precision": "bf16", "grad_accum": 2, **FEW}, fsdp_mixed_precision=True),
        case(ranks=1, setup={"precision": "bf16", **FEW}, fsdp_mixed_precision=True),
    ],
    ids=("padded", "accumulates", "one rank"),
)
def test_a_rank_allocates_what_fsdp1_does_that_reduces_in_float32(run, monkeypatch):
    """As verl asks of it (``MixedPrecision(reduce_dtype=torch.float32)``)."""

    def in_full(**given):
        return Fsdp1(**{**given, "reduces_in_full": True})

    monkeypatch.setattr(rank, "Fsdp1", in_full)

    with_cast = {**run, "reduces": "float32"}
    left = run_both(with_cast, 150)
    if run["ranks"] == 1:  # which takes NO_SHARD
        left = [line for line in left if line != "--" and not line.endswith(MOVED)]
    assert left == []


@pytest.mark.slow(but=("run0",))
@pytest.mark.parametrize(
    "run",
    [
        case(setup={"optim": "adamw_bnb_8bit"}),
        case(ranks=3, setup={**ACCELERATE, "optim": "lion_8bit"}, fsdp_use_orig_params=True),
        case(fsdp="no_shard", setup={"optim": "adamw_bnb_8bit", "grad_accum": 2}),
    ],
)
def test_states_of_bitsandbytes_lie_beside_flat_shards(run):
    """What is alive between phases; on a CPU its kernels take temporaries that CUDA's do not."""
    stream, real = predicted_rank(run), real_rank(run)
    measured = {phase.name: phase for phase in real.phases}
    states = []
    for phase in as_run(stream).phases:
        if not phase.name.startswith("load"):
            assert abs(phase.alive - measured[phase.name].alive) <= HOST, phase.name
            states.append(phase.alive)
    assert max(states) > min(states) + 100_000


@pytest.mark.slow("loss0", "loss1", "loss2", "loss4", "loss3")
@pytest.mark.parametrize(
    ("model", "setup", "spread", "ranks"),
    READ,
    ids=["liger" if "use_liger_kernel" in setup else "loss" for _, setup, *_ in READ],
)
def test_a_rank_whose_loss_reads_the_head_allocates_what_a_real_one_does(
    model, setup, spread, ranks
):
    """Every allocation and free of the steps from 8 KiB on, in order; every phase."""
    if setup.get("use_liger_kernel"):
        pytest.importorskip("liger_kernel.utils")
    case = {"model": model, "ranks": ranks, "setup": setup, "spread": spread}
    real, stream = real_rank(case), predicted_rank(case)
    predicted = as_run(stream)
    check_events(stream.events, stream.sizes)

    recomputes = "checkpointing" in setup or setup.get("fused_loss") == "trl-chunked"
    check_phases(real, predicted, HOST + (8 * RNG if recomputes else 0), 0)
    assert len(predicted.allocations(at_least=8192)) > 200
    assert differences(of_steps(real), of_steps(predicted), at_least=8192) == []
