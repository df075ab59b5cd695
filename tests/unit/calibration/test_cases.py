"""Cases and campaigns: what is read is checked, and a case has one name wherever it is made."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memest.calibration.campaign import CAMPAIGNS, read_campaign
from memest.calibration.case import Case, Parallel, case_from_dict, with_events
from memest.catalog.resolve import resolve_model
from memest.config.setup import Loop, Precision, Setup
from memest.errors import ConfigError

BATCHES = st.integers(1, 512)


@given(
    batch=BATCHES, seq=st.none() | st.integers(8, 4096), accum=st.integers(1, 64),
    precision=st.sampled_from(Precision), loop=st.sampled_from(Loop),
    processes=st.integers(1, 8), cap=st.none() | st.integers(1, 1 << 40), events=st.booleans(),
)  # fmt: skip
def test_a_case_comes_back_from_data(batch, seq, accum, precision, loop, processes, cap, events):
    setup = Setup(
        batch=batch, seq_len=seq, grad_accum=accum, precision=precision, loop=loop,
        dtype="float32", num_steps=4,
    )  # fmt: skip
    case = Case(
        model="gpt2", setup=setup, cap_bytes=cap, record_events=events, processes=processes,
        parallel=Parallel.DDP if processes > 1 else Parallel.NONE,
    )  # fmt: skip

    back = case_from_dict(json.loads(json.dumps(case.to_dict() | {"id": case.id})))

    assert back == case
    assert back.id == case.id


def test_names_are_of_what_runs_not_of_what_is_kept():
    one = case_from_dict({"model": "gpt2", "setup": {"batch": 2}})
    assert with_events(one).id == one.id
    assert case_from_dict({"model": "gpt2", "setup": {"per_device_train_batch_size": 2}}) == one
    others = [{"batch": 3}, {"batch": 2, "bf16": True}, {"batch": 2, "optim": "sgd"}]
    ids = {case_from_dict({"model": "gpt2", "setup": setup}).id for setup in others}
    assert len(ids | {one.id}) == 4


@pytest.mark.parametrize(
    ("software", "dtype"), [("transformers=5.0", "auto"), ("transformers=4.44", "float32")]
)
def test_names_say_what_the_release_made_of_a_dtype_left_open(software, dtype):
    case = case_from_dict({"model": "gpt2", "setup": {"batch": 2, "software": software}})
    assert case.id.split("-")[2] == dtype


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "not an object"),
        ({}, "names no model"),
        ({"model": ""}, "names no model"),
        ({"model": "gpt2", "batch": 3}, "Options of the run belong into setup"),
        ({"model": "gpt2", "setup": []}, "setup is a list"),
        ({"model": "gpt2", "setup": {"bacth": 3}}, "Did you mean batch"),
        ({"model": "gpt2", "setup": {"batch": "many"}}, "not a whole number"),
        ({"model": "gpt2", "setup": {"batch": 0}}, "out of range"),
        ({"model": "gpt2", "parallel": "magic"}, "Legal: none, ddp, fsdp"),
        ({"model": "gpt2", "processes": 0}, "1 to 64"),
        ({"model": "gpt2", "cap_bytes": True}, "whole number of bytes"),
    ],
)
def test_what_is_no_case_is_said(document, said):
    with pytest.raises(ConfigError, match="case 7") as error:
        case_from_dict(document, where="case 7")
    assert said in str(error.value)


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_built_in_campaigns_name_known_models(name):
    campaign = read_campaign(name)

    assert campaign.about
    assert len({case.id for case in campaign.cases}) == len(campaign.cases)
    for model in {case.model for case in campaign.cases}:
        resolve_model(model)


def test_campaigns_grow_and_the_standard_one_records():
    counts = [len(read_campaign(name).cases) for name in ("smoke", "quick", "standard", "full")]
    assert counts == sorted(counts)
    standard = read_campaign("standard").cases
    assert sum(case.record_events for case in standard) >= 10
    # Lightning is a package that calibration does not need
    assert {case.setup.loop for case in standard} == {*Loop} - {Loop.LIGHTNING}
    assert {case.setup.precision for case in standard} == set(Precision)


@pytest.mark.parametrize("suffix", ["json", "jsonl", "toml"])
def test_a_file_of_cases_is_a_campaign_and_lists_are_products(tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    entry = {"model": ["gpt2", "bert-base-uncased"], "setup": {"batch": [1, 2], "seq_len": 64}}
    if suffix == "json":
        path.write_text(json.dumps({"about": "two by two", "cases": [entry]}))
    elif suffix == "jsonl":
        path.write_text(json.dumps(entry) + "\n\n")
    else:
        path.write_text(
            '[[cases]]\nmodel = ["gpt2", "bert-base-uncased"]\n'
            "[cases.setup]\nbatch = [1, 2]\nseq_len = 64\n"
        )

    campaign = read_campaign(str(path))

    assert campaign.name == "mine"
    assert [(c.model, c.setup.batch) for c in campaign.cases] == [
        ("gpt2", 1), ("gpt2", 2), ("bert-base-uncased", 1), ("bert-base-uncased", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("{}", "no list of cases"),
        ("[]", "has no case"),
        ('[{"model": "gpt2", "setup": {"batch": []}}]', "empty list"),
        ('[{"model": "gpt2"}, 3]', "case 2"),
        ("[" * 100_000, "not valid JSON"),
        ('[{"model": "gpt2", "parallel": "ddp", "processes": 2}]', "cases of one process"),
    ],
)
def test_what_is_no_campaign_is_said(tmp_path, text, said):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.json") as error:
        read_campaign(str(path))
    assert said in str(error.value)


def test_the_list_that_a_refusal_shows_is_one(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("{}")
    with pytest.raises(ConfigError) as error:
        read_campaign(str(path))
    path.write_text(str(error.value).partition("write ")[2].partition(", or the list")[0])

    assert len(read_campaign(str(path)).cases) == 3


def test_a_product_without_end_is_refused(tmp_path):
    path = tmp_path / "mine.json"
    many = list(range(1, 200))
    path.write_text(json.dumps([{"model": "gpt2", "setup": {"batch": many, "seq_len": many}}]))
    with pytest.raises(ConfigError, match="39,601 cases"):
        read_campaign(str(path))


def test_an_unknown_campaign_says_what_there_is():
    with pytest.raises(ConfigError, match="Did you mean 'standard'"):
        read_campaign("standart")
