"""What shortens a compilation changes nothing of what is compiled."""

from __future__ import annotations

import collections
import os
import select
import signal
import sys
import time
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from memest.catalog.resolve import ModelSource
from memest.config.setup import Setup
from memest.trace.cuda import beside, inductor, quick_compile
from memest.trace.cuda.beside import Beside
from memest.trace.cuda.quick_compile import made_once, quick_trees, shortcuts
from memest.trace.meta_model import build
from memest.trace.session import trace_built
from memest.trace.training import TracePlan
from memest.workspaces.operator_call import GpuTraits

GPU = GpuTraits(capability=(9, 0), sm_count=132, max_threads_per_sm=2048)
BERT = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128,
    "vocab_size": 500, "max_position_embeddings": 64,
}  # fmt: skip


class Pair(NamedTuple):
    first: Any
    second: Any


TREES = [
    1,
    None,
    (),
    {},
    [[], ((),)],
    {"a": (1, [2, None]), "b": {"c": 3}},
    Pair(1, [Pair("x", None), 2]),
    collections.OrderedDict(a=1, b=(2, 3)),
    collections.defaultdict(list, a=[1, 2]),
    torch.return_types.max((1, (2, 3))),
    (slice(1, 2), torch.device("meta"), {1, 2}),
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_trees_are_taken_apart_and_put_together_as_before(tree: Any) -> None:
    def looked_at() -> list[Any]:
        leaves, spec = pytree.tree_flatten(tree)
        pairs = lambda node: isinstance(node, Pair)  # noqa: E731
        return [
            leaves, spec, list(pytree.tree_iter(tree)), pytree.tree_leaves(tree, is_leaf=pairs),
            pytree.tree_flatten(tree, is_leaf=pairs), pytree.arg_tree_leaves(tree, key=tree),
            pytree.tree_map(lambda leaf: (leaf,), tree), pytree.tree_unflatten(leaves, spec),
        ]  # fmt: skip

    before = looked_at()
    with quick_trees():
        assert looked_at() == before
    assert looked_at() == before


def test_a_tree_of_another_size_is_refused_as_before() -> None:
    _, spec = pytree.tree_flatten((1, 2))
    with quick_trees(), pytest.raises(ValueError, match=r"(has|holds) 2"):
        pytree.tree_unflatten([1, 2, 3], spec)


def test_a_type_that_is_registered_meanwhile_is_a_leaf_no_longer() -> None:
    class Late:
        def __init__(self, inside: Any) -> None:
            self.inside = inside

    tree = [Late(1)]
    with quick_trees():
        assert pytree.tree_leaves(tree) == tree
        pytree.register_pytree_node(
            Late, lambda late: ([late.inside], None), lambda children, _: Late(*children)
        )
        try:
            assert pytree.tree_leaves(tree) == [1]
        finally:
            pytree._deregister_pytree_node(Late)


def test_settings_are_what_they_are() -> None:
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor_config

    def values() -> list[Any]:
        return [
            (name, getattr(config, name, "nothing of that name"))
            for config in (inductor_config, functorch)
            for name in (*config._config, "no_such_setting")
        ]

    for changed in ({}, {"size_asserts": False, "triton.cudagraphs": True}):
        with inductor_config.patch(changed):
            before = values()
            with made_once():
                assert values() == before


def test_another_release_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_compile, "installed_version", lambda _: (2, 14))
    before = pytree.tree_iter, torch.fx.GraphModule.print_readable
    with quick_trees(), shortcuts():
        assert (pytree.tree_iter, torch.fx.GraphModule.print_readable) == before
    assert beside._cores() == 1


@pytest.mark.skipif(not quick_compile.is_known(), reason="nothing is replaced in this release")
def test_what_was_replaced_is_put_back() -> None:
    from torch._inductor import pattern_matcher
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch.utils._config_module import ConfigModule

    def things() -> tuple[Any, ...]:
        return (
            pytree.tree_iter, pytree.tree_flatten, pytree.TreeSpec.unflatten,
            torch.fx.GraphModule.print_readable, pattern_matcher._should_debug_node,
            TritonScheduling.codegen_comment, DtypePropagationOpsHandler.__init__,
            ConfigModule.__getattr__,
        )  # fmt: skip

    before = things()
    with quick_trees(), shortcuts():
        assert not set(things()) & set(before)
    assert things() == before


def _trace(monkeypatch: pytest.MonkeyPatch, cores: int) -> tuple[Any, int]:
    """A compiled training on so many cores, and how many codes a second process wrote."""
    made: list[Beside] = []

    def second() -> Beside:
        made.append(Beside(cores))
        return made[-1]

    monkeypatch.setattr(inductor, "Beside", second)
    setup = Setup(batch=2, seq_len=64, precision="bf16", optim="none", torch_compile=True)
    source = ModelSource(kind="file", id="small", config=BERT, provenance="test")
    run = build(setup, source, None, None, None)
    trace = trace_built(run, setup, GPU, TracePlan(steps=1))
    (only,) = made
    return trace, only.taken


@pytest.fixture(scope="module")
def alone() -> Any:
    """The trace that one process makes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        trace, taken = _trace(monkeypatch, cores=1)
    assert not taken
    return trace


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes that were forked; whatever else runs the tests has children of its own."""
    fork, pids = os.fork, []

    def note() -> int:
        pids.append(fork())
        return pids[-1]

    monkeypatch.setattr(os, "fork", note)
    return pids


def _waited_for(pid: int) -> bool:
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return True


@pytest.mark.slow
def test_a_second_process_changes_nothing(
    alone: Any, forked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "_WORTH_IT", 1)

    trace, taken = _trace(monkeypatch, cores=2)

    assert taken
    assert trace == alone
    assert forked
    assert all(map(_waited_for, forked))


@pytest.mark.slow
@pytest.mark.parametrize("amiss", ["dies", "raises", "lowers otherwise", "takes too long"])
def test_without_the_second_process_the_first_does_its_work(
    amiss: str, alone: Any, forked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = os.getpid()
    lowered = beside._lowered

    def in_the_second(graph: Any) -> Any:
        if os.getpid() == first:
            return lowered(graph)
        if amiss == "dies":
            os._exit(3)
        if amiss == "raises":
            raise RuntimeError
        if amiss == "takes too long":
            os.read(os.pipe()[0], 1)  # for ever
        return [*lowered(graph), "more"]

    monkeypatch.setattr(beside, "_WORTH_IT", 1)
    monkeypatch.setattr(beside, "_SHORTEST_WAIT", 0.1)
    monkeypatch.setattr(beside, "_lowered", in_the_second)

    trace, taken = _trace(monkeypatch, cores=2)

    assert not taken
    assert trace == alone
    assert forked
    assert all(map(_waited_for, forked))


@pytest.mark.slow
def test_a_machine_without_room_for_a_process_compiles_alone(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> int:
        raise BlockingIOError

    monkeypatch.setattr(beside, "_WORTH_IT", 1)
    monkeypatch.setattr(os, "fork", full)

    trace, taken = _trace(monkeypatch, cores=2)

    assert not taken
    assert trace == alone


@pytest.mark.skipif(sys.platform != "linux", reason="no fork goes on elsewhere")
def test_the_second_process_ends_with_the_first() -> None:
    graph = types.SimpleNamespace(is_inference=False, operations=range(1000), graph_id=1)
    held_by_both, holds = os.pipe()
    first = os.fork()
    if first == 0:
        try:
            Beside(cores=2).begin(graph)
            os.write(holds, b".")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(holds)
    assert os.read(held_by_both, 1) + os.read(held_by_both, 1) == b"..", "both are at work"

    os.kill(first, signal.SIGTERM)
    os.waitpid(first, 0)

    assert select.select([held_by_both], [], [], 20)[0], "the second one goes on"
    assert not os.read(held_by_both, 1)
    os.close(held_by_both)
