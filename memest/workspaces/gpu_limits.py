"""What a GPU cannot run at all: a run that would stop there is not priced for it. Torch-free.

Sources, read in the releases named: ``is_bf16_supported`` of ``torch/cuda/__init__.py`` and
``autocast`` of ``torch/amp/autocast_mode.py`` (torch 2.1 to 2.13: GPUs before compute capability
8.0 count as able from 2.3 on, because they can hold a bf16 tensor),
``is_torch_bf16_gpu_available`` of transformers (its own look at the compute capability up to 4.34,
torch's word from 4.35 on), ``is_bf16_available`` of accelerate (torch's word);
``csrc/flash_attn/flash_api.cpp`` of flash-attn 2.8; ``sdp_utils.cpp`` of torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from memest.config.kinds import Attention, Loop, Precision, SdpaBackend
from memest.config.training_run import TrainingRun
from memest.errors import UnfitGpuError
from memest.workspaces.attention_choice import SdpaCall, why_not
from memest.workspaces.operator_call import GpuTraits

__all__ = [
    "check_backend",
    "check_flash_gpu",
    "check_gpu",
    "computes_in_bf16",
]

_AMPERE = (8, 0)
_EMULATED_SINCE = (2, 3)
"""The torch that counts emulated bf16 as supported."""
_ASKS_TORCH_SINCE = (4, 35)
"""The transformers that asks torch whether there is bf16."""


def computes_in_bf16(capability: tuple[int, int]) -> bool:
    """Whether a CUDA GPU has bf16 arithmetic; earlier ones convert to float32 and back."""
    return capability >= _AMPERE


def check_gpu(setup: TrainingRun, gpu: GpuTraits) -> None:
    """Refuse what stops on a GPU before its first step is done.

    Args:
        setup: the run, its attention as the model has it.
        gpu: with the torch that trains.

    Raises:
        UnfitGpuError: the GPU does not run it.
    """
    if setup.attn_implementation is Attention.FLASH_ATTENTION_2:
        check_flash_gpu(gpu.capability)
    if setup.precision is Precision.BF16 and not computes_in_bf16(gpu.capability):
        _check_emulated_bf16(setup, gpu)


def check_flash_gpu(capability: tuple[int, int]) -> None:
    """Refuse GPUs before Ampere, for which flash-attn has no kernels.

    Raises:
        UnfitGpuError: the GPU is too old for FlashAttention 2.
    """
    if capability < _AMPERE:
        raise UnfitGpuError(
            "--attn-implementation flash_attention_2 needs a GPU of compute capability 8.0 or "
            f"newer, and this one has {_dotted(capability)}: the run would stop in its first "
            "forward (flash-attn: 'FlashAttention only supports Ampere GPUs or newer'). Use "
            "--attn-implementation sdpa.",
            "FlashAttention 2 needs compute capability 8.0",
        )


def _check_emulated_bf16(setup: TrainingRun, gpu: GpuTraits) -> None:
    transformers = setup.software.transformers
    who = ""
    if gpu.torch < _EMULATED_SINCE:
        who = f"torch {_dotted(gpu.torch)}"
    elif setup.loop is Loop.TRAINER and transformers and transformers < _ASKS_TORCH_SINCE:
        who = f"TrainingArguments of transformers {_dotted(transformers)}"
    if who:
        raise UnfitGpuError(
            f"--bf16 on a GPU of compute capability {_dotted(gpu.capability)}: {who} refuses it, "
            "because bf16 arithmetic came with 8.0. Use --fp16.",
            f"{who} refuses bf16 before compute capability 8.0",
        )


def check_backend(
    setting: SdpaBackend, calls: Iterable[tuple[SdpaCall, str]], gpu: GpuTraits
) -> None:
    """Refuse a kernel that was named for ``sdpa`` and cannot run what the model asks of it.

    With one backend allowed and that one unable, ``select_sdp_backend`` stops.

    Args:
        setting: of ``--sdpa-backend``.
        calls: the model's attention, with what a trace took for it.
        gpu: whose kernels run.

    Raises:
        UnfitGpuError: it cannot run one of them.
    """
    if setting is SdpaBackend.AUTO:
        return
    for call, _ in calls:
        if why := why_not(setting, call, gpu):
            raise UnfitGpuError(
                f"--sdpa-backend {setting} cannot run this model's attention on a GPU of compute "
                f"capability {_dotted(gpu.capability)}: the {setting} kernel {why}. PyTorch stops "
                "there with 'No available kernel'. Leave --sdpa-backend out, or name another: "
                "math runs everything.",
                f"the {setting} kernel cannot run this model's attention on them",
            )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
