"""Preference methods: TRL's own trainers beside what is written anew.

TRL's ``compute_loss``, run on meta as a trace runs ours, says whether it is the same step: the same
bytes are born and die in the same order. Whole trainers of TRL on the CPU say whether the loop
around it is the one that is priced.
"""

from __future__ import annotations

import importlib
import itertools
import types
from collections import defaultdict
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from memest.calibration.running.cpu_memory import mark, measure
from memest.catalog.resolve import ModelSource
from memest.config.rollouts import Engine, Rollouts
from memest.config.setup import Setup
from memest.events import ALLOC, FREE, MARK
from memest.trace import session
from memest.trace.cuda.no_triton import without_triton
from memest.trace.losses.fused_head import has_router_loss
from memest.trace.losses.objective import objective_of
from memest.trace.losses.trl import parts_for_trl
from memest.trace.meta_model import build
from memest.trace.model.adapters import base_of
from memest.trace.training import TracePlan
from support.cases import GPU
from support.real_memory import differences, run_of_trace
from support.real_steps import RNG_STATE
from support.small_llama import LLAMA
from support.tools import load_tool
from support.trl_on_meta import TRL, TRL_ON_CPU

MIXTURE = {
    **LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 512,
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
}  # fmt: skip
LORA = {"adapter": {"peft_type": "LORA", "r": 8}}
RUNS = [
    {"method": "dpo"},
    {"method": "dpo", "checkpointing": "full", "grad_accum": 2},
    {"method": "dpo", **LORA},
    {"method": "dpo", **LORA, "checkpointing": "full"},
    {"method": "dpo", "precompute_ref_log_probs": True},
    {"method": "dpo", "precision": "bf16", "dtype": "float32"},
    {"method": "dpo", "config": MIXTURE},
    {"method": "dpo", "config": GPT2},
    {"method": "ipo"},
    {"method": "kto"},
    {"method": "kto", "config": MIXTURE, "precompute_ref_log_probs": True},
    {"method": "kto", **LORA},
    {"method": "kto", "precompute_ref_log_probs": True},
    {"method": "orpo"},
    {"method": "orpo", "config": GPT2},
    {"method": "orpo", "precision": "bf16", "dtype": "float32"},
    {"method": "cpo", **LORA},
    {"method": "simpo"},
    {"method": "reward"},
    {"method": "reward", **LORA, "checkpointing": "full"},
    {"method": "grpo"},
    {"method": "grpo", "rollouts": {"completion_len": 31, "kl_beta": 0.04}, "grad_accum": 2},
    {"method": "grpo", **LORA, "checkpointing": "full", "rollouts": {"kl_beta": 0.04}},
    {"method": "grpo", "rollouts": {"engine": "vllm"}, "precision": "bf16", "dtype": "float32"},
    {"method": "grpo", "config": MIXTURE},
    {"method": "rloo"},
    {"method": "rloo", **LORA, "config": GPT2},
    {"method": "online-dpo"},
    {"method": "online-dpo", **LORA},
    {"method": "online-dpo", "checkpointing": "full", "grad_accum": 2},
    {"method": "online-dpo", **LORA, "checkpointing": "full", "rollouts": {"completion_len": 31}},
    {"method": "online-dpo", "precision": "bf16", "dtype": "float32"},
    {"method": "online-dpo", "config": MIXTURE},
    {"method": "online-dpo", "config": GPT2},
]  # fmt: skip
_HOMES = {
    "dpo": ("trl.trainer.dpo_trainer", "DPOTrainer"),
    "ipo": ("trl.trainer.dpo_trainer", "DPOTrainer"),
    "kto": ("trl.trainer.kto_trainer", "KTOTrainer"),
    "reward": ("trl.trainer.reward_trainer", "RewardTrainer"),
    "orpo": ("trl.experimental.orpo.orpo_trainer", "ORPOTrainer"),
    "cpo": ("trl.experimental.cpo.cpo_trainer", "CPOTrainer"),
    "simpo": ("trl.experimental.cpo.cpo_trainer", "CPOTrainer"),
    "grpo": ("trl.trainer.grpo_trainer", "GRPOTrainer"),
    "rloo": ("trl.trainer.rloo_trainer", "RLOOTrainer"),
    "online-dpo": ("trl.experimental.online_dpo.online_dpo_trainer", "OnlineDPOTrainer"),
}


def _trainer(setup, ours):
    """What ``compute_loss`` asks of a trainer, with TRL's defaults."""
    module, name = _HOMES[setup.method]
    kind = getattr(importlib.import_module(module), name)
    accelerator = types.SimpleNamespace(
        device=torch.device("meta"),
        gather=lambda tensor: tensor,
        gather_for_metrics=lambda tensor: tensor,
        unwrap_model=lambda model: model,
        reduce=lambda tensor, reduction: tensor,
        autocast=nullcontext,
        num_processes=1,
        is_main_process=False,
    )
    arguments = types.SimpleNamespace(
        gradient_checkpointing_kwargs={"use_reentrant": False},
        center_rewards_coefficient=None,
        device=torch.device("meta"),
        use_bias_correction_kl=False,
        delta=None,
        steps_per_generation=1,
        report_to=[],
        use_vllm=False,
        missing_eos_penalty=None,
        loss_type="sigmoid",
        torch_empty_cache_steps=None,
        optim="adamw_torch",
        n_gpu=1,
        gradient_accumulation_steps=1,
    )
    fused = setup.scores_by_fused_head
    parts = parts_for_trl(base_of(ours.trained), "a test") if fused else None
    rollouts = setup.rollouts or Rollouts()
    trainer = kind.__new__(kind)
    vars(trainer).update(
        model=ours.trained, accelerator=accelerator, args=arguments,
        aux_loss_enabled=parts is not None and has_router_loss(parts), router_aux_loss_coef=0.001,
        off_policy_mask_threshold=None, top_entropy_quantile=1.0, importance_sampling_level="token",
        epsilon_low=0.2, epsilon_high=0.2, _entropy_bonus_enabled=False,
        use_vllm=rollouts.engine is not Engine.MODEL, vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        ld_alpha=None, precompute_ref_logps=setup.precompute_ref_log_probs,
        f_divergence_type="reverse_kl", loss_types=["ipo" if setup.method == "ipo" else "sigmoid"],
        loss_weights=[1.0], beta=rollouts.kl_beta if setup.rollouts else 0.1,
        use_weighting=False, label_smoothing=0.0, _tp_size=1,
        _metrics={"train": defaultdict(list)}, _total_train_tokens=0, calculate_KL=True,
        loss_type={"kto": "kto", "simpo": "simpo", "grpo": "dapo"}.get(setup.method, "sigmoid"),
        desirable_weight=1.0, undesirable_weight=1.0, is_encoder_decoder=False, padding_value=0,
        pad_token_id=0, _peft_has_been_casted_to_bf16=False, alpha=0.0, simpo_gamma=0.5,
        cpo_alpha=0.0 if setup.method == "simpo" else 1.0, store_metrics=lambda *_, **__: None,
    )  # fmt: skip
    return trainer


def _positional(model):
    """ORPOTrainer and CPOTrainer give the tokens without a name."""

    def call(*tokens, **inputs):
        return model(**inputs, **({"input_ids": tokens[0]} if tokens else {}))

    return call


@contextmanager
def _trl(model, setup):
    """TRL's own loss, and its own head, in place of ours."""
    fetched = mock.patch.object(torch.Tensor, "item", return_value=1.0)
    with (
        without_triton(TRL, lambda: importlib.import_module(_HOMES[setup.method][0])),
        objective_of(model, setup) as ours,
        fetched,
    ):
        assert ours is not None
        head = importlib.import_module("trl.trainer.utils").add_fused_lm_head
        fused = setup.scores_by_fused_head
        if setup.method.generates and fused:
            head(base_of(model), outputs=("log_probs", "entropy"))
        elif fused:
            hits = () if setup.method == "kto" else ("is_top1",)
            head(base_of(model), outputs=("log_probs", "entropy", "mean_logits", *hits))
        if ours.reference is not None and fused:
            head(ours.reference)
        trainer = _trainer(setup, ours)
        if ours.step is not None:
            yield replace(ours, step=partial(_training_step, trainer, ours))
            return

        def loss(model, reference, inputs):
            # the model as accelerate prepares it
            trainer.ref_model = None if ours.reference is None else reference
            return trainer.compute_loss(_positional(model), inputs)

        home = importlib.import_module(_HOMES[setup.method][0])
        with ExitStack() as stack:
            for name, found in (("nanmin", torch.Tensor.min), ("nanmax", torch.Tensor.max)):
                if hasattr(home, name):  # which numbers there are a trace does not know
                    stack.enter_context(mock.patch.object(home, name, found))
            yield replace(ours, loss=loss)


class _Adapted:
    """A model with adapters, called as accelerate prepares it."""

    def __init__(self, call, disable_adapter):
        self.call, self.disable_adapter = call, disable_adapter

    def __call__(self, *arguments, **inputs):
        return self.call(*arguments, **inputs)

    def train(self):
        """It trains already."""


def _training_step(trainer, ours, model, reference, inputs, backward):
    """OnlineDPOTrainer's own, of completions that are written."""
    model = _Adapted(_positional(model), getattr(ours.trained, "disable_adapter", None))
    written = [inputs[f"{part}_{name}"] for part in ("prompt", "completion")
               for name in ("ids", "mask")]  # fmt: skip
    trainer.model, trainer.ref_model = model, ours.reference and _positional(reference)
    trainer.accelerator.backward = backward
    trainer._generate = lambda *_: (*written, None)
    vars(trainer).update(
        eos_token_ids=[1], max_length=512, reward_weights=torch.ones(1), stats=defaultdict(list),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)], _beta=0.1,
        reward_processing_classes=[None], state=types.SimpleNamespace(global_step=1),
        processing_class=types.SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
    )  # fmt: skip
    prompts = [""] * (len(written[0]) // 2)
    with mock.patch.object(torch.Tensor, "tolist", return_value=[]):
        loss = trainer.training_step(model, {"prompt": prompts})
    del trainer._generate
    return loss


def _events(options):
    options = dict(options)
    config = options.pop("config", LLAMA)
    options = {"batch": 4, "seq_len": 96, "dtype": "bfloat16", "optim": "none", **options}
    setup = Setup(**options)
    source = ModelSource(kind="file", id="small", config=config, provenance="test")
    trace = session.trace_built(
        build(setup, source, None, None, None), setup, GPU, TracePlan(steps=2)
    )
    return [
        (kind, str(trace.marks[index].phase) if kind == MARK else trace.sizes[index])
        for kind, index in trace.decode()
        if kind in (ALLOC, FREE, MARK)
    ]


def _case(options):
    """The name of a case."""
    return "-".join(
        value["model_type"] if name == "config" else str(value) for name, value in options.items()
    )


@pytest.mark.parametrize("options", RUNS, ids=_case)
def test_trl_computes_the_same(options):
    ours = _events(options)
    with mock.patch.object(session, "objective_of", _trl):
        theirs = _events(options)

    assert [e for e in ours if e[0] != FREE] == [e for e in theirs if e[0] != FREE]
    assert _large(ours) == _large(theirs)


@contextmanager
def _trl_by_ipo(model, setup):
    """TRL's own step of online DPO with another loss of a pair."""
    with _trl(model, setup) as theirs:
        trainer, _ = theirs.step.args
        trainer.args.loss_type = "ipo"
        yield theirs


@pytest.mark.parametrize("options", [{}, LORA], ids=("full", "lora"))
def test_ipo_takes_of_online_dpo_what_its_default_does(options):
    """But for a number for each pair, and another one."""
    ours = _events({"method": "online-dpo", **options})
    with mock.patch.object(session, "objective_of", _trl_by_ipo):
        theirs = _events({"method": "online-dpo", **options})

    assert _large(ours) == _large(theirs)
    assert ours != theirs


def _large(events):
    """Without single numbers, whose order of death is no matter."""
    return [event for event in events if event[0] == MARK or event[1] > 64]


# -- whole trainers -------------------------------------------------------------------------------

TINY = {"prompt": 1, "completion": 62, "batch": 4, "dtype": "float32", "tiny": True}
WITH_DORA = {"lora": {"r": 8, "target_modules": "all-linear", "use_dora": True}}
WITH_LORA = {"lora": {"r": 8, "target_modules": "all-linear"}}
ROLLOUTS = ("grpo", "rloo", "online-dpo")
TRAINERS = [
    {"method": "dpo"},
    {"method": "dpo", **WITH_LORA},
    {"method": "dpo", "args": {"precompute_ref_log_probs": True}},
    {"method": "dpo", "args": {"gradient_checkpointing": False, "gradient_accumulation_steps": 2}},
    {"method": "kto"},
    {"method": "kto", **WITH_LORA},
    {"method": "kto", "args": {"precompute_ref_log_probs": True}},
    {"method": "kto", **WITH_LORA, "args": {"precompute_ref_log_probs": True}},
    {"method": "orpo"},
    {"method": "orpo", **WITH_LORA, "quantised": "nf4", "dtype": "bfloat16"},
    {"method": "orpo", **WITH_LORA, "quantised": "nf4", "args": {"bf16": False}},
    {"method": "cpo", **WITH_LORA},
    {
        "method": "cpo",
        **WITH_LORA,
        "quantised": "nf4",
        "dtype": "bfloat16",
        "args": {"gradient_checkpointing": False},
    },
    {"method": "dpo", **WITH_LORA, "quantised": "nf4", "dtype": "bfloat16"},
    {"method": "dpo", **WITH_DORA, "quantised": "nf4", "dtype": "bfloat16"},
    {"method": "dpo", **WITH_DORA},
    {"method": "reward"},
    {"method": "grpo"},
    {"method": "grpo", **WITH_LORA, "args": {"beta": 0.04, "gradient_accumulation_steps": 2}},
    {"method": "rloo"},
    {"method": "online-dpo"},
    {"method": "online-dpo", **WITH_LORA},
    {"method": "online-dpo", **WITH_LORA, "args": {"bf16": False}},
    {"method": "online-dpo", "args": {"gradient_checkpointing": False, "bf16": False}},
    {"method": "online-dpo", "args": {"gradient_accumulation_steps": 2}},
]


def _autocasts_on_cpu(device="cpu", *, ask=torch.is_autocast_enabled):
    """What peft asks of CUDA, whose autocast is meant where no device is named."""
    return ask(device)


def _real(asked, folder):
    """Forward and backward of a trainer's steps as the CPU's allocator sees them."""
    tool = load_tool("measure_trainers")
    home = _HOMES[asked["method"]][0]
    asked_of_cpu = mock.patch("torch.is_autocast_enabled", _autocasts_on_cpu)
    with without_triton(TRL_ON_CPU, lambda: importlib.import_module(home)), asked_of_cpu:
        model = tool.load(asked, "cpu", folder)
        trainer = tool.trainer_for(asked, model, "cpu", folder)
        config = model.config
        del model
        names = _phases(asked)
        loss, backward, step = (
            trainer.compute_loss, trainer.accelerator.backward, trainer.training_step
        )  # fmt: skip

        def marked_loss(*arguments, **keywords):
            mark(f"forward {next(names)}")
            return loss(*arguments, **keywords)

        def marked_backward(*arguments, **keywords):
            mark(f"backward {next(names)}")
            return backward(*arguments, **keywords)

        def marked_step(*arguments, **keywords):
            out = step(*arguments, **keywords)
            mark(f"rest {next(names)}")
            return out

        def marked_writing(*arguments, **keywords):
            out = write(*arguments, **keywords)
            mark(f"forward {next(names)}")
            return out

        if asked["method"] == "online-dpo":  # its forward begins where completions are written
            write, trainer._generate = trainer._generate, marked_writing
        trainer.compute_loss, trainer.accelerator.backward = marked_loss, marked_backward
        trainer.training_step = marked_step
        if asked["method"] in ROLLOUTS:  # samples have no tokens yet
            return measure(trainer.train), config, asked["prompt"] + asked["completion"]
        batch = next(iter(trainer.get_train_dataloader()))
        tokens = next(v for k, v in batch.items() if k.endswith("input_ids")).shape[1]
        return measure(trainer.train), config, tokens


_OF_THE_CPU = (
    # it sums integers by way of copies
    "/aten::sum/aten::to/aten::_to_copy/aten::empty_strided",
    # rules of memest.workspaces price where a GPU writes the places of a mask
    "/aten::index/aten::nonzero",
    "/aten::_index_put_impl_/aten::nonzero",
)


def _without_the_cpu_s(events):
    """Without random states, and what the CPU's kernels take otherwise than CUDA's."""
    out, others = [], set()
    for event in events:
        if event.nbytes > 0 and event.op.endswith(_OF_THE_CPU):
            others.add(event.key)
        elif event.nbytes < 0 and event.key in others:
            others.remove(event.key)
        elif abs(event.nbytes) != RNG_STATE:
            out.append(event)
    return out


def _in_one_order(events):
    """What dies together in one order: autocast's cache goes in that of a hash table."""
    out = []
    for (dies, _), group in itertools.groupby(events, lambda e: (e.nbytes < 0, e.phase)):
        together = list(group)
        out.extend(sorted(together, key=lambda event: event.nbytes) if dies else together)
    return out


def _phases(asked):
    """``STEP MICRO_STEP`` of every forward, its backward, and what follows."""
    micro_steps = asked.get("args", {}).get("gradient_accumulation_steps", 1)
    for step in range(1, 10):
        for micro_step in range(1, micro_steps + 1):
            yield from [f"{step} {micro_step}"] * 3


@pytest.mark.slow(but=("dpo",))
@pytest.mark.parametrize(
    "asked", TRAINERS, ids=lambda asked: "-".join(str(value) for value in asked.values())
)
def test_a_whole_trainer_allocates_the_same(asked, tmp_path):
    asked = {**TINY, **asked, "model": "Qwen/Qwen3-0.6B", "name": "test"}
    rollouts = None
    if asked["method"] in ROLLOUTS:
        # no completion ends early
        whole = {"generation_kwargs": {"min_new_tokens": asked["completion"]}}
        asked["args"] = asked.get("args", {}) | whole
        rollouts = Rollouts(completion_len=asked["completion"], kl_beta=asked["args"].get("beta"))
    real, config, tokens = _real(asked, tmp_path)
    arguments = asked.get("args", {})
    setup = Setup(
        method=asked["method"],
        batch=asked["batch"],
        seq_len=tokens,
        dtype=asked["dtype"],
        precision="bf16" if arguments.get("bf16", True) else "fp32",
        checkpointing="full" if arguments.get("gradient_checkpointing", True) else "none",
        grad_accum=arguments.get("gradient_accumulation_steps", 1),
        precompute_ref_log_probs=arguments.get("precompute_ref_log_probs", False),
        rollouts=rollouts,
        adapter={"peft_type": "LORA", **asked["lora"]} if "lora" in asked else None,
        quantization={
            "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": asked["dtype"],
        }
        if "quantised" in asked
        else None,
    )  # fmt: skip
    entries = config.to_dict()
    entries.pop("quantization_config", None)  # what the checkpoint was made of
    source = ModelSource(kind="file", id="tiny", config=entries, provenance="test")
    meta_model = build(setup, source, None, None, None)
    plan = TracePlan(steps=2, micro_steps=setup.grad_accum)
    trace = run_of_trace(session.trace_built(meta_model, setup, GPU, plan, operators="cpu"))
    phases = {event.phase for event in trace.events if event.phase.startswith(("forw", "backw"))}
    for run, events in ((real, _without_the_cpu_s(real.events)), (trace, trace.events)):
        large = (e for e in events if e.phase in phases and abs(e.nbytes) >= 4096)
        run.events = _in_one_order(large)

    assert len(phases) == 4 * setup.grad_accum
    assert len(trace.allocations(at_least=4096)) > 200
    assert differences(real, trace) == []


def test_a_reference_that_follows_the_model_takes_nothing_for_it():
    """Where nothing is sharded TRL's callback computes in place."""
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    model, reference = torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)

    def run():
        mark("sync")
        callbacks.SyncRefModelCallback._sync_target_model(model, reference, 0.6)

    assert measure(run).allocations(at_least=64) == []
