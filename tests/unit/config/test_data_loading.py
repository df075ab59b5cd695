"""Batches on the host: how many there are, against torch's own loader, and what they weigh."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memest.config.data_loading import DataLoading
from memest.config.options import setup_from_options
from memest.config.setup import Setup
from memest.errors import ConfigError

KEYS = {
    "dataloader_num_workers": 3, "dataloader_prefetch_factor": 4,
    "dataloader_persistent_workers": True, "dataloader_pin_memory": False,
}  # fmt: skip


class Counted:
    """A dataset whose samples are their own numbers; it counts what was asked of it."""

    def __init__(self, counter):
        self.counter = counter

    def __len__(self):
        return 200

    def __getitem__(self, index):
        import torch

        with self.counter.get_lock():
            self.counter.value += 1
        return torch.tensor(index)


@pytest.mark.parametrize(("workers", "prefetch"), [(1, None), (2, None), (2, 3), (3, 1)])
def test_torch_loads_as_many_batches_ahead_as_is_said(workers, prefetch):
    torch = pytest.importorskip("torch")
    counter = torch.multiprocessing.get_context("fork").Value("i", 0)
    loader = torch.utils.data.DataLoader(
        Counted(counter), batch_size=5, num_workers=workers, prefetch_factor=prefetch,
        multiprocessing_context="fork",
    )  # fmt: skip
    loading = DataLoading(num_workers=workers, prefetch_factor=prefetch)
    batches = iter(loader)
    for handed_out in (1, 2, 3):
        next(batches)
        wanted = 5 * (handed_out + loading.num_waiting)
        end = time.monotonic() + 60
        while counter.value < wanted and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)  # for one too many to come

        assert counter.value == wanted


def test_accelerate_asks_for_the_next_batch_before_it_hands_out_one():
    torch = pytest.importorskip("torch")
    accelerate = pytest.importorskip("accelerate")
    made = []

    class Noted(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            made.append(index)
            return torch.tensor(index)

    usual = torch.utils.data.DataLoader(Noted(), batch_size=4, num_workers=0)
    batches = iter(accelerate.data_loader.prepare_data_loader(usual, put_on_device=False))
    next(batches)

    assert len(made) == 4 * (1 + DataLoading().num_loaded)


@given(
    sizes=st.lists(st.integers(1, 1 << 30), min_size=1, max_size=6),
    workers=st.integers(0, 16), prefetch=st.integers(1, 8), pins=st.booleans(),
)  # fmt: skip
def test_bytes_grow_with_batches_and_are_rounded_as_the_allocators_do(
    sizes, workers, prefetch, pins
):
    loading = DataLoading(
        num_workers=workers, prefetch_factor=prefetch if workers else None, pin_memory=pins
    )
    pinned, shared = loading.pinned_bytes(sizes), loading.shared_bytes(sizes)

    assert loading.num_loaded == workers * prefetch + 1
    if pins:
        assert loading.num_loaded * sum(sizes) <= pinned < 2 * loading.num_loaded * sum(sizes)
        powers = pinned // loading.num_loaded
        assert powers == sum(2 ** (size - 1).bit_length() for size in sizes)
    else:
        assert pinned == 0
    assert (shared > 0) == (workers > 0)
    assert shared % 4096 == 0
    assert (loading.pageable_bytes(sizes) > 0) == (workers == 0)


def test_training_arguments_names_are_options():
    setup = setup_from_options(**KEYS)

    assert setup.data_loading == DataLoading(
        num_workers=3, prefetch_factor=4, persistent_workers=True, pin_memory=False
    )
    again = Setup(data_loading=setup.to_dict()["data_loading"])
    assert again.data_loading == setup.data_loading
    more = setup_from_options(setup, dataloader_num_workers=5)
    assert more.data_loading.num_loaded == 21


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dataloader_prefetch_factor": 2}, "needs workers"),
        ({"dataloader_persistent_workers": True}, "needs workers"),
        ({"dataloader_num_workers": -1}, "dataloader-num-workers"),
        ({"dataloader_num_workers": 2, "dataloader_prefetch_factor": 0}, "prefetch-factor"),
        ({"dataloader_pin": True}, "dataloader_pin_memory"),
    ],
)
def test_what_torch_refuses_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        setup_from_options(**options)


@pytest.mark.parametrize("loop", ["trainer", "accelerate", "plain"])
@pytest.mark.parametrize("grad_accum", [1, 3])
def test_an_estimate_says_the_host_memory_of_its_batches(loop, grad_accum, tmp_path):
    pytest.importorskip("torch")
    import json

    import memest

    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2,
        "n_head": 4, "vocab_size": 500, "n_positions": 256,
    }))  # fmt: skip
    plain = {"batch": 8, "seq_len": 128, "loop": loop, "grad_accum": grad_accum}
    asked = memest.estimate(str(tmp_path), **plain, dataloader_num_workers=2)
    usual = memest.estimate(str(tmp_path), **plain)
    notes = [note for note in asked.notes if "host memory" in note]

    # ids, mask and labels: 8 x 128 x 8 bytes each, powers of two already
    assert len(notes) == 1
    assert "5 batches of 24 KiB" in notes[0]
    assert "120 KiB pinned" in notes[0]
    assert "24 KiB in shared memory" in notes[0]
    assert asked.peak == usual.peak
    assert not any("host memory" in note for note in usual.notes)
