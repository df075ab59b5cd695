"""Families answer at their points what was traced there, on paper as in memory."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from memest.catalog.gpus import find_gpu, traits
from memest.config.setup import Setup
from memest.profiles.document import (
    BadDocumentError,
    family_from_json,
    family_to_json,
    sizing_from_json,
    sizing_to_json,
)
from memest.profiles.family import Family, NotAlikeError, alike, single_trace_family, unite
from memest.profiles.formula import NoFormulaError
from memest.profiles.sizing import SizeAnswer, Sizing
from memest.trace.training import plan_to_compose, trace_training

GPU = traits(find_gpu("a100"))


class Net(torch.nn.Module):
    """Attention over tokens, and a branch that long inputs take."""

    def __init__(self, branch_at: int = 10**9) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(100, 64)
        self.q, self.k, self.v = (torch.nn.Linear(64, 64) for _ in range(3))
        self.norm = torch.nn.LayerNorm(64)
        self.branch_at = branch_at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        if x.shape[1] > self.branch_at:
            h = h * 2
        q, k, v = (f(self.norm(h)).unsqueeze(1) for f in (self.q, self.k, self.v))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return h + torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).squeeze(1)


def trace(batch, length, **options):
    with torch.device("meta"):
        model = Net(options.pop("branch_at", 10**9))
    setup = Setup(loop="plain", grad_accum=2, **options)
    traced = trace_training(
        model,
        setup,
        make_batch=lambda: {"x": torch.empty(batch, length, dtype=torch.int64, device="meta")},
        loss_of=lambda out, _: out.float().pow(2).mean(),
        gpu=GPU,
        plan=plan_to_compose(setup),
    )
    traced.counts = (batch, length, 7, 7)
    return traced


POINTS = ((4, 33), (2, 33), (509, 545), (171, 161), (2, 545))


@pytest.fixture(scope="module")
def traces():
    return {point: trace(*point) for point in POINTS}


@pytest.fixture(scope="module")
def family(traces):
    return unite(traces, ("batch", "seq_len"), (1, 128), {})


def everything(trace_):
    """A trace by value: equal calls may have other numbers."""
    calls = [trace_.calls[number] for number in trace_.call_of_site]
    return (
        trace_.events, trace_.sizes, trace_.categories, trace_.modules, trace_.ops, calls,
        trace_.site_modules, trace_.marks, trace_.launches, trace_.module_names, trace_.op_names,
        trace_.notes, trace_.attention_choices, trace_.seams, trace_.micro_steps, trace_.weights,
        trace_.counts, trace_.unnoted_ops,
    )  # fmt: skip


def read(document):
    return family_from_json(json.loads(json.dumps(document)))


# -- families -------------------------------------------------------------------------------------


@pytest.mark.slow("point0")
@pytest.mark.parametrize("point", [*POINTS, (3, 33), (64, 289), (100, 417), (508, 161)])
def test_a_family_is_the_trace_at_every_point(family, point):
    assert family.point_of({"batch": point[0], "seq_len": point[1]}) == point
    assert everything(family.at(point)) == everything(trace(*point))


@pytest.mark.parametrize("point", [*POINTS, (64, 289)])
def test_so_it_is_when_it_was_written_and_read(family, point):
    again = read(family_to_json(family))

    assert everything(again.at(point)) == everything(family.at(point))
    assert family_to_json(again) == family_to_json(family)
    for name in ("points", "moduli", "fixed_sizes", "tied", "axes"):
        assert getattr(again, name) == getattr(family, name)


def test_the_family_of_one_trace(traces):
    one = traces[4, 33]
    lonely = single_trace_family(one, {"batch": 4, "seq_len": 33})

    assert lonely.point_of({"batch": 4, "seq_len": 33}) == ()
    assert lonely.point_of({"batch": 5, "seq_len": 33}) is None
    assert everything(lonely.at(())) == everything(one)
    assert everything(read(family_to_json(lonely)).at(())) == everything(one)


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "seq_len": 33},
        {"batch": 510, "seq_len": 33},
        {"batch": 4, "seq_len": 34},
        {"batch": 4, "seq_len": 673},
        {"batch": 4, "seq_len": 33 - 128},
        {"batch": 4},
        {"batch": 4, "seq_len": 33, "target_len": 33},
        {"batch": 4, "image_size": 33},
        {},
    ],
)
def test_beyond_its_box_and_its_class_it_has_nothing_to_say(family, sizes):
    assert family.point_of(sizes) is None


def test_operators_without_a_rule_are_those_of_all_traces(traces):
    named = {point: copy.copy(trace_) for point, trace_ in traces.items()}
    named[4, 33].unnoted_ops = ["aten.one.default", "aten.two.default"]
    named[2, 33].unnoted_ops = ["aten.two.default", "aten.three.default"]
    found = unite(named, ("batch", "seq_len"), (1, 128), {}).skeleton.unnoted_ops

    assert found[:3] == ["aten.one.default", "aten.two.default", "aten.three.default"]
    assert found[3:] == traces[171, 161].unnoted_ops


def test_a_document_of_before_they_were_told_names_none(family):
    document = family_to_json(family)
    assert "aten.add.Tensor" in document["unnoted"]
    del document["unnoted"]

    assert read(document).skeleton.unnoted_ops == []


def test_sizes_that_are_fixed_or_tied(traces):
    tied = unite(traces, ("batch", "seq_len"), (1, 128), {"image_size": 9}, tied=True)
    sizes = {"batch": 4, "seq_len": 33, "target_len": 33, "image_size": 9}

    assert tied.point_of(sizes) == (4, 33)
    assert tied.point_of(sizes | {"target_len": 161}) is None
    assert tied.point_of(sizes | {"image_size": 8}) is None
    assert read(family_to_json(tied)).point_of(sizes) == (4, 33)


def test_only_numbers_may_differ(traces):
    assert alike(traces[4, 33], traces[509, 545])
    other = trace(4, 161, branch_at=100)
    assert not alike(traces[4, 33], other)
    assert not alike(traces[4, 33], trace(4, 33, checkpointing="none", precision="bf16"))
    with pytest.raises(NotAlikeError):
        unite({(4, 33): traces[4, 33], (4, 161): other}, ("batch", "seq_len"), (1, 128), {})


def test_a_number_without_a_formula_makes_no_family(traces):
    noisy = {point: copy.copy(trace_) for point, trace_ in traces.items()}
    for number, one in enumerate(noisy.values()):
        one.sizes = [*one.sizes[:-1], 12345 + number**5]

    with pytest.raises(NoFormulaError):
        unite(noisy, ("batch", "seq_len"), (1, 128), {})


def test_a_formula_that_is_not_whole_everywhere_makes_no_family(traces):
    halves = {point: copy.copy(trace_) for point, trace_ in traces.items()}
    for (batch, _), one in halves.items():
        # whole at every traced point, and a fraction between them
        one.sizes = [*one.sizes[:-1], {2: 10, 4: 12, 171: 179, 509: 517}[batch] * 169 + batch]
    whole = unite(halves, ("batch", "seq_len"), (1, 128), {})

    assert all(whole.numbers_at((batch, 33)) for batch in range(2, 510))

    thirds = {point: copy.copy(trace_) for point, trace_ in traces.items() if point[0] % 13 == 2}
    for (batch, _), one in thirds.items():
        one.sizes = [*one.sizes[:-1], (batch - 2) // 13 + 1]
    with pytest.raises(NoFormulaError):
        unite(thirds, ("batch", "seq_len"), (1, 128), {})


# -- damage ---------------------------------------------------------------------------------------


def places(document, path=()):
    """The paths to everything in a document."""
    yield path
    if isinstance(document, dict):
        for key in document:
            yield from places(document[key], (*path, key))
    elif isinstance(document, list):
        for index in range(len(document)):
            yield from places(document[index], (*path, index))


JUNK = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.floats(allow_nan=False),
    st.sampled_from([-1, 0, 1, 2, 3, 10**6, 1 << 31, 1 << 63, 1 << 70, -(1 << 70), [], {}, [[]],
                     {"n": -1}, {"n": 1 << 40}, {"n": None}, {"dtype": "float32"}, [0] * 3]),
)  # fmt: skip


def damaged(draw, document):
    """A document with one part dropped, cut or replaced."""
    document = json.loads(json.dumps(document))
    first = draw(st.sampled_from(sorted(document)))
    path = draw(st.sampled_from([p for p in places(document[first], (first,)) if len(p) < 7]))
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    kind = draw(st.sampled_from(["drop", "cut", "junk", "junk", "more"]))
    value = parent[path[-1]]
    if kind == "drop":
        del parent[path[-1]]
    elif kind == "cut" and isinstance(value, list):
        parent[path[-1]] = value[: len(value) // 2]
    elif kind == "more" and isinstance(value, list):
        parent[path[-1]] = [*value, *value[:1]]
    else:
        parent[path[-1]] = draw(JUNK)
    return document


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_damaged_family_is_none_or_can_be_asked(family, data):
    """Reading raises one error; what is read can be asked, though it may answer otherwise."""
    document = damaged(data.draw, family_to_json(family))

    try:
        found = family_from_json(document)
    except BadDocumentError:
        return

    assert isinstance(found, Family)
    found.point_of({"batch": 4, "seq_len": 33})
    try:
        found.at(found.points[0])
    except NoFormulaError:
        return


@pytest.mark.parametrize("shape", [None, 3, "ab", [None]])
def test_a_weight_whose_shape_is_none_is_damage(family, shape):
    document = family_to_json(family)
    document["weights"][0][1] = shape

    with pytest.raises(BadDocumentError):
        family_from_json(document)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    document=st.recursive(
        st.one_of(st.none(), st.integers(), st.text(max_size=3)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_anything_else_is_no_family_and_no_sizing(document):
    with pytest.raises(BadDocumentError):
        family_from_json(document)
    with pytest.raises(BadDocumentError):
        sizing_from_json(document)


@pytest.mark.parametrize("key", ["events", "sizes", "formulas", "calls", "reach", "seams"])
def test_every_part_is_needed(family, key):
    document = family_to_json(family)
    del document[key]
    with pytest.raises(BadDocumentError):
        family_from_json(document)


def test_deaths_of_what_was_never_born_and_second_deaths(family):
    document = family_to_json(family)
    document["events"] = [3 + 1000, *document["events"]]
    with pytest.raises(BadDocumentError):
        family_from_json(document)
    document = family_to_json(family)
    at = next(i for i, code in enumerate(document["events"]) if code > 3)
    document["events"].insert(at, document["events"][at])
    with pytest.raises(BadDocumentError):
        family_from_json(document)


def sizing():
    made = Sizing()
    made.learn(
        {
            (("seq_len", n),): SizeAnswer({"seq_len": n}, (f"{n} tokens of {{brace}}",))
            for n in (1, 100, 512)
        },
        {},
    )
    made.exact[(("audio_seconds", 1.5),)] = SizeAnswer({"audio_seconds": 1.5}, ())
    return made


def test_a_sizing_is_written_and_read():
    again = sizing_from_json(json.loads(json.dumps(sizing_to_json(sizing()))))

    assert again == sizing()
    assert again.find((("seq_len", 77),)) == SizeAnswer({"seq_len": 77}, ("77 tokens of {brace}",))
    assert again.find((("seq_len", 513),)) is None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_damaged_sizing_is_none_or_can_be_asked(data):
    document = damaged(data.draw, sizing_to_json(sizing()))

    try:
        found = sizing_from_json(document)
    except BadDocumentError:
        return

    for asked in ((("seq_len", 77),), (("seq_len", 512),), (("audio_seconds", 1.5),), ()):
        assert found.find(asked) is None or isinstance(found.find(asked), SizeAnswer)
