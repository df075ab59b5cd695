"""Unsloth: how ``FastLanguageModel`` loads a model, adapts it, and what of it is not priced.

Source: unsloth and unsloth_zoo 2026.10: ``models/loader.py``, ``models/llama.py``
(``from_pretrained``, ``get_peft_model``), ``models/mapper.py``, ``models/rl.py`` (defaults of TRL's
configurations, mixed precision), ``kernels/utils.py`` (buffers), ``kernels/fast_lora.py``,
``fused_losses/cross_entropy_loss.py``, ``gradient_checkpointing.py``.
"""

from __future__ import annotations

from memest.catalog.mirrors import is_dynamic_copy, original_of_copy
from memest.catalog.models import lookup
from memest.readers.mapping import DocumentKeys, Key, KeyTable, by_key, read_table
from memest.readers.scripts.calls import TRAINERS, arguments_of
from memest.readers.scripts.document import MODEL_KEY, CallDocument
from memest.readers.scripts.found import Found
from memest.readers.scripts.things import Call, Value
from memest.readers.training_arguments import MODELS, read_checkpointing
from memest.readers.values import Bounded, Saving

__all__ = ["CONFIG_DEFAULTS", "is_unsloth", "read_unsloth"]

CONFIG_DEFAULTS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "optim": "adamw_8bit",
    "weight_decay": 0.001,
}
"""What TRL's configurations have unasked once Unsloth is imported."""
_ROLLOUTS = ("max_prompt_length", "max_completion_length")
_TARGETS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
_TARGET_SWITCHES = """finetune_vision_layers finetune_language_layers finetune_attention_modules
    finetune_mlp_modules finetune_audio_layers""".split()
_TABLE = KeyTable(
    options={**MODELS, "max_seq_length": Key("seq_len", "whole")},
    readers=(read_checkpointing,),
    own_names=True,
    ignored_keys=by_key(
        {
            "how the model is loaded": """token device_map device_map_planner_kwargs rope_scaling
                fix_tokenizer trust_remote_code revision use_exact_model_name random_state
                max_lora_rank disable_log_stats gpu_memory_utilization float8_kv_cache text_only
                auto_model cache_dir return_logits fullgraph whisper_language whisper_task
                load_in_16bit local_files_only""",
        }
    ),
    unmodelled_keys={
        "fast_inference": "vLLM, a generation engine in the same memory",
        "qat_scheme": "quantisation-aware training",
        "load_in_fp8": "a base in fp8",
        "float8_training": "training in fp8",
        "float32_mixed_precision": "trained weights in float32",
        "resize_model_vocab": "rows of the embeddings",
        "target_parameters": "LoRA on parameters that are not modules",
        "offload_embedding": Saving("the embedding stays on the host"),
        "unsloth_tiled_mlp": Saving("the MLP works in tiles"),
        "offload_layers": Saving("layers move to the host"),
        "unsloth_force_compile": Bounded("compilation"),
    },
)


def is_unsloth(load: Call) -> bool:
    """Whether a model is loaded by Unsloth."""
    return load.library == "unsloth" or (
        load.maker.startswith("Fast") and load.maker.endswith(("Model",)) and load.library == ""
    )


def read_unsloth(document: CallDocument, found: Found, load: Call) -> DocumentKeys:
    """Take what ``from_pretrained`` and ``get_peft_model`` of Unsloth are given.

    Args:
        document: with the keywords of the load.
        found: the script.
        load: the call.

    Raises:
        ConfigError: a value that cannot be.
    """
    full = document.take("full_finetuning") is True
    if document.get("dtype") is None:
        document.take("dtype")
        document.say_default("dtype", "bfloat16", "default of Unsloth, on a GPU that has it")
    eight = document.get("load_in_8bit") is True
    four = document.take("load_in_4bit") is not False and not eight and not full
    four = four and document.take("load_in_16bit") is not True
    if four and "quantization_config" not in document:
        quantization = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": document.get("dtype"),
        }
        document.say("quantization_config", quantization, load.line)
    if four or eight:
        document.say_default("prepare_kbit", False, "default of Unsloth")
    _name(document, load, four)
    _length(document, found)
    adapter = next(iter(found.on_model("get_peft_model")), None)
    _checkpointing(document, adapter, load)
    _precision(document, found)
    if four:
        document.miss(
            load.line,
            "Unsloth",
            "its kernels keep buffers for good, of the largest layer's weights and their scales: "
            "not priced",
        )
    document.miss(
        load.line,
        "Unsloth",
        Saving(
            "its kernels keep less for backward, and its loss works in chunks: priced are those of "
            "transformers and peft, and all logits at once"
        ),
    )
    adapter_keys = _adapter(document, adapter)
    keys = document.keys()
    read_table(keys, _TABLE)
    if adapter_keys is not None:
        values, origin = adapter_keys
        keys.set_at("adapter", values, document.origin(origin, None, "get_peft_model"))
    return keys


def _name(document: CallDocument, load: Call, four: bool) -> None:
    """Copies in 4 bits by the name of what they are copies of."""
    key = MODEL_KEY
    name = document.get(key)
    if not isinstance(name, str):
        if name is None and not load.arguments and "model_name" not in load.keywords:
            document.say_default(
                key, "unsloth/Llama-3.2-1B-Instruct", "default of Unsloth's from_pretrained"
            )
        return
    dynamic, copy_of = is_dynamic_copy(name), original_of_copy(name)
    if copy_of != name and copy_of.startswith("unsloth/"):
        original = lookup(name)
        if original is not None and lookup(copy_of) is None:
            copy_of = original.id
        document.put(key, Value(copy_of), load)
    plain = not dynamic and copy_of == name
    if four and (dynamic or (plain and document.get("use_exact_model_name") is not True)):
        which = "" if dynamic else "may be "
        document.miss(
            load.line,
            "Unsloth",
            f"the base {which}one of its dynamic 4-bit copies, which leave some layers in 16 bits: "
            "priced in 4 bits",
        )


def _length(document: CallDocument, found: Found) -> None:
    """The shorter of the model's and the trainer's length; 2048 where neither is named."""
    if found.trainer is not None and not TRAINERS[found.trainer.name]:
        # transformers' own trainer cuts nothing: as long as the model may be, samples need not be
        document.take("max_seq_length")
        return
    document.say_default("max_seq_length", 2048, "default of Unsloth")
    own = document.get("max_seq_length")
    config = _config(found)
    given = {} if config is None else config.keywords
    parts = [given.get(key, Value(None)).data for key in _ROLLOUTS]
    numbers = [part for part in parts if isinstance(part, int)]
    if len(numbers) == len(parts) and isinstance(own, int) and sum(numbers) < own:
        document.take("max_seq_length")  # a prompt and what is written behind it
        return
    for key in ("max_length", "max_seq_length"):
        value = None if config is None else config.keywords.get(key)
        number = None if value is None else value.data
        if config and value and isinstance(number, int) and isinstance(own, int) and number < own:
            document.put("max_seq_length", value, config)


def _config(found: Found) -> Call | None:
    """The trainer's arguments, where they are made in the script."""
    value = arguments_of(found.trainer) if found.trainer is not None else None
    return value.data if value is not None and isinstance(value.data, Call) else None


def _checkpointing(document: CallDocument, adapter: Call | None, load: Call) -> None:
    call = adapter or load
    value = call.keywords.get("use_gradient_checkpointing")
    document.take("use_gradient_checkpointing")
    how = "unsloth" if value is None else value.data
    if how in ("unsloth", "True", True):
        document.say("gradient_checkpointing", True, call.line)
        document.say("gradient_checkpointing_kwargs", {"use_reentrant": True}, call.line)
        if how == "unsloth":
            document.miss(
                call.line,
                "use_gradient_checkpointing",
                Saving("unsloth: checkpoints move to the host; priced are those that stay"),
            )
    elif how is False:
        document.say("gradient_checkpointing", False, call.line)
    elif value is not None:
        document.put("gradient_checkpointing", value, call)


def _precision(document: CallDocument, found: Found) -> None:
    """Autocast is on where the training arguments do not say it (``models/rl.py``)."""
    config = _config(found)
    given = {} if config is None else config.keywords
    named = [given[key].data for key in ("bf16", "fp16") if key in given]
    if not any(data is not False and data is not None for data in named):
        dtype = document.get("dtype")
        precision = "fp16" if dtype == "float16" else "bf16"
        document.say_default("precision", precision, "default of Unsloth, on a GPU that has it")


def _adapter(document: CallDocument, call: Call | None) -> tuple[dict[str, object], int] | None:
    """What ``get_peft_model`` of Unsloth makes, as peft's file has it."""
    if call is None:
        return None
    if call.conditional:
        document.miss(
            call.line,
            "get_peft_model",
            Saving("under a condition that cannot be told: all weights are priced"),
        )
        return None
    part = CallDocument(document.source, "transformers")
    names = "r target_modules lora_alpha lora_dropout use_rslora use_dora modules_to_save".split()
    for name in names:
        value = call.argument(1 if name == "r" else -1, name)
        if value is not None:
            part.put(name, value, call)
    document.take_over(part)
    values: dict[str, object] = {
        name: part.get(name) for name in names if part.get(name) is not None
    }
    targets = values.get("target_modules")
    if isinstance(targets, list) and "embed_tokens" in targets:
        # llama.py: it trains whole
        saved = values.get("modules_to_save")
        values["target_modules"] = [name for name in targets if name != "embed_tokens"]
        values["modules_to_save"] = [*(saved if isinstance(saved, list) else []), "embed_tokens"]
    selects = [name for name in _TARGET_SWITCHES if name in call.keywords]
    if "target_modules" not in values and "target_modules" not in call.keywords:
        values["target_modules"] = "all-linear" if selects else list(_TARGETS)
    if selects:
        document.miss(
            call.line,
            "get_peft_model",
            Bounded("adapters on a part of the layers: priced on all linear ones"),
        )
    for name in ("target_parameters", "layers_to_transform"):
        value = call.keywords.get(name)
        if value is not None and value.data is not None:
            document.miss(
                call.line,
                name,
                "adapters on parameters"
                if "param" in name
                else Bounded("adapters on some layers only: priced on all"),
            )
    # peft's own ranks where Unsloth has others: 16 and 16
    values = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, **values}
    return values, call.line
