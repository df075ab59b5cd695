"""Preference training on several GPUs: real ranks of FSDP under the fake process group.

What TRL's trainers compute is proved on one process (``proof/test_preference.py``); here it runs in
real ranks, with accelerate's preparation of the model and TRL's own of the reference. DeepSpeed's
ranks are recorded (``test_zero.py``).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from memest.events import CATEGORY_ORDER, REFERENCE, Category, Phase
from memest.replay.replay import check_events
from support.preference_ranks import real_preference_rank
from support.rank_processes import STEPS
from support.ranks import as_run, freed_from_before, of_steps, predicted_rank
from support.real_memory import differences

HOST = 8192
"""Step counters and numbers wrapped as tensors, which a CPU run cannot tell from the device's."""
HALF = {"precision": "bf16"}
ADAPTER = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}
CASES = {
    "dpo": {"method": "dpo"},
    "dpo half accumulates": {"method": "dpo", **HALF, "checkpointing": "full", "grad_accum": 2},
    "dpo kept gathered": {"method": "dpo", "fsdp": "shard_grad_op", "ranks": 3},
    "dpo hybrid": {"method": "dpo", "fsdp_shard_size": 2, "ranks": 4},
    "dpo half loaded": {"method": "dpo", **HALF, "dtype": "bfloat16"},
    "dpo mixture": {"method": "dpo", **HALF, "model": "mixtral"},
    "dpo synced": {"method": "dpo", **HALF, "sync_ref_model": True},
    "ipo tied": {"method": "ipo", "model": "llama-tied"},
    "dpo gpt2": {"method": "dpo", "model": "gpt2"},
    "dpo lora": {"method": "dpo", "adapter": ADAPTER},
    "dpo lora tied": {"method": "dpo", "adapter": ADAPTER, "model": "llama-tied"},
    "dpo lora in full": {"method": "dpo", "adapter": ADAPTER, **HALF},
    "dpo lora half": {
        "method": "dpo", "adapter": ADAPTER, **HALF, "dtype": "bfloat16", "checkpointing": "full",
        "grad_accum": 2, "ranks": 4,
    },
    "kto lora": {"method": "kto", "adapter": ADAPTER},
    "kto": {"method": "kto"},
    "kto half": {"method": "kto", **HALF, "grad_accum": 2, "ranks": 4},
    "grpo": {"method": "grpo", "rollouts": {"engine": "vllm", "completion_len": 32}},
    "grpo half, with a reference": {
        "method": "grpo", **HALF, "checkpointing": "full", "grad_accum": 2, "ranks": 4,
        "rollouts": {"engine": "server", "completion_len": 32, "kl_beta": 0.1},
    },
    "grpo lora": {
        "method": "grpo", "adapter": ADAPTER, "rollouts": {"engine": "vllm", "completion_len": 32},
    },
    "rloo lora half": {
        "method": "rloo", "adapter": ADAPTER, **HALF, "dtype": "bfloat16", "checkpointing": "full",
        "grad_accum": 2, "ranks": 4, "rollouts": {"engine": "server", "completion_len": 32},
    },
    "grpo lora tied, with a reference": {
        "method": "grpo", "adapter": ADAPTER, "model": "llama-tied", **HALF,
        "rollouts": {"engine": "vllm", "completion_len": 32, "kl_beta": 0.1},
    },
    "grpo by itself": {"method": "grpo", "rollouts": {"completion_len": 32}},
    "grpo half by itself, with a reference": {
        "method": "grpo", **HALF, "checkpointing": "full", "grad_accum": 2, "ranks": 4,
        "rollouts": {"completion_len": 32, "kl_beta": 0.1},
    },
    "rloo by itself": {
        "method": "rloo", "fsdp": "shard_grad_op", "ranks": 3, "model": "llama-tied",
        "rollouts": {"completion_len": 32},
    },
    "grpo hybrid": {
        "method": "grpo", "fsdp_shard_size": 2, "ranks": 4,
        "rollouts": {"engine": "vllm", "completion_len": 32},
    },
    "rloo": {"method": "rloo", "rollouts": {"engine": "vllm", "completion_len": 32}},
    "orpo": {"method": "orpo"},
    "reward": {"method": "reward"},
    "reward lora": {"method": "reward", **HALF, "dtype": "bfloat16", "adapter": ADAPTER},
    "reward fsdp1": {"method": "reward", "fsdp_version": 1},
}  # fmt: skip
SPREAD = ("fsdp", "fsdp_version", "fsdp_shard_size")


def spread(case):
    options = {"loop": "trainer", "batch": 2, "fsdp": "full_shard", **case}
    return {
        "model": options.pop("model", "llama"),
        "ranks": options.pop("ranks", 2),
        "spread": {key: options.pop(key) for key in SPREAD if key in options},
        "setup": options,
    }


@pytest.mark.slow(but=("dpo", "kto half"))
@pytest.mark.parametrize("name", CASES)
def test_a_rank_allocates_what_a_real_one_does(name):
    """Every allocation and free of the steps, in order."""
    case = spread(CASES[name])
    stream = predicted_rank(case)
    check_events(stream.events, stream.sizes)
    measured, predicted = _gathers_of_writing(real_preference_rank(case)), as_run(stream)
    before = freed_from_before(measured)
    for phase in ("batch 1 0", "forward 1 1"):
        real, ours = (next(p.alive for p in r.phases if p.name == phase)
                      for r in (measured, predicted))  # fmt: skip
        assert abs(real + before - ours) <= HOST, phase
    assert len(of_steps(predicted).allocations(at_least=8192)) > 150
    assert differences(of_steps(measured), predicted, at_least=8192) == []


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"checkpointing": "full", "grad_accum": 2, "ranks": 4}])
def test_a_rank_of_torchtune_s_recipe_keeps_what_a_real_one_does(more):
    recipe = {"method": "dpo", "log_probs": "torchtune", "loop": "plain", "adapter": ADAPTER}
    case = spread({**recipe, **more})
    stream = predicted_rank(case)
    measured, predicted = real_preference_rank(case), as_run(stream)

    assert len(of_steps(predicted).allocations(at_least=8192)) > 150
    # the loss stands outside the model: a real rank gathers the last layer ahead when the gradient
    # has come to the logits, ours when the backward begins, which is no less
    found = [line for line in differences(of_steps(measured), predicted, at_least=8192)
             if line != "--"]  # fmt: skip
    assert all("all-gather" in line or "backward_prefetch" in line for line in found)
    assert len(found) <= 2 * STEPS * more.get("grad_accum", 1)


def _gathers_of_writing(run):
    """What a generation of the model itself gathers, at the beginning of a step."""
    out, computed = [], set()
    for event in run.events:
        if event.phase.startswith("generation") and event.nbytes > 0 and "FSDP::" not in event.op:
            computed.add(event.key)
        elif event.nbytes < 0 and event.key in computed:
            computed.remove(event.key)
        else:
            out.append(replace(event, phase=event.phase.replace("generation", "batch")))
    run.events = out
    return run


def test_a_forward_of_the_reference_gathers_all_of_it():
    """Twice: what was gathered lies beside what is copied out of it."""
    stream = predicted_rank(spread(CASES["dpo"]))
    alive, most = 0, 0
    marks = dict(zip(stream.mark_positions, stream.marks, strict=False))  # the last of a place
    for index, event in enumerate(stream.events):
        if index in marks:
            in_forward = marks[index].phase is Phase.FORWARD
        number = event if event >= 0 else ~event
        if stream.module_names[stream.modules[number]].startswith(REFERENCE) and in_forward:
            alive += stream.sizes[number] if event >= 0 else -stream.sizes[number]
            most = max(most, alive)
    kinds = [CATEGORY_ORDER[number] for number in stream.categories]
    shards = sum(s for s, k in zip(stream.sizes, kinds, strict=True) if k is Category.REFERENCE)
    assert most > 2 * 2 * shards > 0
