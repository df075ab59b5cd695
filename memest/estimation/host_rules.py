"""What loading and training take of host memory. Torch-free.

A rule has the moments of a phase, one after the other, each with all that is there at once; its
source is named beside it. Bytes are those of one process. Those of checkpoints are in
:mod:`memest.estimation.checkpoint_rules`.

Sources: transformers 5.23 (``modeling_utils.py``, ``core_model_loading.py``), accelerate 1.15
(``utils/fsdp_utils.py``), peft 0.21, bitsandbytes 0.50, DeepSpeed 0.19.8 (``runtime/engine.py``).
"""

from __future__ import annotations

from memest.config.kinds import Loop, Strategy
from memest.config.setup import Setup
from memest.estimation.host_facts import (
    HostFacts,
    HostPart,
    HostRule,
    Unpriced,
    WeightFacts,
    parts_of_model,
    stays,
)

__all__ = ["loading", "training"]

# -- loading -----------------------------------------------------------------------------------


def loading(setup: Setup, facts: HostFacts) -> HostRule | Unpriced:
    """``from_pretrained``, and what makes the model ready to train.

    Weights are views of the mapped file until they leave the CPU; a copy is made of what gets
    another dtype there, and of what the loader makes of several tensors.

    Source: ``_load_pretrained_model`` and ``_materialize_copy`` of transformers.
    """
    if refused := parts_of_model(setup):
        return refused
    if (setup.software.transformers or (5, 0)) < (5, 0):
        return Unpriced("transformers before 5 loads in other ways")
    distributed, source = setup.distributed, "transformers: _load_pretrained_model"
    mapped = sum(weight.file_bytes for weight in facts.weights)
    if setup.quantization is not None:
        if distributed.fsdp_cpu_ram_efficient_loading:
            return Unpriced("a quantised base that waits in host memory until FSDP cuts it")
        moment = (HostPart("a tensor at a time, which the GPU quantises", 0),)
        return HostRule(moments=(moment,), source=source, mapped=mapped)
    if setup.is_built_in_parts:
        # rank 0 reads the mapped file, the others know shapes; every copy is made on the GPU
        source = "transformers: _load_state_dict_into_zero3_model"
        # (what the loader joins is joined one at a time: _apply_weight_conversions_to_state_dict)
        joined = max((w.loaded_bytes for w in facts.weights if w.is_merged), default=0)
        moment = (HostPart("a weight that the loader joins", joined, every=False),)
        return HostRule(moments=(moment,), source=source, mapped=mapped)
    first_alone = (
        distributed.strategy is Strategy.FSDP and distributed.fsdp_cpu_ram_efficient_loading
    )
    copies = sum(_copied_bytes(weight, setup) for weight in facts.weights)
    adapters = sum(weight.loaded_bytes for weight in facts.weights if not weight.file_bytes)
    parts = [HostPart("weights copied on the CPU", copies, every=not first_alone)]
    if adapters:
        parts.append(HostPart("adapters", adapters))
    if distributed.fsdp_offload:
        parts.append(HostPart("shards that stay", -(-facts.whole_weights // facts.shards)))
    return HostRule(moments=(tuple(parts),), source=source, mapped=mapped)


def _copied_bytes(weight: WeightFacts, setup: Setup) -> int:
    """What of a weight is in memory of the process itself before it goes to the GPU.

    FSDP2 of accelerate makes float32 of what trains (``fsdp2_prepare_model``), DeepSpeed's engine
    the half dtype of all (``_cast_module_mixed_precision``); both on the CPU, a weight after the
    other, and what it was before is let go of.
    """
    if not weight.file_bytes:
        return 0
    distributed = setup.distributed
    fsdp2 = distributed.strategy is Strategy.FSDP and distributed.fsdp_version == 2
    casts = distributed.strategy is Strategy.ZERO or (fsdp2 and setup.loop is not Loop.PLAIN)
    is_copy = weight.is_merged or weight.loaded_bytes != weight.file_bytes
    copied = weight.loaded_bytes if is_copy else 0
    if casts and weight.kept_bytes != weight.loaded_bytes:
        return max(copied, weight.kept_bytes)
    return copied


# -- training ----------------------------------------------------------------------------------


def training(facts: HostFacts) -> HostRule:
    """What is offloaded, the batches that wait, and states that may have to move to the host."""
    return HostRule(moments=(stays(facts),), source="docs/several-gpus.md, docs/data-loading.md")
