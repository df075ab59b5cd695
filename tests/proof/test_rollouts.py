"""What a model writes in the run itself: TRL's generation beside the traced one."""

from __future__ import annotations

import importlib
from unittest import mock

import pytest

from memest.calibration.running.cpu_memory import mark, measure
from memest.catalog.resolve import ModelSource
from memest.config.generation import Generation
from memest.config.setup import Setup
from memest.trace import session
from memest.trace.cuda.no_triton import without_triton
from support.cases import GPU
from support.real_memory import run_of_trace
from support.tools import load_tool
from support.trl_on_meta import TRL_ON_CPU

ASKED = {
    "method": "grpo", "model": "Qwen/Qwen3-0.6B", "name": "test", "prompt": 6, "completion": 40,
    "batch": 4, "dtype": "float32", "tiny": True,
}  # fmt: skip
PRECISIONS = {"fp32": False, "bf16": True}


def _real(folder, *, bf16):
    """GRPOTrainer's first generation on the CPU, and the configuration of its model."""
    tool = load_tool("measure_trainers")
    asked = {**ASKED, "args": {"bf16": bf16}}
    with without_triton(TRL_ON_CPU, lambda: importlib.import_module("trl.trainer.grpo_trainer")):
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


# type promotion of an operator of its own on the CPU, and a draw's exponentials, which
# memest.workspaces prices
_OF_THE_CPU = ("/aten::mul/aten::to", "/aten::add/aten::to", "/aten::cat/aten::to",
               "/aten::multinomial/aten::empty_like")  # fmt: skip


def _births(run, at_least):
    events = [e for e in run.events if e.nbytes >= at_least and e.phase.startswith("generation")]
    return [e.nbytes for e in events if not any(name in e.op for name in _OF_THE_CPU)]


@pytest.mark.slow(but=("fp32",))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_completions_are_written_as_trl_has_them_written(precision, tmp_path):
    real, config = _real(tmp_path, bf16=PRECISIONS[precision])
    setup = Setup(
        batch=ASKED["batch"], seq_len=ASKED["prompt"], dtype="float32", precision=precision,
        checkpointing="full", generation=Generation(new_tokens=ASKED["completion"], draws=True),
    )  # fmt: skip
    source = ModelSource(kind="file", id="tiny", config=config, provenance="test")
    meta_model = session.build(setup, source, None, None, None)
    trace = run_of_trace(
        session.evaluate_built(meta_model, setup, GPU, operators="cpu", generates=True)
    )
    # weights in half precision are copied in another order by the CPU's kernels
    at_least = 512 if precision == "fp32" else 8192
    ours = _births(trace, at_least)

    assert len(ours) > 60
    assert _births(real, at_least)[: len(ours)] == ours
