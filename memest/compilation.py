"""What fuses a model's operators: ``torch.compile`` and fused losses, as options.

The names are those of ``TrainingArguments``: ``torch_compile``, ``torch_compile_backend`` and
``torch_compile_mode``; a mode or a backend switches compilation on, as there.
"""

from __future__ import annotations

from typing import Any

from memest.distributed import Strategy
from memest.errors import ConfigError, closest

__all__ = ["check_compilation", "read_backend", "read_fused_loss", "read_mode"]

_LOSSES = {"": "", "none": "", "cce": "cce", "cut-cross-entropy": "cce"}

_DEFAULT = ("default", "")
_REFUSED = {
    "reduce-overhead": "records CUDA graphs, which keep a memory pool of their own: what a graph "
    "holds between forward and backward, and the warm-up in front of it, are not modelled",
    "max-autotune": "measures matmul templates on the GPU and records CUDA graphs",
    "max-autotune-no-cudagraphs": "measures matmul templates on the GPU and takes what is fastest "
    "there, with workspaces that nothing tells beforehand",
}


def read_mode(value: object) -> str:
    """A mode of ``torch.compile``; "" for the default one.

    Raises:
        ConfigError: an unknown mode, or one that is not priced.
    """
    text = str(value or "").strip().lower().replace("_", "-")
    if text in _DEFAULT:
        return ""
    if text in _REFUSED:
        raise ConfigError(
            f"--torch-compile-mode {text} {_REFUSED[text]}, and memest does not guess. Ask with "
            "--torch-compile-mode default."
        )
    legal = ["default", *_REFUSED]
    near = closest(text, legal)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"--torch-compile-mode {value!r} is not known.{hint} Legal: {', '.join(legal)}; priced is "
        "default."
    )


def read_backend(value: object) -> str:
    """A backend of ``torch.compile``: Inductor.

    Raises:
        ConfigError: another one.
    """
    text = str(value or "").strip().lower()
    if text in ("", "inductor"):
        return ""
    raise ConfigError(
        f"--torch-compile-backend {value!r} is not priced: memest runs TorchInductor's own "
        "planning. Use --torch-compile-backend inductor, or leave --torch-compile out."
    )


def read_fused_loss(value: object, setup: Any) -> str:
    """A loss in place of the model's own; "" for none.

    Raises:
        ConfigError: an unknown one, or one that is not priced with the rest of a setup.
    """
    text = str(value or "").strip().lower().replace("_", "-")
    if text not in _LOSSES:
        near = closest(text, list(_LOSSES))
        hint = f" Did you mean {near[0]!r}?" if near and near[0] else ""
        raise ConfigError(
            f"--fused-loss {value!r} is not known.{hint} Legal: none, cce (cut-cross-entropy). "
            "Liger's fused loss comes with --use-liger-kernel."
        )
    found = _LOSSES[text]
    for there, what, why in (
        (setup.use_liger_kernel, "--use-liger-kernel", "Liger replaces the loss by its own"),
        (
            setup.distributed.strategy is not Strategy.NONE,
            "--num-gpus",
            "wrappers of the model act where its head is called, which it is not",
        ),
        (setup.torch_compile, "--torch-compile", "its kernels are compiled with the graph"),
        (setup.eval_samples is not None, "--eval-samples", "it makes no logits to keep"),
    ):
        if found and there:
            raise ConfigError(
                f"--fused-loss {found} and {what} exclude each other: {why}. Drop one of them."
            )
    return found


def check_compilation(
    *, several_gpus: bool, liger: bool, in_backward: str, quantised: bool, attention: str
) -> None:
    """What is not priced together with ``torch.compile`` is refused.

    Args:
        several_gpus: the model is wrapped for them.
        liger: Liger's kernels are applied.
        in_backward: the optimizer that steps in backward; "" for none.
        quantised: the base is.
        attention: implementation by transformers' name.

    Raises:
        ConfigError: such a pair of options.
    """
    for there, what, why in (
        (several_gpus, "--num-gpus", "graphs are split where wrappers of the model act"),
        (liger, "--use-liger-kernel", "its Triton kernels are compiled with the graph"),
        (
            bool(in_backward),
            f"An optimizer that steps in backward (--optim {in_backward})",
            "the backward is one graph, and its gradients come out together",
        ),
        (
            quantised,
            "A quantised base",
            "how its operators break the graph depends on bitsandbytes' build for the GPU",
        ),
        (
            attention == "flash_attention_2",
            f"--attn-implementation {attention}",
            "its package brings the operators; sdpa takes the same kernel from PyTorch",
        ),
    ):
        if there:
            raise ConfigError(
                f"{what} is not priced together with --torch-compile yet ({why}), and memest does "
                "not guess: leave one of them out."
            )
