"""Optimizers in whole estimates: paged states, decay, every model family, the store."""

from __future__ import annotations

import json
from unittest import mock

import pytest

import memest
from memest.config.optimizers import ALIASES, OPTIMIZER_FACTS
from memest.config.setup import Setup
from memest.events import Category, Phase
from memest.units import GIB

LLAMA = "meta-llama/Llama-3.2-1B?num_hidden_layers=1&hidden_size=512&intermediate_size=1024"
FAMILIES = (
    "bert-base-uncased?num_hidden_layers=1",
    "gpt2?n_layer=1",
    "t5-small?num_layers=1",
    "google/vit-base-patch16-224?num_hidden_layers=1",
)


def _states(estimate):
    rows = {row.category: row.bytes for row in estimate.breakdown}
    return rows.get(Category.OPTIMIZER_STATES, 0)


def _steady(estimate):
    """Weights and states: what is there when the second step's gradients are gone."""
    return next(
        t.allocated_bytes for t in estimate.timeline if t.phase is Phase.BATCH and t.step == 3
    )


def _ask(model=FAMILIES[0], **options):
    return memest.estimate(model, batch=2, **options)


@pytest.mark.slow
def test_paged_states_leave_the_allocator_and_are_told_apart():
    plain, paged = _ask(optim="adamw_8bit"), _ask(optim="paged_adamw_8bit")
    managed = paged.peak.managed_bytes

    assert plain.peak.managed_bytes == 0
    assert managed > 0
    assert paged.peak.device_with_managed_bytes == paged.peak.device_bytes + managed
    # scales and small states stay in torch: nothing is lost on the way
    assert _steady(plain) - _steady(paged) == pytest.approx(managed, rel=0.02)
    assert "paged" in str(paged)
    assert "paged" in paged._repr_html_()
    assert "paged" not in str(plain)
    document = json.loads(paged.to_json())
    assert document["peak"]["managed_bytes"] == managed
    assert any("managed memory" in note for note in document["notes"])


@pytest.mark.slow
def test_the_verdict_is_about_what_cannot_leave_the_gpu():
    model = "bert-base-uncased"
    need = _ask(model, optim="paged_adamw_32bit", max_batch=False)
    size = need.interval.high_bytes + 128 * 1024**2
    assert size < need.peak.device_with_managed_bytes
    paged = _ask(model, optim="paged_adamw_32bit", gpu_memory=size, max_batch=False)
    whole = _ask(model, optim="adamw_torch_loop", gpu_memory=size, max_batch=False)

    assert paged.verdict is memest.Verdict.FITS
    assert whole.verdict is not memest.Verdict.FITS
    assert any("pages move between host and GPU" in note for note in paged.notes)


@pytest.mark.slow
def test_batches_of_a_family_have_the_same_managed_bytes():
    profile = memest.profile(FAMILIES[1], optim="paged_lion_8bit", seq_len=64)
    found = {profile.estimate(batch=batch).peak.managed_bytes for batch in (1, 2, 3, 5)}

    assert len(found) == 1


@pytest.mark.slow(
    "adamw_8bit-t5-small?num_layers=1",
    "adamw_torch_4bit-bert-base-uncased?num_hidden_layers=1",
    "muon-t5-small?num_layers=1",
    "adamw_8bit-bert-base-uncased?num_hidden_layers=1",
    "adamw_8bit-gpt2?n_layer=1",
    "adamw_8bit-google/vit-base-patch16-224?num_hidden_layers=1",
    "paged_ademamix_8bit-t5-small?num_layers=1",
)
@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize(
    "optim", ["adamw_8bit", "paged_ademamix_8bit", "lion_32bit", "adamw_torch_4bit", "muon"]
)
def test_every_family_has_its_price(optim, model):
    estimate = _ask(model, optim=optim, bf16=True, grad_accum=2)

    assert _states(estimate) + estimate.peak.managed_bytes > estimate.model.parameters // 2


@pytest.mark.slow("schedule_free_adamw-precision0", "apollo_adamw-precision2")
@pytest.mark.parametrize(
    "precision", [{}, {"fp16": True, "dtype": "float32"}, {"dtype": "bfloat16"}]
)
@pytest.mark.parametrize("optim", ["schedule_free_adamw", "apollo_adamw"])
def test_libraries_compose_for_any_number_of_steps(optim, precision):
    facts = OPTIMIZER_FACTS[optim]
    pytest.importorskip(facts.module)
    more = {"optim_target_modules": "all-linear"} if facts.targets else {}
    peaks = {
        steps: _ask(LLAMA, seq_len=64, optim=optim, num_steps=steps, **more, **precision).peak
        for steps in (3, 5)
    }

    assert peaks[3] == peaks[5]


def test_master_weights_have_8_bit_states_too():
    half = _ask(optim="adamw_8bit", dtype="bfloat16")
    master = _ask(optim="adamw_8bit", dtype="bfloat16", master_weights=True)

    assert _states(half) == _states(master)


@pytest.mark.parametrize(("optim", "copies"), [("sgd", 1), ("adam", 0), ("adamw_torch", 0)])
def test_decay_makes_a_copy_of_gradients_where_it_is_part_of_them(optim, copies):
    """foreach SGD and Adam add it to a copy of the gradients; AdamW takes it off the weights.

    Adam lets go of the copy before it makes its square roots, which are as large.
    """

    def peak(decay):
        estimate = _ask("gpt2?n_layer=1", seq_len=8, loop="plain", optim=optim, weight_decay=decay)
        found = [
            t.allocated_bytes for t in estimate.timeline
            if t.phase is Phase.OPTIMIZER and t.step == 2
        ]  # fmt: skip
        return max(found), estimate.model.parameter_bytes

    (plain, size), (decayed, _) = peak(0.0), peak(0.1)
    extra = decayed - plain
    assert extra == pytest.approx(copies * size, rel=0.02)


def test_an_answer_from_the_store_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path))
    first = _ask(optim="paged_adamw_8bit")
    again = _ask(optim="paged_adamw_8bit")
    other = _ask(optim="paged_adamw_8bit", software="bitsandbytes=0.43")

    assert again.to_dict() == first.to_dict()
    assert _steady(other) < _steady(first)  # fewer scales: blocks of 2048


def test_every_alias_leads_to_a_name():
    assert {Setup(optim=alias).optim for alias in ALIASES} == set(ALIASES.values())
    assert set(ALIASES.values()) <= set(OPTIMIZER_FACTS)


def test_names_of_the_trainer_are_known_here():
    """What ``--optim`` of the Trainer takes is priced, or refused with a reason."""
    names = pytest.importorskip("transformers.training_args").OptimizerNames
    from memest.config.optimizers import REFUSALS, TRAINER_NAMES

    known = set(OPTIMIZER_FACTS) | set(ALIASES) | set(REFUSALS)
    of_trainer = {member.value for member in names}
    assert of_trainer <= known
    assert of_trainer & set(OPTIMIZER_FACTS) == TRAINER_NAMES


@pytest.mark.slow
def test_the_device_peak_of_8_bit_states_on_a_published_run():
    """bert-large on a V100 with bitsandbytes' Adam: 5,363 MiB, in a loop with Accelerate.

    Source: transformers 4.18, docs/source/en/performance.mdx (``data/reference``).
    """
    estimate = memest.estimate(
        "bert-large-uncased", batch=1, seq_len=512, grad_accum=4, checkpointing="full", fp16=True,
        attn_implementation="eager", zero_grad="zero", loop="accelerate", optim="adamw_bnb_8bit",
        software="torch=1.10,transformers=4.18,cuda=11.2,bitsandbytes=0.26",
        gpu="V100-SXM2-16GB", device_context="1343MiB", max_batch=False,
        task="sequence-classification",
    )  # fmt: skip

    assert estimate.peak.device_bytes == pytest.approx(5363 * 1024**2, rel=0.01)
    assert estimate.peak.device_bytes < 6 * GIB


IN_BACKWARD = [
    {"optim": "lomo"},
    {"optim": "adalomo", "loop": "plain"},
    {"optim": "adamw_torch_fused", "optim_in_backward": True, "loop": "accelerate"},
    {"optim": "paged_adamw_8bit", "optim_in_backward": True, "loop": "plain"},
    {"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"},
    {"optim": "apollo_adamw_layerwise", "optim_target_modules": "all-linear"},
]


@pytest.mark.slow(but=("paged_adamw_8bit",))
@pytest.mark.parametrize("options", IN_BACKWARD, ids=lambda o: o["optim"])
def test_gradients_do_not_pile_up_where_the_optimizer_steps_in_backward(options):
    facts = OPTIMIZER_FACTS[options["optim"]]
    if facts.package:
        pytest.importorskip(facts.module)
    usual = _ask(LLAMA, seq_len=32, optim="adamw_torch_loop", loop=options.get("loop", "trainer"))
    found = _ask(LLAMA, seq_len=32, **options)
    gradients = {row.category: row.bytes for row in found.breakdown}.get(Category.GRADIENTS, 0)

    assert gradients < usual.model.parameter_bytes
    if options["optim"] != "adalomo":  # fp32 copies of the one large embedding outweigh it here
        assert found.peak.allocated_bytes < usual.peak.allocated_bytes
    assert not any(t.phase is Phase.OPTIMIZER for t in found.timeline)


@pytest.mark.slow
def test_a_family_of_batches_holds_with_updates_in_backward():
    profile = memest.profile(
        "gpt2?n_layer=2", optim="adamw_torch_loop", optim_in_backward=True, seq_len=64
    )
    direct = {
        batch: memest.estimate(
            "gpt2?n_layer=2", optim="adamw_torch_loop", optim_in_backward=True, seq_len=64,
            batch=batch,
        ).peak
        for batch in (3, 11)
    }  # fmt: skip
    for batch in (2, 3, 7, 11):
        profile.estimate(batch=batch)

    assert {batch: profile.estimate(batch=batch).peak for batch in direct} == direct


def test_lomo_takes_every_micro_batch_for_a_step():
    pytest.importorskip("lomo_optim")
    one, four = (_ask("gpt2?n_layer=1", optim="lomo", grad_accum=n) for n in (1, 4))

    assert not any(row.category is Category.OPTIMIZER_STATES for row in four.breakdown)
    # three more batches are fetched ahead, and nothing else
    assert 0 <= four.peak.allocated_bytes - one.peak.allocated_bytes < 1024**2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": "x", "grad_accum": 2},
         "the Trainer refuses it too"),
        ({"optim": "adamw", "optim_in_backward": True, "grad_accum": 2}, "cannot accumulate"),
        ({"optim": "lomo", "fp16": True}, "Use --bf16"),
        ({"optim": "lomo", "dtype": "bfloat16", "master_weights": True}, "drop --master-weights"),
        ({"optim": "lomo", "optim_in_backward": True}, "does so anyway"),
        ({"optim": "none", "optim_in_backward": True}, "there is no optimizer"),
        ({"optim": "muon", "optim_in_backward": True}, "one parameter at a time"),
        ({"optim": "adamw", "optim_in_backward": True, "software": "torch=2.0"}, "since 2.1"),
        ({"optim": "galore_adafactor_layerwise"}, "relative_step"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_in_backward(options, said):
    with pytest.raises(memest.MemestError, match=said):
        _ask("gpt2?n_layer=1", **options)


@pytest.mark.slow
def test_a_library_that_fails_on_a_model_is_told_as_its_own_failure():
    schedulefree = pytest.importorskip("schedulefree")
    fails = mock.patch.object(
        schedulefree.AdamWScheduleFree, "step", side_effect=IndexError("no such dimension")
    )
    with fails, pytest.raises(memest.MemestError, match=r"the code of schedulefree fails .* Index"):
        _ask("bert-base-uncased?num_hidden_layers=1", optim="schedule_free_adamw")


def test_the_report_names_what_was_asked_of_the_optimizer():
    estimate = _ask(
        "gpt2?n_layer=1", optim="sgd_momentum_loop", optim_in_backward=True, weight_decay=0.1,
        loop="plain",
    )  # fmt: skip

    assert "sgd_momentum_loop in backward, weight decay 0.1" in str(estimate)


def test_adafactor_of_many_convolutions_takes_little_of_the_host():
    """transformers makes its states on the host, and shapes that tell a rule are large ones."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(*(torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(60)))
    made = []
    real = torch.zeros

    def zeros(*size, **options):
        shape = size[0] if size and not isinstance(size[0], int) else size
        made.append(torch.Size(shape).numel())
        return real(*size, **options)

    inputs = {"input": torch.empty(2, 4, 8, 8, device="meta")}
    with mock.patch("torch.zeros", zeros):
        memest.estimate(model, inputs=inputs, optim="adafactor")
    assert made
    assert max(made) < 1 << 27
