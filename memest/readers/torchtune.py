"""torchtune's YAML: components by dotted name, and a recipe's settings.

Source: torchtune at April 2026: ``recipes/configs``, ``recipes/*_finetune_*.py``,
``torchtune/models/*/_model_builders.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memest.errors import ConfigError
from memest.readers.findings import Level
from memest.readers.sheet import Place, Sheet

__all__ = ["BUILDERS", "model_of_builder", "read_torchtune"]

BUILDERS = {
    "llama2_7b": "meta-llama/Llama-2-7b-hf",
    "llama2_13b": "meta-llama/Llama-2-13b-hf",
    "llama2_70b": "meta-llama/Llama-2-70b-hf",
    "llama3_8b": "meta-llama/Meta-Llama-3-8B",
    "llama3_70b": "meta-llama/Meta-Llama-3-70B",
    "llama3_1_8b": "meta-llama/Llama-3.1-8B",
    "llama3_1_70b": "meta-llama/Llama-3.1-70B",
    "llama3_1_405b": "meta-llama/Llama-3.1-405B",
    "llama3_2_1b": "meta-llama/Llama-3.2-1B",
    "llama3_2_3b": "meta-llama/Llama-3.2-3B",
    "llama3_2_vision_11b": "meta-llama/Llama-3.2-11B-Vision-Instruct",
    "llama3_2_vision_90b": "meta-llama/Llama-3.2-90B-Vision-Instruct",
    "llama3_3_70b": "meta-llama/Llama-3.3-70B-Instruct",
    "llama4_scout_17b_16e": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "llama4_maverick_17b_128e": "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    "mistral_7b": "mistralai/Mistral-7B-v0.1",
    "gemma_2b": "google/gemma-2b",
    "gemma_7b": "google/gemma-7b",
    "gemma2_2b": "google/gemma-2-2b",
    "gemma2_9b": "google/gemma-2-9b",
    "gemma2_27b": "google/gemma-2-27b",
    "phi3_mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi4_14b": "microsoft/phi-4",
}
"""Models of transformers with the sizes of torchtune's builders."""

_QWEN = re.compile(r"qwen(2_5|2|3)_(\d+(?:_\d+)?)b(?:_base|_instruct)?")
_OPTIMIZERS = {
    "torch.optim.AdamW": "adamw", "torch.optim.Adam": "adam", "torch.optim.SGD": "sgd",
    "bitsandbytes.optim.PagedAdamW": "paged_adamw_32bit",
    "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "torchao.optim.AdamW8bit": "adamw_torch_8bit",
    "torchao.prototype.low_bit_optim.AdamW8bit": "adamw_torch_8bit",
    "torchao.optim.AdamW4bit": "adamw_torch_4bit",
}  # fmt: skip
_LOSSES = {
    "LinearCrossEntropyLoss": "torchtune-linear", "CEWithChunkedOutputLoss": "torchtune-chunked",
}  # fmt: skip
_MODULES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_REASONS = {
    **dict.fromkeys("output_dir metric_logger log_every_n_steps log_peak_memory_stats log_level "
                    "profiler save_every_n_steps save_adapter_weights_only resume_from_checkpoint "
                    "enable_async_checkpointing save_last_epoch_only log_dir".split(),
                    "names, logging and saving allocate nothing on the GPU"),
    **dict.fromkeys("dataset_val shuffle collate_fn dataset_name split".split(),
                    "data is prepared on the host"),
    **dict.fromkeys("lr_scheduler epochs max_steps_per_epoch num_steps".split(),
                    "rates and schedules are numbers of the host"),
    **dict.fromkeys("checkpointer base_model_path".split(), "how weights are loaded and saved"),
    **dict.fromkeys("batch_size_val run_val_every_n_steps".split(),
                    "a validation keeps no gradients"),
    "seed": "seeds change no size", "device": "a GPU is priced",
    "cudnn_deterministic_mode": "which kernels run", "low_cpu_ram": "how weights are loaded",
    "use_distributed_state_dict": "how weights are loaded and saved",
}  # fmt: skip
_MATTERS = {
    "enable_activation_offloading": "activations move to the host between forward and backward",
    "custom_sharded_layers": "these layers are FSDP units of their own",
    "memory_efficient_fsdp_wrap": "other FSDP units",
    "quantizer": "quantisation-aware training",
    "teacher_model": "a second model in memory",
    "enable_fp8_training": "fp8", "fp8_recipe_name": "fp8",
    "ac_mode": "selective checkpointing", "ac_option": "selective checkpointing",
    "reward_and_value_model": "further models in memory", "policy_model": "further models",
    "ppo_epochs": "PPO", "use_flex": "flex attention", "resize_token_embeddings": "a few rows",
    "tensor_parallel_plan": "tensor parallelism",
    "context_parallel_dim": "context parallelism",
    "freeze_embeddings": "parts that do not train",
}  # fmt: skip


def model_of_builder(name: str) -> str | None:
    """The model of transformers with the sizes of a builder, None for an unknown one.

    Example:
        >>> model_of_builder("qlora_llama3_1_8b"), model_of_builder("lora_qwen2_5_1_5b_instruct")
        ('meta-llama/Llama-3.1-8B', 'Qwen/Qwen2.5-1.5B')
    """
    plain = re.sub(r"^(q?lora|q?dora)_", "", name)
    if plain in BUILDERS:
        return BUILDERS[plain]
    match = _QWEN.fullmatch(plain)
    if match:
        family, size = (part.replace("_", ".") for part in match.groups())
        return f"Qwen/Qwen{family}-{size}B"
    return None


def read_torchtune(sheet: Sheet, *, distributed: bool | None = None) -> None:
    """Fill in a sheet of a recipe's configuration.

    Args:
        sheet: of the document.
        distributed: the recipe shards with FSDP2; None where only the file is known.

    Raises:
        ConfigError: a value that torchtune would refuse too.
    """
    _interpolate(sheet)
    sheet.default("loop", "plain")
    sheet.default("precision", "fp32", "no autocast: the model computes in its dtype")
    sheet.default("attn_implementation", "sdpa")
    # torchtune/__init__.py, since June 2025
    sheet.default("alloc_conf", "expandable_segments:True", "importing it sets it")
    sheet.default("dtype", "float32")
    dtype = sheet.scalar("dtype")
    if dtype is not None:
        sheet.say("dtype", {"bf16": "bfloat16", "fp32": "float32"}.get(str(dtype), dtype), "dtype")
    _model(sheet)
    for key, option in (("batch_size", "batch"), ("gradient_accumulation_steps", "grad_accum")):
        value = sheet.whole(key)
        if value is not None:
            sheet.say(option, value, key)
    _length(sheet)
    _optimizer(sheet)
    if sheet.switch("optimizer_in_bwd"):
        sheet.say("optim_in_backward", True, "optimizer_in_bwd")
    clip = sheet.scalar("clip_grad_norm")
    sheet.default("max_grad_norm", 0.0)
    if clip is not None:
        sheet.say("max_grad_norm", clip, "clip_grad_norm")
    sheet.default("checkpointing", "none")
    if sheet.switch("enable_activation_checkpointing"):
        sheet.say("checkpointing", "full", "enable_activation_checkpointing")
        sheet.default("use_reentrant", False)
    if sheet.switch("compile"):
        sheet.offer(
            "torch_compile", True, "compile", "compilation fuses operators; eager is priced"
        )
    _loss(sheet)
    _spread(sheet, distributed=distributed)
    sheet.ignore_rest(_REASONS, _MATTERS)


def _interpolate(sheet: Sheet) -> None:
    """``${batch_size}`` stands for another key's value; whole values only, one step."""
    for key, value in sheet.left.items():
        match = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
        if match:
            found: Any = sheet.document
            for part in match.group(1).split("."):
                found = found.get(part) if isinstance(found, Mapping) else None
            if not isinstance(found, Mapping):
                sheet.replace(key, found)


def _model(sheet: Sheet) -> None:
    part = sheet.part("model")
    component = str(part.scalar("_component_") or "")
    name = component.rpartition(".")[2]
    if component:
        model = model_of_builder(name)
        if model is None:
            part.miss("_component_", f"{component} is not known: name the model yourself")
        else:
            part.say("model", model, "_component_")
            part.miss_default("the model's code", f"torchtune's {name}: priced is transformers' "
                              "model of these sizes")  # fmt: skip
    if name.startswith(("lora_", "qlora_", "dora_", "qdora_")):
        _lora(part, name)
    part.ignore_rest({}, dict.fromkeys(part.left, "of the model"))
    sheet.absorb(part)


def _lora(part: Sheet, name: str) -> None:
    part.say("peft", "lora", "_component_")
    part.default("lora_r", 8)
    part.default("lora_alpha", 16)
    part.default("lora_dropout", 0.0)
    part.default("autocast_adapter_dtype", False, "adapters have the model's dtype")
    for key, option in (("lora_rank", "lora_r"), ("lora_alpha", "lora_alpha"),
                        ("lora_dropout", "lora_dropout")):  # fmt: skip
        value = part.take(key)
        if value is not None:
            part.say(option, value, key)
    names = part.take("lora_attn_modules")
    listed = names if isinstance(names, (list, tuple)) else []
    targets = [_MODULES.get(str(each), str(each)) for each in listed]
    if part.switch("apply_lora_to_mlp"):
        targets += _MLP
    if part.switch("apply_lora_to_output"):
        targets.append("lm_head")
    if targets:
        part.say("lora_target_modules", tuple(targets), "lora_attn_modules")
    dora = part.switch("use_dora")
    if dora or name.startswith(("dora_", "qdora_")):
        part.say("use_dora", True, "use_dora" if dora else "_component_")
    quantised = part.switch("quantize_base")
    if quantised or name.startswith(("qlora_", "qdora_")):
        key = "quantize_base" if quantised else "_component_"
        part.say("load_in_4bit", True, key)
        part.default("bnb_4bit_quant_type", "nf4")
        part.default("bnb_4bit_use_double_quant", True)
        part.default("bnb_4bit_compute_dtype", "bfloat16")
        part.default("prepare_kbit", False)
        part.miss(key, "torchao's NF4: priced as bitsandbytes' nf4 with quantised scales")


def _length(sheet: Sheet) -> None:
    tokenizer, dataset = sheet.part("tokenizer"), sheet.part("dataset")
    tokenizer.scalar("_component_")
    length = tokenizer.whole("max_seq_len")
    if length is not None:
        tokenizer.say("seq_len", length, "max_seq_len")
    else:
        sheet.miss_default(
            "length of samples", "nothing names it: 512 tokens are taken; --seq-len says it"
        )
    tokenizer.ignore_rest(dict.fromkeys(tokenizer.document, "data is prepared on the host"), {})
    if dataset.switch("packed"):
        # rows of max_seq_len; a batch stays a batch of rows
        dataset.say("packing", "wrapped", "packed")
        dataset.miss("packed", "masks between the samples of a row: priced are full rows without")
    elif "packed" in dataset.document:
        dataset.ignore("packed", "off")
    dataset.ignore_rest(dict.fromkeys(dataset.document, "data is prepared on the host"), {})
    sheet.absorb(tokenizer)
    sheet.absorb(dataset)


def _optimizer(sheet: Sheet) -> None:
    part = sheet.part("optimizer")
    component = part.scalar("_component_")
    fused, decay = part.switch("fused"), part.scalar("weight_decay")
    foreach = part.switch("foreach")
    if component is not None:
        name = _OPTIMIZERS.get(str(component))
        if name is None:
            raise ConfigError(
                f"{part.place('_component_').origin} {component!r} is not modelled. Legal: "
                f"{', '.join(_OPTIMIZERS)}; or name one with --optim."
            )
        if name == "adamw":
            name = "adamw_torch_fused" if fused else "adamw_torch_foreach"
            name = "adamw_torch_loop" if foreach is False and not fused else name
        elif name == "adam" and fused:
            name = "adam_fused"
        part.say("optim", name, "_component_")
    if decay is not None:
        part.say("weight_decay", decay, "weight_decay")
    hosts = dict.fromkeys(("lr", "betas", "eps"), "a number of the host")
    part.ignore_rest(hosts, {key: "of the optimizer" for key in part.left if key not in hosts})
    sheet.absorb(part)


def _loss(sheet: Sheet) -> None:
    value = sheet.document.get("loss")
    if not isinstance(value, Mapping):
        if value is not None:
            sheet.take("loss")
            sheet.ignore("loss", "priced is cross entropy")
        return
    part = sheet.part("loss")
    name = str(part.scalar("_component_") or "").rpartition(".")[2]
    chunks = part.whole("num_output_chunks")
    fused = _LOSSES.get(name)
    if fused is not None:
        sheet.say("fused_loss", fused if chunks is None else f"{fused}:{chunks}", "loss")
    elif "Chunked" in name or "Linear" in name:
        sheet.miss("loss", f"{name} works in chunks; priced is cross entropy of all logits at once")
    else:
        sheet.ignore("loss", "priced is cross entropy")
    part.ignore_rest(
        {"ignore_index": "which tokens count", "mask_ignored_tokens": "priced is true: all tokens "
         "count"},
        dict.fromkeys(part.left, "of the loss"),
    )  # fmt: skip
    sheet.absorb(part)


def _spread(sheet: Sheet, *, distributed: bool | None) -> None:
    offload = sheet.switch("fsdp_cpu_offload")
    reshard = sheet.scalar("fsdp_reshard_after_forward")
    degrees = {
        key: sheet.whole(key)
        for key in ("tensor_parallel_dim", "data_parallel_shard_dim", "data_parallel_replicate_dim")
    }
    if distributed is None:
        distributed = bool(offload) or any(value not in (None, 1) for value in degrees.values())
    if distributed:
        mode = "shard_grad_op" if reshard is False else "full_shard"
        key = "fsdp_reshard_after_forward"
        if reshard is None:
            sheet.say_at("fsdp", mode, Place("recipe: distributed, FSDP2", Level.DEFAULT))
        else:
            sheet.say("fsdp", mode, key)
        if offload:
            sheet.say("fsdp_offload", True, "fsdp_cpu_offload")
    if degrees["tensor_parallel_dim"] not in (None, 1):
        sheet.offer(
            "tp", degrees["tensor_parallel_dim"], "tensor_parallel_dim", "tensor parallelism"
        )
    for key in ("data_parallel_shard_dim", "data_parallel_replicate_dim"):
        if degrees[key] not in (None, 1, -1):
            sheet.miss(key, "--num-gpus and --fsdp-shard-size say it")
