"""What fuses a model's operators: ``torch.compile`` and fused losses, as options.

The names are those of ``TrainingArguments``: ``torch_compile``, ``torch_compile_backend`` and
``torch_compile_mode``; a mode or a backend switches compilation on, as there.
"""

from __future__ import annotations

from memest.config.installed import installed_version, release
from memest.errors import ConfigError, hint, not_legal

__all__ = [
    "DEFAULT_CHUNKS",
    "FUSED_LOSSES",
    "check_release",
    "fused_loss_flag",
    "fused_loss_words",
    "loss_and_chunks",
    "read_backend",
    "read_fused_loss",
    "read_mode",
]

FUSED_LOSSES = {
    "cce": "cut cross-entropy",
    "trl-fused": "TRL's fused head and loss",
    "trl-chunked": "TRL's chunked loss",
    "torchtune-linear": "torchtune's linear cross-entropy",
    "torchtune-chunked": "torchtune's chunked cross-entropy",
}
"""What ``--fused-loss`` takes, in words."""
DEFAULT_CHUNKS = 8
"""``num_output_chunks`` of torchtune's losses."""
_LOSSES = {"": "", "none": "", "cut-cross-entropy": "cce", **{name: name for name in FUSED_LOSSES}}
_MAX_CHUNKS = 1 << 12

_DEFAULT = ("default", "")
_REFUSALS = {
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
    if text in _REFUSALS:
        raise ConfigError(
            f"--torch-compile-mode {text} {_REFUSALS[text]}, and memest does not guess. Ask with "
            "--torch-compile-mode default."
        )
    legal = ["default", *_REFUSALS]
    label = f"--torch-compile-mode {value!r}"
    raise not_legal(label, text, legal, more="; priced is default")


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


def read_fused_loss(value: object) -> str:
    """A loss in place of the model's own; "" for none.

    Raises:
        ConfigError: an unknown one.
    """
    spelling = str(value or "").strip().lower().replace("_", "-")
    text, colon, chunks = spelling.partition(":")
    if text not in _LOSSES:
        legal = ", ".join(f"{name} ({words})" for name, words in FUSED_LOSSES.items())
        suggestion = hint(text, _LOSSES)
        raise ConfigError(
            f"--fused-loss {value!r} is not known.{suggestion} Legal: none, {legal}. Liger's fused "
            "loss comes with --use-liger-kernel."
        )
    loss = _LOSSES[text]
    return loss + (_chunks(chunks, loss) if colon else "")


def loss_and_chunks(fused_loss: str) -> tuple[str, int]:
    """A fused loss and the pieces in which it works, where it takes a number of them.

    Example:
        >>> loss_and_chunks("torchtune-linear:16"), loss_and_chunks("cce")
        (('torchtune-linear', 16), ('cce', 8))
    """
    name, _, chunks = fused_loss.partition(":")
    return name, int(chunks or DEFAULT_CHUNKS)


def fused_loss_flag(fused_loss: str) -> str:
    """The option of a fused loss, and what else means it, for sentences that refuse it."""
    flag = f"--fused-loss {fused_loss}"
    return f"{flag} (which --method sft means)" if fused_loss == "trl-fused" else flag


def fused_loss_words(fused_loss: str) -> str:
    """A fused loss in words.

    Example:
        >>> fused_loss_words("torchtune-linear:16")
        "torchtune's linear cross-entropy in 16 pieces"
    """
    name, _, chunks = fused_loss.partition(":")
    return FUSED_LOSSES[name] + (f" in {chunks} pieces" if chunks else "")


def _chunks(text: str, name: str) -> str:
    """What follows a loss's name, as it is kept."""
    if not name.startswith("torchtune"):
        raise ConfigError(
            f"--fused-loss {name}:{text}: the number is num_output_chunks of torchtune's losses, "
            f"and {name or 'no loss'} has none. Leave it out, or use torchtune-linear:N."
        )
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MAX_CHUNKS):
        raise ConfigError(
            f"--fused-loss {name}:{text}: the number of pieces must be a whole number from 1 to "
            f"{_MAX_CHUNKS}."
        )
    return "" if int(text) == DEFAULT_CHUNKS else f":{int(text)}"


def check_release(declared: tuple[int, int] | None) -> None:
    """The graphs of ``torch.compile`` are those of the installed PyTorch.

    Args:
        declared: (major, minor) of the torch that will train; None where nobody says.

    Raises:
        ConfigError: another release is said to train.
    """
    installed = installed_version("torch")
    if declared is None or installed is None or declared == installed:
        return
    text = ".".join(map(str, declared))
    raise ConfigError(
        f"--software torch={text} and --torch-compile exclude each other here: the graphs are "
        f"those of the installed torch {release('torch')}. Install the release that trains, "
        "or leave one of them out."
    )
