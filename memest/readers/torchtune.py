"""torchtune's YAML: components by dotted name, and a recipe's settings.

Source: torchtune at April 2026: ``recipes/configs``, ``recipes/*_finetune_*.py``,
``torchtune/models/*/_model_builders.py``; of pairs, ``recipes/lora_dpo_*.py`` of torchtune 0.6.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memest.errors import ConfigError
from memest.readers.mapping import DocumentKeys, Key, KeyTable, by_key, read_table
from memest.readers.training_arguments import METHODS, NO_LENGTH
from memest.readers.values import COPIES, LENGTH, Bounded, Either, KeyOrigin, Level, Saving

__all__ = ["BUILDERS", "installed_config", "model_of_builder", "named_recipe", "read_torchtune"]

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
    "code_llama2_7b": "codellama/CodeLlama-7b-hf",
    "code_llama2_13b": "codellama/CodeLlama-13b-hf",
    "code_llama2_70b": "codellama/CodeLlama-70b-hf",
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
    "torch.optim.AdamW": "adamw",
    "torch.optim.Adam": "adam",
    "torch.optim.SGD": "sgd",
    "bitsandbytes.optim.PagedAdamW": "paged_adamw_32bit",
    "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "torchao.optim.AdamW8bit": "adamw_torch_8bit",
    "torchao.prototype.low_bit_optim.AdamW8bit": "adamw_torch_8bit",
    "torchao.optim.AdamW4bit": "adamw_torch_4bit",
}
_LOSSES = {
    "LinearCrossEntropyLoss": "torchtune-linear",
    "CEWithChunkedOutputLoss": "torchtune-chunked",
}
_FINE_TUNING = ("full_finetune", "lora_finetune", "qat")
_PAIRS = ("DPOLoss", "RSOLoss")
"""Losses of pairs that are priced beside adapters, which are of the same sizes."""
_METHODS = {
    "DPOLoss": METHODS["dpo"],
    "RSOLoss": METHODS["dpo"],
    "SimPOLoss": METHODS["preference"],
    "PPOLoss": METHODS["ppo"],
    "GRPOLoss": METHODS["grpo"],
    "GRPOSimpleLoss": METHODS["grpo"],
}
_MODULES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_IGNORED_KEYS = by_key(
    {
        "names, logging and saving allocate nothing on the GPU": """output_dir metric_logger
            log_every_n_steps log_peak_memory_stats log_level profiler save_every_n_steps
            save_adapter_weights_only resume_from_checkpoint enable_async_checkpointing
            save_last_epoch_only log_dir""",
        "data is prepared on the host": "shuffle collate_fn dataset_name split",
        "rates and schedules are numbers of the host": """lr_scheduler epochs max_steps_per_epoch
            num_steps""",
        "how weights are loaded and saved": """checkpointer base_model_path
            use_distributed_state_dict""",
        "seeds change no size": "seed",
        "a GPU is priced": "device",
        "which kernels run": "cudnn_deterministic_mode",
        "how weights are loaded": """low_cpu_ram teacher_checkpointer ref_policy_checkpointer
            reward_checkpointer value_checkpointer""",
        "of the loss with a teacher": "kd_loss kd_ratio",
        "of PPO": """enable_kv_cache forward_batch_size max_generated_tokens temperature top_k
            min_response_length penalise_no_eos stop_token_ids whiten_rewards gamma lmbda kl_coeff
            ppo_batch_size reward_penalty""",
    }
)
_UNMODELLED_KEYS = {
    "enable_activation_offloading": Saving(
        "activations move to the host between forward and backward"
    ),
    "custom_sharded_layers": "these layers are FSDP units of their own",
    "memory_efficient_fsdp_wrap": Either("other FSDP units"),
    "quantizer": Either("quantisation-aware training"),
    "teacher_model": "a second model in memory",
    "ref_checkpointer": "a second model in memory",
    "datasets": "samples of several sets: --seq-len says it",
    "enable_fp8_training": Either("fp8"),
    "fp8_recipe_name": Either("fp8"),
    "reward_and_value_model": "further models in memory",
    "ppo_epochs": "PPO",
    "use_flex": Either("flex attention"),
    "resize_token_embeddings": Bounded("a few rows of the embeddings"),
    "context_parallel_dim": Either("context parallelism"),
    "freeze_embeddings": Saving("parts that do not train"),
}


def model_of_builder(name: str) -> str | None:
    """The model of transformers with the sizes of a builder, None for an unknown one.

    Example:
        >>> model_of_builder("qlora_llama3_1_8b"), model_of_builder("lora_qwen2_5_1_5b_instruct")
        ('meta-llama/Llama-3.1-8B', 'Qwen/Qwen2.5-1.5B')
    """
    base_name = re.sub(r"^(q?lora|q?dora)_", "", name)
    if base_name in BUILDERS:
        return BUILDERS[base_name]
    match = _QWEN.fullmatch(base_name)
    if match:
        family, size = (part.replace("_", ".") for part in match.groups())
        return f"Qwen/Qwen{family}-{size}B"
    return None


def read_torchtune(keys: DocumentKeys, *, recipe: str | None = None) -> None:
    """Read a recipe's configuration.

    Args:
        keys: of the document.
        recipe: the one that a command or the header names; None where only the file is known.

    Raises:
        ConfigError: a value that torchtune would refuse too.
    """

    def sharding(keys: DocumentKeys) -> None:
        _sharding(keys, distributed=None if recipe is None else "distributed" in recipe)

    def method(keys: DocumentKeys) -> None:
        priced = _FINE_TUNING if keys.value_of("method") is None else ("lora_dpo",)
        if recipe and not recipe.startswith(priced):
            keys.miss_default(f"recipe {recipe}", "priced is fine-tuning")

    _interpolate(keys)
    read_table(keys, replace(_TABLE, readers=(*_TABLE.readers, sharding, method)))


def installed_config(name: str) -> Path | None:
    """The file of a configuration that comes with torchtune, where torchtune is; None elsewhere.

    Its wheel has a package ``recipes`` beside it, which is looked for and not imported.
    """
    folders = [Path("recipes")]
    try:
        spec = find_spec("recipes")
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.submodule_search_locations:
        folders += [Path(place) for place in spec.submodule_search_locations]
    paths = [folder / "configs" / f"{name}.yaml" for folder in folders]
    return next((path for path in paths if ".." not in path.parts and path.is_file()), None)


def named_recipe(text: str) -> tuple[str, int | None] | None:
    """The recipe, and how many GPUs, of the command that a file has in its header's comments.

    Args:
        text: of the file.

    Returns:
        None where no comment has such a command.

    Example:
        >>> named_recipe("#   tune run --nproc_per_node 4 lora_finetune_distributed --config x")
        ('lora_finetune_distributed', 4)
        >>> named_recipe("# tune run --nnodes 2 --nproc_per_node 8 qat_distributed --config x")
        ('qat_distributed', 16)
    """
    comments = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    match = _COMMAND.search(" ".join(comments))
    if match is None:
        return None
    counts = dict(_COUNT.findall(match.group("flags")))
    numbers = [counts.get("nnodes", "1"), counts.get("nproc", "")]
    is_told = all(re.fullmatch(r"[1-9]\d{0,2}", text) for text in numbers)  # no variable, no auto
    return match.group("recipe"), int(numbers[0]) * int(numbers[1]) if is_told else None


_COMMAND = re.compile(
    r"tune run (?P<flags>(?:--?[a-z][\w-]*(?:[= ](?!--)[^\s=]+)? )*)(?P<recipe>[a-z]\w+) --config"
)
_COUNT = re.compile(r"--(nnodes|nproc)(?:[-_]per[-_]node)?[= ](\S+)")


def _interpolate(keys: DocumentKeys) -> None:
    """``${batch_size}`` stands for another key's value; whole values only, one step."""
    for key, value in keys.remaining.items():
        match = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
        if match:
            target: Any = keys.document
            for part in match.group(1).split("."):
                target = target.get(part) if isinstance(target, Mapping) else None
            if not isinstance(target, Mapping):
                keys.replace(key, target)


def _model(keys: DocumentKeys) -> None:
    # PPO's is its policy
    part = keys.part("policy_model" if keys.has("policy_model") else "model")
    component = str(part.scalar("_component_") or "")
    name = component.rpartition(".")[2]
    if component:
        model = model_of_builder(name)
        if model is None:
            part.miss("_component_", Bounded(f"{component} is not known: name the model yourself"))
        else:
            part.set("model", model, "_component_")
            part.miss_default(
                "the model's code",
                Bounded(f"torchtune's {name}: priced is transformers' model of these sizes"),
            )
    if name.startswith(("lora_", "qlora_", "dora_", "qdora_")):
        _lora(part, name)
    why = Either("which parts train: priced as the builder's name says")
    parts = dict.fromkeys(_TRAINABLE, why)
    part.ignore_rest({}, dict.fromkeys(part.remaining, "of the model") | parts)
    keys.absorb(part)


_TRAINABLE = ("encoder_trainable", "decoder_trainable", "fusion_trainable")
_LORA = {
    "lora_rank": Key("lora_r", default=8),
    "lora_alpha": Key("lora_alpha", default=16),
    "lora_dropout": Key("lora_dropout", default=0.0),
}


def _lora(part: DocumentKeys, name: str) -> None:
    part.set("peft", "lora", "_component_")
    part.default("autocast_adapter_dtype", False, "adapters have the model's dtype")
    for key, row in _LORA.items():
        part.set_from(key, row)
    names = part.take("lora_attn_modules")
    module_names = names if isinstance(names, (list, tuple)) else []
    targets = [_MODULES.get(str(each), str(each)) for each in module_names]
    if part.switch("apply_lora_to_mlp"):
        targets += _MLP
    if part.switch("apply_lora_to_output"):
        targets.append("lm_head")
    if targets:
        part.set("lora_target_modules", tuple(targets), "lora_attn_modules")
    dora, quantised = part.switch("use_dora"), part.switch("quantize_base")
    if dora or name.startswith(("dora_", "qdora_")):
        part.set("use_dora", True, "use_dora" if dora else "_component_")
    if quantised or name.startswith(("qlora_", "qdora_")):
        key = "quantize_base" if quantised else "_component_"
        part.set("load_in_4bit", True, key)
        part.default("bnb_4bit_quant_type", "nf4")
        part.default("bnb_4bit_use_double_quant", True)
        part.default("bnb_4bit_compute_dtype", "bfloat16")
        part.default("prepare_kbit", False)
        part.miss(key, Bounded("torchao's NF4: priced as bitsandbytes' nf4 with quantised scales"))


def _length(keys: DocumentKeys) -> None:
    tokenizer = keys.part("tokenizer")
    if isinstance(keys.document.get("dataset"), list):
        # ConcatDataset: its recipes leave packing of single sets out
        keys.take("dataset")
        keys.ignore("dataset", "several sets, one after the other: data is prepared on the host")
    dataset = keys.part("dataset")
    tokenizer.scalar("_component_")
    if tokenizer.set_from("max_seq_len", Key("seq_len", "whole")) is None:
        if "max_seq_len" in tokenizer.document:
            tokenizer.ignore("max_seq_len", "samples are not cut")
        keys.miss_default(LENGTH, NO_LENGTH)
    tokenizer.ignore_all("data is prepared on the host")
    if dataset.on("packed"):
        # rows of max_seq_len; a batch stays a batch of rows
        dataset.set("packing", "wrapped", "packed")
        dataset.miss("packed", "masks between the samples of a row: priced are full rows without")
    dataset.ignore_all("data is prepared on the host")
    keys.absorb(tokenizer)
    keys.absorb(dataset)


def _optimizer(keys: DocumentKeys) -> None:
    part = keys.part("optimizer")
    component = part.scalar("_component_")
    fused, foreach = part.switch("fused"), part.switch("foreach")
    if component is not None:
        name = _OPTIMIZERS.get(str(component))
        if name is None:
            raise ConfigError(
                f"{part.where('_component_')} {component!r} is not modelled. Legal: "
                f"{', '.join(_OPTIMIZERS)}; or name one with --optim."
            )
        if name == "adamw":
            name = "adamw_torch_fused" if fused else "adamw_torch_foreach"
            name = "adamw_torch_loop" if foreach is False and not fused else name
        elif name == "adam" and fused:
            name = "adam_fused"
        part.set("optim", name, "_component_")
    part.set_from("weight_decay", Key("weight_decay", "scalar"))
    hosts = dict.fromkeys(("lr", "betas", "eps"), "a number of the host")
    part.ignore_rest(hosts, {key: "of the optimizer" for key in part.remaining if key not in hosts})
    keys.absorb(part)


def _checkpointing(keys: DocumentKeys) -> None:
    on, mode, interval = (
        keys.switch("enable_activation_checkpointing"),
        keys.scalar("ac_mode"),
        keys.scalar("ac_option"),
    )
    if mode is not None and on:
        # its recipes leave both out where both are named
        keys.ignore("ac_mode", "enable_activation_checkpointing is on: neither acts")
    elif mode is not None:
        keys.set("checkpointing", "full" if mode == "full" else f"every_n:{interval}", "ac_mode")
        keys.default("use_reentrant", False)
    elif on:
        keys.set("checkpointing", "full", "enable_activation_checkpointing")
        keys.default("use_reentrant", False)
    if mode is None and interval is not None:
        keys.ignore("ac_option", "no ac_mode")
    _compilation(keys)


def _compilation(keys: DocumentKeys) -> None:
    """A switch, or one for each part that may be compiled."""
    parts = keys.document.get("compile")
    if not isinstance(parts, Mapping):
        parts = {"model": keys.switch("compile")}
    keys.take("compile")
    if parts.get("model", True):
        keys.offer("torch_compile", True, "compile", "compilation fuses operators; eager is priced")
    elif any(parts.values()):
        keys.miss("compile", Bounded("the loss or the update is compiled: priced eagerly"))
    elif "compile" in keys.document:
        keys.ignore("compile", "off")


def _validation(keys: DocumentKeys) -> None:
    """A validation between the steps, which holds all logits and nothing for a backward."""
    names = ("dataset_val", "batch_size_val", "run_val_every_n_steps")
    batch, size = keys.value_of("batch"), keys.whole("batch_size_val")
    if not (keys.has("dataset_val") and keys.has("run_val_every_n_steps")):
        keys.pass_over(names, "no validation runs")
    elif size is not None and isinstance(batch, int) and size > batch:
        keys.miss("batch_size_val", f"a validation of {size} samples at once, training of {batch}")
        keys.pass_over((names[0], names[2]), "with batch_size_val")
    else:
        keys.pass_over(names, "a validation of no larger batches keeps less than a training step")


def _loss(keys: DocumentKeys) -> None:
    value = keys.document.get("loss")
    if not isinstance(value, Mapping):
        if value is not None:
            keys.take("loss")
            keys.ignore("loss", "priced is cross entropy")
        return
    part = keys.part("loss")
    name = str(part.scalar("_component_") or "").rpartition(".")[2]
    chunks = part.whole("num_output_chunks")
    fused_loss = _LOSSES.get(name)
    if fused_loss is not None:
        keys.set("fused_loss", fused_loss if chunks is None else f"{fused_loss}:{chunks}", "loss")
    elif name in ("", "CrossEntropyLoss"):
        keys.ignore("loss", "priced is cross entropy")
    elif name in _PAIRS and keys.value_of("peft") is not None:
        keys.set("method", "dpo", "loss")
        keys.set("log_probs", "torchtune", "loss")
        part.ignore_all("a number of the loss")
    else:
        why = f"{name}: {_METHODS.get(name, 'another loss')}; priced is cross entropy"
        keys.miss("loss", why if name in _METHODS else Either(why))
    if keys.has_missed("loss") and fused_loss is None:
        part.ignore_all("with the loss")
    part.ignore_rest(
        {
            "ignore_index": "which tokens count",
            "mask_ignored_tokens": "priced is true: all tokens count",
        },
        dict.fromkeys(part.remaining, "of the loss"),
    )
    keys.absorb(part)


def _sharding(keys: DocumentKeys, *, distributed: bool | None) -> None:
    offload = keys.switch("fsdp_cpu_offload")
    reshard = keys.scalar("fsdp_reshard_after_forward")
    tensor_degree = keys.whole("tensor_parallel_dim")
    degrees = {
        key: keys.whole(key) for key in ("data_parallel_shard_dim", "data_parallel_replicate_dim")
    }
    if distributed is None:
        several = any(value not in (None, 1) for value in (tensor_degree, *degrees.values()))
        distributed = bool(offload) or several or None
    mode = "shard_grad_op" if reshard is False else "full_shard"
    if distributed is None:
        keys.default("fsdp", mode, "its recipes for several GPUs: FSDP2", several_gpus=True)
    if keys.value_of("load_in_4bit") and distributed is not False:
        why = "so that FSDP2 shards them, as it does torchao's"
        several = distributed is None
        keys.default("bnb_4bit_quant_storage", "bfloat16", why, several_gpus=several)
    if distributed:
        if reshard is None:
            keys.set_at("fsdp", mode, KeyOrigin("recipe: distributed, FSDP2", Level.DEFAULT))
        else:
            keys.set("fsdp", mode, "fsdp_reshard_after_forward")
        if offload:
            keys.set("fsdp_offload", True, "fsdp_cpu_offload")
    plan = keys.take("tensor_parallel_plan")
    if tensor_degree not in (None, 1):
        keys.offer("tp", tensor_degree, "tensor_parallel_dim", "tensor parallelism")
        if plan is not None:
            words = plan.get("_component_") if isinstance(plan, Mapping) else plan
            keys.miss("tensor_parallel_plan", Either(f"{words}: priced is transformers' plan"))
    elif "tensor_parallel_plan" in keys.document:
        keys.ignore("tensor_parallel_plan", "tensor_parallel_dim is 1")
    shards, copies = degrees.values()
    copies = max(copies or 1, 1)
    if shards is None or shards == -1:
        if copies > 1:
            keys.set(COPIES, copies, "data_parallel_replicate_dim")
        return
    if copies > 1:
        keys.set("fsdp_shard_size", shards, "data_parallel_shard_dim")
    if copies > 1 or shards > 1:
        world = shards * copies * max(tensor_degree or 1, 1)
        keys.default("num_gpus", world, "as many as its sizes make")


_TABLE = KeyTable(
    defaults={
        "loop": "plain",
        "precision": ("fp32", "no autocast: the model computes in its dtype"),
        "attn_implementation": "sdpa",
        # torchtune/__init__.py, since June 2025
        "alloc_conf": ("expandable_segments:True", "importing it sets it"),
        "checkpointing": "none",
    },
    options={
        "dtype": Key("dtype", "scalar", "float32", words={"bf16": "bfloat16", "fp32": "float32"}),
        "batch_size": Key("batch", "whole"),
        "gradient_accumulation_steps": Key("grad_accum", "whole"),
        "optimizer_in_bwd": Key("optim_in_backward", "enabled"),
        "clip_grad_norm": Key("max_grad_norm", "scalar", 0.0),
    },
    readers=(_model, _length, _optimizer, _checkpointing, _validation, _loss),
    ignored_keys=_IGNORED_KEYS,
    unmodelled_keys=_UNMODELLED_KEYS,
)
