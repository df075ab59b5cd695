"""``memest.measure``: a training loop of one's own under watch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from memest.calibration.live import counters
from memest.calibration.live.watch import Watch, WatchedRun, logger
from memest.config.inputs import ModuleInputs, module_inputs_of
from memest.config.options import setup_from_options
from memest.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["Measure", "measure"]

_OPTIMIZERS = {
    "AdamW": ("adamw_torch", "adamw_torch_fused", "adamw_torch_loop"),
    "Adam": ("adam", "adam_fused", "adam_loop"),
    "SGD": ("sgd", "", "sgd_loop"),
    "RMSprop": ("rmsprop", "", "rmsprop_loop"),
    "Adagrad": ("adagrad", "", "adagrad_loop"),
    "Adadelta": ("adadelta", "", ""),
    "Adamax": ("adamax", "", ""),
    "NAdam": ("nadam", "", ""),
    "RAdam": ("radam", "", ""),
    "Adafactor": ("adafactor_torch", "", "adafactor_torch"),
}
"""Classes of torch: as torch chooses on CUDA (foreach), fused, one parameter after the other."""


def measure(
    model: torch.nn.Module,
    optimizer: Any = None,
    *,
    inputs: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | str | None = None,
    step_fn: Callable[..., Any] | None = None,
    dims: Mapping[str, int] | Sequence[str] | None = None,
    gpu: str | None = None,
    gpu_memory: int | str | None = None,
    strict: bool = False,
    store: str | Path | bool | None = None,
    history: bool = False,
    **options: Any,
) -> Measure:
    """Watch a training loop: predicted before its first step, measured while it trains.

    Args:
        model: live; wrapped or not, on its device.
        optimizer: a step of it ends a step of the loop, and it names ``optim`` where options do
            not. Without one, call :meth:`Measure.step`.
        inputs: as for :func:`memest.estimate`. Left out, the shapes of the first batch that the
            model is called with are taken, right before it runs.
        loss: as for :func:`memest.estimate`.
        step_fn: as for :func:`memest.estimate`.
        dims: as for :func:`memest.estimate`.
        gpu: whose verdict is asked for; left out, the GPU of this process.
        gpu_memory: bytes of it.
        strict: raise where the run will not fit, or cannot be predicted.
        store: file that the record goes to; left out, the store of ``memest calibrate``; False
            keeps none.
        history: keep the allocator's own history of the first three steps, which takes host memory
            and time: :attr:`Measure.by_category` is the allocated difference by category then.
        **options: what :func:`memest.estimate` takes: ``bf16``, ``grad_accum``, ``checkpointing``.

    Raises:
        MemestError: under ``strict``, when the block is entered or at its first batch:
            :class:`DoesNotFitError`, or whatever keeps the run from being predicted.

    Example:
        >>> import torch, memest
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with memest.measure(model, optimizer, inputs="input:float32[B,8]", store=False) as run:
        ...     for _ in range(3):
        ...         model(torch.zeros(8, 8)).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> run.prediction.model.parameters
        9
    """
    module_inputs = module_inputs_of(inputs, loss, step_fn, dims)
    watch = Watch(
        model,
        counters.open_counters(),
        gpu=gpu,
        gpu_memory=gpu_memory,
        strict=strict,
        store=store,
        history=history,
    )
    return Measure(watch, module_inputs, optimizer, options)


class Measure(WatchedRun):
    """A loop under watch; a context manager.

    A body that raises leaves its record too: out of memory is a result.
    """

    def __init__(
        self, watch: Watch, module_inputs: ModuleInputs, optimizer: Any, options: dict[str, Any]
    ) -> None:
        self._watch = watch
        self._feed = module_inputs
        self._optimizer = optimizer
        self._options = options
        self._handles: list[Any] = []
        self._has_predicted = False

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far."""
        return self._watch.num_steps

    def logs(self) -> dict[str, int]:
        """All figures under ``memest/...``, for a tracker: ``wandb.log(run.logs())``."""
        return self._watch.logs()

    def step(self) -> None:
        """A step of the loop is over, where no optimizer says so."""
        self._watch.step_done()

    def __enter__(self) -> Measure:
        module = self._module
        has_config = hasattr(getattr(module, "config", None), "model_type")
        if self._feed.inputs is not None or (has_config and "seq_len" in self._options):
            self._predict(self._feed)
        elif hasattr(module, "register_forward_pre_hook"):
            self._handles.append(
                module.register_forward_pre_hook(self._first_call, with_kwargs=True)
            )
        else:
            self._watch.cannot_predict(ConfigError("inputs= is missing: nothing says the shapes."))
        hook = getattr(self._inner_optimizer, "register_step_post_hook", None)
        if hook is not None:
            self._handles.append(hook(lambda *_: self.step()))
        self._watch.start()
        if self._watch.counters is None:
            logger.warning("memest: no CUDA device here, so there is nothing to measure.")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watch.close(error)
        if self._watch.attribution is not None:
            logger.info("memest: %s", self._watch.attribution)
        self.warn_of_growth()

    @property
    def _module(self) -> Any:
        """The model without what DDP puts around it."""
        model = self._watch.model
        return model.module if type(model).__name__ == "DistributedDataParallel" else model

    @property
    def _inner_optimizer(self) -> Any:
        inner = getattr(self._optimizer, "optimizer", None)
        return self._optimizer if inner is None else inner

    def _first_call(self, module: Any, args: Any, kwargs: Any) -> None:
        """The shapes that the model is called with first; it runs right after this."""
        if self._has_predicted or not module.training:
            return
        self._handles.pop(0).remove()
        names = list(inspect.signature(module.forward).parameters)
        batch = dict(zip(names, args, strict=False)) | dict(kwargs)
        inputs = {name: _shape(value) for name, value in batch.items() if value is not None}
        precision = _region(module)
        if precision and not {"bf16", "fp16", "precision"} & self._options.keys():
            self._options["precision"] = precision
        self._predict(ModuleInputs(inputs=inputs, loss=self._feed.loss, step_fn=self._feed.step_fn))

    def _predict(self, module_inputs: ModuleInputs) -> None:
        self._has_predicted = True
        try:
            options = dict(self._options)
            if self._optimizer is not None and "optim" not in options:
                options = {**_options_of_optimizer(self._optimizer), **options}
            options.setdefault("loop", "plain")
            setup = setup_from_options(**options)
        except Exception as error:  # noqa: BLE001 - a prediction must not end a training
            self._watch.cannot_predict(error)
            return
        self._watch.predict(setup, module_inputs, self._module)


def _region(module: Any) -> str:
    """The autocast region that a model is called in, empty outside of one."""
    import torch

    device = next((p.device.type for p in module.parameters()), "cuda")
    if not torch.is_autocast_enabled(device):
        return ""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(torch.get_autocast_dtype(device), "")


def _shape(value: Any) -> Any:
    """A batch without its numbers, which may be on a GPU; small integers keep theirs on the CPU."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and not value.is_floating_point():
            return value.detach()
        return torch.empty_like(value, device="meta", requires_grad=False)
    if isinstance(value, Mapping):
        return {name: _shape(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_shape(item) for item in value)
    return value


def _options_of_optimizer(optimizer: Any) -> dict[str, Any]:
    """The options of an estimate that name a live optimizer.

    Args:
        optimizer: of torch, perhaps wrapped by accelerate.

    Raises:
        ConfigError: one that the table does not have, or with settings that it has not.
    """
    wrapped = type(optimizer).__name__ == "AcceleratedOptimizer"
    inner = optimizer.optimizer if wrapped else optimizer
    kind = type(inner)
    names = _OPTIMIZERS.get(kind.__name__) if kind.__module__.startswith("torch.") else None
    group = getattr(inner, "defaults", {})
    if names is None:
        raise ConfigError(
            f"the optimizer {kind.__module__}.{kind.__name__} is none that memest knows by its "
            "class: name it with optim=, for example optim='adamw_8bit'."
        )
    usual, fused, loop = names
    name = fused if group.get("fused") else loop if group.get("foreach") is False else usual
    if kind.__name__ == "SGD" and group.get("momentum"):
        name = name.replace("sgd", "sgd_momentum")
    unpriced_settings = [n for n in ("amsgrad", "centered", "differentiable") if group.get(n)]
    if kind.__name__ == "RMSprop" and group.get("momentum"):
        unpriced_settings.append("momentum")
    if not name or unpriced_settings:
        what = ", ".join(unpriced_settings) or ("fused" if group.get("fused") else "foreach=False")
        raise ConfigError(
            f"{kind.__name__} with {what} is not priced: leave measure's prediction "
            "out, or name the nearest one with optim=."
        )
    decay = group.get("weight_decay")
    options = {"optim": name, "loop": "accelerate" if wrapped else "plain"}
    return options | ({} if decay is None else {"weight_decay": decay})
