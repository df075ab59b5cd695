"""What libraries took unasked, by release: for options that a question leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memest.config.software import Software

__all__ = ["PREPARED", "RELEASE_DEFAULTS", "ReleaseDefault", "release_default"]

PREPARED = "prepared base"
"""A quantised base that a script of its own prepares by peft."""


@dataclass(frozen=True, slots=True)
class ReleaseDefault:
    """What one option is where nobody names it, from a release on.

    Attributes:
        option: keyword of the option.
        value: what it is.
        source: where that was read, and in which releases.
        since: the first release of each library that has it, as (major, minor).
        among: what it holds for alone: families of models (``model_type``), or
            :data:`PREPARED`; empty for all.
    """

    option: str
    value: str
    source: str
    since: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    among: frozenset[str] = frozenset()


_SDPA_SINCE = {
    (5, 24): "codegen gptj layoutlmv3",
    (5, 21): "gemma2 t5gemma vaultgemma",
    (5, 20): "decision_transformer layoutlm",
    (5, 16): "seamless_m4t seamless_m4t_v2 wav2vec2-bert wav2vec2-conformer",
    (5, 15): "mt5 pix2struct pop2piano t5 udop umt5",
    (5, 13): "ctrl recurrent_gemma",
    (5, 11): "zamba",
    (5, 9): "segformer swin",
    (5, 6): "altclip chinese_clip clipseg xclip",
    (5, 4): "owlv2 owlvit",
    (5, 1): "conditional_detr d_fine deformable_detr detr maskformer rt_detr rt_detr_v2",
    (5, 0): """bert-generation data2vec-text electra ernie mobilebert patchtst
        roberta-prelayernorm roc_bert xmod""",
    (4, 56): "esm modernbert-decoder",
    (4, 53): "blenderbot blenderbot-small marian pegasus persimmon plbart",
    (4, 52): "blip-2 fuyu instructblip instructblipvideo kosmos-2 pixtral",
    (4, 50): "dpt vitpose_backbone",
    (4, 48): "beit data2vec-vision sam",
    (4, 46): "distilbert idefics2 opt rag vivit",
    (4, 45): """albert biogpt camembert dinov2 m2m_100 mbart phi3 roberta xlm-roberta
        xlm-roberta-xl""",
    (4, 43): """clip clip_text_model clip_vision_model siglip siglip_text_model
        siglip_vision_model""",
    (4, 42): "gpt2 gpt_neox",
    (4, 41): """audio-spectrogram-transformer bert data2vec-audio deit dpr hubert sew unispeech
        unispeech-sat videomae vit vit_mae vit_msn wav2vec2 yolos""",
    (4, 40): "musicgen musicgen_melody",
    (4, 39): "phi stablelm",
    (4, 37): "llava mistral mixtral",
}
"""First release whose class says ``_supports_sdpa`` (or asks its parts), of families that are
older; the newest of each decides. Classes that never did are eager by themselves."""
_SDPA_TORCH = (2, 1)


def _attention(
    value: str, transformers: tuple[int, int], families: str, source: str
) -> ReleaseDefault:
    """A row of attention, which asks torch for 2.1.1 as well (``is_torch_sdpa_available``)."""
    since = {"transformers": transformers, "torch": _SDPA_TORCH}
    return ReleaseDefault("attn_implementation", value, source, since, frozenset(families.split()))


_ATTENTION = (
    *(
        _attention(
            "auto",
            release,
            families,
            f"_supports_sdpa of the model's class since transformers {release[0]}.{release[1]}",
        )
        for release, families in _SDPA_SINCE.items()
    ),
    # soft caps, which sdpa has not, were left out, but where gemma2 asked for eager by itself
    _attention(
        "sdpa", (4, 53), "t5gemma vaultgemma", "_supports_sdpa of transformers 4.53 to 5.20"
    ),
    _attention("sdpa", (4, 48), "gemma2", "_supports_sdpa of transformers 4.48 to 5.20"),
    _attention("eager", (4, 45), "gemma2", "_check_and_enable_sdpa of transformers 4.45 to 4.47"),
    _attention("sdpa", (4, 42), "gemma2", "_supports_sdpa of transformers 4.42 to 4.44"),
    ReleaseDefault(
        "attn_implementation",
        "eager",
        "the model's class before it had _supports_sdpa, or torch before 2.1",
        among=frozenset(" ".join(_SDPA_SINCE.values()).split()),
    ),
    _attention("auto", (4, 36), "", "_autoset_attn_implementation since transformers 4.36"),
    ReleaseDefault("attn_implementation", "eager", "transformers before 4.36, or torch before 2.1"),
)

RELEASE_DEFAULTS = (
    ReleaseDefault(
        "optim",
        "adamw_torch_fused",
        "TrainingArguments.optim of transformers 4.54.1 to 5.0.0, with torch 2.8 or later",
        {"transformers": (4, 54), "torch": (2, 8)},
    ),
    ReleaseDefault(
        "optim",
        "adamw_torch",
        "TrainingArguments.optim of transformers 4.32.1 to 4.53.3, and later before torch 2.8",
        {"transformers": (4, 32)},
    ),
    ReleaseDefault("optim", "adamw_hf", "TrainingArguments.optim of transformers 4.18.0 to 4.31.0"),
    ReleaseDefault(
        "dtype", "auto", "from_pretrained of transformers 5.0.0", {"transformers": (5, 0)}
    ),
    ReleaseDefault("dtype", "float32", "from_pretrained of transformers 4.18.0 to 4.57.1"),
    ReleaseDefault(
        "use_reentrant",
        "true",
        "prepare_model_for_kbit_training of peft 0.6 to 0.21, which switches checkpointing on "
        "with no word of it and so by torch's own default",
        {"peft": (0, 6)},
        frozenset({PREPARED}),
    ),
    ReleaseDefault(
        "use_reentrant",
        "false",
        "gradient_checkpointing_enable of transformers 5.0.0",
        {"transformers": (5, 0)},
    ),
    ReleaseDefault(
        "use_reentrant",
        "true",
        "gradient_checkpointing_enable of transformers 4.18.0 to 4.57.1",
    ),
    ReleaseDefault(
        "use_cache", "false", "the Trainer of transformers 5.0.0", {"transformers": (5, 0)}
    ),
    ReleaseDefault(
        "use_cache", "auto", "the model's config, before transformers 5 under the Trainer too"
    ),
    ReleaseDefault("zero_grad", "none", "Optimizer.zero_grad of torch 2.0", {"torch": (2, 0)}),
    ReleaseDefault("zero_grad", "zero", "Optimizer.zero_grad of torch 1.13"),
    ReleaseDefault(
        "autocast_adapter_dtype",
        "true",
        "get_peft_model of peft 0.12.0 to 0.21.2",
        {"peft": (0, 12)},
    ),
    ReleaseDefault(
        "autocast_adapter_dtype",
        "false",
        "LoraLayer of peft 0.4.0 to 0.11.1, which has the dtype of its base",
    ),
    ReleaseDefault(
        "prepare_kbit",
        "float32",
        "prepare_model_for_kbit_training of peft 0.4.0 to 0.21.2, and "
        "prepare_model_for_int8_training of 0.3.0",
        {"peft": (0, 3)},
    ),
    ReleaseDefault(
        "prepare_kbit",
        "layer_norm",
        "prepare_model_for_int8_training of peft 0.2.0: vectors named layer_norm become float32, "
        "and so do the logits",
    ),
    *_ATTENTION,
)
"""The newest first: the first that a software has all releases for is the one that holds."""


def release_default(option: str, software: Software, among: str = "") -> ReleaseDefault:
    """What an option is under some software; what is not declared counts as the newest.

    Args:
        option: keyword of an option that the table has.
        software: declared versions.
        among: what it is asked for, where a row may be for that alone.
    """
    return next(
        row
        for row in RELEASE_DEFAULTS
        if row.option == option
        and (not row.among or among in row.among)
        and all(
            (getattr(software, library) or first) >= first for library, first in row.since.items()
        )
    )
