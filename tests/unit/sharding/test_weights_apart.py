"""Why DDP is refused around stages of zero-bubble schedules: torch's own behaviour."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)


def test_gradients_of_weights_that_are_computed_apart_pass_by_ddp(tmp_path):
    """No bucket is reduced by ``stage_backward_weight``; by ``stage_backward`` one is."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        reduced = []
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))

        def communicates(_state, bucket):
            reduced.append(bucket.index())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model.register_comm_hook(None, communicates)

        def forward():
            inputs = torch.ones(2, 4, requires_grad=True)
            with model.no_sync():
                output = model(inputs)
            model.reducer.prepare_for_backward([output])
            return inputs, output

        inputs, output = forward()
        _, groups = stage_backward_input(
            [output], [torch.ones_like(output)], [inputs], model.parameters()
        )
        stage_backward_weight(model.parameters(), groups)
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert reduced == []

        inputs, output = forward()
        stage_backward((output,), (torch.ones_like(output),), [inputs])
        assert reduced == [0]
    finally:
        dist.destroy_process_group()
