"""What saving and resuming take of host memory, and of the GPU beside a step. Torch-free.

Rules as in :mod:`memest.estimation.host_rules`.

Sources: transformers 5.23 (``trainer.py``), safetensors 0.8 (``torch.py``), torch 2.13
(``serialization.py``, ``optim/optimizer.py``, ``distributed/checkpoint/state_dict.py``),
accelerate 1.15 (``checkpointing.py``, ``utils/fsdp_utils.py``), bitsandbytes 0.50,
DeepSpeed 0.19.8 (``runtime/engine.py``, ``checkpoint/utils.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memest.config.kinds import Loop, Strategy
from memest.config.life import StateDicts
from memest.config.optimizers import facts_of
from memest.config.setup import Setup
from memest.estimation.host_facts import (
    HostFacts,
    HostPart,
    HostRule,
    Moment,
    Unpriced,
    WeightFacts,
    parts_of_model,
    stays,
)

__all__ = ["largest_file", "resuming", "saving"]

MAX_SHARD_BYTES = 50 * 10**9
"""``max_shard_size`` of ``save_pretrained``, which the Trainer leaves as it is."""


# -- saving ------------------------------------------------------------------------------------


def saving(setup: Setup, facts: HostFacts) -> HostRule | Unpriced:
    """A checkpoint is written between two steps: weights, then the optimizer's states."""
    refused = parts_of_model(setup) or _own_checkpoints(setup)
    if refused:
        return refused
    strategy = setup.distributed.strategy
    if strategy is Strategy.FSDP:
        rule = _saving_fsdp(setup, facts)
    elif strategy is Strategy.ZERO:
        rule = _saving_zero(setup, facts)
    else:
        rule = _saving_whole(setup, facts)
    kept = stays(facts)
    moments = tuple((*kept, *moment) for moment in rule.moments)
    return HostRule(moments=moments, source=rule.source, on_gpu=rule.on_gpu)


def _own_checkpoints(setup: Setup) -> Unpriced | None:
    """What is written and read in ways that no source tells."""
    distributed = setup.distributed
    if distributed.strategy is Strategy.FSDP:
        if distributed.fsdp_version == 1:
            return Unpriced("checkpoints of FSDP1")
        if setup.quantization is not None:
            return Unpriced("checkpoints of a quantised base in shards")
        if setup.loop is Loop.PLAIN and _named_type(setup) is None:
            return Unpriced(
                "a script's own FSDP checkpoints; --fsdp-state-dict-type says which it writes"
            )
    if setup.partitions_whole_model:
        return Unpriced("checkpoints of a quantised base in shards")
    return None


def _named_type(setup: Setup) -> StateDicts | None:
    return None if setup.life is None else setup.life.fsdp_state_dict_type


def _state_dict_type(setup: Setup) -> StateDicts:
    """``set_state_dict_type`` of accelerate; ``TrainingArguments`` asks for full ones."""
    usual = StateDicts.FULL if setup.loop is Loop.TRAINER else StateDicts.SHARDED
    return _named_type(setup) or usual


def _saving_whole(setup: Setup, facts: HostFacts) -> HostRule:
    """Whole weights on a GPU, written by the first process.

    ``save_file`` copies all tensors of a file to the host and keeps them (``_to_ndarray``);
    ``torch.save`` copies a storage at a time (``_save``). ``save_state`` of accelerate writes
    one file.
    """
    weights = [weight for weight in facts.weights if weight.kept_bytes]
    if setup.loop is Loop.ACCELERATE:
        size, source = facts.weight_bytes, "accelerate: save_state; safetensors: save_file"
    else:
        source = "transformers: save_pretrained; safetensors: save_file; torch: _save"
        if setup.adapter is not None:
            weights = [weight for weight in weights if weight.trains]
        size = largest_file(weight.kept_bytes for weight in weights)
    what = "adapters" if setup.adapter is not None and setup.loop is not Loop.ACCELERATE else ""
    return HostRule(
        moments=(
            (HostPart(what or "weights of a file", size, every=False),),
            (HostPart("a state of the optimizer", facts.largest_state, every=False),),
        ),
        source=source,
    )


def largest_file(sizes: Iterable[int], limit: int = MAX_SHARD_BYTES) -> int:
    """Bytes of the largest file that weights are split into, in their order.

    Source: ``split_state_dict_into_shards_factory`` of huggingface_hub.

    Args:
        sizes: of the weights.
        limit: of a file; a larger weight has one of its own.

    Example:
        >>> largest_file([3, 4, 2, 9, 1], limit=8)
        9
    """
    files, current = [0], 0
    for size in sizes:
        if size > limit:
            files.append(size)
            continue
        if current + size > limit:
            files.append(current)
            current = 0
        current += size
    return max(*files, current)


def _saving_fsdp(setup: Setup, facts: HostFacts) -> HostRule:
    """A full checkpoint on the first process, or every one's own shards.

    ``save_fsdp_model`` and ``save_fsdp_optimizer`` of accelerate: ``_gather_state_dict`` of torch
    makes a tensor whole on every GPU, and the first process takes it to the host.
    """
    if _state_dict_type(setup) is StateDicts.SHARDED:
        offloads = setup.distributed.fsdp_offload
        shards = 0 if offloads else facts.weight_bytes
        return HostRule(
            moments=(
                (HostPart("shards of the weights", shards),),
                (HostPart("shards of the states", 0 if offloads else facts.state_bytes),),
            ),
            source="torch: _offload_state_dict_to_cpu; accelerate: save_fsdp_model",
        )
    return HostRule(
        moments=(
            (HostPart("all weights, gathered", facts.whole_weights, every=False),),
            (HostPart("all states, gathered", facts.whole_states, every=False),),
        ),
        source="torch: _gather_state_dict; accelerate: save_fsdp_optimizer",
        # a state has the shape and the dtype of its weight
        on_gpu=facts.largest_weight,
    )


def _saving_zero(setup: Setup, facts: HostFacts) -> HostRule:
    """The Trainer's weights (``Accelerator.get_state_dict``), and DeepSpeed's ``save_checkpoint``.

    Stages 1 and 2: every process clones all weights to its host
    (``clone_tensors_for_torch_save``), the first one writes them. Stage 3:
    ``_zero3_consolidated_16bit_state_dict`` gathers a module at a time on every GPU, where its file
    asks for it, and adapters alone of an adapted model.
    """
    distributed, on_gpu = setup.distributed, 0
    moments: list[Moment] = []
    if setup.loop is Loop.TRAINER and distributed.zero < 3:
        moments.append((HostPart("all weights, cloned", facts.whole_weights),))
    life = setup.life
    gathers = life is not None and life.stage3_gather_16bit_weights_on_model_save
    if setup.loop is Loop.TRAINER and distributed.zero == 3 and gathers:
        size = facts.whole_weights if setup.adapter is None else facts.trained_weights
        moments.append((HostPart("weights, gathered", size, every=False),))
        # a gathered parameter may be made of a copy
        on_gpu = 2 * _largest_module(facts.weights)
    if distributed.zero < 3:
        # parameters are views of one flat storage, which is written as a whole
        moments.append((HostPart("flat weights", facts.trained_weights, every=False),))
    moments.append((HostPart("a state of the optimizer", facts.largest_state),))
    frozen = facts.whole_weights - facts.trained_weights
    excluded = setup.adapter is not None and setup.loop is Loop.TRAINER
    if frozen and distributed.zero > 1 and not excluded:
        # ``_get_zero_frozen_param_attributes``: all at once, on every process
        parts = facts.shards if distributed.zero == 3 else 1
        moments.append((HostPart("frozen weights", -(-frozen // parts)),))
    return HostRule(
        moments=tuple(moments),
        source="DeepSpeed: save_checkpoint; accelerate: get_state_dict",
        on_gpu=on_gpu,
    )


def _largest_module(weights: Sequence[WeightFacts]) -> int:
    """The most that one module has of weights of its own."""
    sizes: dict[str, int] = {}
    for weight in weights:
        owner = weight.name.rpartition(".")[0]
        sizes[owner] = sizes.get(owner, 0) + weight.kept_bytes
    return max(sizes.values(), default=0)


# -- resuming ----------------------------------------------------------------------------------


def resuming(setup: Setup, facts: HostFacts) -> HostRule | Unpriced:
    """A checkpoint is read into a model that is ready to train, before its first step."""
    refused = parts_of_model(setup) or _own_checkpoints(setup)
    if refused:
        return refused
    strategy = setup.distributed.strategy
    if strategy is Strategy.FSDP:
        rule = _resuming_fsdp(setup, facts)
    elif strategy is Strategy.ZERO:
        rule = _resuming_zero(setup, facts)
    else:
        rule = _resuming_whole(setup, facts)
    kept = (HostPart("offloaded", facts.offloaded),) if facts.offloaded else ()
    moments = tuple((*kept, *moment) for moment in rule.moments)
    return HostRule(moments=moments, source=rule.source, mapped=rule.mapped, on_gpu=rule.on_gpu)


def _resuming_whole(setup: Setup, facts: HostFacts) -> HostRule:
    """Whole weights: read as views of the mapped file, and the optimizer's states behind them.

    ``_load_from_checkpoint`` and ``_load_optimizer_and_scheduler`` of the Trainer, and
    ``load_state`` of accelerate, read states to the CPU where there is one process and else to the
    GPU, a storage at a time. A script is taken to read them to the CPU. bitsandbytes' optimizers
    copy what they are given once more (``Optimizer8bit.load_state_dict``).
    """
    adapted = setup.adapter is not None and setup.loop is not Loop.ACCELERATE
    mapped = facts.trained_weights if adapted else facts.whole_weights
    copies = 2 if facts_of(setup.optimizer).block_states else 1
    states, on_gpu = copies * (facts.state_bytes + facts.managed), 0
    what = "states of the optimizer" + (", twice" if copies == 2 else "")
    source = "transformers: _load_from_checkpoint, _load_optimizer_and_scheduler; torch: load"
    if setup.distributed.num_gpus > 1 and setup.loop is not Loop.PLAIN:
        what, states = "a state on its way to the GPU", facts.largest_state
        on_gpu = (copies - 1) * facts.state_bytes
        if setup.loop is Loop.ACCELERATE:
            # weights come to the GPU beside those of the model, when there are no states yet
            on_gpu = max(on_gpu, facts.whole_weights - facts.state_bytes)
    if setup.loop is Loop.ACCELERATE:
        source = "accelerate: load_accelerator_state; safetensors: load_model; torch: load"
    return HostRule(
        moments=((HostPart(what, states),),), source=source, mapped=mapped, on_gpu=on_gpu
    )


def _resuming_fsdp(setup: Setup, facts: HostFacts) -> HostRule:
    """``load_fsdp_model`` and ``load_fsdp_optimizer`` of accelerate.

    Of a full checkpoint the first process reads everything and broadcasts a tensor at a time
    (``_broadcast_tensors``); of a sharded one each process has its shards on the host. Before,
    states are made by a step on gradients of zero (``_init_optim_state``).
    """
    gradients = 0 if setup.distributed.fsdp_offload else facts.gradient_bytes
    if _state_dict_type(setup) is StateDicts.SHARDED:
        offloads = setup.distributed.fsdp_offload
        return HostRule(
            moments=(
                (HostPart("shards of the weights", 0 if offloads else facts.weight_bytes),),
                (HostPart("shards of the states", 0 if offloads else facts.state_bytes),),
            ),
            source="accelerate: load_fsdp_model; torch: dist_cp.load",
            on_gpu=gradients,
        )
    adapted = setup.adapter is not None and setup.loop is Loop.TRAINER
    weights = facts.trained_weights if adapted else facts.whole_weights
    return HostRule(
        moments=(
            (HostPart("all weights, read by the first process", weights, every=False),),
            (HostPart("all states, read by the first process", facts.whole_states, every=False),),
        ),
        source="accelerate: load_fsdp_model, load_fsdp_optimizer; torch: _broadcast_tensors",
        on_gpu=max(gradients, facts.largest_weight),
    )


def _resuming_zero(setup: Setup, facts: HostFacts) -> HostRule:
    """DeepSpeed's ``load_checkpoint``: files are read to the CPU by every process.

    In stages 1 and 2 all of them read the weights, then each its own part of the states
    (``_get_all_zero_checkpoint_state_dicts``). Stage 3 finds no weights but master weights, and
    what is frozen in parts.
    """
    moments: list[Moment] = []
    adapted = setup.adapter is not None and setup.loop is Loop.TRAINER
    weights = facts.trained_weights if adapted else facts.whole_weights
    if setup.distributed.zero == 3:
        weights = 0 if adapted else -(-(weights - facts.trained_weights) // facts.shards)
    if weights:
        moments.append((HostPart("weights", weights),))
    states = facts.state_bytes or facts.host_states
    moments.append((HostPart("its part of the states and master weights", states),))
    return HostRule(moments=tuple(moments), source="DeepSpeed: load_checkpoint")
