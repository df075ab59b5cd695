"""A real Trainer's evaluation on the CPU against the trace, and any number of its batches."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from memest.calibration.running.cpu_memory import mark, measure
from memest.calibration.running.loops import to_device
from memest.calibration.running.material import host_batches
from memest.trace.evaluation import TRACED_BATCHES, trace_evaluation
from memest.trace.inputs.batch import realise
from memest.trace.losses.loss import loss_for
from support.cases import GPU, twin
from support.real_memory import run_of_trace


def _real(twins, keeps, tmp_path):
    """The measured evaluation of as many batches as are traced."""
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_pt_utils import EvalLoopContainer

    batches = host_batches(twins.plans, TRACED_BATCHES)
    at = {"batch": 0}

    def send(batch, *_, **__):
        at["batch"] += 1
        mark(f"evaluation 0 {at['batch']}")
        return to_device(batch, torch.device("cpu"))

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return TRACED_BATCHES

        def __getitem__(self, index):
            return {"row": index}

    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, per_device_eval_batch_size=1, report_to=[],
        disable_tqdm=True, remove_unused_columns=False, bf16=twins.setup.precision == "bf16",
    )  # fmt: skip

    class Watched(Trainer):
        def prediction_step(self, *args, **kwargs):
            out = super().prediction_step(*args, **kwargs)
            # the loader says one sample a batch, a row is a whole batch
            self.args.per_device_eval_batch_size = twins.setup.batch
            return out

    trainer = Watched(
        model=twins.real, args=arguments, data_collator=lambda rows: batches[rows[0]["row"]],
        compute_metrics=(lambda _: {}) if keeps else None,
    )  # fmt: skip

    def arrays(container):
        mark("end 0 0")  # what follows is on the host
        return to_host(container)

    to_host = EvalLoopContainer.get_arrays
    with (
        mock.patch("accelerate.data_loader.send_to_device", send),
        mock.patch.object(EvalLoopContainer, "get_arrays", arrays),
    ):
        return measure(lambda: trainer.evaluate(Rows()))


@pytest.mark.slow(
    "gpt2-{'dtype': 'bfloat16'}-True", "gpt2-{'dtype': 'bfloat16'}-False", "t5-{}-False"
)
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(
    ("model", "setup"),
    [("bert", {}), ("llama", {}), ("t5", {}), ("vit", {}), ("gpt2", {"dtype": "bfloat16"})],
    ids=str,
)
def test_batches_allocate_what_those_of_a_real_evaluation_do(model, setup, keeps, tmp_path):
    twins = twin(model, loop="trainer", eval_batch=4, eval_samples=16 if keeps else None, **setup)
    real = _real(twins, keeps, tmp_path)
    trace = run_of_trace(
        trace_evaluation(
            twins.built_model.model, twins.setup, make_batch=lambda: realise(twins.plans),
            loss_of=loss_for(twins.built_model), gpu=GPU, operators="cpu",
        )
    )  # fmt: skip

    measured = {phase.name: phase for phase in real.phases}
    assert [p.name for p in trace.phases] == [
        f"evaluation 0 {n}" for n in range(1, TRACED_BATCHES + 1)
    ]
    for phase in trace.phases:
        same = measured[phase.name]
        assert phase.alive == pytest.approx(same.alive, abs=2048), phase.name
        assert phase.peak == pytest.approx(same.peak, rel=0.005, abs=2048), phase.name
