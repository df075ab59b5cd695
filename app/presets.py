"""Questions that many people have, one click each; the first one is what a first visit sees."""

from __future__ import annotations

from memest.app.question import ExplorerQuestion

__all__ = ["DEFAULT_GPU", "DEFAULT_MODEL", "DEFAULT_QUESTION", "PRESETS"]


def _ask(model: str, gpu: str, **options: object) -> ExplorerQuestion:
    return ExplorerQuestion.of(model, {"gpu": (gpu,), **options})


PRESETS = {
    "Llama-3.1-8B QLoRA, 24 GB": _ask(
        "meta-llama/Llama-3.1-8B", "rtx-4090", lora_r=16, qlora=True, precision="bf16",
        checkpointing="full", batch=2, seq_len=2048,
    ),
    "bert-large, T4, fp16": _ask(
        "bert-large-uncased", "t4", precision="fp16", batch=16, seq_len=256
    ),
    "Qwen3-8B full, 8 x H100, FSDP2": _ask(
        "Qwen/Qwen3-8B", "h100", precision="bf16", checkpointing="full", batch=1, seq_len=4096,
        num_gpus=8, fsdp="full_shard", fsdp_version=2,
    ),
    "ViT-L, RTX 3090": _ask(
        "google/vit-large-patch16-224", "rtx-3090", precision="fp16", batch=64
    ),
    "The guide: bert-large, V100": _ask("bert-large-uncased", "v100", batch=4, seq_len=512),
}  # fmt: skip
"""By what stands on the chip; each is answered from profiles that come with the package."""

DEFAULT_QUESTION = next(iter(PRESETS.values()))
"""Of a first visit."""
DEFAULT_MODEL = "bert-large-uncased"
DEFAULT_GPU = "rtx-4090"
"""Of a link that names none: links were short once, and stay what they were."""
