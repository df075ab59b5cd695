"""What a model writes in the run itself: TRL's generation beside the traced one."""

from __future__ import annotations

import importlib
from unittest import mock

import pytest

from memest.calibration.running.cpu_memory import mark, measure
from memest.catalog.resolve import ModelSource
from memest.config.setup import Setup
from memest.estimation.whole_run import generation_setup
from memest.trace import session
from memest.trace.cuda.no_triton import without_triton
from memest.trace.meta_model import build
from support.cases import GPU
from support.real_memory import run_of_trace
from support.tools import load_tool
from support.trl_on_meta import TRL_ON_CPU

ASKED = {
    "method": "grpo", "model": "Qwen/Qwen3-0.6B", "name": "test", "prompt": 6, "completion": 40,
    "batch": 4, "dtype": "float32", "tiny": True,
}  # fmt: skip
_HOMES = {
    "grpo": "trl.trainer.grpo_trainer",
    "online-dpo": "trl.experimental.online_dpo.online_dpo_trainer",
}
ONLINE = {"method": "online-dpo", "batch": 2}
CASES = {
    "fp32": {},
    "bf16": {"args": {"bf16": True}},
    # checkpointing leaves no cache: every token is a forward of all before it
    "online-dpo": ONLINE,
    "online-dpo-bf16": {**ONLINE, "args": {"bf16": True}},
    "online-dpo-lora": {**ONLINE, "lora": {"r": 8, "target_modules": "all-linear"}},
    "online-dpo-cache": {**ONLINE, "args": {"gradient_checkpointing": False}},
}


def _real(folder, asked):
    """A trainer's first generation on the CPU, and the configuration of its model."""
    tool = load_tool("measure_trainers")
    home = _HOMES[asked["method"]]
    with without_triton(TRL_ON_CPU, lambda: importlib.import_module(home)):
        model = tool.load(asked, "cpu", folder)
        generate = type(model).generate

        def marked(*arguments, **keywords):
            mark("generation")
            try:
                return generate(*arguments, **keywords)
            finally:
                mark("rest")

        with mock.patch.object(type(model), "generate", marked):
            trainer = tool.trainer_for(asked, model, "cpu", folder)
            run = measure(trainer.train)
    return run, model.config.to_dict()


# a draw's exponentials, which memest.workspaces prices
_OF_THE_CPU = ("/aten::multinomial/aten::empty_like",)


def _births(run, at_least):
    events = [e for e in run.events if e.nbytes >= at_least and e.phase.startswith("generation")]
    return [e.nbytes for e in events if not any(name in e.op for name in _OF_THE_CPU)]


@pytest.mark.slow(but=("fp32",))
@pytest.mark.parametrize("case", CASES)
def test_completions_are_written_as_trl_has_them_written(case, tmp_path):
    asked = {**ASKED, **CASES[case]}
    arguments = asked["args"] = {"bf16": False, **asked.get("args", {})}
    real, config = _real(tmp_path, asked)
    precision = "bf16" if arguments["bf16"] else "fp32"
    lora = {"peft_type": "LORA", "r": 8, "target_modules": "all-linear"}
    setup = generation_setup(Setup(
        method=asked["method"], batch=asked["batch"], seq_len=asked["prompt"] + asked["completion"],
        rollouts={"completion_len": asked["completion"]}, dtype="float32", precision=precision,
        checkpointing="full" if arguments.get("gradient_checkpointing", True) else "none",
        adapter=lora if "lora" in asked else None,
    ))  # fmt: skip
    source = ModelSource(kind="file", id="tiny", config=config, provenance="test")
    meta_model = build(setup, source, None, None, None)
    trace = run_of_trace(
        session.evaluate_built(meta_model, setup, GPU, operators="cpu", generates=True)
    )
    # weights in half precision are copied in another order by the CPU's kernels
    at_least = 512 if precision == "fp32" else 8192
    ours = _births(trace, at_least)

    assert len(ours) > 60
    assert _births(real, at_least)[: len(ours)] == ours
