"""Optimizers on meta as on CUDA: states, temporaries, clipping, the gradient scaler."""

from __future__ import annotations

import pytest
import torch

from memest.config.setup import SdpaBackend, Setup
from memest.events import ALLOC, FREE, Category, Phase
from memest.trace.cuda.autocast import autocast_on_meta
from memest.trace.cuda.cuda_ops import cuda_handlers, cuda_operators, kernel_handlers
from memest.trace.cuda.value_answers import answer_handlers
from memest.trace.optimizers.torch import make_optimizer
from memest.trace.recorder import Recorder
from memest.workspaces.operator_call import GpuTraits

GPU = GpuTraits(capability=(8, 0), sm_count=108, max_threads_per_sm=2048)
SIZES = (300_000, 100_000, 50_000)
P = 4 * sum(SIZES)
P_MAX = 4 * max(SIZES)


def _model(dtype=torch.float32):
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.empty(n // 100, 100, device="meta", dtype=dtype)) for n in SIZES]
    )
    for parameter in model:
        parameter.grad = torch.empty_like(parameter)
    return model


def _bytes(trace, phase, step):
    """(alive at the start of a phase, highest in it, alive at its end)."""
    now = peak = start = 0
    inside = False
    for kind, index in trace.decode():
        if kind == 3:
            mark = trace.marks[index]
            if inside:
                break
            inside = mark.phase is phase and mark.step == step
            start = peak = now
        elif kind in (ALLOC, FREE):
            now += trace.sizes[index] * (1 if kind == ALLOC else -1)
            peak = max(peak, now)
    return start, peak, now


def _steps(optim, dtype=torch.float32, **options):
    """Two steps: (bytes of states, extra peak of the second step)."""
    recorder = Recorder({**cuda_handlers(), **kernel_handlers()})
    setup = Setup(optim=optim, loop="plain")
    with cuda_operators(GPU, SdpaBackend.AUTO), recorder:
        recorder.mark(Phase.LOAD, 0)
        model = _model(dtype)
        optimizer = make_optimizer(model, setup, recorder, (2, 13))
        for group in optimizer.param_groups:
            group.update(options)
        for step in (1, 2):
            recorder.mark(Phase.OPTIMIZER, step)
            optimizer.step()
        recorder.mark(Phase.ZERO_GRAD, 2)
    recorder.forget()
    loaded, _, stepped = _bytes(recorder.trace, Phase.OPTIMIZER, 1)
    start, peak, end = _bytes(recorder.trace, Phase.OPTIMIZER, 2)
    assert end == start
    # states are what the weights (and their gradients) are not
    return stepped - 2 * sum(p.nbytes for p in model), peak - start, loaded


SCALAR = 4


@pytest.mark.slow("adamw_torch-3600000-1800000")
@pytest.mark.parametrize(
    ("optim", "states", "extra"),
    [
        # foreach: a list of square roots, one for each parameter
        ("adamw_torch", 2 * P, P),
        ("adamw_torch_foreach", 2 * P, P),
        ("adam", 2 * P, P),
        # fused: nothing but the step counters, which live on the device
        ("adamw_torch_fused", 2 * P + 3 * SCALAR, 0),
        ("adam_fused", 2 * P + 3 * SCALAR, 0),
        ("sgd", 0, 0),
        ("sgd_momentum", P, 0),
        ("rmsprop", P, P),
        ("adagrad", P, 2 * P),
        ("adadelta", 2 * P, 2 * P),
        ("adamax", 2 * P, P),
        ("nadam", 2 * P, P),
        ("radam", 2 * P, P),
    ],
)
def test_states_and_temporaries_of_all_parameters_at_once(optim, states, extra):
    found_states, found_extra, _ = _steps(optim)

    assert found_states == states
    assert found_extra == pytest.approx(extra, abs=1000)


@pytest.mark.parametrize(
    ("optim", "states", "tensors"),
    [
        ("adamw_torch_loop", 2 * P, 3),
        ("adam_loop", 2 * P, 3),
        ("adamw_hf", 2 * P, 2),
        ("sgd_loop", 0, 0),
        ("sgd_momentum_loop", P, 0),
        ("rmsprop_loop", P, 2),
        ("adagrad_loop", P, 2),
    ],
)
def test_one_parameter_after_the_other_needs_a_few_tensors(optim, states, tensors):
    found_states, found_extra, _ = _steps(optim)

    assert found_states == states
    assert found_extra <= tensors * P_MAX
    assert (found_extra > 0) == (tensors > 0)


def test_sgd_with_weight_decay_copies_the_gradients():
    assert _steps("sgd", weight_decay=0.1)[1] == P


def test_adagrad_makes_its_state_before_the_first_step():
    assert _steps("adagrad")[2] == 3 * P
    assert _steps("rmsprop")[2] == 2 * P


def test_states_have_the_dtype_of_the_weights():
    assert _steps("adamw_torch", torch.bfloat16)[0] == P


def test_adafactor_of_transformers_keeps_rows_and_columns_in_fp32():
    rows = sum(n // 100 for n in SIZES) + 100 * len(SIZES)
    assert _steps("adafactor")[0] == pytest.approx(4 * rows, abs=64)
    assert _steps("adafactor", torch.bfloat16)[0] == pytest.approx(4 * rows, abs=64)


def test_foreach_is_the_default_since_torch_2():
    model = _model()
    for version, foreach in (((2, 0), True), ((1, 13), False)):
        optimizer = make_optimizer(
            model, Setup(optim="adamw_torch", loop="plain"), Recorder(), version
        )
        assert optimizer.param_groups[0]["foreach"] is foreach


def test_clipping_makes_numbers_only():
    recorder = Recorder({**cuda_handlers(), **kernel_handlers()})
    model = _model()
    with cuda_operators(GPU, SdpaBackend.AUTO), recorder:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    names = {recorder.trace.op_names[o] for o in recorder.trace.ops}
    recorder.forget()

    # one norm each and a stack of them, then the total and its coefficient: no gradient is copied
    assert "aten._foreach_norm.Scalar" in names
    assert sum(recorder.trace.sizes) <= (2 * len(SIZES) + 8) * SCALAR


def test_the_gradient_scaler_holds_two_numbers_and_copies_no_gradient():
    recorder = Recorder({**cuda_handlers(), **kernel_handlers(), **answer_handlers()})
    model = _model()
    with cuda_operators(GPU, SdpaBackend.AUTO), autocast_on_meta(recorder, (2, 13)), recorder:
        scaler = torch.amp.GradScaler("cuda")
        optimizer = make_optimizer(model, Setup(optim="sgd", loop="plain"), recorder, (2, 13))
        scaler.scale(torch.empty((), device="meta"))
        held = len(recorder._live)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    recorder.forget()

    assert held == 2  # scale and growth tracker
    assert set(recorder.trace.sizes) <= {SCALAR, 2 * SCALAR}


def test_master_weights_are_copies_in_fp32():
    recorder = Recorder({**cuda_handlers(), **kernel_handlers()})
    model = _model(torch.bfloat16)
    setup = Setup(optim="adamw_torch_fused", loop="plain", dtype="bfloat16", master_weights=True)
    with cuda_operators(GPU, SdpaBackend.AUTO), recorder:
        optimizer = make_optimizer(model, setup, recorder, (2, 13))
        optimizer.step()
    trace = recorder.trace
    masters = [s for i, s in enumerate(trace.sizes) if trace.category(i) is Category.MASTER_WEIGHTS]
    recorder.forget()

    assert sum(masters) == P


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit"])
def test_groups_are_those_of_the_trainer(name, tmp_path):
    from transformers import AutoConfig, AutoModel, Trainer, TrainingArguments

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(name, **({} if name in ("t5", "gpt2") else small))
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    optimizer = make_optimizer(model, Setup(optim="sgd"), Recorder(), (2, 13))
    trainer = Trainer(
        model=None,
        model_init=lambda: torch.nn.Linear(1, 1),
        args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]),
    )
    decays = set(trainer.get_decay_parameter_names(model))

    names = {id(p): n for n, p in model.named_parameters()}
    assert [names[id(p)] for p in optimizer.param_groups[0]["params"]] == [
        n for n, _ in model.named_parameters() if n in decays
    ]
