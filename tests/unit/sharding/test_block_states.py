"""bitsandbytes' optimizers on several GPUs: which libraries give them tensors that they take.

FSDP1 and DeepSpeed hand an optimizer ordinary flat tensors, of which the library's own states are
compared with what is predicted; whole ranks are in ``test_fsdp_ranks.py``. FSDP2 hands it DTensors.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from memest.config.options import setup_from_options
from memest.errors import ConfigError
from memest.events import Category, Landmarks, Weight
from memest.sharding.rank import update_setup, updated_weights

MODULES = {"": "Model", "embed": "Embedding", "layers": "ModuleList", "layers.0": "Layer"}
MARKS = Landmarks(kinds=MODULES, blocks=("Layer",), embeddings="embed")


def weight(name, *shape):
    return Weight(
        name, shape, (shape[1], 1)[: len(shape)], "float32", trains=True, decays=True, has_grad=True
    )


WEIGHTS = (
    weight("embed.weight", 100, 512), weight("layers.0.a", 512, 300), weight("layers.0.b", 9, 1),
)  # fmt: skip


def predicted_states(setup):
    """Bytes that an update of rank 0 leaves as states."""
    from memest.trace.training import trace_updates
    from support.cases import GPU

    trace = trace_updates(updated_weights(WEIGHTS, setup, MARKS), update_setup(setup), GPU)
    alive = {}
    for kind, index in trace.decode():
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
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    }
    return sum(storages.values())


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
    run = setup_from_options(num_gpus=3, optim="adamw_bnb_8bit", loop="plain", **options)
    assert predicted_states(run) == states_of_the_library(run) > 0


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
    ("kind", "size", "message"),
    [
        ("AdamW8bit", 512, "mixed torch.Tensor and DTensor"),
        ("AdamW8bit", 16, "does not have a sharding strategy"),
        ("AdamW", 512, "does not have a sharding strategy"),
    ],
)
def test_fsdp2_stops_in_the_library(kind, size, message):
    script = REAL.format(kind=kind, size=size)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert "STOPS" in done.stdout, done.stderr
    assert message in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp": "full_shard"}, "FSDP2's parameters are DTensors"),
        ({"fsdp": "full_shard", "fsdp_version": 1, "fsdp_offload": True}, "--fsdp-offload"),
        ({"zero": 2, "offload_optimizer": True}, "zero_force_ds_cpu_optimizer"),
    ],
)
def test_what_does_not_run_is_refused_with_the_reason(options, message):
    with pytest.raises(ConfigError, match=message):
        setup_from_options(num_gpus=4, optim="paged_adamw_8bit", **options)
