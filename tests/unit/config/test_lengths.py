"""Lengths of samples: files, batches that can happen, chances against counting."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memest.config.length_files import lengths_of_dataset, read_lengths
from memest.config.lengths import Batching, Lengths
from memest.config.options import setup_from_options
from memest.config.positions import check_text_length
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.estimation.whole_run import length_notes

SMALL = Lengths.of([3, 3, 5, 8, 8, 9])


@pytest.mark.parametrize(
    "text",
    [
        "length,count\n12,3\n40,1\n", "12 3\n40\t1", "12\n40\n12\n12", "[12, 12, 40, 12]",
        '{"12": 3, "40": 1}', "[[12, 3], [40, 1]]", '[{"length": 12, "count": 3}, 40]',
        "12;3\n40\n", "id,tokens\n0,12\n1,40\n2,12\n3,12\n", '"count","len"\n3,12\n1,"40"\n',
    ],
)  # fmt: skip
def test_every_way_to_write_lengths_reads_the_same(tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    assert read_lengths(tmp_path / "lengths").counts == ((12, 3), (40, 1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("12\nabc\n", "line 2"), ("12,3,4", "line 1"), ("", "no samples"), ("0\n", "1 or more"),
        ("[1.5]", "no length"), ("id,name\n12,3\n", "which column is the length.* has id, name"),
        ("id,len\n12\n", "line 2"), ("{", "no JSON"), ("-4", "1 or more"),
        ('{"a": 1}', "no length"),
    ],
)  # fmt: skip
def test_what_is_no_length_is_named(tmp_path, text, said):
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_lengths(tmp_path / "lengths")


@pytest.mark.parametrize("text", ["512", "100, 200", "100 200"])
def test_numbers_in_the_place_of_a_file_are_told_where_they_go(text):
    with pytest.raises(ConfigError, match=r"is no file.*--seq-len 512"):
        read_lengths(text)


def test_a_dataset_of_the_hub_is_to_be_saved_first():
    with pytest.raises(ConfigError, match=r"load_dataset\('tatsu-lab/alpaca', split='train'\)"):
        lengths_of_dataset("tatsu-lab/alpaca", None, None)


@pytest.mark.parametrize("flat", [False, True])
def test_samples_that_a_model_has_no_positions_for(flat):
    """Also where the mean of a row laid end to end has: each sample has positions of its own."""
    lengths = Lengths.of([20] * 50 + [90])
    setup = setup_from_options(lengths=lengths, padding_free=flat, batch=32)
    with pytest.raises(ConfigError, match=r"up to 90 tokens .* the 64 positions.*--max-length 64"):
        check_text_length(setup, 64, "positions of this model")
    check_text_length(setup, 90, "positions of this model")
    cut = setup_from_options(lengths=lengths, padding_free=flat, batch=32, seq_len=64)
    check_text_length(cut, 64, "positions of this model")
    with pytest.raises(ConfigError, match=r"--seq-len 64 is longer than the 60 positions"):
        check_text_length(cut, 60, "positions")


def test_a_batch_of_more_samples_than_there_are_is_said():
    setup = setup_from_options(lengths=Lengths.of([8] * 3), batch=4)
    assert "lengths: 3 samples make no batch of 4" in " ".join(length_notes(setup))
    few = setup_from_options(lengths=Lengths.of([8] * 3), batch=3)
    assert "make no batch" not in " ".join(length_notes(few))


def test_datasets_of_every_format_count_the_same(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "a": 1, "b": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(2)  # a file that cuts: lengths are of the samples all the same
    made.save(str(tmp_path / "tokenizer.json"))
    texts = ["a b a", "b", "a b x a b"]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    (tmp_path / "d.json").write_text(json.dumps([{"text": t} for t in texts]))
    (tmp_path / "d.csv").write_text("id,text\n" + "\n".join(f"1,{t}" for t in texts))
    (tmp_path / "d.txt").write_text("\n\n".join(texts))
    for name in ("d.jsonl", "d.json", "d.csv", "d.txt"):
        found = lengths_of_dataset(tmp_path / name, str(tmp_path), None)
        assert found.counts == ((1, 1), (3, 1), (5, 1)), name


def test_ids_need_no_tokenizer_and_what_does_is_refused(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4]}\n')
    assert lengths_of_dataset(file, None, None).counts == ((1, 1), (3, 1))
    file.write_text('{"messages": [{"role": "user", "content": "x"}]}')
    with pytest.raises(ConfigError, match="chat template"):
        lengths_of_dataset(file, None, None)
    (tmp_path / "d.txt").write_text("some words\n")
    with pytest.raises(ConfigError, match=r"--tokenizer.*--lengths FILE"):
        lengths_of_dataset(tmp_path / "d.txt", None, None)


def every_batch(lengths, batch):
    samples = [n for n, c in lengths.counts for _ in range(c)]
    return list(itertools.combinations(samples, batch))


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 16),
    st.sampled_from([None, 4]), st.integers(1, 3),
)  # fmt: skip
def test_chances_are_those_of_counting_all_batches(samples, batch, tokens, multiple, steps):
    batching = Batching(lengths=Lengths.of(samples), multiple_of=multiple)
    rows = every_batch(batching.lengths, min(batch, len(samples)))
    mean = sum(batching.padded_length(max(r)) for r in rows) / len(rows)
    assert batching.mean_padded_length(batch) == pytest.approx(mean)
    first = every_batch(batching.lengths, min(batch * steps, len(samples)))
    above = sum(batching.padded_length(max(r)) > tokens for r in first) / len(first)
    assert batching.chance_above(batch, tokens, steps) == pytest.approx(above, abs=1e-9)


def test_bound_of_batches_laid_flat_holds_in_simulated_epochs():
    source = random.Random(3)
    samples = [int(source.lognormvariate(4, 0.7)) + 1 for _ in range(640)]
    batching = Batching(lengths=Lengths.of(samples), flat=True)
    bound = batching.flat_at_most(8, 0.05)
    exceeded = 0
    for _ in range(200):
        source.shuffle(samples)
        exceeded += max(sum(samples[i : i + 8]) for i in range(0, 640, 8)) > bound
    assert exceeded <= 0.05 * 200
    assert bound < batching.lengths.sum_of_longest(8)


def test_largest_batch_holds_the_longest_sample():
    batching = Batching(lengths=SMALL, multiple_of=8)
    assert batching.worst(1) == batching.worst(4) == 16
    assert Batching(lengths=SMALL, flat=True).worst(3) == 9  # 9 + 8 + 8, a third of it, up
    assert Batching(lengths=SMALL, max_length=6).worst(2) == 6
    assert Batching(lengths=SMALL, max_length=32, padding="max_length").worst(2) == 32


@pytest.mark.parametrize("grouped", [False, True])
def test_an_order_is_the_seed_s_and_holds_the_largest(grouped):
    batching = Batching(lengths=SMALL, group_by_length=grouped)
    drawn = batching.draw(2, 9)
    assert drawn == batching.draw(2, 9)
    assert len(drawn) == 9
    assert drawn[0 if grouped else -1] == max(drawn) == 9
    other = Batching(lengths=SMALL, seed=7, group_by_length=grouped)
    assert drawn != other.draw(2, 9)


def test_setup_takes_the_largest_batch_for_every_batch_size(tmp_path):
    (tmp_path / "l").write_text("3\n3\n5\n8\n8\n9\n")
    setup = setup_from_options(lengths=str(tmp_path / "l"), batch=2, pad_to_multiple_of=8)
    assert (setup.seq_len, setup.padded) == (16, True)
    flat = setup_from_options(lengths=str(tmp_path / "l"), batch=3, padding_free=True)
    assert (flat.seq_len, flat.padded, flat.padding_free) == (9, False, True)
    more = setup_from_options(flat, batch=6)
    assert more.seq_len == 6
    cut = setup_from_options(lengths=str(tmp_path / "l"), batch=2, seq_len=7)
    assert cut.seq_len == 7
    alone = setup_from_options(lengths=str(tmp_path / "l"), batch=1)
    assert not alone.padded


def test_packing_is_full_rows():
    bfd = setup_from_options(packing=True, seq_len=64, batch=2)
    assert (bfd.padding_free, bfd.seq_len) == (True, 64)
    wrapped = setup_from_options(packing="wrapped", seq_len=64)
    assert not wrapped.padding_free
    assert setup_from_options(packing="none") == Setup()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"padding": "longest"}, "add --lengths FILE"),
        ({"tokenizer": "x"}, "add --dataset FILE"),
        ({"lengths": "/nowhere"}, "cannot be read"),
        ({"packing": True}, "add --seq-len"),
        ({"packing": "bdf", "seq_len": 8}, "Did you mean 'bfd'"),
        ({"lengths": SMALL, "padding": "max_length"}, "add --max-length"),
        ({"lengths": SMALL, "packing": True, "seq_len": 8}, "drop --lengths"),
        ({"lengths": SMALL, "dataset": "x.txt"}, "drop one"),
        ({"lengths": SMALL, "padding": "longst"}, "Did you mean 'longest'"),
    ],
)
def test_what_does_not_go_together_is_said(options, said):
    with pytest.raises(ConfigError, match=said):
        setup_from_options(**options)
