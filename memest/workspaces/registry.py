"""The registry: which operators have a rule, and what one call of them allocates behind its back.

A rule is a function of a call and a GPU, registered by :func:`rule` under the operator's packet
(``aten.sum``, all overloads) or one overload (``aten.max.dim``). The docstring is part of it:

    first line    the formula, in words
    Source:       where it was read (file and versions of PyTorch, or a recorded trace)
    Evidence:     one of ``recorded``, ``source``, ``memory``, and what that covers
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from memest.workspaces.flops import counts_flops
from memest.workspaces.layout import tensor
from memest.workspaces.operator_call import GpuTraits, OpCall, Workspace

__all__ = [
    "Rule",
    "RuleInfo",
    "all_rules",
    "has_rule",
    "reads_calls",
    "rule",
    "workspaces_of",
]

Rule = Callable[[OpCall, GpuTraits], tuple[Workspace, ...]]
_Formula = Callable[..., Iterable[Workspace]]
"""What a rule file writes: of a call, a GPU and the tensors that the rule needs."""

_RULES: dict[str, Rule] = {}

_MODULES = (
    "attention",
    "blas",
    "conv",
    "embedding",
    "inductor",
    "norm",
    "optimizer",
    "reduce",
    "scalar",
    "softmax",
    "sort",
)


@dataclass(frozen=True, slots=True)
class RuleInfo:
    """One rule as the documentation shows it.

    Attributes:
        name: ``module.function``.
        ops: operators it is registered for, sorted.
        summary: first line of the docstring.
        source: where the formula was read.
        evidence: how far it was confirmed.
    """

    name: str
    ops: tuple[str, ...]
    summary: str
    source: str
    evidence: str


def rule(*ops: str, needs: str = "") -> Callable[[_Formula], Rule]:
    """Register a function as the rule of operators, by packet or by overload.

    Args:
        ops: names such as ``aten.sum`` or ``aten.max.dim``.
        needs: names of the tensors that the schema begins with, and ``out`` for the first one that
            is returned. The function gets them behind the GPU; where one is missing or has no
            elements, nothing is allocated.

    Raises:
        ValueError: if an operator already has a rule, or its name cannot be one.
    """
    names = needs.split()

    def register(function: _Formula) -> Rule:
        @functools.wraps(function)
        def allocates(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
            operands = [
                call.output if name == "out" else tensor(call, place, name)
                for place, name in enumerate(names)
            ]
            if any(operand is None or not operand.numel for operand in operands):
                return ()
            return tuple(function(call, gpu, *operands))

        for op in ops:
            if op.count(".") not in (1, 2):
                raise ValueError(f"{op!r} names no operator: write aten.sum or aten.max.dim")
            if op in _RULES:
                owner = f"{_RULES[op].__module__}.{_RULES[op].__name__}"
                raise ValueError(f"{op} already has a rule: {owner}")
        _RULES.update(dict.fromkeys(ops, allocates))
        return allocates

    return register


def has_rule(op: str) -> bool:
    """Whether calls of an overload (``aten.sum.dim_IntList``) can have hidden allocations."""
    return _find(op) is not None


def reads_calls(op: str) -> bool:
    """Whether anything is computed from calls of an overload: workspaces by a rule, or FLOPs.

    A trace notes the calls of these operators. Of all others it keeps the names, by which
    ``memest.profiles.known_profiles`` knows that a trace was made before there was a rule.
    """
    return has_rule(op) or counts_flops(op)


def workspaces_of(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """What a call allocates besides its outputs, in the order in which the kernel does.

    Example:
        >>> from memest.workspaces.operator_call import TensorSpec
        >>> grad = TensorSpec((8192, 4096), (4096, 1), "float32")
        >>> bias = TensorSpec((4096,), (1,), "float32")
        >>> call = OpCall("aten.sum.dim_IntList", (grad, (0,)), (), (bias,), "autograd")
        >>> [w.nbytes for w in workspaces_of(call, GpuTraits((9, 0), 132, 2048))]
        [138412032, 128]
    """
    function = _find(call.op)
    return () if function is None else function(call, gpu)


def all_rules() -> tuple[RuleInfo, ...]:
    """Every rule with its operators, its first docstring line and its source."""
    _load()
    ops: dict[Rule, list[str]] = {}
    for op, function in _RULES.items():
        ops.setdefault(function, []).append(op)
    infos = (_describe(function, tuple(sorted(names))) for function, names in ops.items())
    return tuple(sorted(infos, key=lambda info: info.name))


def _describe(function: Rule, ops: tuple[str, ...]) -> RuleInfo:
    lines = inspect.getdoc(function) or ""
    fields = {"Source": "", "Evidence": ""}
    current = None
    for line in lines.splitlines():
        head, colon, rest = line.partition(":")
        if colon and head in fields:
            current, line = head, rest
        elif not line.strip():
            current = None
        if current is not None:
            fields[current] = f"{fields[current]} {line.strip()}".strip()
    return RuleInfo(
        name=f"{function.__module__.rpartition('.')[2]}.{function.__name__}",
        ops=ops,
        summary=lines.partition("\n")[0],
        source=fields["Source"],
        evidence=fields["Evidence"],
    )


@functools.cache
def _find(op: str) -> Rule | None:
    _load()
    exact = _RULES.get(op)
    if exact is not None or op.count(".") != 2:
        return exact
    return _RULES.get(op.rpartition(".")[0])


@functools.cache
def _load() -> None:
    # here and not at the top: the rule files import the decorator from this one
    for name in _MODULES:
        importlib.import_module(f"memest.workspaces.{name}")
