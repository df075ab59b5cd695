"""Small models of every kind, built twice: on meta for the trace, on the CPU for the real run."""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.integrations.neftune import activate_neftune
from transformers.modeling_layers import GradientCheckpointingLayer

from memest.catalog.resolve import ModelSource
from memest.config.quantization import Format
from memest.config.setup import Loop, Setup
from memest.trace.inputs.batch import plan_batch
from memest.trace.model.adapters import add_adapter
from memest.trace.model.build import BuiltModel, build_model, cast_weights, freeze
from memest.trace.model.noise import add_noise
from memest.trace.model.packed import GptqLinear, pack, register_packed_layers
from memest.trace.model.quantization import quantize
from memest.trace.model.selective import selective_arguments
from memest.workspaces.operator_call import GpuTraits

GPU = GpuTraits(capability=(8, 0), sm_count=108, max_threads_per_sm=2048)

_TEXT = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}
_LLAMA = {**_TEXT, "num_key_value_heads": 4, "pad_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], **_TEXT},
    "roberta": {"model_type": "roberta", **_TEXT},
    "distilbert": {
        "model_type": "distilbert",
        "dim": 128,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 384,
        "vocab_size": 1000,
        "max_position_embeddings": 256,
    },
    "deberta": {
        "model_type": "deberta-v2",
        **_TEXT,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 32,
    },
    "albert": {"model_type": "albert", **_TEXT, "embedding_size": 64},
    "modernbert": {
        "model_type": "modernbert",
        **_TEXT,
        "pad_token_id": 0,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 128,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": 1000,
        "n_positions": 256,
        "bos_token_id": 1,
        "eos_token_id": 1,
    },
    "llama": {"model_type": "llama", **_LLAMA},
    "llama6": {"model_type": "llama", **_LLAMA, "num_hidden_layers": 6},
    "llama-tied": {"model_type": "llama", **_LLAMA, "tie_word_embeddings": True},
    "llama-gqa": {"model_type": "llama", **_LLAMA, "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", **_LLAMA, "num_key_value_heads": 2, "head_dim": 32},
    "gemma2": {"model_type": "gemma2", **_LLAMA, "head_dim": 32, "sliding_window": 64},
    "opt": {
        "model_type": "opt",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "ffn_dim": 384,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 128,
    },
    "bloom": {
        "model_type": "bloom",
        "hidden_size": 128,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": 1000,
    },
    "gpt_neox": {"model_type": "gpt_neox", **_TEXT},
    "phi": {"model_type": "phi", **_LLAMA},
    "t5": {
        "model_type": "t5",
        "d_model": 128,
        "d_kv": 32,
        "d_ff": 384,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 1000,
        "decoder_start_token_id": 0,
    },
    "bart": {
        "model_type": "bart",
        "d_model": 128,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 384,
        "decoder_ffn_dim": 384,
        "vocab_size": 1000,
        "max_position_embeddings": 256,
        "architectures": ["BartForConditionalGeneration"],
    },
    "vit": {"model_type": "vit", **_TEXT, "image_size": 64, "patch_size": 8},
    "swin": {
        "model_type": "swin",
        "image_size": 64,
        "patch_size": 4,
        "embed_dim": 48,
        "depths": [2, 2],
        "num_heads": [3, 6],
        "window_size": 4,
    },
    "convnext": {
        "model_type": "convnext",
        "hidden_sizes": [32, 64],
        "depths": [2, 2],
        "num_stages": 2,
        "image_size": 64,
    },
    "resnet": {
        "model_type": "resnet",
        "embedding_size": 32,
        "hidden_sizes": [64, 128],
        "depths": [2, 2],
        "layer_type": "basic",
    },
    "segformer": {
        "model_type": "segformer",
        "hidden_sizes": [16, 32, 64, 128],
        "depths": [1, 1, 1, 1],
        "decoder_hidden_size": 64,
        "image_size": 64,
    },
    "clip": {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": 64,
        "text_config": {**_TEXT, "eos_token_id": 2},
        "vision_config": {**_TEXT, "image_size": 64, "patch_size": 8},
    },
    "whisper": {
        "model_type": "whisper",
        "d_model": 128,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 384,
        "decoder_ffn_dim": 384,
        "vocab_size": 1000,
        "max_source_positions": 150,
        "max_target_positions": 64,
        "num_mel_bins": 80,
        "decoder_start_token_id": 1,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
    },
    "wav2vec2": {
        "model_type": "wav2vec2",
        "architectures": ["Wav2Vec2ForCTC"],
        **_TEXT,
        "vocab_size": 32,
        "conv_dim": [32, 32, 32],
        "conv_stride": [5, 4, 4],
        "conv_kernel": [10, 4, 4],
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "mask_time_prob": 0.0,
    },
    "mixtral": {
        "model_type": "mixtral",
        **_LLAMA,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_LLAMA,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_LLAMA,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "detr": {
        "model_type": "detr",
        "architectures": ["DetrForObjectDetection"],
        "use_timm_backbone": False,
        "backbone": None,
        "backbone_config": {
            "model_type": "resnet",
            "embedding_size": 16,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "layer_type": "basic",
            "out_features": ["stage2"],
        },
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "num_queries": 20,
    },
    "yolos": {
        "model_type": "yolos",
        "architectures": ["YolosForObjectDetection"],
        **_TEXT,
        "image_size": [64, 64],
        "patch_size": 8,
        "num_detection_tokens": 10,
    },
    "videomae": {
        "model_type": "videomae",
        "architectures": ["VideoMAEForVideoClassification"],
        **_TEXT,
        "image_size": 64,
        "patch_size": 16,
        "num_frames": 8,
    },
    "timesformer": {
        "model_type": "timesformer",
        "architectures": ["TimesformerForVideoClassification"],
        **_TEXT,
        "image_size": 64,
        "patch_size": 16,
        "num_frames": 4,
    },
    "trocr": {
        "model_type": "vision-encoder-decoder",
        "architectures": ["VisionEncoderDecoderModel"],
        "encoder": {"model_type": "vit", **_TEXT, "image_size": 64, "patch_size": 8},
        "decoder": {
            "model_type": "trocr",
            "d_model": 128,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 384,
            "vocab_size": 1000,
            "max_position_embeddings": 64,
            "is_decoder": True,
            "add_cross_attention": True,
        },
        "is_encoder_decoder": True,
        "decoder_start_token_id": 2,
        "pad_token_id": 1,
        "tie_word_embeddings": False,
    },
    "idefics3": {
        "model_type": "idefics3",
        "architectures": ["Idefics3ForConditionalGeneration"],
        "image_token_id": 999,
        "scale_factor": 2,
        "text_config": {"model_type": "llama", **_LLAMA},
        "vision_config": {
            "model_type": "idefics3_vision",
            **_TEXT,
            "image_size": 32,
            "patch_size": 8,
        },
    },
    "internvl": {
        "model_type": "internvl",
        "architectures": ["InternVLForConditionalGeneration"],
        "image_token_id": 999,
        "downsample_ratio": 0.5,
        "text_config": {"model_type": "qwen2", **_LLAMA},
        "vision_config": {
            "model_type": "internvl_vision",
            **_TEXT,
            "image_size": [64, 64],
            "patch_size": [8, 8],
        },
    },
    "git": {
        "model_type": "git",
        "architectures": ["GitForCausalLM"],
        **_TEXT,
        "vision_config": {
            "model_type": "git_vision_model",
            **_TEXT,
            "image_size": 64,
            "patch_size": 8,
        },
    },
    "granite_speech": {
        "model_type": "granite_speech",
        "architectures": ["GraniteSpeechForConditionalGeneration"],
        "audio_token_index": 999,
        "has_lora_adapter": False,
        "downsample_rate": 5,
        "window_size": 15,
        "text_config": {"model_type": "granite", **_LLAMA},
        "encoder_config": {
            "model_type": "granite_speech_encoder",
            "hidden_dim": 64,
            "num_layers": 2,
            "num_heads": 4,
            "dim_head": 16,
            "input_dim": 160,
            "output_dim": 64,
            "context_size": 20,
            "max_pos_emb": 32,
        },
        "projector_config": {
            "model_type": "blip_2_qformer",
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "encoder_hidden_size": 64,
        },
    },
    "mamba": {
        "model_type": "mamba",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "state_size": 8,
        "vocab_size": 1000,
        "pad_token_id": 0,
    },
}


@dataclass(frozen=True, slots=True)
class Twin:
    """The same model twice, and the plan of its batch; ``real`` is None where nobody runs it."""

    built_model: BuiltModel
    real: torch.nn.Module | None
    plans: Any
    setup: Setup


def setup_of(name: str, **kwargs: Any) -> Setup:
    """The setup of a model of ``CONFIGS``; keywords are those of :func:`twin`."""
    config = {**CONFIGS[name], **kwargs.pop("config", {})}
    defaults: dict[str, Any] = {"batch": 4, "optim": "adamw_torch_loop", "dtype": "float32"}
    if "hidden_size" in config or "d_model" in config or "n_embd" in config or "dim" in config:
        defaults["seq_len"] = 96
    if name in ("vit", "swin", "convnext", "resnet", "segformer", "clip", "detr"):
        defaults["image_size"] = 64
    if name in ("whisper", "wav2vec2", "granite_speech"):
        defaults.pop("seq_len", None)
        defaults["audio_seconds"] = 1.0
    return Setup(**{**defaults, **kwargs})


def twin(name: str, *, runs: bool = True, **kwargs: Any) -> Twin:
    """Build a model on meta and on the CPU, in the same state of training.

    Args:
        name: one of ``CONFIGS``.
        runs: whether the one on the CPU is wanted.
        kwargs: options of ``Setup``, and ``config``, values that are not as in ``CONFIGS``.
    """
    setup = setup_of(name, **kwargs)
    config = {**CONFIGS[name], **kwargs.get("config", {})}
    source = ModelSource(kind="file", id=name, config=config, provenance="test")
    built_model = build_model(source, setup)
    if setup.adapter is None:
        freeze(built_model.model, setup)
    real = _with_numbers(built_model) if runs else None
    for model in filter(None, (built_model.model, real)):
        if setup.loop is Loop.TRAINER and hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        if setup.checkpointing == "selective":
            checkpoint_by_operator(model, as_torchtitan=model is real)
        elif setup.checkpointing != "none":
            reenters = bool(setup.use_reentrant) or setup.must_reenter
            model.gradient_checkpointing_enable({"use_reentrant": reenters})
    if setup.neftune_noise_alpha is not None:
        add_noise(built_model.model, setup)
        if real is not None:
            activate_neftune(real, setup.neftune_noise_alpha)
    plans, _, _ = plan_batch(built_model, setup)
    if setup.quantization is not None and setup.quantization.format.packed:
        built_model, real = _pack(built_model, real, setup)
    elif setup.quantization is not None:
        built_model, real = _quantize(built_model, real, setup)
    if setup.adapter is not None:
        built_model, real = _with_adapters(built_model, real, setup)
    return Twin(built_model, real, plans, setup)


def checkpoint_by_operator(model, *, as_torchtitan):
    """memest's checkpointing by operator, or torchtitan's wrapper with its policy, by hand."""
    if not as_torchtitan:
        model.activation_checkpointing_enable(selective_arguments())
        return
    model.config.use_cache = False  # what a wrapped layer gets, it would fill twice
    for module in list(model.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, GradientCheckpointingLayer):
                setattr(module, name, checkpoint_wrapper(layer, context_fn=_titan_contexts,
                                                         early_stop=False))  # fmt: skip


_TITAN_SAVES = """
    mm addmm bmm linear max topk convolution _scaled_mm
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _flash_attention_forward _efficient_attention_forward
""".split()


def _titan_contexts():
    counts = Counter()

    def policy(ctx, func, *args, **kwargs):
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in ("mm", "linear"):
            counts[ctx.is_recompute] += 1
        odd = counts[ctx.is_recompute] % 2 or name not in ("mm", "linear")
        saves = name in _TITAN_SAVES and odd and not func.name().startswith("aten::max.")
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _with_numbers(built_model):
    """The model that was built on meta, with numbers, and what trains of it."""
    real = type(built_model.model)._from_config(
        built_model.config, dtype=built_model.dtype, attn_implementation=built_model.attention
    )
    real.train()
    trains = {n: p.requires_grad for n, p in built_model.model.named_parameters()}
    for parameter_name, parameter in real.named_parameters():
        parameter.requires_grad_(trains[parameter_name])
    return real


def _quantize(built_model, real, setup):
    """A quantised base as memest makes it on meta, and as from_pretrained makes it of a file."""
    loading, _ = quantize(built_model.model, built_model.dtype, setup)
    if real is not None:
        real = _load_pretrained(built_model, real, setup)
    # the one that was saved may have had the same configuration
    if setup.loop is Loop.TRAINER and hasattr(built_model.model.config, "use_cache"):
        built_model.model.config.use_cache = False
    return replace(built_model, loading=loading), real


def _load_pretrained(built_model, real, setup):
    """A quantised base of a file, in the state of training of the one that was saved."""
    import peft
    import transformers

    quantization = setup.quantization
    four = quantization.format is Format.BNB_4BIT
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=four, load_in_8bit=not four,
        bnb_4bit_quant_type=quantization.quant_type,
        bnb_4bit_use_double_quant=quantization.double_quant,
        bnb_4bit_compute_dtype=quantization.compute_dtype,
        bnb_4bit_quant_storage=quantization.quant_storage,
        llm_int8_threshold=quantization.threshold,
        llm_int8_skip_modules=None if quantization.skip_modules is None
        else list(quantization.skip_modules),
    )  # fmt: skip
    if hasattr(real.config, "use_cache"):
        real.config.use_cache = True  # as a checkpoint has it: decoders keep copies of the config
    with tempfile.TemporaryDirectory() as folder:
        real.save_pretrained(folder)
        real = type(real).from_pretrained(
            folder, quantization_config=config, dtype=built_model.dtype, device_map={"": "cpu"},
            attn_implementation=built_model.attention,
        )  # fmt: skip
    real.train()
    if setup.prepares_base:
        real = peft.prepare_model_for_kbit_training(real, use_gradient_checkpointing=False)
    if setup.loop is Loop.TRAINER and hasattr(real.config, "use_cache"):
        real.config.use_cache = False
    if setup.checkpointing != "none":
        real.gradient_checkpointing_enable({"use_reentrant": setup.recomputes_reentrantly})
    return real


def _pack(built_model, real, setup):
    """A base of GPTQ as memest makes it on meta, and with numbers on the CPU."""
    import peft

    from support.packed_reference import reference_of

    loading, _ = pack(built_model.model, built_model.dtype, setup)
    if real is not None:
        for name, layer in built_model.model.named_modules():
            if isinstance(layer, GptqLinear):
                real.set_submodule(name, reference_of(layer))
        real.quantization_method = setup.quantization.format.value
        if setup.prepares_base:
            real = peft.prepare_model_for_kbit_training(real, use_gradient_checkpointing=False)
    return replace(built_model, loading=loading), real


def _with_adapters(built_model, real, setup):
    """Adapters as memest puts them on meta, and as a script puts them on a device."""
    wrapper, _ = add_adapter(built_model.model, built_model.task, setup)
    cast_weights(wrapper, setup)
    if real is not None:
        real = add_adapters(real, setup, wrapper.active_peft_config.task_type)
        for cast in setup.casts:
            _cast_what_trains(real, getattr(torch, cast.removeprefix("trainable=")))
    return replace(built_model, wrapper=wrapper), real


def _cast_what_trains(model, dtype):
    """As TRL's and LLaMA-Factory's own code does it."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def add_adapters(real, setup, task_type):
    """A model with numbers, with the adapters of a setup."""
    import peft

    values = {**setup.adapter.to_dict(), "task_type": task_type}
    cast = values.pop("autocast_adapter_dtype", True)
    kind = peft.PeftType(values.pop("peft_type"))
    config = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kind](**values)
    register_packed_layers(config, real, setup.adapter.method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(real, config, autocast_adapter_dtype=cast)
