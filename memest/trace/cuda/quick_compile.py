"""What PyTorch's compilers do that changes no graph, left out or done sooner.

A compilation is Python from end to end. A tenth of it takes apart arguments (``pytree``), anew for
each node and each operator; a twentieth writes graphs out for logs that nobody keeps; a twentieth
looks up settings and makes anew what is always the same. None of it decides what is compiled.

Source: torch 2.13, ``utils/_pytree.py`` (``tree_iter``, ``tree_flatten``, ``TreeSpec.unflatten``),
``utils/_config_module.py`` (``ConfigModule.__getattr__``), ``fx/graph_module.py``
(``print_readable``), ``_inductor/pattern_matcher.py`` (``_should_debug_node``),
``_inductor/codegen/triton.py`` (``codegen_comment``), ``_inductor/dtype_propagation.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memest.config.installed import installed_version
from memest.trace.cuda.patching import patch_attributes

__all__ = ["is_known", "made_once", "quick_trees", "shortcuts", "without_logs"]

_READ = (2, 13)


def is_known() -> bool:
    """Whether the installed PyTorch is the release whose source this was written from.

    Others are left as they are: slower, and the same answer.
    """
    return installed_version("torch") == _READ


@contextmanager
def shortcuts() -> Iterator[None]:
    """All that may be left out or done once while models are compiled."""
    if not is_known():
        yield
        return
    with without_logs(), made_once():
        yield


def without_logs() -> AbstractContextManager[None]:
    """Graphs are not written out for people: neither for logs nor as comments of the code."""
    from torch._inductor import pattern_matcher
    from torch._inductor.codegen.triton import TritonScheduling

    return patch_attributes(
        (torch.fx.GraphModule, "print_readable", lambda *_, **__: ""),
        (pattern_matcher, "_should_debug_node", lambda _: False),
        (TritonScheduling, "codegen_comment", lambda *_, **__: None),
    )


def made_once() -> AbstractContextManager[None]:
    """Settings are read without detours, and the one table of dtypes is filled once.

    ``DtypePropagationOpsHandler()`` always gives the same object, and fills it anew each time.
    """
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._inductor.utils import op_dtype_propagation_rules
    from torch.utils import _config_module as configs

    fill, filled = DtypePropagationOpsHandler.__init__, 0

    def fill_once(handler: Any) -> None:
        nonlocal filled
        if filled != (rules := len(op_dtype_propagation_rules)):  # lowerings register theirs
            filled = rules
            fill(handler)

    unset, immutable = configs._UNSET_SENTINEL, configs._IMMUTABLE_CONFIG_TYPES
    look_up = configs.ConfigModule.__getattr__

    def get(config: Any, name: str) -> Any:
        entry = config._config.get(name)
        if entry is None or entry.hide or entry.deprecated or entry.alias is not None:
            return look_up(config, name)
        if entry.env_value_force is unset:
            value = entry.user_override.get()
            if value is not unset:
                return value
            if entry.env_value_default is unset and entry.justknob is None:
                value = entry.default
                if isinstance(value, immutable):
                    return value
        return look_up(config, name)

    return patch_attributes(
        (configs.ConfigModule, "__getattr__", get),
        (DtypePropagationOpsHandler, "__init__", fill_once),
    )


def quick_trees() -> AbstractContextManager[None]:
    """Trees of arguments are taken apart and put together as PyTorch does it, in half the time.

    For compilers alone: Dynamo follows a model's code, and would follow this one too.
    """
    if not is_known():
        return nullcontext()
    kinds = _Kinds()
    return patch_attributes(
        (pytree, "tree_iter", kinds.leaves),
        (pytree, "tree_flatten", kinds.flatten),
        (pytree.TreeSpec, "unflatten", _unflatten),
    )


_Flatten = Callable[[Any], tuple[list[Any], Any]]


class _Kinds:
    """How trees of each Python type are taken apart; looked up once for a type."""

    def __init__(self) -> None:
        self._nodes = pytree.SUPPORTED_NODES
        self._known = 0
        self._kinds: dict[type, tuple[Any, _Flatten | None]] = {}

    def _look_up(self, python_type: type) -> tuple[Any, _Flatten | None]:
        """The kind of node that a type is, and what flattens it; None for leaves."""
        kind = pytree.namedtuple if pytree.is_namedtuple_class(python_type) else python_type
        node = self._nodes.get(kind)
        found = kind, None if node is None else node.flatten_fn
        self._kinds[python_type] = found
        return found

    def _renew(self) -> dict[type, tuple[Any, _Flatten | None]]:
        """The table, emptied where types were registered since."""
        if len(self._nodes) != self._known:
            self._known = len(self._nodes)
            self._kinds.clear()
        return self._kinds

    def leaves(self, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[Any]:
        """In place of ``tree_iter``."""
        kinds, out = self._renew(), []

        def collect(node: Any) -> None:
            if is_leaf is not None and is_leaf(node):
                out.append(node)
                return
            python_type = type(node)
            _, flatten = kinds.get(python_type) or self._look_up(python_type)
            if flatten is None:
                out.append(node)
                return
            for child in flatten(node)[0]:
                collect(child)

        collect(tree)
        return iter(out)

    def flatten(
        self, tree: Any, is_leaf: Callable[[Any], bool] | None = None
    ) -> tuple[list[Any], pytree.TreeSpec]:
        """In place of ``tree_flatten``."""
        kinds, out = self._renew(), []

        def collect(node: Any) -> pytree.TreeSpec:
            if is_leaf is None or not is_leaf(node):
                python_type = type(node)
                kind, flatten = kinds.get(python_type) or self._look_up(python_type)
                if flatten is not None:
                    children, context = flatten(node)
                    return pytree.TreeSpec(kind, context, [collect(each) for each in children])
            out.append(node)
            return pytree._LEAF_SPEC

        spec = collect(tree)
        return out, spec


def _unflatten(spec: pytree.TreeSpec, leaves: Any) -> Any:
    """In place of ``TreeSpec.unflatten``, which copies the leaves of every branch."""
    leaves = list(leaves)
    if len(leaves) != spec.num_leaves:
        raise ValueError(f"{len(leaves)} leaves for a tree that has {spec.num_leaves}: {spec}")
    rest, nodes = iter(leaves), pytree.SUPPORTED_NODES

    def build(spec: pytree.TreeSpec) -> Any:
        if spec.type is None:
            return next(rest)
        children = [build(each) for each in spec._children]
        return nodes[spec.type].unflatten_fn(children, spec._context)

    return build(spec)
