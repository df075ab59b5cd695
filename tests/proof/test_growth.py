"""Real training loops on the CPU, recorded as torch records them on a GPU: what each one keeps."""

from __future__ import annotations

import copy
import pickle
from collections import deque

import pytest
import torch

import memest
from memest.errors import ReplayError
from memest.replay.sites import Role
from memest.replay.snapshot import load_content
from memest.replay.survivors import passes_of
from memest.report.growth_result import Cause
from support.recorded_loop import recorded
from support.snapshots import for_each_recording

PASSES = 8
LENGTHS = (16, 24, 40, 20, 64, 31, 80, 50, 100)


def network():
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2)]
    return torch.nn.Sequential(torch.nn.Embedding(200, 32), *layers, torch.nn.Linear(32, 200))


def train(keep=lambda model, loss, out: None, *, lengths=(24,), accumulate=1, passes=PASSES,
          retain=False):  # fmt: skip
    """A loop that keeps what ``keep`` returns of each pass."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    for number in range(passes):
        tokens = torch.randint(0, 200, (4, lengths[number % len(lengths)]))
        out = model(tokens)
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten())
        loss.backward(retain_graph=retain)
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        kept.append(keep(model, loss, out))
    return model, optimizer, kept


def evaluate(model):
    tokens = torch.randint(0, 200, (4, 24))
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


LOOPS = {
    "clean": ({}, None, 0),
    "accumulated": ({"accumulate": 4, "passes": 12}, None, 0),
    "losses": ({"keep": lambda model, loss, out: loss}, Cause.KEPT_TENSORS, 512),
    "outputs": ({"keep": lambda model, loss, out: out}, Cause.KEPT_TENSORS, 4 * 24 * 200 * 4),
    "graphs": ({"keep": lambda model, loss, out: loss, "retain": True}, Cause.KEPT_GRAPH, None),
    "evaluations with their graphs": (
        {"keep": lambda model, loss, out: evaluate(model)}, Cause.KEPT_GRAPH, None,
    ),
    "copies": (
        {"keep": lambda model, loss, out: copy.deepcopy(model.state_dict())},
        Cause.KEPT_WEIGHTS, None,
    ),
}  # fmt: skip
"""Of each: what it does, the leak, and bytes that are kept with every pass."""


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("growth")

    def of(loop=None, **options):
        path = folder / "run.pickle"
        path.write_bytes(pickle.dumps(recorded(loop or (lambda: train(**options)))))
        return memest.explain_growth(path)

    return of


@pytest.mark.slow(but=("losses", "graphs"))
@pytest.mark.parametrize("name", LOOPS)
def test_the_leak_is_named_and_its_size_and_line(name, explained):
    options, cause, size = LOOPS[name]
    found = explained(**options)
    leaks = [finding for finding in found.findings if finding.is_leak]

    assert [finding.cause for finding in leaks] == ([cause] if cause else [])
    assert len(found.points) == options.get("passes", PASSES)  # one before, the last is not over
    if cause is None:
        assert found.sites == ()
        return
    assert leaks[0].step_bytes == sum(site.pass_bytes for site in found.sites)
    assert size in (None, leaks[0].step_bytes)
    assert found.sites[0].line.startswith("test_growth.py:")


def test_states_of_the_optimizer_are_no_leak(explained):
    found = explained()
    (first,) = found.findings
    model = network()
    moments = 2 * sum(-(-p.numel() * 4 // 512) * 512 for p in model.parameters())

    assert (first.cause, first.is_leak) == (Cause.FIRST_STEP, False)
    # beside the moments of AdamW, a step counter for each weight
    assert moments <= first.bytes <= moments + 512 * len(list(model.parameters()))


@pytest.mark.slow
def test_lengths_that_vary_are_no_leak(explained):
    found = explained(lengths=LENGTHS, passes=12)

    assert not found.leaks
    assert Cause.VARYING_SIZES in [finding.cause for finding in found.findings]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"accumulate": 4, "passes": 24}, {"lengths": LENGTHS, "passes": 18}]
)
def test_what_stays_is_found_below_what_comes_and_goes(options, explained):
    """Gradients that add up, or samples of other lengths, are far more than what is kept."""
    every = options.get("accumulate", 1)
    passes = iter(range(1, 100))
    found = explained(keep=lambda _, loss, out: None if next(passes) % every else loss, **options)
    (leak,) = (finding for finding in found.findings if finding.is_leak)
    (site,) = found.sites

    assert leak.cause is Cause.KEPT_TENSORS
    assert (site.passes, site.pass_bytes) == (options["passes"] // every, 512)
    assert f"in each of {site.passes} passes" in " ".join(leak.evidence)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "passes"), [(4, 8), (7, 12)])
def test_a_buffer_that_is_full_is_no_leak(size, passes, explained):
    ring, heap = deque(maxlen=size), []
    first = explained(keep=lambda model, loss, out: ring.append(out.detach()), passes=passes)
    filled = explained(
        keep=lambda model, loss, out: len(heap) < size and heap.append(out.detach()), passes=passes
    )

    for found in (first, filled):
        assert (found.leaks, found.sites) == (False, ())
        assert Cause.VARYING_SIZES not in [finding.cause for finding in found.findings]


def test_samples_that_get_longer_are_no_leak(explained):
    found = explained(lengths=range(8, 80, 4), passes=18)

    assert not found.leaks
    assert "later ones free" in " ".join(s for f in found.findings for s in f.evidence)


def test_outputs_of_several_places_are_no_graph(explained):
    """Of a forward of dozens of places, a cache of keys and hidden states is a few."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=200,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model, kept = LlamaForCausalLM(config), []

    def loop():
        for _ in range(PASSES):
            tokens = torch.randint(0, 200, (4, 24))
            kept.append(model(input_ids=tokens, labels=tokens))
            kept[-1].loss.backward()
            model.zero_grad()

    (leak,) = (finding for finding in explained(loop=loop).findings if finding.is_leak)
    assert leak.cause is Cause.KEPT_TENSORS


def test_a_leak_is_found_on_whichever_device_it_is(tmp_path):
    content = recorded(lambda: train(keep=lambda model, loss, out: loss))
    content["device_traces"].append(recorded(lambda: train(passes=12))["device_traces"][0])
    path = tmp_path / "two.pickle"
    path.write_bytes(pickle.dumps(content))
    found = memest.explain_growth(path)

    assert found.leaks
    assert "of cuda:1 there is a history too" in found.notes[0]


@pytest.mark.parametrize("frames", [[None], [{}], "x", 5, [{"filename": "a.py"}], []])
def test_frames_of_another_kind_are_refused(frames, tmp_path):
    path = tmp_path / "bad.pickle"
    event = {"action": "alloc", "addr": 512, "size": 512, "stream": 0, "frames": frames}
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[event] * 9]}))
    if not frames:
        assert "no frames" in memest.explain_growth(path).notes[0]
        return
    with pytest.raises(ReplayError, match="none of torch"):
        memest.explain_growth(path)


@pytest.mark.parametrize("passes", [1, 3])
def test_of_few_passes_nothing_is_said(passes, explained):
    found = explained(passes=passes, keep=lambda model, loss, out: out)

    assert (found.points, found.findings, found.sites) == ((), (), ())
    assert "no pass of a training loop repeats" in found.notes[0]


@for_each_recording(large_are_slow=True)
def test_layers_of_one_recorded_step_are_no_passes(path):
    """The public recordings have a step, or a part of one, with up to 33 layers that repeat."""
    snapshot, content = load_content(path)
    device = max(range(len(snapshot.traces)), key=lambda number: len(snapshot.traces[number]))
    passes = passes_of(snapshot, content, device)

    assert passes.points == ()
    assert not any(site.grows for site in passes.sites)
    assert {site.role for site in passes.sites} <= set(Role)
