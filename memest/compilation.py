"""``torch.compile`` as an option: which of its modes are priced, and with what.

The names are those of ``TrainingArguments``: ``torch_compile``, ``torch_compile_backend`` and
``torch_compile_mode``; a mode or a backend switches compilation on, as there.
"""

from __future__ import annotations

from memest.errors import ConfigError, closest

__all__ = ["check_compilation", "read_backend", "read_mode"]

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
