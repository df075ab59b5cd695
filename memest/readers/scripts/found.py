"""What a script holds: the model that trains, who trains it, and the calls around both."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memest.errors import ConfigError
from memest.readers.scripts.calling import WRAPPERS, root_of
from memest.readers.scripts.calls import SCRIPT_LOOPS, TRAINERS, is_load, is_optimizer
from memest.readers.scripts.follow import Follower
from memest.readers.scripts.source import Source
from memest.readers.scripts.things import Call, Unknown, Value
from memest.readers.scripts.vision import HEADS, is_vision_load

__all__ = ["Found", "find"]

_MODULES = {"Module", "nn.Module", "torch.nn.Module"}
_USES = ("pipeline", "generate", "predict", "evaluate", "LLM")


_NAME = "pretrained_model_name_or_path"


_MAKES_OTHER_WEIGHTS = "dtype torch_dtype quantization_config load_in_4bit load_in_8bit".split()


def _is_copy(call: Call) -> bool:
    """Whether it copies the one thing that it is given, whole."""
    alone = len(call.arguments) == 1 and not call.keywords
    of_trl = call.name == "create_reference_model" and call.path.startswith("trl.")
    return alone and (call.path == "copy.deepcopy" or of_trl)


_CASTS = frozenset("half bfloat16 float double".split())


def _is_made_alike(one: Call, other: Call) -> bool:
    """Whether two calls make weights of the same dtypes."""
    kinds = [
        [call.keywords[key].data for key in _MAKES_OTHER_WEIGHTS if key in call.keywords]
        for call in (one, other)
    ]
    return kinds[0] == kinds[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a script holds.

    Attributes:
        source: its statements.
        calls: of libraries, in their order.
        gpu_questions: lines where the GPU's answer decides.
        loads: calls that make models.
        trainer: of transformers or TRL, None for a loop of the script's own.
        optimizers: that the script makes.
        model: what is trained, as the trainer or the optimizer has it.
        end: how many of the calls are made until the training ends.
    """

    source: Source
    calls: tuple[Call, ...]
    gpu_questions: tuple[int, ...]
    loads: tuple[Call, ...]
    trainer: Call | None
    optimizers: tuple[Call, ...]
    model: Any
    end: int

    @property
    def load(self) -> Call | None:
        """The call that makes the model that is trained, None where that cannot be told."""
        root = root_of(self.model)
        if isinstance(root, Call) and root in self.loads:
            return root
        if isinstance(root, Call) and root.methods:
            # a module of the script's own around a model
            inner = [each for each in self.loads if each.owner == root.subclass]
            return inner[0] if inner else None
        if isinstance(self.model, Unknown) or self.model is None:
            before = self.early(self.loads)
            return before[0] if len(before) == 1 else None
        return None

    @property
    def head(self) -> Call | None:
        """What takes the place of a vision model's last layer, ``model.fc = Linear(...)``."""
        if self.load is None or not is_vision_load(self.load):
            return None
        layers = [
            call.arguments[0].data
            for call in self.calls
            if call.path.startswith("=")
            and call.path[1:] in HEADS
            and root_of(call.receiver) is self.load
            and call.arguments
        ]
        last = layers[-1] if layers else None
        return last if isinstance(last, Call) and last.path == "torch.nn.Linear" else None

    @property
    def wrapper(self) -> Call | None:
        """The script's own module around the model, if that is what trains."""
        root = root_of(self.model)
        return root if isinstance(root, Call) and root.methods and root not in self.loads else None

    @property
    def reference(self) -> Call | None:
        """The call that makes what the trainer would make itself: its reference model."""
        if self.trainer is None or TRAINERS.get(self.trainer.name) not in ("dpo", "kto"):
            return None
        given, load = self.given_reference, self.load
        root = None if given is None else root_of(given.data)
        if self.adapts or load is None or not isinstance(root, Call):
            return None
        if any(call.name in _CASTS and root_of(call.receiver) is root for call in self.calls):
            return None
        if _is_copy(root):
            return root if root_of(root.arguments[0].data) is load else None
        if root not in self.loads:
            return None
        own, other = root.argument(0, _NAME), load.argument(0, _NAME)
        same = own is not None and other is not None and own.data == other.data
        return root if same and _is_made_alike(root, load) else None

    @property
    def given_reference(self) -> Value | None:
        """What a trainer is given as its reference model."""
        return None if self.trainer is None else self.trainer.argument(1, "ref_model")

    @property
    def name(self) -> Any:
        """What the model that is trained is loaded by; None where that cannot be told."""
        data = self.model
        if self.load is not None:
            first = self.load.argument(0, _NAME)
            data = None if first is None else first.data
        return data if isinstance(data, str) else None

    @property
    def other_trainers(self) -> tuple[Call, ...]:
        """Further trainers."""
        return tuple(each for each in self.calls if _trains(each) and each is not self.trainer)

    @property
    def adapts(self) -> bool:
        """Whether adapters are put beside the model."""
        return self.trainer_adapts or any(self.named("get_peft_model", "add_adapter"))

    @property
    def trainer_adapts(self) -> bool:
        """Whether the trainer puts them there."""
        config = self.trainer.keywords.get("peft_config") if self.trainer is not None else None
        return config is not None and config.data is not None

    def early(self, calls: tuple[Call, ...]) -> tuple[Call, ...]:
        """Those of some calls that are made until the training ends."""
        places = {id(call): place for place, call in enumerate(self.calls)}
        last = self.calls[self.end].loops[:1] if self.end < len(self.calls) else ()
        return tuple(
            call
            for call in calls
            # in the same loop it is made again before the next step
            if places.get(id(call), 0) <= self.end or (last and call.loops[:1] == last)
        )

    def named(self, *names: str) -> Iterator[Call]:
        """Calls by the last part of their path."""
        return (call for call in self.calls if call.name in names)

    def on_model(self, *names: str) -> Iterator[Call]:
        """Calls that are made of the model that is trained, or are given it."""
        roots = [each for each in (root_of(self.model), self.load) if each is not None]
        for call in self.named(*names):
            first = call.argument(0, "model", "module")
            of = root_of(call.receiver) if call.receiver is not None else None
            given = root_of(first.data) if first is not None else None
            same = any(of is root or given is root for root in roots)
            if same or (of is None and given is None) or self._is_only(of) or self._is_only(given):
                yield call

    def compiles(self, call: Call) -> bool:
        """Whether ``torch.compile`` is made of what trains, and its result is what trains."""
        of = root_of(call.arguments[0].data)
        if not (of in (root_of(self.model), self.load) or self._is_only(of)):
            return False
        data = self.model
        while self.trainer is not None and isinstance(data, Call) and data is not call:
            inner = data.argument(0, "model", "module") if data.name in WRAPPERS else None
            data = None if inner is None else inner.data
        return self.trainer is None or data is call or isinstance(self.model, Unknown)

    def _is_only(self, data: Any) -> bool:
        """Whether something may stand for the only model that there is."""
        return isinstance(data, Unknown) and len(self.loads) <= 1


def find(follower: Follower, source: Source) -> Found:
    """What the calls of a script come to.

    Raises:
        ConfigError: no trainer, no optimizer and no backward.
    """
    calls = tuple(follower.calls)
    trainers = [call for call in calls if _trains(call)]
    started = [root_of(call.receiver) for call in calls if call.name in ("train", "fit", "learn")]
    trainer = next((each for each in trainers if each in started), None)
    trainer = trainer or (trainers[-1] if trainers else None)
    optimizers = tuple(call for call in calls if is_optimizer(call))
    backward = [call for call in calls if call.name == "backward"]
    loads = tuple(call for call in calls if is_load(call))
    apart = [call for call in calls if call.library in SCRIPT_LOOPS]
    if trainer is None and not backward and not (optimizers and (loads or apart)):
        raise ConfigError(_nothing(calls, loads, source))
    return Found(
        source=source,
        calls=calls,
        gpu_questions=tuple(follower.gpu_questions),
        loads=loads,
        trainer=trainer,
        optimizers=optimizers,
        model=_model(trainer, optimizers),
        end=_end(calls, trainer),
    )


def _trains(call: Call) -> bool:
    is_class = call.name in TRAINERS and call.receiver is None and bool(call.library)
    return is_class and call.library in ("transformers", "trl", "unsloth", "")


def _model(trainer: Call | None, optimizers: tuple[Call, ...]) -> Any:
    """What trains: the trainer's model, or whose parameters the first optimizer has."""
    if trainer is not None:
        value = trainer.argument(0, "model")
        if value is None or value.data is None:
            value = trainer.keywords.get("model_init")
        return None if value is None else value.data
    for optimizer in optimizers:
        given = optimizer.parameters
        if given is not None and isinstance(given.data, Call) and is_load(root_of(given.data)):
            return given.data  # timm's function is given the model itself
        data = _owner(given)
        if data is not None:
            return data
    return None


def _owner(value: Value | None) -> Any:
    """Whose parameters a value is."""
    data = None if value is None else value.data
    if isinstance(data, Call) and data.receiver is not None:
        return data.receiver
    return None


def _end(calls: tuple[Call, ...], trainer: Call | None) -> int:
    ends = [
        place
        for place, call in enumerate(calls)
        if (trainer is not None and call.name == "train" and root_of(call.receiver) is trainer)
        or (trainer is None and (call.name in ("backward", "step") or _fits(call)))
    ]
    return ends[-1] if ends else len(calls)


def _fits(call: Call) -> bool:
    """Whether it is the training of a loop that is not the script's: ``trainer.fit``."""
    trainer = root_of(call.receiver)
    return call.name == "fit" and isinstance(trainer, Call) and trainer.library in SCRIPT_LOOPS


def _nothing(calls: tuple[Call, ...], loads: tuple[Call, ...], source: Source) -> str:
    name = source.name
    uses = [call for call in calls if call.name in _USES]
    if uses:
        return (
            f"{name} trains nothing that memest can see: it calls {uses[0].name}. memest prices "
            "training; give the script of a training."
        )
    trainers = [call for call in calls if call.name.endswith("Trainer") and call.receiver is None]
    if trainers:
        return (
            f"{name} trains by {trainers[-1].path}, which memest does not read: write the run "
            "itself, memest estimate MODEL --batch 8 --seq-len 512."
        )
    modules = [
        each.name
        for each in source.body
        if isinstance(each, ast.ClassDef) and {ast.unparse(base) for base in each.bases} & _MODULES
    ]
    if modules and name.endswith(".py"):
        return (
            f"{name} trains nothing that memest can see; it defines {', '.join(modules)}. Ask for "
            f"one: {name}:{modules[-1]} in place of the file, with --input "
            "'x:float32[B,3,224,224]' for each tensor that it takes, and --loss."
        )
    what = "loads a model and" if loads else "has no model, and"
    return (
        f"{name} trains nothing that memest can see: it {what} has no trainer, no optimizer and no "
        "backward(). What other files of it do is not read: write the run itself, "
        "memest estimate MODEL --batch 8 --seq-len 512."
    )
