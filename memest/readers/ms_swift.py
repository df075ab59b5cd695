"""ms-swift: ``swift sft``, ``swift pt`` and ``swift rlhf``, their YAML or JSON, and ``args.json``.

Source: ms-swift 4.6.0: ``arguments/`` (fields and defaults), ``trainers/arguments.py`` and
``trainers/mixin.py`` (batch, accumulation, checkpointing, logits), ``pipelines/train/tuner.py``
(what trains), ``config/*.json`` (presets); 3.12.6 has the same under ``llm/argument``, and calls
``tuner_type`` ``train_type``; of 2.6.1, ``llm/utils/argument.py``, its names and its defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

from memest.readers.documents import find_file, read_document
from memest.readers.mapping import DocumentKeys, Key, KeyTable, read_table
from memest.readers.ms_swift_keys import (
    ATTENTION,
    FSDP2,
    IMAGE_CAP,
    IMAGE_VARIABLES,
    LORA,
    MARKS_OF_2,
    OF_OTHER_TUNERS,
    OLD_NAMES,
    OPTIMIZERS,
    PARTS,
    PRESETS,
    SAMPLES,
    SETTINGS_OF_TUNERS,
    SWIFT_IGNORED_KEYS,
    SWIFT_UNMODELLED_KEYS,
    TARGETS,
    TUNERS,
)
from memest.readers.ms_swift_methods import read_preference
from memest.readers.training_arguments import (
    TRAINER,
    UNMODELLED_KEYS,
    read_checkpointing,
    read_evaluation,
    read_liger,
    read_sharding,
    set_adapter_value,
)
from memest.readers.values import (
    IMAGES,
    LENGTH,
    PIXELS,
    Bounded,
    Either,
    KeyOrigin,
    Level,
    Saving,
    StepSize,
    names_of,
)

__all__ = ["read_ms_swift"]


def read_ms_swift(
    keys: DocumentKeys, *, method: str | None = None, distributed: bool = False
) -> None:
    """Read ms-swift's arguments.

    Args:
        keys: of the arguments.
        method: of its command line: ``sft``, ``pt`` or ``rlhf``; None for a file alone.
        distributed: a launcher starts it, which decides how it checkpoints.

    Raises:
        ConfigError: a value that cannot be.
    """
    is_version_2 = any(keys.has(key) for key in MARKS_OF_2)
    keys.rename(OLD_NAMES)
    distributed = _environment(keys) or distributed
    read_table(
        keys,
        KeyTable(
            defaults={
                **TRAINER,
                "batch": 1,
                "weight_decay": 0.1,
                "dataloader_num_workers": 1,
            },
            options={"model": Key("model", "text"), "max_pixels": Key(PIXELS, "whole")},
            readers=(
                partial(_method, method=method),
                _precision,
                partial(_length, is_version_2=is_version_2),
                partial(_checkpointing, distributed=distributed),
                partial(_evaluation, is_version_2=is_version_2),
                read_liger,
                _kernels,
                partial(_training, is_version_2=is_version_2),
                _quantization,
                _optimizer,
                _sharding,
                partial(_logits, method=method),
            ),
            own_names=True,
            ignored_keys=SWIFT_IGNORED_KEYS,
            unmodelled_keys=SWIFT_UNMODELLED_KEYS,
        ),
    )
    names_steps = keys.has("gradient_accumulation_steps") or keys.value_of("method") == "grpo"
    if keys.value_of("grad_accum") == TRAINER["grad_accum"] and not names_steps:
        origin = f"default of {keys.framework} ({SAMPLES} samples a step)"
        keys.samples_per_step = StepSize(SAMPLES, origin, is_exact=False)


def _environment(keys: DocumentKeys) -> bool:
    """Variables that a file sets for the run; whether they make it one of several processes."""
    part = keys.part("ENV")
    processes, nodes = part.whole("NPROC_PER_NODE"), part.whole("NNODES")
    if processes is not None:
        part.set("num_gpus", processes * (nodes or 1), "NPROC_PER_NODE")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        part.set_from(name, Key("alloc_conf", "text"))
    # model_kwargs are put into the environment
    part.set_from(IMAGE_CAP, Key(PIXELS, "whole"))
    for name, value in keys.mapping("model_kwargs").items():
        if name.upper() == IMAGE_CAP and str(value).isdigit():
            keys.set(PIXELS, int(value), "model_kwargs")
        elif name.upper() in IMAGE_VARIABLES:
            keys.miss(f"model_kwargs.{name}", IMAGES)
        else:
            keys.ignore(f"model_kwargs.{name}", "no variable that memory depends on")
    images = dict.fromkeys(IMAGE_VARIABLES, IMAGES)
    part.ignore_rest(
        dict.fromkeys(part.remaining.keys() - images.keys(), "no variable that memory depends on"),
        images,
    )
    keys.absorb(part)
    total = keys.whole("global_world_size")
    if total is not None and total > 0:
        keys.set("num_gpus", total, "global_world_size")
    return processes is not None or (total or 1) > 1


def _method(keys: DocumentKeys, *, method: str | None) -> None:
    kind = keys.text("rlhf_type")
    if method == "rlhf" or (method is None and kind is not None):
        read_preference(keys, kind or "dpo")
    elif kind is not None:
        keys.ignore("rlhf_type", "the command trains without preferences")
    task = keys.text("task_type") or "causal_lm"
    if task == "seq_cls":
        keys.set("task", "sequence-classification", "task_type")
    elif task != "causal_lm":
        keys.miss("task_type", Either(f"{task}: priced is a causal language model"))
    elif keys.has("task_type"):
        keys.ignore("task_type", "what is priced")
    scale = set((keys.text("loss_scale") or "default").split("+"))
    if scale - {"default", "all", "last_round", "ignore_empty_think", "ignore_think_prefix"}:
        keys.miss("loss_scale", SWIFT_UNMODELLED_KEYS["enable_dft_loss"])
    elif keys.has("loss_scale"):
        keys.ignore("loss_scale", "which tokens count is data")


def _precision(keys: DocumentKeys) -> None:
    """The dtype of the weights is that of autocast, of float32 weights float16.

    Source: ``_init_mixed_precision`` of ``arguments/base_args/model_args.py``.
    """
    names = [key for key in ("torch_dtype", "dtype") if keys.has(key)]
    for key in ("torch_dtype", "dtype"):
        keys.set_from(key, Key("dtype", "text", words={"AUTO": "auto"}))
    dtype = str(keys.value_of("dtype") or "auto").removeprefix("torch.")
    half = {"float16": "fp16", "fp16": "fp16", "float32": "fp16", "fp32": "fp16"}.get(dtype, "bf16")
    switches = {key: keys.switch(key) for key in ("bf16", "fp16")}
    on = {key: key == half if value is None else value for key, value in switches.items()}
    precision = next((key for key, value in on.items() if value), "fp32")
    for key, value in switches.items():
        if value is not None and key != precision:
            keys.ignore(key, "off")
    if switches.get(precision):
        keys.set("precision", precision, precision)
    else:
        said = f"{keys.where(names[0])}: " if names else ""
        origin = f"default of {keys.framework} ({said}autocast has the dtype of the weights)"
        keys.set_at("precision", precision, KeyOrigin(origin, Level.FILE))


def _length(keys: DocumentKeys, *, is_version_2: bool) -> None:
    if keys.value_of("method") == "grpo":
        keys.pass_over(("packing_length",), "prompts are not packed")
        return
    packing, row = keys.switch("packing"), keys.whole("packing_length")
    length = keys.whole("max_length")
    if packing:
        keys.set("packing", "bfd", "packing")
    elif packing is not None:
        keys.ignore("packing", "off")
    if row is not None and packing:
        keys.set("seq_len", row, "packing_length")
    elif row is not None:
        keys.ignore("packing_length", "samples are not packed")
    if length is not None and not (row and packing):
        keys.set("seq_len", length, "max_length")
    elif length is not None:
        keys.ignore("max_length", "rows are as long as packing_length")
    elif is_version_2:
        keys.default("seq_len", 2048, "of ms-swift 2")
    elif not (row and packing):
        why = "nothing cuts them but the model: 512 tokens are taken; --seq-len says it"
        keys.miss_default(LENGTH, Either(why))


def _checkpointing(keys: DocumentKeys, *, distributed: bool) -> None:
    keys.default("checkpointing", "full")
    shards = any(keys.document.get(key) for key in ("deepspeed", "fsdp"))
    keys.default("use_reentrant", shards or not distributed, "unless DDP has it otherwise")
    read_checkpointing(keys)
    tower = keys.switch("vit_gradient_checkpointing")
    if tower is False and keys.document.get("freeze_vit") in (False, "false", "False"):
        keys.miss("vit_gradient_checkpointing", "a tower that trains without checkpointing")
    elif tower is not None:
        keys.ignore("vit_gradient_checkpointing", "a frozen tower keeps nothing, others as all")


def _evaluation(keys: DocumentKeys, *, is_version_2: bool) -> None:
    """An evaluation needs samples of its own, and runs unless a strategy says no."""
    share = keys.document.get("split_dataset_ratio", 0.01 if is_version_2 else 0)
    has_samples = str(share) not in ("0", "0.0", "None") or any(
        keys.document.get(key) not in (None, [], "", False)
        for key in ("val_dataset", "cached_val_dataset")
    )
    strategy = keys.document.get("eval_strategy") or keys.document.get("evaluation_strategy")
    strategy = strategy or keys.document.get("save_strategy") or "steps"
    keys.pass_over(("eval_strategy", "evaluation_strategy"), "an evaluation needs samples")
    if has_samples and str(strategy) != "no":
        keys.replace("eval_strategy", strategy)
        if keys.switch("predict_with_generate"):
            keys.miss("predict_with_generate", "generation in evaluation")
    keys.pass_over(("predict_with_generate",), "no evaluation generates")
    read_evaluation(keys, batch=1)


def _kernels(keys: DocumentKeys) -> None:
    attention = keys.text("attn_impl")
    flash = keys.switch("use_flash_attn")
    if attention in ATTENTION:
        keys.set("attn_implementation", ATTENTION[attention], "attn_impl")
    elif attention is not None:
        keys.miss("attn_impl", Either(f"{attention}: priced as transformers' own choice"))
    if flash:
        keys.set("attn_implementation", "flash_attention_2", "use_flash_attn")
    elif flash is False:
        keys.ignore("use_flash_attn", "off")
    shares = keys.whole("sequence_parallel_size")
    if shares is not None and shares > 1:
        words = "sequences are split over GPUs; whole ones are priced"
        keys.miss("sequence_parallel_size", Saving(words))
    elif shares is not None:
        keys.ignore("sequence_parallel_size", "off")
    backend = keys.text("tuner_backend")
    if backend == "unsloth":
        keys.miss("tuner_backend", UNMODELLED_KEYS["use_unsloth"])
    elif backend is not None:
        keys.ignore("tuner_backend", "what is priced")


def _training(keys: DocumentKeys, *, is_version_2: bool) -> None:
    """What trains: all, or adapters of a kind, and which parts of a multimodal model."""
    named = keys.text("tuner_type")
    kind = named or "lora"
    if kind != "full" and named is None:
        keys.default("peft", "lora")
    parts = _frozen_parts(keys, is_version_2=is_version_2)
    if kind == "full":
        keys.ignore("tuner_type", "all parameters train")
        _freezing(keys)
        keys.pass_over((*LORA, *TARGETS, "lora_dtype", "init_weights"), "no adapters are trained")
    else:
        keys.pass_over(
            ("freeze_parameters", "freeze_parameters_regex", "freeze_parameters_ratio"),
            "adapters freeze the model",
        )
        keys.pass_over(("trainable_parameters", "trainable_parameters_regex"), "adapters train")
        all_linear = _adapters(keys, kind, is_version_2=is_version_2)
        parts = parts if all_linear else ()
        if keys.value_of("dtype") == "float16":
            keys.default(
                "cast_weights", ("trainable=float32",), "what trains in float16 is made so"
            )
    keys.pass_over(
        [key for key in keys.remaining if OF_OTHER_TUNERS.match(key)], f"tuner_type is {kind}"
    )
    if parts:
        keys.default("frozen_parts", parts, "where the model is multimodal")


def _frozen_parts(keys: DocumentKeys, *, is_version_2: bool) -> tuple[str, ...]:
    defaults = {"freeze_vit": not is_version_2, "freeze_aligner": not is_version_2}
    parts = []
    for key, part in PARTS.items():
        value = keys.switch(key)
        if value if value is not None else defaults.get(key, False):
            parts.append(part)
        if value is not None:
            keys.ignore(key, "counted with the parts of the model that do not train")
    return tuple(parts)


def _freezing(keys: DocumentKeys) -> None:
    trainable = ("trainable_parameters", "trainable_parameters_regex")
    prefixes = names_of(keys.take("freeze_parameters") or (), keys.where("freeze_parameters"))
    pattern = keys.text("freeze_parameters_regex")
    ratio = keys.scalar("freeze_parameters_ratio")
    if any(keys.has(key) for key in trainable):
        named = "freeze_parameters freeze_parameters_regex freeze_parameters_ratio".split()
        for key in (*named, *trainable):
            keys.take(key)
            if keys.has(key):
                keys.miss(key, Saving("which parameters train: all are priced; --freeze says it"))
        return
    if prefixes or pattern:
        patterns = [f"^{re.escape(prefix)}" for prefix in prefixes] + ([pattern] if pattern else [])
        key = "freeze_parameters" if prefixes else "freeze_parameters_regex"
        keys.set("freeze", tuple(patterns), key)
    if ratio not in (None, 0, 0.0):
        keys.miss(
            "freeze_parameters_ratio",
            Saving("a share of the parameters does not train: all are priced; --freeze says it"),
        )
    elif keys.has("freeze_parameters_ratio"):
        keys.ignore("freeze_parameters_ratio", "off")
    keys.pass_over(trainable, "off")


def _adapters(keys: DocumentKeys, kind: str, *, is_version_2: bool) -> bool:
    """Adapters; whether all linear layers get them."""
    if kind not in TUNERS:
        keys.miss("tuner_type", Either(f"{kind}: priced is LoRA"))
    elif kind == "longlora":
        keys.miss("tuner_type", Either("longlora: attention over groups; priced is LoRA"))
    peft = TUNERS.get(kind, "lora")
    if peft in SETTINGS_OF_TUNERS:
        settings = SETTINGS_OF_TUNERS[peft]
        values = {
            setting: default if (value := keys.take(key)) is None else value
            for key, (setting, default) in settings.items()
        }
        keys.set("adapter", {"peft_type": peft.upper(), **values}, "tuner_type")
        keys.pass_over(LORA, f"tuner_type is {kind}")
    else:
        if keys.has("tuner_type"):
            keys.set("peft", "lora", "tuner_type")
        for key, default in LORA.items():
            option = {"lora_rank": "lora_r"}.get(key, key)
            keys.set_from(key, Key(option, "scalar", default))
    if keys.text("lora_dtype") in ("bf16", "bfloat16"):
        keys.miss("lora_dtype", Bounded("adapters in bfloat16; float32 is priced"))
    elif keys.has("lora_dtype"):
        keys.ignore("lora_dtype", "float32, as peft has it")
    if str(keys.take("init_weights")).startswith("lora-ga"):
        keys.miss("init_weights", "gradients before the first step")
    elif keys.has("init_weights"):
        keys.ignore("init_weights", "changes values only")
    return _targets(keys, is_version_2=is_version_2)


def _targets(keys: DocumentKeys, *, is_version_2: bool) -> bool:
    regex = keys.text("target_regex")
    value = keys.take("target_modules")
    names = names_of(value or (), keys.where("target_modules"), split=True)
    saved = names_of(keys.take("modules_to_save") or (), keys.where("modules_to_save"), split=True)
    groups = {"all-embedding", "EMBEDDING", "all-norm", "LN"}
    for key, listed in (("target_modules", names), ("modules_to_save", saved)):
        if groups & set(listed):
            keys.miss(key, f"{', '.join(sorted(groups & set(listed)))}: priced without")
    saved = tuple(name for name in saved if name not in groups)
    names = tuple(name for name in names if name not in groups)
    if saved:
        set_adapter_value(keys, "modules_to_save", saved, "modules_to_save")
    if regex:
        set_adapter_value(keys, "lora_target_modules", regex, "target_regex")
        if names:
            keys.ignore("target_modules", "target_regex counts")
        return False
    is_default = not names or names in (("DEFAULT",), ("AUTO",))
    if is_version_2 and is_default:
        keys.miss_default(
            "target_modules", Bounded("some layers, by the model's type; all linear are priced")
        )
    if is_default:
        keys.default("lora_target_modules", ("all-linear",))
        return True
    all_linear = bool({"all-linear", "ALL"} & set(names))
    set_adapter_value(
        keys, "lora_target_modules", ("all-linear",) if all_linear else names, "target_modules"
    )
    return all_linear


_OF_4BIT = {
    "bnb_4bit_quant_type": Key("bnb_4bit_quant_type", "scalar", "nf4"),
    "bnb_4bit_use_double_quant": Key("bnb_4bit_use_double_quant", "switch", default=True),
    "bnb_4bit_quant_storage": Key("bnb_4bit_quant_storage", "scalar"),
}


def _quantization(keys: DocumentKeys) -> None:
    bits, method = keys.scalar("quant_bits"), keys.text("quant_method")
    if method is None and keys.where("quant_bits").endswith("quantization_bit") and bits:
        method = "bnb"
    compute = keys.text("bnb_4bit_compute_dtype")
    keys.default("prepare_kbit", False, "it does not call peft's preparation")
    quantises = method == "bnb" and bits in (4, 8)
    if not quantises or bits == 8:
        keys.pass_over((*_OF_4BIT, "bnb_4bit_compute_dtype"), "no base of 4 bits")
    if method in (None, "awq", "gptq", "gptq_v2", "aqlm"):
        if method is not None:
            keys.ignore("quant_method", "the checkpoint says it itself")
        if "quant_bits" in keys.document:
            keys.ignore("quant_bits", "without a quant_method nothing is quantised")
        return
    if not quantises:
        key = "quant_method" if keys.has("quant_method") else "quant_bits"
        keys.miss(key, Either(f"{method} of {bits} bits: priced is the base as it is"))
        return
    keys.set(f"load_in_{bits}bit", True, "quant_bits")
    keys.ignore("quant_method", "bitsandbytes")
    if bits == 4:
        for key, row in _OF_4BIT.items():
            keys.set_from(key, row)
        if compute in (None, "AUTO"):
            is_half = keys.value_of("precision") == "bf16"
            default = "bfloat16" if is_half else "float32"
            keys.default("bnb_4bit_compute_dtype", default, "by the dtype of the weights")
        else:
            keys.set("bnb_4bit_compute_dtype", compute, "bnb_4bit_compute_dtype")


def _optimizer(keys: DocumentKeys) -> None:
    name = keys.text("optimizer")
    galore = keys.switch("use_galore") or name == "galore"
    if name is not None:
        own = Either(f"{name}: an optimizer of one's own; --optim names another")
        remark = OPTIMIZERS.get(name, own)
        if remark:
            keys.miss("optimizer", remark)
            keys.pass_over(("optim_args", "optim_target_modules"), f"of {name}")
        else:
            keys.ignore("optimizer", "groups of parameters with rates of their own")
    values = {
        key.removeprefix("galore_"): keys.take(key)
        for key in keys.remaining
        if key.startswith("galore_")
    }
    for setting in values:
        keys.ignore(f"galore_{setting}", "counted with GaLore" if galore else "use_galore is off")
    key = "use_galore" if keys.has("use_galore") else "optimizer"
    if not galore:
        if "use_galore" in keys.document:
            keys.ignore("use_galore", "off")
        return
    keys.set("optim", "galore_adamw", key)
    rank, gap = values.get("rank") or 128, values.get("update_proj_gap") or 50
    scale = values.get("scale") or 1.0
    keys.set("optim_args", f"rank={rank},update_proj_gap={gap},scale={scale}", key)
    targets = values.get("target_modules")
    keys.set("optim_target_modules", targets or "all-linear", key)
    keys.miss(key, Either("ms-swift's own GaLore; galore_torch's is priced"))


def _sharding(keys: DocumentKeys) -> None:
    """DeepSpeed and FSDP, with the names of the configurations that come along."""
    value = keys.document.get("deepspeed")
    preset = str(value).removeprefix("default-").replace("-", "_") if value else ""
    if preset in PRESETS:
        automatic = dict.fromkeys(
            ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size"), "auto"
        )
        keys.replace("deepspeed", {"zero_optimization": PRESETS[preset], **automatic})
    fsdp = keys.document.get("fsdp")
    document: Any = FSDP2 if fsdp == "fsdp2" else fsdp
    if isinstance(fsdp, str) and PurePath(fsdp).suffix == ".json":
        path = find_file(fsdp, folder=keys.folder, origin=keys.where("fsdp"))
        document = read_document(path, fsdp)
    if isinstance(document, Mapping):
        keys.replace("fsdp", document.get("fsdp", "full_shard auto_wrap"))
        keys.replace("fsdp_config", document.get("fsdp_config") or {})
    read_sharding(keys)


def _logits(keys: DocumentKeys, *, method: str | None) -> None:
    """Logits are made where labels are (``prepare_logits_to_keep`` of ``trainers/mixin.py``)."""
    keeps = keys.switch("use_logits_to_keep")
    if keeps is not None:
        keys.ignore("use_logits_to_keep", "on" if keeps else "off: all logits, which are priced")
    scores_completions = keys.value_of("method") == "grpo"
    if keeps is not False and keys.value_of("task") is None and not scores_completions:
        # how many those are is the data's to say, as how long samples are
        words = "only logits of tokens with labels are made; all are priced"
        remark: str = Bounded(words)
        if method == "pt" and keys.value_of("batch") == 1:
            remark = f"{words}, without the copy of hidden states before them"
        keys.miss_default("use_logits_to_keep", remark)
