"""Lightning: what its Trainer is told, and whether a module is a model and nothing besides.

A module is priced where its ``training_step`` calls the model that it loads and returns the loss
of that, or the cross entropy of what a model of images says. What is known to change nothing is
listed here; whatever else it has or does is named.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from memest.readers.scripts.calling import root_of
from memest.readers.scripts.document import CallDocument
from memest.readers.scripts.expressions import as_text
from memest.readers.scripts.found import Found
from memest.readers.scripts.own_module import typed_for
from memest.readers.scripts.things import Call, Unknown, Value
from memest.readers.scripts.vision import is_vision_load
from memest.readers.values import FACTORY_SAYS_IT, Either

__all__ = ["MODULE_METHODS", "Extra", "LightningRun", "lightning_of", "put_gpus", "put_precision"]

_LIBRARIES = ("lightning", "pytorch_lightning")
_PRECISIONS = {
    "32-true": "fp32", "32": "fp32", "16-mixed": "fp16", "16": "fp16", "bf16-mixed": "bf16",
    "bf16": "bf16",
}  # fmt: skip
_HALVES = {"16-true": "float16", "bf16-true": "bfloat16"}
_CALLBACKS = frozenset(
    """ModelCheckpoint EarlyStopping LearningRateMonitor RichProgressBar TQDMProgressBar
    RichModelSummary ModelSummary Timer DeviceStatsMonitor LearningRateFinder""".split()
)
"""Callbacks that keep no tensors."""
_METRICS = frozenset(
    f"{kind}{name}"
    for kind in ("", "Binary", "Multiclass", "Multilabel")
    for name in ("Accuracy", "F1Score", "Precision", "Recall", "ConfusionMatrix", "MeanMetric")
)
"""Metrics that count, and keep no predictions."""
_CHOOSES = frozenset(("argmax", "eq", "size"))
"""Methods of tensors that say which class is chosen, or how many there are."""
_COUNTS = frozenset(("sum", "mean", "float", "item", "detach"))
"""Methods that count what those say; of all that a model says they would copy or reduce it."""
_CROSS_ENTROPIES = (
    "F.cross_entropy", "functional.cross_entropy", "nn.functional.cross_entropy",
    "torch.nn.functional.cross_entropy",
)  # fmt: skip
MODULE_METHODS = frozenset(("log", "log_dict", "print", "save_hyperparameters"))
"""Methods of Lightning's modules that keep a number, or nothing."""
_METHODS = frozenset(
    """__init__ forward training_step configure_optimizers validation_step test_step predict_step
    train_dataloader val_dataloader test_dataloader predict_dataloader prepare_data""".split()
)
"""Methods of a module that are read here, or have no part in a training step."""
_DTYPES = ("dtype", "torch_dtype", "quantization_config", "load_in_4bit", "load_in_8bit")
"""Arguments of a load that say what weights are stored in."""


class Extra(NamedTuple):
    """Something of a module that is not priced.

    Attributes:
        line: where it stands.
        what: its name.
        why: it matters.
    """

    line: int
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class LightningRun:
    """A module and the Trainer that fits it.

    Attributes:
        found: the script.
        trainer: the call that makes the Trainer.
        fit: the call that trains.
        module: the call that makes the module.
        model: what the module calls its model; empty where it has none that is loaded.
    """

    found: Found
    trainer: Call
    fit: Call
    module: Call
    model: str

    @property
    def loader(self) -> Call | Unknown:
        """The loader that trains, or why it cannot be told."""
        given = self.fit.argument(1, "train_dataloaders", "datamodule")
        call = None if given is None else root_of(given.data)
        if isinstance(call, Call) and call.name == "DataLoader":
            return call
        unknown = Unknown("the loader that fit is given", self.fit.line)
        if given is not None and not (isinstance(call, Call) and call.methods):
            return unknown  # nor is it a module of data that the script defines
        spans = [
            (node.lineno, node.end_lineno or node.lineno)
            for statement in self.found.source.body
            for node in ast.walk(statement)
            if isinstance(node, ast.FunctionDef) and node.name == "train_dataloader"
        ]
        every = list(self.found.named("DataLoader"))
        inside = [
            each for each in every if any(first <= each.line <= last for first, last in spans)
        ]
        loaders = inside or every
        return loaders[0] if len(loaders) == 1 else unknown

    def read(self, document: CallDocument) -> None:
        """Put down what the Trainer is told."""
        trainer = self.trainer
        put_precision(document, trainer, self.found)
        accumulates = trainer.keywords.get("accumulate_grad_batches", Value(1))
        if isinstance(accumulates.data, dict):
            why = "it changes in the training: --grad-accum says the most"
            document.miss(trainer.line, "grad_accum", why)
        else:
            document.put("grad_accum", accumulates, trainer)
        self._clipping(document)
        put_gpus(document, trainer)
        if "**" in trainer.keywords:
            document.miss(trainer.line, "Trainer", Either("further arguments cannot be told: **"))
        for each in _listed(trainer.keywords.get("plugins")):
            document.miss(trainer.line, "plugins", f"{_name_of(each)} is not read")
        for each in _listed(trainer.keywords.get("callbacks")):
            if not isinstance(each, Call) or each.subclass or each.name not in _CALLBACKS:
                document.miss(trainer.line, "callbacks", f"{_name_of(each)} is not read")
        for call in self.found.calls:
            if call.library in _LIBRARIES and call.name.endswith(("Averaging", "Pruning")):
                document.miss(call.line, call.name, "further copies of the weights")

    def _clipping(self, document: CallDocument) -> None:
        """Clipping to a norm; gradients that are clipped one by one take no memory."""
        value = self.trainer.keywords.get("gradient_clip_val", Value(None))
        how = self.trainer.keywords.get("gradient_clip_algorithm", Value("norm"))
        if value.data is not None and how.data != "value":
            document.put("max_grad_norm", value, self.trainer)

    def extras(self) -> Iterator[Extra]:
        """What the module has or does besides its model."""
        module, name = self.module, self.module.subclass
        node = self._class()
        if node is None or not self.model:
            typed = typed_for(module, self.found.source)
            why = f"a module of the script's own ({name}) is not read; {typed}{FACTORY_SAYS_IT}"
            yield Extra(module.line, name, why)
            return
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef) and not statement.decorator_list:
                if statement.name not in _METHODS:
                    what = f"{name}.{statement.name}"
                    yield Extra(statement.lineno, what, "what it changes of a step is not read")
            elif not _is_text(statement):
                yield Extra(statement.lineno, name, f"{_start(statement)}: it is not read")
        methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        for statement in _body(methods.get("__init__")):
            if not self._is_plain(statement):
                yield Extra(
                    statement.lineno, name, f"{_start(statement)}: what it adds is not read"
                )
        yield from self._of_step(methods)
        for method in ("validation_step", "test_step"):
            if ".append(" in "".join(map(as_text, _body(methods.get(method)))):
                yield Extra(methods[method].lineno, method, "what an evaluation keeps")

    def _class(self) -> ast.ClassDef | None:
        """The statement that defines the module, of Lightning's base alone."""
        nodes = [
            node
            for statement in self.found.source.body
            for node in ast.walk(statement)
            if isinstance(node, ast.ClassDef) and node.name == self.module.subclass
        ]
        own = self.module.name == "LightningModule" and self.module.library in _LIBRARIES
        bases = [as_text(base).rpartition(".")[2] for node in nodes for base in node.bases]
        is_plain = len(nodes) == 1 and bases == ["LightningModule"] and not nodes[0].decorator_list
        return nodes[0] if own and is_plain else None

    def _is_plain(self, statement: ast.stmt) -> bool:
        """Whether a statement of ``__init__`` adds the model, or nothing."""
        words = as_text(statement)
        if isinstance(statement, ast.Pass) or _is_text(statement):
            return True
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            # what is called of the model is read where models are
            starts = ("super().__init__(", "self.save_hyperparameters(", f"self.{self.model}.")
            return words.startswith(starts)
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return False
        target = statement.targets[0]
        if isinstance(target, ast.Name):
            nodes = ast.walk(statement.value)  # a name alone adds nothing
            return not any(isinstance(each, ast.Name) and each.id == "self" for each in nodes)
        if words.startswith(f"self.{self.model}."):
            return True  # what is put into a model is read elsewhere
        name = target.attr if isinstance(target, ast.Attribute) else ""
        value = self.module.attributes.get(name)
        if as_text(target) != f"self.{name}" or value is None:
            return False
        if name == "automatic_optimization":
            return value.data is True
        return name == self.model or _is_small(value.data)

    def _of_step(self, methods: dict[str, ast.FunctionDef]) -> Iterator[Extra]:
        step = self._step(methods.get("training_step"))
        forward = _body(methods.get("forward"))
        last = forward[-1] if len(forward) == 1 else None
        passed = last.value if isinstance(last, ast.Return) else None
        if isinstance(passed, ast.Call) and step.is_forward(passed):
            step.forwards.add("self")
        body = _body(methods.get("training_step"))
        if not body:
            yield Extra(self.module.line, "training_step", "none that can be read")
        for statement in body:
            if not step.is_plain(statement):
                why = f"{_start(statement)}: what it takes is not read"
                yield Extra(statement.lineno, "training_step", why)
        if body and step.num_forwards != 1:
            why = f"{step.num_forwards} forwards of the model: one is priced"
            yield Extra(body[0].lineno, "training_step", why)

    def _step(self, method: ast.FunctionDef | None) -> _Step:
        """What the statements of ``training_step`` may call."""
        attributes = {
            f"self.{name}": value.data
            for name, value in self.module.attributes.items()
            if isinstance(value.data, Call)
        }
        load = self.found.load
        losses = set(_CROSS_ENTROPIES)
        losses.update(name for name, made in attributes.items() if made.name == "CrossEntropyLoss")
        return _Step(
            {f"self.{self.model}"},
            batch=method.args.args[1].arg if method and len(method.args.args) > 1 else "",
            losses=losses if load is not None and is_vision_load(load) else set(),
            metrics={name for name, made in attributes.items() if made.name in _METRICS},
        )


def lightning_of(found: Found) -> LightningRun | None:
    """The module and the Trainer of Lightning that fits it; None where there are none."""
    for fit in found.named("fit"):
        trainer, module = root_of(fit.receiver), fit.argument(0, "model")
        made = None if module is None else root_of(module.data)
        if not isinstance(trainer, Call) or not isinstance(made, Call) or not made.methods:
            continue
        if trainer.library in _LIBRARIES and trainer.name == "Trainer":
            names = [
                name
                for name, value in made.attributes.items()
                if found.load is not None and root_of(value.data) is found.load
            ]
            return LightningRun(found, trainer, fit, made, names[0] if len(names) == 1 else "")
    return None


def put_precision(document: CallDocument, trainer: Call, found: Found) -> None:
    """``precision=`` of a Trainer, or of Fabric."""
    value = trainer.keywords.get("precision")
    if value is None or value.data is None:
        return
    name, load = str(value.data), found.load
    if name in _PRECISIONS:
        document.put("precision", value.with_data(_PRECISIONS[name]), trainer)
    elif name not in _HALVES:
        unknown = value.data if isinstance(value.data, Unknown) else Unknown(repr(value.data))
        document.put("precision", value.with_data(unknown), trainer)
    elif found.adapts or (load is not None and _says_dtype(load)):
        why = f"all of the module becomes {_HALVES[name]}, whatever dtype it is loaded in"
        document.miss(trainer.line, "precision", f"{why}: priced without; --dtype says it")
    else:
        document.put("dtype", value.with_data(_HALVES[name]), trainer)


def put_gpus(document: CallDocument, trainer: Call) -> None:
    """How many GPUs share the work."""
    accelerator = trainer.keywords.get("accelerator", Value("auto")).data
    if accelerator not in ("auto", "gpu", "cuda"):
        why = "priced is a GPU of NVIDIA's"
        document.miss(trainer.line, "accelerator", f"{_name_of(accelerator)}: {why}")
    number = 1
    for key in ("devices", "num_nodes"):
        data = trainer.keywords.get(key, Value(1)).data
        count = _count(data)
        if count is None:
            why = "as many GPUs as there are: one is priced; --num-gpus says it"
            document.miss(trainer.line, "num_gpus", why)
            return
        number *= count
    if number > 1:
        document.say("num_gpus", number, trainer.line)


class _Step:
    """The statements of a ``training_step``, one after the other.

    Args:
        forwards: what calls the model.
        batch: what the method calls its batch.
        losses: functions whose loss is the one that is priced.
        metrics: what counts hits.
    """

    def __init__(
        self, forwards: set[str], *, batch: str, losses: set[str], metrics: set[str]
    ) -> None:
        self.forwards = forwards
        self.num_forwards = 0
        self._batch = batch
        self._loss_functions = losses
        self._metrics = metrics
        self._outputs: set[str] = set()
        self._losses: set[str] = set()
        self._numbers: set[str] = set()

    def is_plain(self, statement: ast.stmt) -> bool:
        """Whether a statement calls the model, names its loss, logs or returns it."""
        if isinstance(statement, ast.Return):
            value = statement.value
            if isinstance(value, ast.Dict) and len(value.keys) == 1:
                key = value.keys[0]
                is_named = isinstance(key, ast.Constant) and key.value == "loss"
                value = value.values[0] if is_named else None
            return value is not None and self._is_loss(value)
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
            if self._is_of_batch(value) and isinstance(target, (ast.Name, ast.Tuple)):
                return all(isinstance(each, ast.Name) for each in getattr(target, "elts", ()))
            if not isinstance(target, ast.Name):
                return False
            if self._is_loss(value):
                self._losses.add(target.id)
                return True
            if self._is_outputs(value):
                self._outputs.add(target.id)
                return True
            if self._is_number(value):
                self._numbers.add(target.id)
                return True
            return False
        return isinstance(statement, ast.Pass) or self._logs(statement)

    def _is_of_batch(self, node: ast.expr) -> bool:
        """Whether it is the batch, or parts of it."""
        if isinstance(node, ast.Tuple):
            return all(map(self._is_of_batch, node.elts))
        if isinstance(node, (ast.Subscript, ast.Attribute)):
            return self._is_of_batch(node.value)
        return isinstance(node, ast.Name) and node.id == self._batch

    def is_forward(self, node: ast.Call) -> bool:
        """Whether a call is of the model, with parts of a batch."""
        given = (*node.args, *(word.value for word in node.keywords))
        return as_text(node.func) in self.forwards and all(
            isinstance(each, (ast.Name, ast.Subscript, ast.Starred)) for each in given
        )

    def _is_outputs(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call) and self.is_forward(node):
            self.num_forwards += 1
            return True
        return isinstance(node, ast.Name) and node.id in self._outputs

    def _is_loss(self, node: ast.expr) -> bool:
        """Whether it is the loss of what the model returned."""
        if isinstance(node, ast.Name):
            return node.id in self._losses
        if isinstance(node, ast.Call) and as_text(node.func) in self._loss_functions:
            labels = all(isinstance(each, (ast.Name, ast.Subscript)) for each in node.args[1:])
            return bool(node.args) and labels and self._is_outputs(node.args[0])
        if isinstance(node, ast.Attribute) and node.attr == "loss":
            return self._is_outputs(node.value)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return node.slice.value in ("loss", 0) and self._is_outputs(node.value)
        return False

    def _logs(self, statement: ast.stmt) -> bool:
        """Whether numbers are logged that are there already."""
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or as_text(call.func) not in (
            "self.log",
            "self.log_dict",
        ):
            return False
        given = [*call.args, *(word.value for word in call.keywords)]
        parts = [
            part
            for each in given
            for part in ([*each.keys, *each.values] if isinstance(each, ast.Dict) else [each])
        ]
        return all(isinstance(part, ast.Constant) or self._is_number(part) for part in parts)

    def _is_number(self, node: ast.expr | None) -> bool:
        """Whether it is the loss, or counts what the model said."""
        if node is None:
            return False
        if isinstance(node, ast.Name) and node.id in self._numbers:
            return True
        return self._counts(node) or (not isinstance(node, ast.Call) and self._is_loss(node))

    def _counts(self, node: ast.expr) -> bool:
        """Whether it is hits among what the model said: numbers, and one for each sample."""
        if isinstance(node, ast.Compare):
            return all(map(self._counts_or_names, (node.left, *node.comparators)))
        if isinstance(node, ast.BinOp):
            return all(map(self._counts_or_names, (node.left, node.right)))
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        of_torch = as_text(node.func.value) == "torch" and bool(node.args)
        counted = node.args[0] if of_torch else node.func.value
        if as_text(node.func) in self._metrics:
            return all(map(self._counts_or_names, node.args))
        if node.func.attr in _CHOOSES:
            return self._counts_or_names(counted)
        return node.func.attr in _COUNTS and self._counts(counted)

    def _counts_or_names(self, node: ast.expr) -> bool:
        has_calls = any(isinstance(each, ast.Call) for each in ast.walk(node))
        return not has_calls or self._counts(node)


def _is_small(data: object) -> bool:
    """Whether what a module keeps has no weights, and no memory to speak of."""
    if data is None or isinstance(data, (str, int, float)):
        return True
    if not isinstance(data, Call):
        return False
    is_loss = data.library == "torch" and data.name.endswith("Loss")
    is_metric = data.library == "torchmetrics" and data.name in _METRICS
    return is_loss or is_metric or data.maker.endswith(("Tokenizer", "Processor"))


def _says_dtype(load: Call) -> bool:
    return not {*load.keywords}.isdisjoint(_DTYPES)


def _body(function: ast.FunctionDef | None) -> list[ast.stmt]:
    """The statements of a method, without its words."""
    if function is None:
        return []
    return function.body[_is_text(function.body[0]) :]


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _start(statement: ast.stmt) -> str:
    """The first line of a statement."""
    return as_text(statement).partition("\n")[0]


def _count(data: object) -> int | None:
    """How many devices ``devices`` stands for; None for as many as there are."""
    if isinstance(data, str) and data.replace(",", "").strip().isdigit():
        data = int(data) if data.isdigit() else [each for each in data.split(",") if each]
    if isinstance(data, list):
        return len(data) or None
    is_number = isinstance(data, int) and not isinstance(data, bool) and data > 0
    return data if isinstance(data, int) and is_number else None


def _listed(value: Value | None) -> list[object]:
    if value is None or value.data is None:
        return []
    return value.data if isinstance(value.data, list) else [value.data]


def _name_of(data: object) -> str:
    if isinstance(data, Call):
        return data.subclass or data.name
    return data.why if isinstance(data, Unknown) else str(data)
