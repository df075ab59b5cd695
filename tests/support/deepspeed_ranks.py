"""Real DeepSpeed, measured once and kept: ``tests/proof/ranks/recorded``.

    # with DeepSpeed 0.19.8 installed
    DS_BUILD_OPS=0 PYTHONPATH=tests python -m support.deepspeed_ranks [NAME ...]

measures the recordings of these names again, or all. A new one begins as a file with its ``case``
alone: ``model``, ``ranks``, and options of ``Setup`` and of ``Distributed`` in ``setup`` and
``spread``; ``two_groups`` for weights that decay and others; ``evaluation`` as for
``evaluation_ranks.real_evaluation``; ``gloo`` for ranks that are all there.

DeepSpeed's engine runs on the CPU as one rank of PyTorch's fake process group, or as several
processes under gloo, of which one is measured; where ranks share sequences, with its attention in
place of transformers' and its loader. What a CPU has in the host's memory is the device's: what is
offloaded is compared by the sum, and batches that DeepSpeed's loader keeps on the host are NumPy's
here, which the profiler does not see, and are copied where a GPU would copy them.

Quantised bases are whole when DeepSpeed gets them: ``from_pretrained`` quantises them without
``zero.Init``. On a CPU bitsandbytes takes scales and a weight apart before it multiplies, which a
prediction with the CPU's operators has too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from support.paths import IN_TESTS, RECORDED_RANKS
from support.recorded_ranks import case_of, names_of

AT_LEAST = 8192


def measured_rank(case: dict[str, Any], rank: int, meeting: str) -> Any:
    """Train with DeepSpeed as one rank of a case, and measure it.

    Args:
        case: see above.
        rank: which one.
        meeting: a file where processes meet.
    """
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29555",
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(case["ranks"]),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    import torch

    from support.rank_processes import STEPS, join_group
    from support.ranks import loss_of_setup, make_optimizer_of, plans_of, setup_of_case

    backend = "gloo" if case.get("gloo") else "fake"
    join_group(backend, rank, case["ranks"], meeting)
    import deepspeed

    from memest.calibration.running.cpu_memory import mark, measure
    from memest.calibration.running.material import host_batches
    from support.cases import twin
    from support.evaluation_ranks import evaluate

    _without_kernels(case)
    deepspeed.init_distributed(dist_backend=backend, dist_init_required=False)
    torch.manual_seed(0)
    options = {k: v for k, v in case["setup"].items() if k != "precision"}
    asked = setup_of_case(case)  # where a trainer has it otherwise under ZeRO-3, that too
    options |= {"adapter": asked.adapter, "use_reentrant": asked.recomputes_reentrantly or None}
    half = case["setup"].get("precision") == "bf16"
    twins = twin(case["model"], **{**options, "dtype": "bfloat16" if half else "float32"})
    setup, ways = twins.setup, case["spread"].get("sp", 1)
    batches = host_batches(plans_of(twins), STEPS * setup.grad_accum)
    config = _config(case, setup, half)

    def then(model: Any) -> None:
        # the Trainer evaluates the module in the engine
        if "evaluation" in case:
            evaluate(model, twins, case)

    def run() -> None:
        mark("load 0 0")
        model = twins.real
        if case["spread"]["zero"] == 3 and setup.quantization is None:
            # zero.Init does not know of a group that shares sequences
            whole = {k: v for k, v in config.items() if ways == 1 or k != "train_batch_size"}
            model = _build_in_parts(model, setup, whole)
        optimizer = make_optimizer_of(setup)(model)
        if case.get("two_groups"):
            _part(optimizer, model)
        if not setup.method.is_supervised:
            _train_for_preference(model, optimizer, twins, batches, config)
            return
        if ways > 1:
            _train_with_shared_sequences(model, optimizer, twins, batches, config, ways, then)
            return
        with loss_of_setup(model, setup):
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
            _train(engine, twins, batches, lambda: then(engine.module))

    # batches of DeepSpeed's loader are kept where torch does not count
    host = mock.patch.object(torch.Tensor, "cpu", lambda tensor: _on_host(tensor))
    with host if ways > 1 else contextlib.nullcontext():
        return measure(run)


def _without_kernels(case: dict[str, Any]) -> None:
    """Leave out what a CPU would compile, has not or does otherwise."""
    from memest.trace.losses import fused_head
    from support.ranks import launch_nothing_on_the_cpu

    # an operator that DeepSpeed would compile where it finds ninja; neither group needs one
    theirs: Any = importlib.import_module("deepspeed.comm.torch")
    theirs.build_shm_op = lambda: None
    if case["setup"].get("use_liger_kernel"):
        # these look for Triton, so they come first
        for name in ("torch._inductor.codecache", "deepspeed.runtime.zero.muon.muon_optimizer"):
            importlib.import_module(name)
        launch_nothing_on_the_cpu()
        # gradients that no kernel has written are no numbers, and would skip the update
        stage_3: Any = importlib.import_module("deepspeed.runtime.zero.stage3")
        stage_3.is_invalid_grad_norm = lambda norm: False
    if "quantization" in case["setup"]:
        # a CPU with AVX-512 would pack the weights anew for an evaluation
        bnb_modules: Any = importlib.import_module("bitsandbytes.nn.modules")
        bnb_modules.has_avx512bf16 = lambda: False
    # a CPU has no product of halves in float32; what it would write has a place already
    fused_head._add_product = lambda *_: None


def _config(case: dict[str, Any], setup: Any, half: bool) -> dict[str, Any]:
    """What DeepSpeed is told."""
    parallelism = case["spread"]
    zero = {"stage": parallelism["zero"], **parallelism.get("zero_settings", {})}
    for key in ("offload_optimizer", "offload_param"):
        if parallelism.get(key):
            zero[key] = {"device": "cpu", "pin_memory": False}
    copies = case["ranks"] // parallelism.get("sp", 1)
    return {
        "train_micro_batch_size_per_gpu": setup.batch,
        "gradient_accumulation_steps": setup.grad_accum,
        "train_batch_size": setup.batch * setup.grad_accum * copies,
        "bf16": {"enabled": half},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _train(engine: Any, twins: Any, batches: Any, then: Any) -> None:
    """The loop of DeepSpeed's documentation."""
    from memest.calibration.running.cpu_memory import mark
    from memest.trace.losses.loss import loss_for

    accum, loss_of = twins.setup.grad_accum, loss_for(twins.built_model)
    mark("batch 1 1")
    batch = None
    for index, on_host in enumerate(batches):
        step, micro = index // accum + 1, index % accum + 1
        batch = _on_device(on_host)
        mark(f"forward {step} {micro}")
        outputs = engine(**batch)
        loss = loss_of(outputs, batch)
        mark(f"backward {step} {micro}")
        engine.backward(loss)
        if micro == accum:
            mark(f"optimizer {step} 0")
        engine.step()
        if micro == accum:
            mark(f"zero_grad {step} 0")
        mark(f"batch {(index + 1) // accum + 1} {(index + 1) % accum + 1}")
    then()
    del batch, outputs


def _train_for_preference(
    model: Any, optimizer: Any, twins: Any, batches: Any, config: dict[str, Any]
) -> None:
    """``Trainer._run_epoch`` around a loss of TRL, with ``prepare_deepspeed`` of the reference.

    Where adapters are turned off for it, TRL asks the model itself, and not the engine.
    """
    import deepspeed

    from memest.trace.losses import objective as objectives
    from support.preference_ranks import train_for_preference

    if twins.setup.adapter is not None and twins.setup.checkpointing != "none":
        model.enable_input_require_grads()  # as TRL's trainers do

    def build_again(*_: Any) -> Any:
        return _build_in_parts(model, twins.setup, config).eval()

    with (
        mock.patch.object(objectives, "_reference_of", build_again),
        objectives.objective_of(model, twins.setup) as objective,
    ):
        reference = objective.reference
        if reference is not None:
            reference, *_ = deepspeed.initialize(model=reference, config=config)
            reference.eval()
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        train_for_preference(
            engine, objective, reference or engine.module, twins.setup, batches,
            # DeepSpeedEngineWrapper of accelerate
            engine.set_gradient_accumulation_boundary, engine.backward, engine.step,
            lambda: _sync(engine.module, reference, twins.setup),
            lambda *_: _hand_out(engine, twins.setup), engine.module,
        )  # fmt: skip


def _sync(model: Any, reference: Any, setup: Any) -> None:
    """TRL's own, as its callback does it at the end of a step."""
    from trl.trainer import callbacks

    if setup.sync_ref_model:
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3))
        with mock.patch.object(callbacks, "AcceleratorState", return_value=state):
            callbacks.SyncRefModelCallback.sync_target_model(model, reference, 0.6)


def _hand_out(engine: Any, setup: Any) -> None:
    """TRL's own: the weights for its ``generate``, or for an engine."""
    import deepspeed
    from trl.generation.vllm_generation import VLLMGeneration
    from trl.models.utils import _unwrap_model_for_generation

    if engine.zero_optimization_stage() != 3:
        return
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3), fsdp_plugin=None)
    if setup.writes_completions:
        accelerator = SimpleNamespace(unwrap_model=lambda model: model.module, state=state)
        kwargs = {"use_reentrant": setup.recomputes_reentrantly}
        with _unwrap_model_for_generation(engine, accelerator, True, kwargs):
            return
    backend = SimpleNamespace(gather_params=deepspeed.zero.GatheredParameters, is_fsdp=False)
    giver = SimpleNamespace(
        model=engine.module, _dist=backend, _fix_param_name_to_vllm=lambda name, *_, **__: name
    )
    for _ in VLLMGeneration._iter_named_params(giver):
        pass


def _train_with_shared_sequences(
    model: Any, optimizer: Any, twins: Any, batches: Any, config: Any, ways: int, then: Any
) -> None:
    """Train with sequences that ranks share."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    from memest.calibration.running.cpu_memory import mark
    from support.rank_processes import STEPS

    setup = twins.setup
    for batch in batches:
        batch["position_ids"] = _positions(batch["input_ids"].shape)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=ways,
        micro_batch_size=setup.batch,
        disable_in_eval=True,  # as Accelerator._prepare_deepspeed asks for it
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
    loader = _loader(batches, setup.loop.value, mpu)
    train = _trainer if setup.loop == "trainer" else _script
    train(engine, loader, STEPS, setup.grad_accum, mpu, mark, lambda: then(engine.module))


def _part(optimizer: Any, model: Any) -> None:
    """A group with weight decay and one without, as the Trainer has them."""
    from memest.trace.optimizers.torch import named_parameters

    (group,) = optimizer.param_groups
    parameters = named_parameters(model)
    optimizer.param_groups = [
        {**group, "params": [one.parameter for one in parameters if one.decays is decays]}
        for decays in (True, False)
    ]


def _build_in_parts(like: Any, setup: Any, config: dict[str, Any]) -> Any:
    """The same model as transformers builds it where stage 3 is configured: by ``zero.Init``."""
    from transformers.integrations import HfDeepSpeedConfig

    from memest.trace.model.adapters import base_of
    from memest.trace.model.build import freeze
    from support.cases import add_adapters

    base = base_of(like)
    hf_config = HfDeepSpeedConfig(config)  # transformers asks for it as long as it lives
    model = type(base)._from_config(like.config, dtype=base.dtype)
    del hf_config
    if setup.adapter is None:
        freeze(model, setup)
    if setup.checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": bool(setup.use_reentrant)})
    if setup.adapter is not None:
        # whole until the engine partitions them with what is partitioned already
        model = add_adapters(model, setup, like.active_peft_config.task_type)
    return model.train()


def _positions(shape: Any) -> Any:
    import numpy as np

    return np.broadcast_to(np.arange(shape[1]), shape).copy()


def _on_host(tensor: Any) -> Any:
    """A copy in memory that is not torch's."""
    import torch

    if tensor.is_floating_point():
        return tensor  # what an evaluation brings to the host in the end
    return torch.from_numpy(tensor.numpy().copy())


def _on_device(batch: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {name: torch.as_tensor(value).clone() for name, value in batch.items()}


def _loader(batches: Any, loop: str, mpu: Any) -> Any:
    """DeepSpeed's adapter on accelerate's loader, or on one that leaves batches to the adapter."""
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    if loop == "plain":
        inner: Any = _CopyingLoader(batches)
    else:
        from accelerate import data_loader

        class Shard(data_loader.DataLoaderShard):
            """On a CPU it has nothing to move."""

        data_loader.send_to_device = lambda batch, *_, **__: _on_device(batch)
        inner = Shard(
            [{n: torch.as_tensor(v) for n, v in batch.items()} for batch in batches],
            device=torch.device("cpu"), batch_size=None,
        )  # fmt: skip
    return UlyssesSPDataLoaderAdapter(
        inner, sp_rank=mpu.get_sequence_parallel_rank(),
        sp_group=mpu.get_sequence_parallel_group(),
        sp_world_size=mpu.get_sequence_parallel_world_size(), device=torch.device("cpu"),
    )  # fmt: skip


class _CopyingLoader:
    """Batches that are copied where the adapter moves them: it holds them and nobody else does."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return (_on_device(batch) for batch in self._batches)


def _script(
    engine: Any, loader: Any, steps: int, accum: int, mpu: Any, mark: Any, then: Any
) -> None:  # fmt: skip
    """The guides' loop (accelerate's ``sequence_parallelism``, DeepSpeed's ALST tutorial)."""
    group, ways = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_world_size()
    mark("batch 1 1")
    batch = None
    for index in range(steps * accum):
        step, micro = index // accum + 1, index % accum + 1
        batch = _next(loader, micro)
        batch = _on_device(batch)
        mark(f"forward {step} {micro}")
        outputs = engine(**batch)
        shift_labels = batch["shift_labels"]
        loss = engine.module.loss_function(
            logits=outputs.logits, labels=None, shift_labels=shift_labels,
            vocab_size=engine.module.config.vocab_size,
        )  # fmt: skip
        loss = _joint_loss(loss, shift_labels, group, ways)
        mark(f"backward {step} {micro}")
        engine.backward(loss)
        if micro == accum:
            mark(f"optimizer {step} 0")
        engine.step()
        if micro == accum:
            mark(f"zero_grad {step} 0")
        mark(f"batch {(index + 1) // accum + 1} {(index + 1) % accum + 1}")
    then()
    del batch, outputs, shift_labels


def _next(loader: Any, micro: int) -> Any:
    """The next part, from a new batch in every step's first micro-step as in the prediction."""
    if micro == 1:
        loader.micro_batches.clear()
    elif not loader.micro_batches:
        loader.micro_batches.extend([_next.last] * 64)
    _next.last = next(loader)
    return _next.last


def _joint_loss(loss: Any, shift_labels: Any, group: Any, ways: int) -> Any:
    import torch.distributed.nn.functional as functional

    losses = functional.all_gather(loss, group=group)
    good = (shift_labels != -100).view(-1).sum()
    counts = functional.all_gather(good, group=group)
    total = sum(losses[rank] * counts[rank] for rank in range(ways) if counts[rank] > 0)
    return total / max(sum(counts), 1)


def _trainer(
    engine: Any, loader: Any, steps: int, accum: int, mpu: Any, mark: Any, then: Any
) -> None:  # fmt: skip
    """The Trainer's step, its loss by its own function."""
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    del mpu
    config = SimpleNamespace(sp_backend="deepspeed", sp_size=2)
    for step in range(1, steps + 1):
        mark(f"batch {step} 0")
        samples = [_next(loader, micro) for micro in range(1, accum + 1)]
        for micro, sample in enumerate(samples, start=1):
            if micro > 1:
                mark(f"batch {step} {micro}")
            inputs = _on_device(sample)
            mark(f"forward {step} {micro}")
            loss = deepspeed_sp_compute_loss(None, engine, inputs, False, config)
            del inputs
            mark(f"backward {step} {micro}")
            loss = loss / accum
            engine.backward(loss, scale_wrt_gas=False)
            if micro == accum:
                mark(f"optimizer {step} 0")
            engine.step()
            loss = loss.detach()
        mark(f"zero_grad {step} 0")
    then()
    mark("end 0 0")


def _record(name: str, rank: int, recorded_rank: int, meeting: str) -> None:
    case = case_of(name)
    run = measured_rank(case, rank, meeting)
    if rank != recorded_rank:
        return
    import accelerate
    import torch
    import transformers

    names = sorted({event.phase for event in run.events})
    events = [[e.nbytes, names.index(e.phase)] for e in run.events if abs(e.nbytes) >= AT_LEAST]
    group = "gloo" if case.get("gloo") else "fake process group"
    document = {
        "software": f"DeepSpeed 0.19.8, torch {torch.__version__.partition('+')[0]}, transformers "
        f"{transformers.__version__}, accelerate {accelerate.__version__}, CPU, {group}",
        "case": case,
        "rank": rank,
        "phases": [[phase.name, phase.alive, phase.peak] for phase in run.phases],
        "names": names,
        "events": events,
    }
    text = json.dumps(document, separators=(",", ":"))
    (RECORDED_RANKS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank, recorded_rank, name, meeting = sys.argv[2:]
        _record(name, int(rank), int(recorded_rank), meeting)
        return
    from support.evaluation_ranks import predicted_evaluation
    from support.ranks import predicted_rank

    for name in sys.argv[1:] or names_of("*"):
        case = case_of(name)
        recorded_rank = (predicted_evaluation if "evaluation" in case else predicted_rank)(
            case
        ).rank
        ranks = range(case["ranks"]) if case.get("gloo") else [recorded_rank]
        # the profiler remembers addresses: processes for each
        with tempfile.TemporaryDirectory() as folder:
            meeting = str(Path(folder) / "store")
            program = [sys.executable, "-m", "support.deepspeed_ranks", "--rank"]
            running = [
                subprocess.Popen(
                    [*program, str(rank), str(recorded_rank), name, meeting],
                    cwd=folder,
                    env=IN_TESTS,
                )
                for rank in ranks
            ]
            assert [process.wait() for process in running] == [0] * len(running), name


if __name__ == "__main__":
    _main()
