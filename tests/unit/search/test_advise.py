"""Plans fit when asked for directly, follow the guide's rule, and say what they change."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import memest
from memest.config.options import samples_of_each, setup_from_options
from memest.config.setup import Attention, Precision
from memest.errors import ConfigError
from memest.report.result import Verdict
from memest.search.advise import names_precision
from memest.search.combos import BY_SFT_TRAINER, Candidate, Combo, Finder, losses, sharded
from memest.search.plan_words import arguments_of, own_arguments_of, trainer_of
from support.small_llama import LLAMA

MODEL = "prajjwal1/bert-tiny"
COMMON = {"seq_len": 128, "device_context": "600MiB", "precision": "fp32"}
OPEN = {name: value for name, value in COMMON.items() if name != "precision"}


def direct(plan, **where):
    """The estimate of a plan, made without the advice."""
    return memest.estimate(
        MODEL,
        plan.estimate.setup,
        device_context=COMMON["device_context"],
        max_batch=False,
        **where,
    )


def options(plan):
    return {step.option: (step.value, step.why) for step in plan.steps}


@pytest.fixture(scope="module")
def room():
    """A card on which half of the effective batch fits."""
    return memest.advise(MODEL, gpu_memory="956MiB", effective_batch=64, **COMMON)


@pytest.mark.slow
def test_every_plan_fits_as_it_says(room):
    assert room.plans
    for plan in room.plans:
        estimate = direct(plan, gpu_memory="956MiB")
        assert estimate.verdict is plan.verdict
        assert estimate.peak == plan.estimate.peak
        assert plan.effective_batch >= 64


@pytest.mark.slow
def test_the_first_plan_fills_the_card_before_it_accumulates(room):
    """The guide's rule, by brute force: no larger micro-batch that fits takes fewer steps."""
    best = room.plans[0]
    assert best.verdict is Verdict.FITS
    assert best.changes_training == ()
    assert best.grad_accum > 1
    for steps in range(1, best.grad_accum):
        more = memest.estimate(
            MODEL, batch=-(-64 // steps), grad_accum=steps, gpu_memory="956MiB", max_batch=False,
            **COMMON,
        )  # fmt: skip
        assert more.verdict is not Verdict.FITS
    value, why = options(best)["micro-batch"]
    assert value == str(best.batch)
    assert "fills the card" in why


@pytest.mark.slow
def test_plans_are_ordered_and_tight_ones_come_last(room):
    keys = [
        (p.verdict is not Verdict.FITS, bool(p.changes_training), p.relative_time)
        for p in room.plans
    ]
    assert keys == sorted(keys)
    assert room.plans[0].relative_time == 1.0
    within = {Verdict.FITS, Verdict.RELEASES_CACHE, Verdict.TIGHT}
    assert {p.verdict for p in room.plans} <= within


def test_plans_that_change_the_training_say_so(room):
    changed = [plan for plan in room.plans if plan.changes_training]
    for plan in changed:
        assert options(plan)["optimizer"][1].startswith("changes the training")
        assert any("may converge differently" in note for note in room.notes)
        # there is a point in them: they are faster than what changes nothing, or more certain
        same = [p for p in room.plans if not p.changes_training and p.verdict is plan.verdict]
        assert not same or plan.relative_time < min(p.relative_time for p in same)


@pytest.mark.slow
def test_the_whole_batch_at_once_where_it_fits():
    answer = memest.advise(MODEL, gpu="rtx-3090", effective_batch=16, seq_len=32, precision="fp32")
    (plan,) = answer.plans
    assert (plan.batch, plan.grad_accum) == (16, 1)
    assert options(plan)["accumulation"] == ("1", "not needed")
    assert options(plan)["checkpointing"] == ("none", "not needed")
    assert plan.arguments == ("--per_device_train_batch_size=16", "--optim=adamw_torch_fused")
    assert answer.verdict is Verdict.FITS


@pytest.mark.slow
def test_what_does_not_divide_is_rounded_up_and_said():
    answer = memest.advise(MODEL, gpu_memory="956MiB", effective_batch=67, **COMMON)
    above = [plan for plan in answer.plans if plan.effective_batch > 67]
    assert above
    assert all(plan.effective_batch - 67 < plan.grad_accum for plan in above)
    assert "above the 67 asked for" in options(above[0])["accumulation"][1]
    assert any("nearest number above" in note for note in answer.notes)


@pytest.mark.slow
def test_an_exact_batch_comes_first_where_it_is_about_as_fast():
    answer = memest.advise("bert-large-uncased", gpu="v100", effective_batch=64, precision="fp32")
    best, *others = answer.plans
    assert best.effective_batch == 64
    # more samples a step are shown where they are worth it, and the fastest stands first
    above = [plan for plan in others if plan.effective_batch > 64]
    assert all(plan.relative_time < 1 / 1.05 for plan in above)
    same = [plan.relative_time for plan in answer.plans if plan.verdict is Verdict.FITS]
    assert same == sorted(same)


def test_checkpointing_is_for_larger_micro_batches():
    answer = memest.advise(MODEL, gpu_memory="950MiB", effective_batch=128, optim="sgd", **COMMON)
    plain = [p for p in answer.plans if p.estimate.setup.checkpointing == "none"]
    recomputing = [p for p in answer.plans if p.estimate.setup.checkpointing == "full"]
    assert answer.plans[0] in plain
    for plan in recomputing:
        smaller = [p.batch for p in plain if p.verdict is plan.verdict]
        assert not smaller or plan.batch > min(smaller)
        assert "times the operations" in options(plan)["checkpointing"][1]
        assert "--gradient_checkpointing" in plan.arguments


class TestNothingFits:
    @pytest.mark.slow
    def test_the_closest_plan_and_its_distance(self):
        answer = memest.advise(MODEL, gpu_memory="500MiB", effective_batch=4, **COMMON)
        assert answer.plans == ()
        assert answer.verdict is Verdict.DOES_NOT_FIT
        estimate = direct(answer.closest, gpu_memory="500MiB")
        assert answer.miss_bytes == -estimate.gpu.headroom_bytes > 0
        assert "misses by" in str(answer)

    @pytest.mark.slow
    def test_tight_alone_is_tight(self):
        need = memest.estimate(
            MODEL, batch=1, gpu_memory="10GiB", optim="sgd", max_batch=False, **COMMON
        )
        between = (need.interval.low_bytes + need.interval.high_bytes) // 2
        answer = memest.advise(MODEL, gpu_memory=between, effective_batch=1, optim="sgd", **COMMON)
        assert answer.verdict is Verdict.TIGHT
        assert {plan.verdict for plan in answer.plans} == {Verdict.TIGHT}


class TestPrecision:
    def test_it_is_kept_where_something_fits_with_it(self, room):
        kept = {plan.estimate.setup.precision for plan in room.plans}
        assert kept == {Precision.FP32}
        assert options(room.plans[0])["precision"] == ("fp32", "as the run has it")

    @pytest.mark.slow
    def test_any_precision_takes_the_faster_one(self):
        answer = memest.advise(
            MODEL, gpu="a100-80gb", effective_batch=512, any_precision=True, **OPEN
        )
        best = answer.plans[0]
        assert best.estimate.setup.precision is Precision.BF16
        assert best.changes_training == ()
        assert "--bf16" in best.arguments

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("gpu", "precision", "words"),
        [
            ("rtx-3090", "bf16", ("not named: 0.", "rounded to 8 bits", "--precision fp32 keeps")),
            ("t4", "fp16", ("not named: 0.", "gradient scaler")),
            ("p100", "fp32", ("not named, and this GPU has none that is faster",)),
        ],
    )
    def test_where_none_is_named_the_cards_own_is_tried(self, gpu, precision, words):
        answer = memest.advise("bert-large-uncased", gpu=gpu, effective_batch=64)
        best = answer.plans[0]
        assert best.changes_training == ()
        value, why = options(best)["precision"]
        assert value == precision
        assert (f"--{precision}" in best.arguments) == (precision != "fp32")
        for word in words:
            assert word in why

    @pytest.mark.parametrize(
        ("named", "open_to_others"),
        [
            ({}, True),
            ({"bf16": False, "learning_rate": 1e-4}, True),
            ({"precision": "fp32"}, False),
            ({"mixed_precision": "no"}, False),
            ({"fp16": True}, False),
        ],
    )
    def test_what_names_a_precision(self, named, open_to_others):
        setup = setup_from_options(**named)
        assert names_precision(setup, named) is not open_to_others

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("asked", "precisions"),
        [
            ({"gpu": "t4", "effective_batch": 512, **OPEN}, {Precision.FP32, Precision.FP16}),
            # half-precision weights have no use for autocast
            ({"gpu": "a100", "effective_batch": 8, "dtype": "bfloat16"}, {Precision.FP32}),
        ],
    )
    def test_only_what_the_gpu_has_and_weights_can_use(self, asked, precisions):
        answer = memest.advise(MODEL, any_precision=True, **{"seq_len": 32, **asked})
        assert answer.plans
        assert {p.estimate.setup.precision for p in answer.plans} <= precisions


@pytest.mark.slow
def test_eager_attention_may_become_sdpa():
    wanted = {"seq_len": 512, "attn_implementation": "eager", "device_context": "600MiB"}
    answer = memest.advise(MODEL, gpu_memory="1100MiB", effective_batch=16, **wanted)
    best = answer.plans[0]
    assert best.estimate.setup.attn_implementation is Attention.SDPA
    assert best.changes_training == ()
    assert "computes the same" in options(best)["attention"][1]


def test_the_document_says_the_same(room):
    document = json.loads(room.to_json())
    assert document["gpu"]["usable_bytes"] == 956 << 20
    assert document["verdict"] == "fits"
    assert len(document["plans"]) == len(room.plans)
    first = document["plans"][0]
    assert first["batch"] * first["grad_accum"] == first["effective_batch"] == 64
    assert [s["option"] for s in first["steps"]][:2] == ["micro-batch", "accumulation"]


class FakeFinder(Finder):
    """Fits as a table says."""

    def __init__(self, wanted, largest, tight=0, *, is_exact=False):
        self.samples, self._largest_fit, self._tight = wanted, largest, tight
        self.is_exact = is_exact
        self.asked = []

    def at(self, combo, batch, grad_accum=None):
        self.asked.append(batch)
        accum = -(-self.samples // batch) if grad_accum is None else grad_accum
        verdict = Verdict.FITS if batch <= self._largest_fit else Verdict.DOES_NOT_FIT
        if verdict is Verdict.DOES_NOT_FIT and batch <= self._tight:
            verdict = Verdict.TIGHT
        return Candidate(combo, batch, accum, FakeEstimate(verdict))


class FakeEstimate:
    def __init__(self, verdict):
        self.verdict = verdict


@pytest.mark.parametrize(
    ("wanted", "largest", "tight", "plans"),
    [
        (32, 100, 0, [(32, 1)]),
        (32, 31, 0, [(16, 2)]),
        (32, 20, 0, [(16, 2)]),
        (30, 20, 0, [(15, 2)]),
        (31, 20, 0, [(16, 2), (1, 31)]),
        (36, 10, 0, [(9, 4)]),
        (35, 10, 0, [(9, 4), (7, 5)]),
        (32, 8, 32, [(8, 4), (32, 1)]),
        (32, 8, 9, [(8, 4)]),
        (32, 0, 4, [(4, 8)]),
        (32, 0, 0, [(1, 32), (32, 1)]),
        (1, 1, 0, [(1, 1)]),
    ],
)
def test_micro_batches_worth_a_look(wanted, largest, tight, plans):
    combo = Combo("none", Precision.FP32, "sgd", Attention.AUTO)
    finder = FakeFinder(wanted, largest, tight)
    assert [(c.batch, c.grad_accum) for c in finder.candidates(combo)] == plans
    assert len(finder.asked) <= 2 * (2 + wanted.bit_length()) + 2


@pytest.mark.parametrize(
    ("wanted", "largest", "tight", "plans"),
    [
        (8, 3, 0, [(2, 4)]),
        (8, 3, 7, [(2, 4), (4, 2)]),
        (31, 20, 0, [(1, 31)]),
        (8, 0, 3, [(2, 4)]),
        (8, 2, 3, [(2, 4)]),
        (8, 8, 0, [(8, 1)]),
    ],
)
def test_completions_are_as_many_as_were_asked_for(wanted, largest, tight, plans):
    combo = Combo("none", Precision.FP32, "sgd", Attention.AUTO)
    finder = FakeFinder(wanted, largest, tight, is_exact=True)
    assert [(c.batch, c.grad_accum) for c in finder.candidates(combo)] == plans
    for candidate in finder.candidates(combo):
        if candidate.grad_accum > 1:
            larger = finder.larger(candidate)
            assert larger.samples == wanted
            assert larger.batch > candidate.batch


@pytest.mark.parametrize(("method", "is_exact"), [("grpo", True), ("dpo", False), ("sft", False)])
def test_which_methods_keep_the_samples_exactly(method, is_exact):
    setup = setup_from_options(**({} if method == "sft" else {"method": method}))
    probe = SimpleNamespace(profile=SimpleNamespace(setup=setup))
    assert Finder(probe, 8).is_exact is is_exact


@pytest.mark.parametrize(
    ("options", "samples", "said"),
    [
        ({"method": "grpo"}, 7, "give a multiple of 8"),
        ({"method": "grpo", "num_gpus": 3}, 36, "give a multiple of 24"),
        ({"method": "rloo"}, 7, "give a multiple of 2"),
        ({"method": "grpo", "steps_per_generation": 2}, 6, "give a multiple of 4"),
        ({"method": "grpo", "num_generations": 7}, 7, ""),
        ({"method": "grpo", "steps_per_generation": 8}, 3, ""),
        ({"method": "online-dpo"}, 7, ""),
    ],
)
def test_samples_hold_whole_prompts(options, samples, said):
    setup = setup_from_options(**options)
    if said:
        with pytest.raises(memest.ConfigError, match=said):
            samples_of_each(samples, setup)
    else:
        samples_of_each(samples, setup)


def test_micro_batches_of_fixed_steps_hold_whole_prompts():
    """Of 12 samples and 2 steps at once, 4 completions and 12 hold the 8 of a prompt."""
    setup = setup_from_options(method="grpo", steps_per_generation=2)
    finder = Finder(SimpleNamespace(profile=SimpleNamespace(setup=setup)), 12)
    assert [finder._split(largest) for largest in (3, 6, 11, 12)] == [(4, 3)] * 3 + [(12, 1)]


def test_a_plan_is_written_with_the_engine_it_has():
    setup = setup_from_options(method="grpo", engine="vllm", engine_share=0.4, engine_sleeps=True)
    combo = Combo("none", Precision.FP32, "sgd", Attention.AUTO)
    words = arguments_of(Candidate(combo, 2, 4, SimpleNamespace(setup=setup)))
    assert words[-2:] == ("--vllm_gpu_memory_utilization=0.4", "--vllm_enable_sleep_mode")


@pytest.mark.parametrize(
    ("run", "combo", "trainer", "own"),
    [
        ({}, {}, "TrainingArguments", ()),
        ({"method": "ipo"}, {}, "DPOConfig", ()),
        ({"fused_loss": "trl-fused"}, {}, "SFTConfig", ()),
        ({"method": "grpo"}, {}, "GRPOConfig", ()),
        ({"loop": "plain"}, {"optim": "adam_fused"}, "memest", ()),
        ({}, {"optim": "adam_fused"}, "TrainingArguments", ("--optim=adam_fused",)),
        ({}, {"attention": Attention.SDPA}, "TrainingArguments", ("--attn_implementation=sdpa",)),
        ({}, {"loss": "Liger's kernels"}, "TrainingArguments", ()),
        (
            {"dtype": "float32"},
            {"loss": BY_SFT_TRAINER},
            "SFTConfig",
            ("--fused-loss", "trl-fused"),
        ),
        (
            {},
            {"loss": BY_SFT_TRAINER},
            "SFTConfig",
            ("--fused-loss", "trl-fused", "--dtype=auto"),
        ),
    ],
)
def test_a_plan_is_written_in_the_settings_of_its_trainer(run, combo, trainer, own):
    """What a configuration does not take stands apart, as memest's own; all of it is read here."""
    choice = {"optim": "adamw_torch_fused", "attention": Attention.AUTO, **combo}
    made = Combo("full", Precision.BF16, **choice)
    candidate = Candidate(made, 2, 4, SimpleNamespace(setup=setup_from_options(**run)))
    words = arguments_of(candidate)
    assert (trainer_of(candidate), own_arguments_of(candidate)) == (trainer, own)
    assert not set(own) & set(words)
    assert ("--use_liger_kernel" in words) == (made.loss == "Liger's kernels")
    assert words[:2] == ("--per_device_train_batch_size=2", "--gradient_accumulation_steps=4")


def test_sft_trainers_loss_is_for_the_loop_that_has_it():
    assert BY_SFT_TRAINER in losses(setup_from_options())
    assert losses(setup_from_options(loop="plain")) == ["Liger's kernels"]
    assert losses(setup_from_options(use_liger_kernel=True)) == []


@pytest.mark.slow
def test_where_no_plan_fits_adapters_that_do_are_told(tmp_path):
    """Full training does not fit, not even by SGD; the step named for it fits as it is told."""
    wide = {"vocab_size": 64_000, "hidden_size": 1024, "intermediate_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **wide}))
    card = {"gpu": "a100-80gb", "device_context": "100MiB"}
    run = {"seq_len": 32, "bf16": True, "dtype": "float32"}
    small = {"batch": 1, "checkpointing": "full", "max_batch": False}
    whole, adapters = (
        memest.estimate(str(tmp_path), **run, **small, **card, **more).interval
        for more in ({"optim": "sgd"}, {"lora_r": 16})
    )
    memory = f"{(whole.low_bytes + adapters.high_bytes) // 2 >> 20}MiB"
    answer = memest.advise(str(tmp_path), effective_batch=2, gpu_memory=memory, **run, **card)
    assert answer.verdict is Verdict.DOES_NOT_FIT
    best = answer.otherwise.changes[0]
    assert "trains adapters only" in best.changes_training
    assert "trains adapters only" in str(answer).split("micro-batch")[1]
    asked = {**run, **dict(best.options), "batch": dict(best.options).get("batch", 2)}
    after = memest.estimate(str(tmp_path), gpu_memory=memory, max_batch=False, **asked, **card)
    assert after.verdict is best.verdict is Verdict.FITS


def test_gpus_share_the_model_where_it_fits_none_of_them_whole(tmp_path):
    config = {**LLAMA, "hidden_size": 256, "intermediate_size": 2048, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    card = {"gpu": "a100-80gb", "gpu_memory": "1350MiB", "device_context": "100MiB"}
    run = {"seq_len": 64, "bf16": True, "num_gpus": 4, "optim": "adamw_torch_fused"}
    answer = memest.advise(str(tmp_path), effective_batch=4, **run, **card)
    best, whole = answer.plans
    assert best.verdict is Verdict.FITS
    assert whole.verdict is Verdict.TIGHT
    assert best.changes_training == ()
    assert "--fsdp=full_shard" in best.arguments
    assert "cut among the 4 GPUs" in options(best)["sharding"][1]
    assert "FSDP2 full_shard" in str(answer)
    run |= {"batch": best.batch, "grad_accum": best.grad_accum, "fsdp": "full_shard"}
    asked = memest.estimate(str(tmp_path), max_batch=False, **run, **card)
    assert asked.peak == best.estimate.peak
    # the samples asked for are those of all GPUs, and nothing says otherwise
    assert {plan.effective_batch for plan in answer.plans} == {4}
    assert "times as many samples" not in str(answer)


@pytest.mark.parametrize(
    "setup", [{}, {"num_gpus": 4, "fsdp": "full_shard"}, {"num_gpus": 4, "zero": 2},
              {"num_gpus": 2, "tp": 2}, {"num_gpus": 4, "pp": 2}],
)  # fmt: skip
def test_what_is_shared_already_is_not_sharded_again(setup):
    combo = Combo("none", Precision.FP32, "sgd", Attention.AUTO)
    assert sharded(setup_from_options(**setup), [combo]) == []
    assert len(sharded(setup_from_options(num_gpus=4), [combo])) == 1


def test_a_loss_without_logits_where_nothing_fits_for_them(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 32000}))
    card = {"gpu": "a100-80gb", "gpu_memory": "480MiB", "device_context": "100MiB"}
    run = {"seq_len": 256, "bf16": True}
    best = memest.advise(str(tmp_path), effective_batch=1, **run, **card).plans[0]
    assert best.verdict is Verdict.FITS
    assert "without all logits" in dict(options_of(best))["loss"]
    assert best.estimate.setup.use_liger_kernel or best.estimate.setup.fused_loss == "trl-fused"


def test_emulated_bf16_is_said():
    answer = memest.advise(MODEL, effective_batch=2, gpu="t4", bf16=True, seq_len=64)
    assert [note for note in answer.notes if note.startswith("bf16 is emulated on Tesla T4")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effective_batch": 8}, "needs a GPU"),
        ({"effective_batch": 0, "gpu": "t4"}, "out of range"),
        ({"effective_batch": "many", "gpu": "t4"}, "not a whole number"),
        ({"effective_batch": 8, "gpu": ["t4", "l4"]}, "one GPU, not 2"),
        ({"effective_batch": 8, "gpu": "t4", "batch": 4}, "batch is what memest advise looks for"),
        ({"effective_batch": 8, "gpu": "t4", "gradient_accumulation_steps": 4}, "looks for"),
        (
            {"effective_batch": 8, "gpu": "t4", "num_gpus": 2, "pp": 2},
            "not estimated for pipelines",
        ),
    ],
)
def test_what_cannot_be_advised(options, message):
    with pytest.raises(ConfigError, match=message):
        memest.advise(MODEL, **options)


@pytest.mark.slow
def test_a_smaller_share_of_an_engine_is_a_change_that_is_said(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    common = {"seq_len": 128, "bf16": True, "gpu_memory": "5GiB", "device_context": "400MiB"}
    options = {**common, "method": "grpo", "engine": "vllm", "effective_batch": 16}

    less = memest.advise(str(tmp_path), engine_share=0.5, **options)
    plan = less.plans[0]
    assert plan.verdict is Verdict.FITS
    assert plan.engine.share == plan.engine.largest_share < plan.engine.asked_share == 0.5
    assert plan.to_dict()["engine"]["share"] == plan.engine.share
    assert f"--vllm_gpu_memory_utilization={plan.engine.share:g}" in plan.arguments
    assert "less than the 0.5 asked for" in dict(options_of(plan))["engine share"]
    assert plan.relative_time is None
    assert "share up to" in str(less)
    assert "in place of 0.5" in str(less)

    kept = memest.advise(str(tmp_path), engine_share=0.1, **options).plans[0]
    assert kept.engine.share == 0.1 < kept.engine.largest_share


def options_of(plan):
    return [(step.option, step.why) for step in plan.steps]
