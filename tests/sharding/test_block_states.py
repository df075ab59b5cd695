"""bitsandbytes' optimizers on several GPUs: which libraries give them tensors that they take.

FSDP1 and DeepSpeed hand an optimizer ordinary flat tensors, of which the library's own states are
compared with what is predicted; whole ranks are in ``test_fsdp1.py``. FSDP2 hands it DTensors.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

import memest
from memest.errors import ConfigError
from memest.events import Category, Landmarks, Weight
from memest.options import setup_from_options
from memest.sharding.updated import as_updated, updated_weights

KINDS = {"": "Model", "embed": "Embedding", "layers": "ModuleList", "layers.0": "Layer"}
MARKS = Landmarks(kinds=KINDS, blocks=("Layer",), embeddings="embed")


def weight(name, *shape):
    return Weight(
        name, shape, (shape[1], 1)[: len(shape)], "float32", trains=True, decays=True, has_grad=True
    )


WEIGHTS = (
    weight("embed.weight", 100, 512), weight("layers.0.a", 512, 300), weight("layers.0.b", 9, 1),
)  # fmt: skip


def predicted_states(setup):
    """Bytes that an update of rank 0 leaves as states."""
    from cases import GPU

    from memest.trace.training import trace_updates

    trace = trace_updates(updated_weights(WEIGHTS, setup, MARKS), as_updated(setup), GPU)
    alive = {}
    for kind, index in trace.decoded():
        if kind == 0:
            alive[index] = trace.sizes[index]
        elif kind == 1:
            alive.pop(index, None)
    states = Category.OPTIMIZER_STATES
    return sum(size for index, size in alive.items() if trace.category(index) is states)


def states_of_the_library(setup):
    import bitsandbytes
    import torch

    parts = [
        torch.nn.Parameter(torch.zeros(part.shape, dtype=getattr(torch, part.dtype)))
        for part in updated_weights(WEIGHTS, setup, MARKS)
    ]
    optimizer = bitsandbytes.optim.AdamW8bit(parts)
    for part in parts:
        part.grad = torch.ones_like(part)
    optimizer.step()
    found = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    }
    return sum(found.values())


@pytest.mark.parametrize(
    "options",
    [
        {"fsdp": "full_shard", "fsdp_version": 1},
        {"fsdp": "full_shard", "fsdp_version": 1, "fsdp_use_orig_params": True},
        {"fsdp": "no_shard", "fsdp_version": 1},
        {"zero": 1}, {"zero": 2}, {"zero": 3},
    ],
)  # fmt: skip
def test_states_are_those_of_the_library_on_a_ranks_part(options):
    """Blocks of 256 elements, and the limit for 8 bits, count on the part and not on the whole."""
    asked = setup_from_options(num_gpus=3, optim="adamw_bnb_8bit", loop="plain", **options)
    assert predicted_states(asked) == states_of_the_library(asked) > 0


REAL = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
import bitsandbytes
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(torch.nn.Linear({size}, {size}, bias=False))
fully_shard(model, mesh=dist.init_device_mesh("cpu", (4,)))
optimizer = bitsandbytes.optim.{kind}(model.parameters())
model(torch.randn(2, {size})).sum().backward()
try:
    optimizer.step()
except (RuntimeError, NotImplementedError) as error:
    print("STOPS", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "said"),
    [
        ("AdamW8bit", 512, "mixed torch.Tensor and DTensor"),
        ("AdamW8bit", 16, "does not have a sharding strategy"),
        ("AdamW", 512, "does not have a sharding strategy"),
    ],
)
def test_fsdp2_stops_in_the_library(kind, size, said):
    script = REAL.format(kind=kind, size=size)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert "STOPS" in done.stdout, done.stderr
    assert said in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fsdp": "full_shard"}, "FSDP2's parameters are DTensors"),
        ({"fsdp": "full_shard", "fsdp_version": 1, "fsdp_offload": True}, "--fsdp-offload"),
        ({"zero": 2, "offload_optimizer": True}, "zero_force_ds_cpu_optimizer"),
    ],
)
def test_what_does_not_run_is_refused_with_the_reason(options, said):
    with pytest.raises(ConfigError, match=said):
        setup_from_options(num_gpus=4, optim="paged_adamw_8bit", **options)


def test_a_sharded_run_has_a_quarter_of_the_states_of_float32():
    run = {
        "batch": 2, "seq_len": 64, "num_gpus": 4, "fsdp": "full_shard", "fsdp_version": 1,
        "fsdp_wrap": ["BertLayer"], "max_batch": False, "loop": "plain",
    }  # fmt: skip

    def states(optim):
        found = memest.estimate("prajjwal1/bert-tiny", optim=optim, **run)
        return {str(row.category): row.bytes for row in found.breakdown}["optimizer states"]

    # two bytes an element and eight for each block of 256, and maps
    eight, full = states("adamw_bnb_8bit"), states("adamw_torch")
    assert eight == pytest.approx(full / 4 * (1 + 4 / 256), rel=0.05)
