"""Expert parallelism as transformers does it, on one rank that talks to nobody.

``from_pretrained(..., distributed_config=DistributedConfig(tp_size=N, ep_size=N))`` shards the
weights of experts by expert and gives their modules a forward that exchanges tokens
(``apply_expert_parallelism``). The same function does it on meta here; how many tokens come back
from the others depends on their routers, and is assumed as everything is that routers decide.
"""

from __future__ import annotations

from typing import Any

from memest.errors import ConfigError

__all__ = ["check_has_experts", "num_experts", "own_units"]

_STYLE = "ep_dispatch_experts"


def num_experts(model: Any) -> list[int]:
    """How many experts each layer that transformers' plan shares has; empty = no such layer."""
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    plan = getattr(model, "ep_plan", None) or {}
    counts = []
    for name, module in model.named_modules():
        if plan.get(replace_layer_number_by_wildcard(name)) == _STYLE:
            counts.append(int(next(iter(module.parameters(recurse=False))).shape[0]))
    return counts


def check_has_experts(model: Any, ranks: int) -> None:
    """Whether a model has experts that so many ranks can share.

    Raises:
        ConfigError: it has none, transformers has no plan for them, or they do not divide.
    """
    counts = num_experts(model)
    if not counts:
        raise ConfigError(
            f"--ep cannot share the experts of {type(model).__name__}: it has none, or "
            "transformers has no plan for them (base_model_ep_plan of its configuration), as it "
            "has for mixtral, qwen2_moe, qwen3_moe, gpt_oss, olmoe or deepseek_v3. Leave --ep out."
        )
    wrong = next((count for count in counts if count % ranks), None)
    if wrong is not None:
        legal = [n for n in range(1, min(counts) + 1) if all(count % n == 0 for count in counts)]
        near = sorted(legal, key=lambda n: (abs(n - ranks), n))
        raise ConfigError(
            f"--ep {ranks} does not divide the {wrong} experts of this model. Legal: "
            f"{', '.join(map(str, near))}."
        )


Units = tuple[tuple[tuple[str, ...], bool, bool], ...]


def own_units(model: Any, ep_plan: dict[str, str], fsdp_plan: dict[str, str]) -> Units:
    """What transformers makes units of FSDP2, beside the root, in its order.

    Source: ``apply_fully_sharded_data_parallelism`` of transformers 5.23: modules of experts; what
    frees its weights after a forward; what keeps them, norm and head together.

    Returns:
        Paths of the modules of each, whether it frees, whether it is of experts.
    """
    from transformers.distributed.fsdp import is_norm_and_head_pair

    experts = [name for name, _ in model.named_modules() if ep_plan.get(name) == _STYLE]
    out: list[tuple[tuple[str, ...], bool, bool]] = [((name,), True, True) for name in experts]
    full_weight_names = [name for name, style in fsdp_plan.items() if style == "keep_full_weight"]
    out += [((name,), True, False) for name in fsdp_plan if name not in full_weight_names]
    if is_norm_and_head_pair(
        [(name, model.get_submodule(name)) for name in full_weight_names], model
    ):
        return (*out, (tuple(full_weight_names), False, False))
    return (*out, *(((name,), False, False) for name in full_weight_names))
