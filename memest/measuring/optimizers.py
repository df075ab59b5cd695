"""Which optimizer of memest's table a live optimizer is."""

from __future__ import annotations

from typing import Any

from memest.errors import ConfigError

__all__ = ["options_of_optimizer"]

_NAMES = {
    "AdamW": ("adamw_torch", "adamw_torch_fused", "adamw_torch_loop"),
    "Adam": ("adam", "adam_fused", "adam_loop"),
    "SGD": ("sgd", "", "sgd_loop"),
    "RMSprop": ("rmsprop", "", "rmsprop_loop"),
    "Adagrad": ("adagrad", "", "adagrad_loop"),
    "Adadelta": ("adadelta", "", ""),
    "Adamax": ("adamax", "", ""),
    "NAdam": ("nadam", "", ""),
    "RAdam": ("radam", "", ""),
    "Adafactor": ("adafactor_torch", "", "adafactor_torch"),
}
"""Classes of torch: as torch chooses on CUDA (foreach), fused, one parameter after the other."""


def options_of_optimizer(optimizer: Any) -> dict[str, Any]:
    """The options of an estimate that name a live optimizer.

    Args:
        optimizer: of torch, perhaps wrapped by accelerate.

    Raises:
        ConfigError: one that the table does not have, or with settings that it has not.
    """
    wrapped = type(optimizer).__name__ == "AcceleratedOptimizer"
    inner = optimizer.optimizer if wrapped else optimizer
    kind = type(inner)
    known = _NAMES.get(kind.__name__) if kind.__module__.startswith("torch.") else None
    group = getattr(inner, "defaults", {})
    if known is None:
        raise ConfigError(
            f"the optimizer {kind.__module__}.{kind.__name__} is none that memest knows by its "
            "class: name it with optim=, for example optim='adamw_8bit'."
        )
    usual, fused, loop = known
    name = fused if group.get("fused") else loop if group.get("foreach") is False else usual
    if kind.__name__ == "SGD" and group.get("momentum"):
        name = name.replace("sgd", "sgd_momentum")
    unpriced = [n for n in ("amsgrad", "centered", "differentiable") if group.get(n)]
    if kind.__name__ == "RMSprop" and group.get("momentum"):
        unpriced.append("momentum")
    if not name or unpriced:
        what = ", ".join(unpriced) or ("fused" if group.get("fused") else "foreach=False")
        raise ConfigError(f"{kind.__name__} with {what} is not priced: leave measure's prediction "
                          "out, or name the nearest one with optim=.")  # fmt: skip
    decay = group.get("weight_decay")
    options = {"optim": name, "loop": "accelerate" if wrapped else "plain"}
    return options | ({} if decay is None else {"weight_decay": decay})
