"""What a case record must say, and what happens to one that does not."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memest.calibration.validation import read_records
from memest.errors import ConfigError
from support.case_records import record


def test_a_complete_record_is_taken_with_what_it_says(written):
    found = read_records([written(record(device_offset_bytes=1 << 20, limit_bytes=5 << 30))])
    (one,) = found.complete
    assert one.measured_bytes == 99 << 20, "what is not this run's is taken off"
    assert one.limit_bytes == 5 << 30
    assert one.group == "runs"
    assert one.taken == ("grad_accum", "dtype", "attn_implementation", "zero_grad")
    assert not found.incomplete
    assert not found.problems


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"gpu": ""}, ("gpu",)),
        ({"model": None}, ("model",)),
        ({"measured_bytes": None}, ("measured_bytes",)),
        ({"setup_": {"optim": None}}, ("setup.optim",)),
        ({"setup_": {"batch": None, "checkpointing": None}},
         ("setup.batch", "setup.checkpointing")),
        ({"setup_": {"precision": None}}, ("setup.precision",)),
        ({"setup_": {"seq_len": None}}, ("setup.seq_len",)),
        ({"software_": {"torch": "", "transformers": None}},
         ("software.torch", "software.transformers")),
    ],
)  # fmt: skip
def test_what_decides_memory_is_named_where_it_is_missing(written, change, missing):
    found = read_records([written(record(**change))])
    assert not found.complete
    assert [(one.id, one.missing) for one in found.incomplete] == [("one", missing)]


def test_a_record_of_another_form_lacks_everything_it_calls_otherwise(written):
    foreign = {"id": "x", "model": "gpt2", "micro_batch": 4, "value": 3, "framework": "nanoGPT"}
    (one,) = read_records([written(foreign)]).incomplete
    assert {"metric", "measured_bytes", "setup.batch", "software.torch"} <= set(one.missing)


def test_an_image_model_needs_no_length(written):
    setup = {"seq_len": None}
    images = record(model="google/vit-base-patch16-224", task="image-classification", setup_=setup)
    assert len(read_records([written(images)]).complete) == 1


def test_what_is_declared_fills_gaps_and_nothing_else(written):
    path = written(record(software_={"torch": None}), record(id="two"))
    found = read_records([path], assume={"software.torch": "2.1"})
    assert [(r.id, r.software["torch"], r.declared) for r in found.complete] == [
        ("one", "2.1", ("software.torch=2.1",)), ("two", "2.6", ()),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["torch", "software", "setup.", "softwar.torch", "measured_bytes"])
def test_only_fields_of_a_run_can_be_declared(written, name):
    with pytest.raises(ConfigError, match="no field of a record"):
        read_records([written(record())], assume={name: "1"})


def test_lengths_between_bounds_are_a_range(written):
    (one,) = read_records(
        [written(record(setup_={"seq_len": None}, seq_len_range=[2, 128]))]
    ).complete
    assert one.lengths == (2, 128)
    assert "seq_len" not in one.setup


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ("[" * 100_000, "nested too deeply"),
        (record(metric="reservd"), "did you mean reserved"),
        (record(measured_bytes="12 GB"), "write a number of bytes"),
        (record(measured_bytes=True), "write a number of bytes"),
        (record(measured_bytes=-1), "whole bytes"),
        (record(measured_bytes=1.5), "whole bytes"),
        (record(device_offset_bytes=100 << 20), "nothing is left"),
        (record(seq_len_range=[5, 2]), "shortest, longest"),
        (record(setup=[1]), "write an object"),
    ],
)
def test_a_line_that_is_no_record_is_told_and_the_next_is_read(written, line, said):
    found = read_records([written(line, record(id="after"))])
    assert [one.id for one in found.complete] == ["after"]
    (problem,) = found.problems
    assert problem.startswith("runs.jsonl:1: ")
    assert said in problem


def test_ids_count_once_and_files_may_be_packed(written, tmp_path):
    path = written(record(), record(measured_bytes=1))
    packed = tmp_path / "more.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(record(id="packed")).encode()))
    found = read_records([path, packed])
    assert [(r.id, r.measured_bytes, r.group) for r in found.complete] == [
        ("one", 100 << 20, "runs"), ("packed", 100 << 20, "more"),
    ]  # fmt: skip


def test_files_that_cannot_be_read_are_told(tmp_path):
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(b"no gzip at all")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(bytes(range(256)) * 4)
    for path in (tmp_path / "none.jsonl", tmp_path, broken, binary):
        with pytest.raises(ConfigError, match=path.name):
            read_records([path])


def test_runs_that_failed_before_anything_was_read_are_listed(written):
    failed = record(measured_bytes=None, status="crashed")
    found = read_records([written(failed)])
    assert found.without_figure == {"one": "crashed"}
    assert not found.incomplete


def test_only_takes_what_contains_the_words(written):
    path = written(record(), record(id="two", gpu="A100"))
    assert [one.id for one in read_records([path], only="a100").complete] == ["two"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.slow
@given(
    field=st.sampled_from([*record(), "oom", "limit_bytes", "seq_len_range", "status"]), value=_JSON
)
def test_whatever_stands_in_a_field_every_line_is_accounted_for(tmp_path_factory, field, value):
    path = tmp_path_factory.mktemp("any") / "runs.jsonl"
    path.write_text(json.dumps({**record(), field: value}), encoding="utf-8")
    found = read_records([path])
    assert found.count == 1
