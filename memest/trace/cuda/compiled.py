"""``torch.compile`` in a traced run: the loop calls the compiled model, as the Trainer's does.

The model is compiled before anything is recorded, forward and backward, because Dynamo and
Inductor run fake tensors through the dispatcher. Then the loop runs the compiled code under the
recorder. A recompilation in between would run eagerly under a dispatch mode, so it is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memest.config.compilation import check_release
from memest.config.setup import Setup
from memest.errors import ConfigError, MemestError, TraceError
from memest.trace.cuda.devices import without_modes
from memest.trace.cuda.inductor import inductor_without_gpu
from memest.trace.cuda.inductor_code import Code, CodeWatch
from memest.trace.loop_model import TrainingLoop, loss_region, prepare_model
from memest.trace.loops import to_items
from memest.workspaces.operator_call import GpuTraits

__all__ = ["compile_model"]


@contextmanager
def compile_model(
    run: TrainingLoop, setup: Setup, gpu: GpuTraits, *, training: bool = True
) -> Iterator[None]:
    """Have a run call its model compiled, where the setup says so.

    Args:
        run: what the loops run; its ``compiled_model`` is set while this is open.
        setup: the run's options.
        gpu: for which Inductor writes code.
        training: False for an evaluation, which has no backward.

    Raises:
        TraceError: Dynamo, AOTAutograd or Inductor cannot compile the model for tensors without
            values.
    """
    if not setup.torch_compile:
        yield
        return
    import torch._dynamo as dynamo

    check_release(setup.software.torch)
    watch = CodeWatch()
    codes: list[Code] = []

    def add_code(code: Code) -> None:
        code.watch = watch
        codes.append(code)

    dynamo.reset()
    dynamo.utils.counters["graph_break"].clear()
    with inductor_without_gpu(gpu, add_code) as backend:
        model = torch.compile(prepare_model(run), backend=backend, dynamic=False)
        run.compiled_model = without_modes(model)
        try:
            with _disable_current_modes():
                _compile(lambda: _step(run, training=training))
            breaks = _graph_breaks(dynamo)
            if not codes:
                raise TraceError(
                    "--torch-compile: Dynamo compiled nothing of this model, so the run would be "
                    f"eager{_first_break(breaks)}. Leave --torch-compile out."
                )
            _say(run, codes, breaks)
            watch.recorder = run.recorder
            with torch.compiler.set_stance("fail_on_recompile"):
                yield
        finally:
            run.compiled_model = None
            dynamo.reset()


def _compile(step: Callable[[], None]) -> None:
    """Compile by running, until a run compiles nothing more."""
    log_level = logging.root.manager.disable
    logging.disable(max(log_level, logging.WARNING))  # what compilers say of their work
    try:
        step()
        step()
    except MemestError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        text = (str(cause).strip().splitlines() or ["no message"])[0].rstrip(".")
        if "BF16 is not supported" in text:
            raise ConfigError(
                "--torch-compile: Inductor leaves models in bfloat16 as they are on GPUs before "
                "Ampere, so the run would be eager. Leave --torch-compile out, or take float16."
            ) from error
        raise TraceError(
            "--torch-compile: the model cannot be compiled for tensors without values: "
            f"{type(cause).__name__}: {text}. Leave --torch-compile out."
        ) from error
    finally:
        logging.disable(log_level)


def _step(run: TrainingLoop, *, training: bool) -> None:
    """One micro-step that nobody records."""
    batch = run.make_batch()
    inputs = dict(batch)
    if run.counts_items and "labels" in batch:
        inputs["num_items_in_batch"] = to_items(run, [batch])
    with torch.set_grad_enabled(training), loss_region(run):
        assert run.compiled_model is not None
        outputs = run.compiled_model(**inputs)
        loss = run.loss_of(outputs, inputs)
    del outputs
    if training:
        loss.backward()
        for parameter in run.model.parameters():
            parameter.grad = None


def _graph_breaks(dynamo: Any) -> list[str]:
    return [str(reason).partition("\n")[0] for reason in dynamo.utils.counters["graph_break"]]


def _first_break(breaks: list[str]) -> str:
    return f" ({breaks[0]})" if breaks else ""


def _say(run: TrainingLoop, codes: list[Code], breaks: list[str]) -> None:
    kernels = sum(code.kernels for code in codes)
    graphs = "1 graph" if len(codes) == 1 else f"{len(codes)} graphs"
    text = f"torch.compile: {graphs} with {kernels} Triton kernels, as Inductor of torch "
    text += f"{torch.__version__.partition('+')[0]} schedules them for this GPU with static shapes"
    if breaks:
        where = "one place" if len(breaks) == 1 else f"{len(breaks)} places, first"
        text += f"; the model breaks at {where}: {breaks[0]}"
    run.recorder.note(text)
    run.recorder.note(
        "torch.compile: what is saved for backward is exact; temporaries are approximate where "
        "Inductor decides by measuring on the GPU (padding of matmuls, buffers of its measurements "
        "at the first step): the upper end of the range covers them. Dynamic shapes, once a second "
        "size of batch is met, are not modelled."
    )
