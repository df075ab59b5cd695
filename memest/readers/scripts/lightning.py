"""Lightning: what its Trainer is told, and whether a module is a model and nothing besides.

A module is priced where its ``training_step`` calls the model that it loads and returns the loss
of that. Whatever else it has or does is named as not read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from memest.readers.scripts.calling import root_of
from memest.readers.scripts.document import CallDocument
from memest.readers.scripts.expressions import as_text
from memest.readers.scripts.found import Found
from memest.readers.scripts.things import Call, Function, Unknown, Value
from memest.readers.values import Bounded, Saving

__all__ = ["MODULE_METHODS", "LightningRun", "lightning_of"]

_LIBRARIES = ("lightning", "pytorch_lightning")
_PRECISIONS = {
    "32-true": "fp32", "32": "fp32", "16-mixed": "fp16", "16": "fp16", "bf16-mixed": "bf16",
    "bf16": "bf16",
}  # fmt: skip
_HALVES = {"16-true": "float16", "bf16-true": "bfloat16"}
_ONE_GPU = ("auto", "single_device")
_DDP = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")
_AVERAGES = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")
MODULE_METHODS = frozenset(("log", "log_dict", "print", "save_hyperparameters"))
"""Methods of Lightning's modules that keep a number, or nothing."""
_METHODS = frozenset(
    """__init__ forward training_step configure_optimizers validation_step test_step predict_step
    train_dataloader val_dataloader test_dataloader predict_dataloader prepare_data setup
    on_train_epoch_start on_train_epoch_end on_validation_epoch_start on_validation_epoch_end
    on_test_epoch_start on_test_epoch_end""".split()
)
"""Methods of a module that change nothing of a training step, or are read here."""


@dataclass(frozen=True, slots=True)
class LightningRun:
    """A module and the Trainer that fits it.

    Attributes:
        trainer: the call that makes the Trainer.
        fit: the call that trains.
        module: the call that makes the module.
        model: what the module calls its model; empty where it has none that is loaded.
    """

    trainer: Call
    fit: Call
    module: Call
    model: str

    def read(self, document: CallDocument) -> None:
        """Put down what the Trainer is told."""
        trainer = self.trainer
        self._precision(document)
        for key, name in (
            ("accumulate_grad_batches", "grad_accum"),
            ("gradient_clip_val", "max_grad_norm"),
        ):
            value = trainer.keywords.get(key)
            if value is not None and value.data is not None and not self._clips_values(key):
                document.put(name, value, trainer)
        self._gpus(document)
        if "**" in trainer.keywords:
            document.miss(trainer.line, "Trainer", "further arguments cannot be told: **")
        for each in _listed(trainer.keywords.get("plugins")):
            document.miss(trainer.line, "plugins", f"{_name_of(each)} is not read")
        for each in _listed(trainer.keywords.get("callbacks")):
            if isinstance(each, Call) and each.name in _AVERAGES:
                document.miss(each.line, each.name, "averages of the weights, a copy of them")
            elif not isinstance(each, Call) or each.subclass:
                document.miss(trainer.line, "callbacks", f"{_name_of(each)} is not read")

    def _clips_values(self, key: str) -> bool:
        """Whether gradients are clipped one by one, which takes no memory."""
        how = self.trainer.keywords.get("gradient_clip_algorithm")
        return key == "gradient_clip_val" and how is not None and how.data == "value"

    def _precision(self, document: CallDocument) -> None:
        value = self.trainer.keywords.get("precision")
        if value is None or value.data is None:
            return
        name = str(value.data)
        if name in _PRECISIONS:
            document.put("precision", value.with_data(_PRECISIONS[name]), self.trainer)
        elif name in _HALVES:
            document.put("dtype", value.with_data(_HALVES[name]), self.trainer)
        else:
            unknown = value.data if isinstance(value.data, Unknown) else Unknown(repr(value.data))
            document.put("precision", value.with_data(unknown), self.trainer)

    def _gpus(self, document: CallDocument) -> None:
        """How many GPUs share the work, and how."""
        trainer = self.trainer
        strategy = trainer.keywords.get("strategy", Value("auto"))
        name = strategy.data if isinstance(strategy.data, str) else _name_of(strategy.data)
        if name not in (*_ONE_GPU, *_DDP):
            why = f"Lightning's {name} is not read: priced is DDP; --fsdp or --zero say it"
            document.miss(trainer.line, "strategy", Saving(why))
        number = 1
        for key in ("devices", "num_nodes"):
            value = trainer.keywords.get(key)
            data = 1 if value is None or value.data is None else value.data
            count = len(data) if isinstance(data, list) else data
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                why = Bounded("as many as there are: one is priced; --num-gpus says it")
                document.miss(trainer.line, key, why)
                return
            number *= count
        if number > 1:
            document.say("num_gpus", number, trainer.line)

    def extras(self) -> Iterator[tuple[int, str, str]]:
        """What the module has or does besides its model: line, what, and why it matters."""
        module = self.module
        if not self.model:
            yield module.line, module.subclass, f"a module of the script's own ({module.subclass})"
            return
        for name, value in module.attributes.items():
            if name == "automatic_optimization" and value.data is False:
                yield module.line, name, "an optimization of the script's own is not read"
            if name != self.model and not isinstance(value.data, Function) and _holds(value.data):
                yield module.line, f"{module.subclass}.{name}", "what it adds is not read"
        for name in sorted(module.methods - _METHODS):
            yield module.line, f"{module.subclass}.{name}", "what it changes of a step is not read"
        forwards = {f"self.{self.model}"}
        forward = _body(module, "forward")
        if forward and self._is_passed_on(forward):
            forwards.add("self")
        for statement in _body(module, "training_step"):
            if not _is_plain(statement, forwards):
                words = as_text(statement)
                yield statement.lineno, "training_step", f"{words}: what it takes is not read"

    def _is_passed_on(self, forward: list[ast.stmt]) -> bool:
        last = forward[-1]
        call = last.value if isinstance(last, ast.Return) and len(forward) == 1 else None
        return isinstance(call, ast.Call) and as_text(call.func) == f"self.{self.model}"


def lightning_of(found: Found) -> LightningRun | None:
    """The module and the Trainer of Lightning that fits it; None where there are none."""
    for fit in found.named("fit"):
        trainer, module = root_of(fit.receiver), fit.argument(0, "model")
        made = None if module is None else root_of(module.data)
        if not isinstance(trainer, Call) or not isinstance(made, Call) or not made.methods:
            continue
        if trainer.library in _LIBRARIES and trainer.name == "Trainer":
            loads = {
                name: value
                for name, value in made.attributes.items()
                if found.load is not None and root_of(value.data) is found.load
            }
            return LightningRun(trainer, fit, made, next(iter(loads), ""))
    return None


def _holds(data: object) -> bool:
    """Whether what a module keeps may have weights, or memory of its own."""
    if not isinstance(data, Call):
        return isinstance(data, list) and any(map(_holds, data))
    is_loss = data.library == "torch" and data.name.endswith("Loss")
    return not (is_loss or data.library == "torchmetrics" or data.name == "save_hyperparameters")


def _body(module: Call, method: str) -> list[ast.stmt]:
    """The statements of a method, without its words."""
    value = module.attributes.get(method)
    function = None if value is None else value.data
    node = function.node if isinstance(function, Function) else None
    if node is None or isinstance(node, ast.Lambda):
        return []
    is_text = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
    return node.body[is_text:]


def _is_plain(statement: ast.stmt, forwards: set[str]) -> bool:
    """Whether a statement of a step calls the model, names its loss, logs or returns it."""
    if isinstance(statement, ast.Return):
        value = statement.value
        if isinstance(value, ast.Dict):
            keys = [key.value for key in value.keys if isinstance(key, ast.Constant)]
            return keys == ["loss"] and _is_loss(value.values[0], forwards)
        return value is not None and _is_loss(value, forwards)
    if isinstance(statement, ast.Assign):
        named = all(isinstance(target, ast.Name) for target in statement.targets)
        return named and _is_loss(statement.value, forwards)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        return as_text(call.func) in ("self.log", "self.log_dict") and not any(
            isinstance(each, ast.Call) for part in ast.iter_child_nodes(call)
            for each in ast.walk(part)
        )  # fmt: skip
    return isinstance(statement, ast.Pass)


def _is_loss(node: ast.expr, forwards: set[str]) -> bool:
    """Whether an expression is a call of the model with a batch, or a part of what it returned."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute) and node.attr != "loss":
            return False
        node = node.value
    if isinstance(node, ast.Call):
        return as_text(node.func) in forwards and not any(
            isinstance(each, ast.Call)
            for part in (*node.args, *(word.value for word in node.keywords))
            for each in ast.walk(part)
        )
    return isinstance(node, ast.Name)


def _listed(value: Value | None) -> list[object]:
    if value is None or value.data is None:
        return []
    return value.data if isinstance(value.data, list) else [value.data]


def _name_of(data: object) -> str:
    if isinstance(data, Call):
        return data.subclass or data.name
    return data.why if isinstance(data, Unknown) else str(data)
