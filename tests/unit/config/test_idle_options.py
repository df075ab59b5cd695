"""Options that change nothing, or not what their names promise, are said."""

from __future__ import annotations

import pytest

from memest.config.idle_options import (
    idle_options,
    refuse_stopped,
    smallest_batch,
    smallest_micro_batch,
)
from memest.config.options import samples_of_each, setup_from_options
from memest.errors import ConfigError

AMPERE, TURING = (8, 0), (7, 5)
CAUSAL = {"task": "causal-lm", "seq_len": 64}
FSDP2 = {"fsdp": "full_shard", "num_gpus": 2}
FULL = {"fsdp_state_dict_type": "full_state_dict"}
GATHERS = {"stage3_gather_16bit_weights_on_model_save": True}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_reentrant": True}, "--use-reentrant has no effect"),
        ({"num_labels": 3}, "a causal-lm head has no labels"),
        ({"optim": "none", "weight_decay": 0.1}, "--weight-decay 0.1 has no effect"),
        ({"optim": "none", "max_grad_norm": 1.0}, "--max-grad-norm 1 has no effect"),
        ({"method": "grpo", "batch": 1}, "1 completions at once are no multiple of the 8 of each"),
        ({"method": "rloo", "batch": 5, "num_gpus": 3}, "15 completions at once"),
        ({"method": "grpo", "batch": 8, "num_generations": 6}, "no multiple of the 6"),
        ({"method": "kto", "batch": 1}, "Write --batch 2"),
        ({"optim_in_backward": True, "max_grad_norm": 1.0}, "leaves no gradients to clip"),
        ({"load_in_4bit": True, "lora_r": 8, "llm_int8_threshold": 5}, "this base has 4 bits"),
        ({"channels_last": True}, "no convolutions over images"),
        ({"eval_batch": 4, "eval_accumulation_steps": 2}, "moves losses alone"),
        ({"padded": True, "seq_len": None, "task": "image-classification"}, "no attention mask"),
        ({"tf32": True}, "the speed of matmuls, not the memory"),
        ({"zero": 3}, "--zero 3 on one GPU has nobody to share with"),
        ({"fsdp": "full_shard"}, "cuts nothing, and every unit is copied"),
        ({"fsdp": "shard_grad_op", "fsdp_version": 1}, "is NO_SHARD"),
        (
            {
                "fsdp": "full_shard", "fsdp_version": 1, "num_gpus": 2,
                "fsdp_cpu_ram_efficient_loading": True,
            },
            "waits in host memory anyway",
        ),
        ({**FULL, "with_": "save"}, "without --fsdp there are no shards"),
        ({**FULL, **FSDP2, "with_": "eval"}, "Add --with save, --with resume"),
        ({**GATHERS, "num_gpus": 2, "zero": 2, "with_": "save"}, "--zero 3 alone"),
        ({**GATHERS, "num_gpus": 2, "zero": 3, "loop": "plain"}, "--loop plain"),
        ({**GATHERS, "num_gpus": 2, "zero": 3, "with_": "resume"}, "Add --with save"),
        ({"processes_per_node": 4, "num_gpus": 8}, "Add --host-memory 64GiB"),
        ({"processes_per_node": 4, "num_gpus": 2, "with_": "save"}, "2 of --num-gpus are taken"),
    ],
    ids=str,
)  # fmt: skip
def test_what_has_no_effect_is_said_once(options, words):
    (note,) = idle_options(setup_from_options(**{**CAUSAL, **options}), AMPERE)

    assert words in note


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_reentrant": True, "checkpointing": "full"},
        {"num_labels": 3, "task": "sequence-classification"},
        {"weight_decay": 0.1, "max_grad_norm": 1.0},
        {"optim": "none", "max_grad_norm": 0.0},
        {"eval_batch": 4, "eval_samples": 8, "eval_accumulation_steps": 2},
        {"padded": True},
        {"method": "kto", "batch": 2},
        {"method": "kto", "batch": 1, "overpriced": ("loss_type apo_zero_unpaired",)},
        {"zero": 3, "num_gpus": 2},
        {"fsdp": "full_shard", "num_gpus": 2},
        {**FULL, **FSDP2, "with_": "resume"},
        {**GATHERS, "num_gpus": 2, "zero": 3, "with_": "save"},
        {"processes_per_node": 4, "num_gpus": 8, "host_memory": "64GiB"},
        {"host_memory": "64GiB"},
    ],
    ids=str,
)
def test_what_has_an_effect_is_not(options):
    assert not list(idle_options(setup_from_options(**{**CAUSAL, **options}), AMPERE))


def test_tf32_needs_a_card_that_has_it():
    (note,) = idle_options(setup_from_options(**CAUSAL, tf32=True), TURING)

    assert "no effect on this GPU" in note


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "grpo", "batch": 4}, "Write a --batch that 8 divides"),
        ({"method": "kto", "batch": 1}, "Write --batch 2"),
    ],
    ids=str,
)
def test_a_run_that_its_trainer_stops_is_refused(options, words):
    """``GRPOConfig.__post_init__`` and ``KTOTrainer.__init__`` of TRL 1.16 raise."""
    setup = setup_from_options(**{**CAUSAL, **options})
    with pytest.raises(ConfigError, match=words):
        refuse_stopped(setup)
    # what a script leaves open may be what keeps it going: a loss without a divergence, a number
    refuse_stopped(setup_from_options(**{**CAUSAL, **options, "unpriced": ("num_generations",)}))


def test_what_changes_nothing_is_not_refused():
    refuse_stopped(setup_from_options(**CAUSAL, tf32=True, use_reentrant=True))


SWIFT = {"method": "kto", "log_probs": "ms-swift"}


@pytest.mark.parametrize(
    ("options", "at_once", "accumulated"),
    [
        ({}, 1, 1),
        ({"method": "kto"}, 2, 2),
        (SWIFT, 2, 1),
        ({**SWIFT, "num_gpus": 2}, 1, 1),
        ({"method": "grpo", "num_generations": 6}, 6, 1),
        ({"method": "kto", "unpriced": ("loss",)}, 1, 1),
    ],
    ids=str,
)
def test_the_smallest_batch_is_one_with_which_the_trainer_begins(options, at_once, accumulated):
    setup = setup_from_options(**{**CAUSAL, **options})
    assert smallest_batch(setup) == at_once
    assert smallest_micro_batch(setup, samples=12) == accumulated


def test_an_effective_batch_that_no_accumulation_reaches_is_refused():
    setup = setup_from_options(**CAUSAL, method="kto", num_gpus=4)
    with pytest.raises(ConfigError, match=r"TRL stops.*Write --effective-batch 8"):
        samples_of_each(4, setup)
    assert samples_of_each(8, setup) == 2
