"""Parameters that are read outside of their modules under ZeRO-3: whose they are from then on.

That a rank allocates what DeepSpeed does where it happens is in ``test_zero.py`` (``READ`` of
``deepspeed_ranks``).
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from memest.events import CueKind, Phase, Weight
from memest.profiles.stream import Stream
from memest.sharding.engine import Rewriter
from memest.sharding.zero3_fetch import Fetcher, Limits
from memest.trace.inputs.batch import realise
from memest.trace.losses.loss import loss_for
from memest.trace.optimizers.torch import weights_of
from memest.trace.parallel.zero3 import _Parameters
from memest.trace.training import trace_training
from support.cases import twin
from support.ranks import loss_of_setup

HEAD, EMBEDDING = 1, 0
ROOT, EMBED, LM_HEAD = 0, 1, 2
TIGHT = {
    "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 1000,
    "stage3_max_reuse_distance": 0, "reduce_bucket_size": 60_000,
}  # fmt: skip


def make_fetcher(**options):
    weights = [
        Weight(name, (100, 8), (8, 1), "bfloat16", trains=True, decays=True, has_grad=True)
        for name in ("embed.weight", "head.weight")
    ]
    limits = Limits(prefetch_bucket_size=0, max_reuse_distance=0, param_persistence_threshold=0)
    options = {"limits": limits, "ranks": 3, "overlaps": True, "from_host": False, **options}
    return Fetcher(
        to=Rewriter(Stream(module_names=["", "embed", "head"])), weights=weights,
        owned_weights={EMBED: (EMBEDDING,), LM_HEAD: (HEAD,)}, **options,
    )  # fmt: skip


def sizes(fetcher):
    """Sizes of what was allocated since, and what is alive."""
    out = fetcher.to.out
    alive = {}
    for event in out.events:
        if event >= 0:
            alive[event] = out.sizes[event]
        else:
            del alive[~event]
    return sum(alive.values())


def one_pass(fetcher, *, reads=True):
    """Bytes alive behind the places of a pass in which the root reads the head."""
    seen = {}
    fetcher.begin()
    fetcher.enter(ROOT, backward=False)
    seen["entered"] = sizes(fetcher)
    fetcher.enter(EMBED, backward=False)
    fetcher.leave(EMBED, backward=False)
    if reads:
        fetcher.read(HEAD)
    seen["read"] = sizes(fetcher)
    fetcher.leave(ROOT, backward=False)
    seen["left"] = sizes(fetcher)
    fetcher.enter(ROOT, backward=True)
    seen["backward"] = sizes(fetcher)
    fetcher.backward_done()
    seen["done"] = sizes(fetcher)
    return seen


@pytest.mark.parametrize("options", [{}, {"from_host": True}, {"ranks": 1}])
def test_what_is_read_belongs_to_who_reads_it(options):
    """From the second pass on it is there from the reader's beginning to its end."""
    fetcher = make_fetcher(**options)
    ranks = fetcher.ranks
    gathered = ranks * -(-800 // ranks) * 2
    first = one_pass(fetcher)
    assert first == {
        "entered": 0, "read": gathered, "left": 0, "backward": gathered if ranks > 1 else 0,
        "done": 0,
    }  # fmt: skip
    if ranks > 1:
        always = {"entered": gathered, "read": gathered, "left": 0, "backward": gathered, "done": 0}
        assert one_pass(fetcher) == always
        # an evaluation reads nothing that DeepSpeed sees, and has it all the same
        assert one_pass(fetcher, reads=False) == always


def test_what_is_there_is_nobody_elses():
    fetcher = make_fetcher()
    fetcher.begin()
    fetcher.enter(ROOT, backward=False)
    fetcher.enter(LM_HEAD, backward=False)
    before = sizes(fetcher)
    fetcher.read(HEAD)
    assert sizes(fetcher) == before
    fetcher.leave(LM_HEAD, backward=False)
    assert sizes(fetcher) == 0
    assert fetcher._external == {}


def traced(**setup):
    """A trace for ZeRO-3 and the model that it was made of."""
    from memest.config.parallelism import Distributed
    from support.cases import GPU

    ranks = Distributed(num_gpus=2, zero=3, zero_settings=TIGHT)
    twins = twin("llama", distributed=ranks, dtype="bfloat16", loop="plain", **setup)
    with loss_of_setup(twins.built_model.model, twins.setup):
        trace = trace_training(
            twins.built_model.trained_model, twins.setup, make_batch=lambda: realise(twins.plans),
            loss_of=loss_for(twins.built_model), gpu=GPU, operators="cpu",
            loading=twins.built_model.loading,
        )  # fmt: skip
    return trace, twins.built_model.trained_model


def read_in(trace, model):
    names = [weight.name for weight in weights_of(model)]
    return [names[cue.index] for cue in trace.cues if cue.kind is CueKind.READ]


def test_a_trace_tells_who_is_read():
    """The head by a loss, in every forward; nothing by a model that calls its modules."""
    trace, model = traced(fused_loss="trl-chunked")
    forwards = sum(mark.phase is Phase.FORWARD for mark in trace.marks)
    assert forwards > 1
    assert read_in(trace, model) == ["lm_head.weight"] * forwards
    assert read_in(*traced()) == []


def test_peft_reads_adapters_for_their_dtype():
    adapter = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}
    trace, model = traced(adapter=adapter)
    reads = {name.rpartition("q_proj.")[2] for name in read_in(trace, model)}
    assert reads == {"lora_A.default.weight"}
    names = trace.module_names
    entered = [names[cue.index] for cue in trace.cues if cue.kind is CueKind.PRE_FORWARD]
    # each of peft's layers has hooks of its own, and the outermost begins the pass
    assert entered[:3] == ["", "base_model", "base_model.model"]


def test_a_model_is_afterwards_what_it_was():
    trace, model = traced(fused_loss="trl-chunked")
    assert trace.cues
    assert {type(module._parameters) for module in model.modules()} == {
        type(torch.nn.Linear(1, 1)._parameters)
    }
    storages = [p.untyped_storage()._cdata for p in model.parameters()]
    assert len(set(storages)) == len(storages)


def test_a_copy_of_a_module_tells_nothing():
    reads = []
    running = SimpleNamespace(read=reads.append)
    own = _Parameters({"weight": torch.zeros(1)}, running)
    own["weight"]
    assert len(reads) == 1
    copied = copy.deepcopy(own)
    assert type(copied) is dict
    assert list(copied) == ["weight"]
