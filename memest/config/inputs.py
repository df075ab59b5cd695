"""What a module of one's own is fed, and how it is stepped: words and values as users give them.

A specification of a tensor, ``x:float32[B,3,224,224]``, names it, its dtype and its extents.
Extents are numbers, letters, and sums and products of them: ``B`` is ``--batch``, ``S`` is
``--seq-len``, any other name is bound by ``--dim``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memest.errors import ConfigError, not_legal

if TYPE_CHECKING:
    from memest.config.training_run import TrainingRun

__all__ = [
    "DTYPES",
    "LOSSES",
    "NO_INPUTS",
    "InputSpec",
    "ModuleInputs",
    "arguments_of",
    "check_own_parts",
    "extent",
    "module_inputs_of",
    "names_in",
    "read_spec",
]

DTYPES = tuple(
    """float32 float16 bfloat16 float64 int64 int32 int16 int8 uint8 bool complex64 float8_e4m3fn
    float8_e5m2""".split()
)
"""Dtypes that a specification may name, as torch spells them."""
_SHORT_DTYPES = {
    "float": "float32",
    "half": "float16",
    "double": "float64",
    "long": "int64",
    "int": "int32",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}
LOSSES = tuple(
    """cross_entropy mse l1 smooth_l1 huber bce bce_with_logits nll kl_div mean sum""".split()
)
"""Losses that go by a name: functions of ``torch.nn.functional``, and two without a target."""
_LOSS_ALIASES = {
    "ce": "cross_entropy",
    "l2": "mse",
    "binary_cross_entropy": "bce",
    "binary_cross_entropy_with_logits": "bce_with_logits",
}
_SPEC = re.compile(
    r"^\s*(?P<name>[A-Za-z_]\w*(?:\.\w+)*)\s*:\s*(?P<dtype>(?:torch\.)?\w+)\s*"
    r"\[(?P<shape>[^\[\]]*)\]\s*(?:=\s*(?P<fill>-?\d+))?\s*$"
)
_EXAMPLE = "write for example 'x:float32[B,3,224,224]' or 'ids:int64[B,S]'"
_DIM = re.compile(r"^[A-Za-z_]\w*$")
_MAX_EXTENT = 1 << 40
_ARITHMETIC = (
    ast.BinOp,
    ast.Name,
    ast.Constant,
    ast.Load,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.FloorDiv,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """One tensor of a batch.

    Attributes:
        name: of the argument; dots lead into nested dicts.
        dtype: as torch spells it.
        extents: a number or an expression each; see :func:`extent`.
        fill: its value everywhere, where values are asked for (a mask of ones); None = unknown.
    """

    name: str
    dtype: str
    extents: tuple[str, ...]
    fill: int | None = None

    def shape(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """The shape where letters have these values.

        Raises:
            ConfigError: a letter that nothing binds, or an extent that is none.
        """
        return tuple(extent(text, dims, self.name) for text in self.extents)


def read_spec(text: str) -> InputSpec:
    """Read ``name:dtype[extents]``, with ``=VALUE`` behind it where the value matters.

    Raises:
        ConfigError: it cannot be read, or names no dtype of torch.

    Example:
        >>> read_spec("x:float32[B,3,H,H//2]").shape({"B": 4, "H": 8})
        (4, 3, 8, 4)
    """
    match = _SPEC.match(text)
    if match is None:
        raise ConfigError(f"--input {text!r} is no specification of a tensor: {_EXAMPLE}.")
    dtype = match["dtype"].removeprefix("torch.")
    dtype = _SHORT_DTYPES.get(dtype, dtype)
    if dtype not in DTYPES:
        label = f"--input {text!r}: {dtype!r}"
        raise not_legal(label, dtype, DTYPES, state="is not a dtype")
    shape = match["shape"].strip()
    extents = tuple(part.strip() for part in shape.split(",")) if shape else ()
    for part in extents:
        _parse(part, match["name"])
    fill = None if match["fill"] is None else int(match["fill"])
    return InputSpec(name=match["name"], dtype=dtype, extents=extents, fill=fill)


def _parse(text: str, name: str) -> ast.expr:
    if text == "...":
        raise ConfigError(
            f"--input {name}: ... stands for the extents behind the batch, which nobody but you "
            f"knows: {_EXAMPLE}."
        )
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        raise ConfigError(
            f"--input {name}: the extent {text!r} cannot be read: {_EXAMPLE}."
        ) from None
    for node in ast.walk(tree):
        number = not isinstance(node, ast.Constant) or type(node.value) is int
        if not isinstance(node, _ARITHMETIC) or not number:
            raise ConfigError(
                f"--input {name}: the extent {text!r} is no whole number, letter, or sum, product "
                f"or floor division (H//8) of them: {_EXAMPLE}."
            )
    return tree


def names_in(text: str) -> frozenset[str]:
    """The letters of an extent."""
    tree = ast.parse(text, mode="eval")
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def extent(text: str, dims: Mapping[str, int], name: str) -> int:
    """The value of an extent.

    Args:
        text: a number or an expression of numbers and letters.
        dims: what letters are.
        name: of the tensor, for messages.

    Raises:
        ConfigError: a letter that nothing binds, or a value below 0.
    """
    missing = sorted(names_in(text) - dims.keys())
    if missing:
        raise ConfigError(
            f"--input {name}: nothing says what {missing[0]} is: add --dim {missing[0]}=N (in "
            f"Python dims={{{missing[0]!r}: N}}). B is --batch, S is --seq-len."
        )
    try:
        value = _value(_parse(text, name), dims)
    except ZeroDivisionError:
        value = -1
    if not 0 <= value <= _MAX_EXTENT:
        bindings = ", ".join(f"{n}={dims[n]}" for n in sorted(names_in(text)))
        raise ConfigError(
            f"--input {name}: the extent {text} is {value} at {bindings}: not a size."
        )
    return value


def _value(node: ast.expr, dims: Mapping[str, int]) -> int:
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, dims), _value(node.right, dims)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        return left * right if isinstance(node.op, ast.Mult) else left // right
    if isinstance(node, ast.Name):
        return dims[node.id]
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int)
    return node.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleInputs:
    """What users say of a module of their own; see ``docs/any-module.md``.

    Attributes:
        inputs: tensors, specifications, or a function of the batch; None where the model's
            configuration says what it takes.
        loss: a function of (outputs, batch), a name of :data:`LOSSES`, ``package.module:function``;
            None where the outputs carry it.
        step_fn: ``step(model, batch) -> loss`` in place of forward and loss, or its
            ``package.module:name``; None without.
        dims: what the letters of specifications are.
        model_args: arguments of a factory.
    """

    inputs: Any = None
    loss: Any = None
    step_fn: Any = None
    dims: tuple[tuple[str, int], ...] = ()
    model_args: tuple[tuple[str, Any], ...] = ()

    @property
    def travels(self) -> bool:
        """Whether it is plain words, which other processes can be told."""
        words = isinstance(self.inputs, tuple) and all(isinstance(i, str) for i in self.inputs)
        values = (value for _, value in self.model_args)
        plain = all(isinstance(v, (str, int, float, bool, type(None))) for v in values)
        functions = (self.loss, self.step_fn)
        named = all(f is None or isinstance(f, str) for f in functions)
        return (self.inputs is None or words) and named and plain


NO_INPUTS = ModuleInputs()
"""Nothing was said: the model's configuration decides."""


def module_inputs_of(
    inputs: Any = None,
    loss: Any = None,
    step_fn: Any = None,
    dims: Any = None,
    model_args: Any = None,
) -> ModuleInputs:
    """Read what a user gave, in Python or as words of the command line.

    Raises:
        ConfigError: a specification, a binding or an argument that cannot be read.
    """
    if isinstance(inputs, str):
        inputs = (inputs,)
    if isinstance(inputs, (list, tuple)) and inputs and all(isinstance(i, str) for i in inputs):
        names: set[str] = set()
        for text in inputs:
            name = read_spec(text).name
            if name in names:
                raise ConfigError(f"--input {name} is given twice: drop one.")
            names.add(name)
        inputs = tuple(inputs)
    if isinstance(inputs, Mapping) and any(isinstance(v, str) for v in inputs.values()):
        inputs = {  # the name in front of the colon may be left out where a dict names it
            k: v if not isinstance(v, str) or ":" in v else f"{k}:{v}" for k, v in inputs.items()
        }
    if isinstance(loss, str) and ":" not in loss and loss not in LOSSES:
        loss = _loss_name(loss)
    if step_fn is not None and loss is not None:
        raise ConfigError("--step makes the loss itself: leave --loss out.")
    return ModuleInputs(
        inputs=inputs,
        loss=loss,
        step_fn=step_fn,
        dims=_dims(dims),
        model_args=arguments_of(model_args),
    )


def _loss_name(text: str) -> str:
    """A loss by one of its usual names."""
    name = text.strip().lower().removesuffix("_loss").replace("-", "_")
    name = _LOSS_ALIASES.get(name, name)
    if name in LOSSES:
        return name
    raise not_legal(
        f"--loss {text!r}",
        text,
        LOSSES,
        more=", package.module:function, or in Python a function, loss=lambda outputs, batch: ..",
    )


def _pairs(values: Any, flag: str, example: str) -> list[tuple[str, Any]]:
    """``NAME=VALUE`` words or a mapping, as pairs."""
    if values is None:
        return []
    if isinstance(values, Mapping):
        return list(values.items())
    words: Sequence[Any] = [values] if isinstance(values, str) else list(values)
    out: list[tuple[str, Any]] = []
    for word in words:
        if isinstance(word, (tuple, list)) and len(word) == 2:
            out.append((word[0], word[1]))
            continue
        name, equals, value = str(word).partition("=")
        if not equals:
            raise ConfigError(f"{flag} {word!r} has no value: write for example {flag} {example}.")
        out.append((name.strip(), value.strip()))
    return out


def _dims(dims: Any) -> tuple[tuple[str, int], ...]:
    numbers: dict[str, int] = {}
    for name, value in _pairs(dims, "--dim", "H=224"):
        if not isinstance(name, str) or not _DIM.match(name):
            raise ConfigError(f"--dim {name!r} is no name: write for example --dim H=224.")
        if name in ("B", "S"):
            flag = "--batch" if name == "B" else "--seq-len"
            raise ConfigError(f"--dim {name}={value}: {name} is {flag}: give that.")
        try:
            number = int(value)
        except (TypeError, ValueError):
            raise ConfigError(f"--dim {name}={value!r} is not a whole number.") from None
        if isinstance(value, (bool, float)) or not 0 <= number <= _MAX_EXTENT:
            raise ConfigError(f"--dim {name}={value!r} is not a size.")
        if numbers.setdefault(name, number) != number:
            raise ConfigError(
                f"--dim {name} is given twice, as {numbers[name]} and {number}: drop one."
            )
    return tuple(sorted(numbers.items()))


def arguments_of(
    values: Any, flag: str = "--model-arg", example: str = "depth=12"
) -> tuple[tuple[str, Any], ...]:
    """Named arguments as a command line or Python gives them, text as Python reads it.

    Args:
        values: ``NAME=VALUE`` words, pairs or a mapping; None = no arguments.
        flag: how messages call it.
        example: what messages propose.

    Raises:
        ConfigError: no name, no value, or a name that is there twice.
    """
    arguments: dict[str, Any] = {}
    for name, value in _pairs(values, flag, example):
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(
                f"{flag} {name!r} is no name of an argument: write for example {flag} {example}."
            )
        if name in arguments:
            raise ConfigError(f"{flag} {name} is given twice: drop one.")
        arguments[name] = _literal(value) if isinstance(value, str) else value
    return tuple(arguments.items())


def _literal(text: str) -> Any:
    """A number, True, None, a list as Python writes it; anything else is text."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def check_own_parts(setup: TrainingRun, module_inputs: ModuleInputs) -> None:
    """Refuse options that a loss or a step of the user's own does not go with.

    The loss of a shared sequence is the library's: every rank has a part of it.

    Raises:
        ConfigError: there is such an option.
    """
    has_step = module_inputs.step_fn is not None
    what = "loss" if module_inputs.loss is not None else "step" if has_step else ""
    if setup.distributed.sp > 1 and what:
        raise ConfigError(
            f"--sp {setup.distributed.sp}: a {what} of one's own is not priced with sequences "
            "that GPUs share, whose losses the library joins (deepspeed_sp_compute_loss): leave it "
            "or --sp out."
        )
    if has_step and setup.eval_batch is not None:
        raise ConfigError(
            "An evaluation (--eval-batch, --with eval) has no --step: leave one of them out."
        )
    if has_step and setup.torch_compile:
        raise ConfigError(
            "--torch-compile compiles the model that a loop calls, and a step of one's own "
            "calls what it likes: leave --torch-compile out, or give inputs and a loss."
        )
