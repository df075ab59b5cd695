"""Families that were traced before there was a rule are not believed once there is one."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from memest.catalog.gpus import find_gpu, traits
from memest.catalog.resolve import resolve_model
from memest.config.options import setup_from_options
from memest.estimation.profiler import Profiler
from memest.estimation.whole_run import steps_run
from memest.profiles.cache import Store
from memest.profiles.document import family_from_json
from memest.profiles.known_profiles import shipped_folder
from memest.profiles.packs import Packs
from memest.workspaces import registry
from memest.workspaces.operator_call import Workspace

MODEL = "prajjwal1/bert-tiny"
SETUP = setup_from_options(batch=4, seq_len=64)
GPU = traits(find_gpu("a100"))


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """Profiles that come with the package are told apart by releases, not by the code of memest."""
    folder = tmp_path_factory.mktemp("shipped")
    store = Store(folder, shipped=True, writable=True)
    steps_run(Profiler(source=resolve_model(MODEL), stores=(store,)), SETUP, GPU)
    return Store(folder, shipped=True)


@pytest.fixture
def with_rule(monkeypatch):
    """Rules for operators, of a GiB each."""

    def add(op):
        monkeypatch.setitem(registry._RULES, op, lambda call, gpu: (Workspace(1 << 30, "scratch"),))
        registry._find.cache_clear()

    yield add
    monkeypatch.undo()
    registry._find.cache_clear()


def unnoted(store, prefix):
    found = [
        family_from_json(document.content.get("updates", document.content)).skeleton.unnoted_ops
        for entry in store.entries() for document in store.read(entry.digest, prefix)
    ]  # fmt: skip
    assert found
    return {op for ops in found for op in ops}


def stream_of(tracer):
    stream = steps_run(tracer, SETUP, GPU).stream
    return list(stream.events), stream.sizes, [stream.label_names[i] for i in stream.labels]


def asked(store):
    said: list[str] = []
    tracer = Profiler(
        source=resolve_model(MODEL), stores=(Store(None), store), progress=said.append
    )
    stream = stream_of(tracer)
    traced = {line.split()[1] for line in said if line.startswith("tracing")}
    return stream, traced | {"training" for line in said if ": trace " in line}


def test_without_a_new_rule_they_answer(shipped):
    assert asked(shipped) == (stream_of(Profiler(source=resolve_model(MODEL), stores=())), set())


@pytest.mark.slow
def test_a_rule_for_what_they_saw_has_them_traced_anew(shipped, with_rule):
    before, _ = asked(shipped)
    with_rule("aten.tanh")
    found, traced = asked(shipped)

    assert "training" in traced
    assert found != before
    assert found == stream_of(Profiler(source=resolve_model(MODEL), stores=()))
    assert any(label.startswith("aten.tanh.default: ") for label in found[2])


def test_so_has_a_rule_for_what_the_optimizer_does(shipped, with_rule):
    ops = sorted(unnoted(shipped, "rule") - unnoted(shipped, "steps"))
    before, _ = asked(shipped)
    with_rule(ops[0])
    found, traced = asked(shipped)

    assert traced == {SETUP.optimizer}
    assert found != before
    assert found == stream_of(Profiler(source=resolve_model(MODEL), stores=()))


def test_a_rule_for_what_they_never_saw_changes_nothing(shipped, with_rule):
    before, _ = asked(shipped)
    with_rule("aten.heard_of_by_nobody")

    assert asked(shipped) == (before, set())


@pytest.mark.slow
def test_the_profiles_that_come_with_the_package_were_all_made_alike():
    store = Packs(shipped_folder())
    named = {
        bool(document.content.get("unnoted"))
        for entry in store.entries()
        for prefix in ("steps", "updates") for document in store.read(entry.digest, prefix)
    }  # fmt: skip
    if named == {False}:
        pytest.skip("they were made before operators without a rule were told")
    assert named == {True}
