"""Preference losses that make all logits: what of them is alive, and for how long.

Their own functions (torchtune 0.6.1; DPO, IPO, KTO and GRPO of ms-swift 4.6.0 over TRL 0.29; KTO
and rewards of LLaMA-Factory 0.9.4 over TRL 0.24; KTO of TRL 1.9 and 1.13) were run on meta in place
of these once: every allocation and free from 2 KiB on was the same, in order.
"""

from __future__ import annotations

import itertools

import pytest

from memest import ConfigError
from memest.catalog.resolve import ModelSource
from memest.config.options import setup_from_options
from memest.config.setup import Setup
from memest.events import ALLOC, FREE, MARK, Category
from memest.trace import meta_model, session
from memest.trace.meta_model import build
from memest.trace.training import TracePlan
from support.cases import GPU
from support.small_llama import LLAMA

LORA = {"adapter": {"peft_type": "LORA", "r": 8}}
SEQUENCES, LENGTH = 8, 96
TOKENS = SEQUENCES * LENGTH * LLAMA["vocab_size"]
TORCHTUNE = {"method": "dpo", "log_probs": "torchtune", "loop": "plain", **LORA}
SWIFT = {"method": "dpo", "log_probs": "ms-swift", **LORA}


def _lives(options):
    """Sizes of storages, and the phases (in order of the trace) of their births and deaths."""
    setup = Setup(batch=4, seq_len=LENGTH, dtype="bfloat16", optim="none", **options)
    source = ModelSource(kind="file", id="small", config=LLAMA, provenance="test")
    trace = session.trace_built(
        build(setup, source, None, None, None), setup, GPU, TracePlan(steps=2)
    )
    phase, phases, born, died = -1, [], {}, {}
    for kind, index in trace.decode():
        if kind == MARK:
            phases.append(str(trace.marks[index].phase))
            phase += 1
        elif kind == ALLOC:
            born[index] = phase
        elif kind == FREE:
            died[index] = phase
    return [(trace.sizes[i], at, died.get(i, len(phases))) for i, at in born.items()], phases


def test_torchtune_keeps_the_logits_of_the_reference_until_it_is_asked_again():
    lives, phases = _lives(TORCHTUNE)

    kept = [(born, died) for size, born, died in lives if size == 4 * TOKENS and died > born + 1]

    # "_" of the first step lives through backward and update into the forward of the second
    forwards = [number for number, name in enumerate(phases) if name == "forward"]
    assert (forwards[0], forwards[1]) in kept


def test_torchtune_makes_logarithms_of_all_logits_in_float32_and_keeps_them_for_backward():
    lives, _ = _lives(TORCHTUNE)

    length = LENGTH - 1
    of_logarithms = 4 * TOKENS // LENGTH * length
    in_forward = [died - born for size, born, died in lives if size == of_logarithms]
    # of each step a divided copy by both models, and logarithms by both, of which one is kept
    assert in_forward.count(1) == 2
    assert in_forward.count(0) >= 6


def test_ms_swift_makes_logarithms_of_one_sequence_at_a_time():
    lives, _ = _lives(SWIFT)

    of_one = 2 * TOKENS // SEQUENCES
    lives_of_one = [died - born for size, born, died in lives if size == of_one]
    # of each of two steps the model's wait for backward, the reference's go at once
    assert lives_of_one.count(1) == 2 * SEQUENCES
    assert lives_of_one.count(0) >= 2 * SEQUENCES


def test_ms_swift_lets_go_of_the_logits_of_halves_before_backward():
    lives, phases = _lives(SWIFT)

    whole = [(born, died) for size, born, died in lives if size == 2 * TOKENS]
    in_forward = [life for life in whole if phases[life[0]] == "forward"]
    assert len(in_forward) >= 4
    assert all(born == died for born, died in in_forward)


def test_kto_of_ms_swift_lets_go_of_the_logits_of_its_divergence_before_the_others_are_made():
    lives, _ = _lives({**SWIFT, "method": "kto"})

    of_answers = 2 * TOKENS // 2  # four answers
    at_once = [(born, died) for size, born, died in lives if size == of_answers]
    # by both models, of the divergence and of the answers, in each of two steps
    assert len([life for life in at_once if life[0] == life[1]]) >= 8


FACTORY = {"log_probs": "float32", **LORA}


def test_kto_of_llama_factory_copies_the_float32_logits_of_both_kinds_of_answers():
    lives, phases = _lives({**FACTORY, "method": "kto"})

    in_forward = [size for size, born, _ in lives if phases[born] == "forward"]
    # in each of two steps, by both models: answers and the divergence's, of which the answers' are
    # sorted into two halves, as large as the logits were before they became float32
    assert in_forward.count(4 * TOKENS // 2) == 2 * 2 * 2
    assert in_forward.count(2 * TOKENS // 2) == 2 * 2 * (2 + 2)


def test_a_reward_model_of_llama_factory_makes_all_logits_and_a_loss_that_nobody_asks_for():
    lives, phases = _lives({**FACTORY, "method": "reward"})

    # of each step float32 logits for the model's own loss, its logarithms, and those it returns
    whole = [(born, died) for size, born, died in lives if size == 4 * TOKENS]
    assert len(whole) >= 6
    assert all(born == died and phases[born] == "forward" for born, died in whole)


def test_a_reward_model_of_llama_factory_trains_a_value_in_float32():
    setup = Setup(method="reward", log_probs="float32", batch=1, seq_len=LENGTH, dtype="bfloat16")
    source = ModelSource(kind="file", id="small", config=LLAMA, provenance="test")
    model = meta_model.build(setup, source, None, None, None).model

    head = dict(model.named_parameters())["v_head.summary.weight"]
    assert head.shape == (1, LLAMA["hidden_size"])
    assert (str(head.dtype), head.requires_grad) == ("torch.float32", True)


def test_kto_of_trl_1_9_keeps_all_logits_of_the_model_until_its_log_is_made():
    lives, phases = _lives({"method": "kto", "log_probs": "logits", **LORA})

    of_answers = [life for life in lives if life[0] == 2 * TOKENS // 2]
    # by both models, of the divergence and of the answers, in each of two steps
    assert [phases[born] for _, born, died in of_answers if born == died].count("forward") >= 8


@pytest.mark.parametrize(("dtype", "nbytes"), [("auto", 2), ("float32", 4)])
def test_a_reference_has_the_dtype_that_it_is_loaded_in(dtype, nbytes):
    setup = Setup(
        method="dpo", ref_dtype=dtype, batch=1, seq_len=LENGTH, dtype="bfloat16", optim="none"
    )
    source = ModelSource(kind="file", id="small", config=LLAMA, provenance="test")
    trace = session.trace_built(
        meta_model.build(setup, source, None, None, None), setup, GPU, TracePlan(steps=1)
    )

    kept = [
        trace.sizes[index]
        for kind, index in trace.decode()
        if kind == ALLOC and trace.category(index) is Category.REFERENCE
    ]
    numel = LLAMA["vocab_size"] * LLAMA["hidden_size"]
    assert max(kept) == nbytes * numel


def test_grpo_of_ms_swift_makes_logits_of_completions_alone():
    completion = 40
    rollouts = {"completion_len": completion, "kl_beta": 0.04, "engine": "server"}
    lives, _ = _lives({"method": "grpo", "log_probs": "ms-swift", "rollouts": rollouts, **LORA})

    per_token = 2 * LLAMA["vocab_size"]
    assert any(size == 4 * (completion + 1) * per_token for size, _, _ in lives)
    assert not any(size >= 4 * LENGTH * per_token for size, _, _ in lives)
    kept = [died - born for size, born, died in lives if size == completion * per_token]
    assert kept.count(1) == 2 * 4


def test_grpo_of_ms_swift_is_refused_where_what_is_gathered_was_not_checked():
    with pytest.raises(ConfigError, match="was not checked; DDP and --zero 2 are priced"):
        setup_from_options(method="grpo", log_probs="ms-swift", engine="server", zero=3, num_gpus=2)


@pytest.mark.parametrize(
    ("method", "log_probs"),
    [*itertools.product(("orpo", "kto", "reward"), ("torchtune",)), ("cpo", "float32"),
     ("grpo", "torchtune"), ("rloo", "ms-swift")],
)  # fmt: skip
def test_what_no_such_trainer_computes_is_refused(method, log_probs):
    loop = "plain" if log_probs == "torchtune" else "trainer"

    with pytest.raises(ConfigError, match=f"--log-probs {log_probs}"):
        Setup(method=method, log_probs=log_probs, loop=loop)


def test_the_loop_of_torchtune_is_asked_for():
    with pytest.raises(ConfigError, match="--loop plain --no-bf16"):
        Setup(method="dpo", log_probs="torchtune")
