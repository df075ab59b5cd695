"""axolotl's YAML.

Source: axolotl at July 2026: ``utils/schemas/`` (fields and defaults), ``utils/config`` (dtype,
checkpointing), ``loaders/model.py`` (quantisation), ``core/builders/base.py`` (training arguments).
"""

from __future__ import annotations

from memest.config.adapter import LINEAR_TOO
from memest.errors import ConfigError, not_legal
from memest.readers.axolotl_keys import AXOLOTL_IGNORED_KEYS, AXOLOTL_UNMODELLED_KEYS
from memest.readers.mapping import DocumentKeys, Key, KeyTable
from memest.readers.sharding import note_shared_layers, read_deepspeed_value, read_fsdp
from memest.readers.training_arguments import (
    METHODS,
    change_model,
    read_checkpointing,
    read_load,
    set_adapter_value,
)
from memest.readers.values import Bounded, Either, Saving, names_of

__all__ = ["AXOLOTL"]


def _batch(keys: DocumentKeys) -> None:
    micro, total = keys.value_of("batch"), keys.whole("batch_size")
    grad_accum = Key("grad_accum", "whole", 1)
    if keys.set_from("gradient_accumulation_steps", grad_accum) is not None:
        if total is not None:
            keys.ignore("batch_size", "gradient_accumulation_steps says it")
    elif total is not None:
        if "gradient_accumulation_steps" in keys.document:
            keys.set("grad_accum", max(1, total // max(1, micro)), "batch_size")
        else:
            keys.ignore("batch_size", "gradient_accumulation_steps is 1 where it is not named")


def _precision(keys: DocumentKeys) -> None:
    """Autocast and the dtype of the weights (``resolve_dtype``)."""
    bf16, fp16 = keys.scalar("bf16"), keys.switch("fp16")
    key, is_set = "bf16", bf16 is not None
    full = str(bf16).lower() == "full"
    auto = "bf16" not in keys.document or bf16 == "auto"
    on = (auto and not fp16) or str(bf16).lower() == "true"
    pure_bf16, pure_fp16 = keys.switch("bfloat16"), keys.switch("float16")
    words = "bf16 or fp16 settles the dtype" if on or fp16 else "off"
    for name, value in (("bfloat16", pure_bf16), ("float16", pure_fp16)):
        if name in keys.document and (on or fp16 or not value):
            keys.ignore(name, words)
    if on and is_set:
        keys.set("precision", "bf16", key)
        keys.set("dtype", "bfloat16", key)
    elif on:
        keys.default("precision", "bf16", "bf16 auto, on a GPU that has it")
        keys.default("dtype", "bfloat16", "bf16 auto, on a GPU that has it")
    elif fp16:
        keys.set("precision", "fp16", "fp16")
        keys.set("dtype", "float16", "fp16")
    else:
        if is_set:
            keys.set("precision", "fp32", key)
        else:
            keys.default("precision", "fp32")
        if full:
            # the Trainer is told bf16_full_eval in place of bf16
            keys.set("dtype", "bfloat16", key)
        for name, value in (("bfloat16", pure_bf16), ("float16", pure_fp16)):
            if value:
                keys.set("dtype", name, name)
        if keys.value_of("dtype") is None and keys.document.get("load_in_8bit"):
            keys.default("dtype", "float16", "of 8-bit bases")
        elif keys.value_of("dtype") is None:
            keys.default("dtype", "float32")
    if on and fp16 is False:
        keys.ignore("fp16", "off")
    keys.pass_over(("float32",), "bf16, fp16 and bfloat16 settle the dtype")


def _checkpointing(keys: DocumentKeys) -> None:
    value = keys.document.get("gradient_checkpointing")
    offload = keys.take("activation_offloading")
    if value in ("offload", "offload_disk"):
        keys.take("gradient_checkpointing")
        keys.set("checkpointing", "full", "gradient_checkpointing")
        offload = value
    elif value is None:
        keys.take("gradient_checkpointing")
        keys.default("checkpointing", "none")
    is_named = "activation_offloading" in keys.document
    key = "activation_offloading" if is_named else "gradient_checkpointing"
    if offload:
        # _configure_gradient_checkpointing: adapters are trained without recomputation then
        words = "activations move to the host, some in place of being recomputed"
        keys.miss(key, Either(f"{offload}: {words}"))
    elif is_named:
        keys.ignore(key, "off")
    if value and not keys.has("gradient_checkpointing_kwargs") and not keys.has("rl"):
        # normalize_config leaves it alone beside unfrozen_parameters, and the Trainer gets False
        keys.default("use_reentrant", not keys.has("unfrozen_parameters"))
    read_checkpointing(keys)


_ADAPTER = {
    "lora_r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "lora_target_modules",
    "lora_modules_to_save": "modules_to_save",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "peft_autocast_adapter_dtype": "autocast_adapter_dtype",
}


def _adapter(keys: DocumentKeys) -> None:
    kind = keys.scalar("adapter")
    four, eight = keys.switch("load_in_4bit"), keys.switch("load_in_8bit")
    linear = keys.switch("lora_target_linear")
    if kind is None:
        keys.pass_over((*_ADAPTER, "lora_target_linear"), "no adapter is named")
        for key, on in (("load_in_4bit", four), ("load_in_8bit", eight)):
            if on:
                raise ConfigError(
                    f"{keys.where(key)}: a quantised base does not train without adapters; "
                    "axolotl wants adapter: qlora."
                )
        return
    kind = str(kind).lower()
    if kind in ("lora", "qlora"):
        keys.default("lora_dropout", 0.0)
    keys.set("peft", "lora" if kind == "qlora" else kind, "adapter")
    for key, option in _ADAPTER.items():
        value = keys.take(key)
        if value not in (None, False) and value != []:
            set_adapter_value(keys, option, value, key)
    if linear:
        key = "lora_target_modules"
        named = names_of(keys.document.get(key) or (), keys.where(key))
        # its own rule: the union; a name can be one of a head, or of experts that are no layers
        targets = (LINEAR_TOO, *named) if named else ("all-linear",)
        keys.set(key, targets, "lora_target_linear")
    if kind == "qlora" and eight:
        raise ConfigError(
            f"{keys.where('adapter')} qlora is for 4-bit bases, and load_in_8bit is on."
        )
    if four and kind == "lora":
        _prepared_base(keys)
        four = None
    elif four or kind == "qlora":
        _four_bits(keys, "load_in_4bit" if four else "adapter")
    elif eight:
        keys.set("load_in_8bit", True, "load_in_8bit")
    if four or eight or kind == "qlora":
        keys.default("prepare_kbit", False, "norms and embeddings are converted back after it")


_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def _lora_kernels(keys: DocumentKeys) -> None:
    """Kernels that keep less for the backward; of layers that are recomputed, of one at a time."""
    if keys.value_of("peft") is None:
        keys.pass_over(_LORA_KERNELS, "no adapter is named")
        return
    unasked = keys.value_of("load_in_8bit") is None and not keys.has("rl")
    keeps = keys.value_of("checkpointing") == "none"
    kind = Saving if keeps else Bounded
    for key in _LORA_KERNELS:
        if keys.on(key):
            keys.miss(key, kind("a fused kernel for LoRA"))
    if unasked and not any(key in keys.document for key in _LORA_KERNELS):
        keys.miss_default(
            "fused LoRA kernels", kind("on wherever the model allows; priced without")
        )


def _prepared_base(keys: DocumentKeys) -> None:
    """A base that is not quantised, and prepared as if it were.

    Source: ``_set_quantization_config`` of ``loaders/model.py`` quantises to 4 bits for qlora
    alone, and ``_prepare_model_for_quantization`` asks for ``load_in_4bit``: peft makes every
    weight float32, and axolotl makes norms and embeddings half-precision ones again.
    """
    keys.set("cast_weights", (f"^(?!.*({_EMBEDDINGS}))=float32",), "load_in_4bit")
    keys.miss(
        "load_in_4bit",
        Bounded(
            "axolotl quantises for adapter: qlora alone: priced is a base that is not quantised, "
            "in float32 but for norms and embeddings"
        ),
    )


_EMBEDDINGS = "norm|embed_tokens|lm_head|embed_in|embed_out|word_embeddings"
"""Weights whose dtype axolotl settles by name (``get_linear_embedding_layers``)."""


def _upcasts(keys: DocumentKeys) -> None:
    """Norms, embeddings and head, which full training has in float32.

    Source: ``_configure_embedding_dtypes`` of ``loaders/model.py``: made float32 unless FSDP wraps
    the model, and half-precision ones again for adapters, for cut-cross-entropy, and for attention
    that is named and neither eager nor sdpa.
    """
    attention = keys.value_of("attn_implementation") or keys.document.get("attn_implementation")
    converts_back = attention not in (None, "eager", "sdpa")
    if (
        keys.has("adapter")
        or keys.value_of("fused_loss") == "cce"
        or converts_back
        or keys.value_of("dtype") not in ("bfloat16", "float16")
    ):
        return
    keys.default(
        "cast_weights",
        (rf"?{_EMBEDDINGS}|\.gate\.=float32",),  # gpt2 without a head has no such name
        "norms, embeddings and head in full training with sdpa or eager attention",
    )


def _four_bits(keys: DocumentKeys, key: str) -> None:
    keys.set("load_in_4bit", True, key)
    part = keys.part("bnb_config_kwargs")
    for option, value in (
        ("bnb_4bit_quant_type", "nf4"),
        ("bnb_4bit_use_double_quant", True),
        ("bnb_4bit_compute_dtype", str(keys.value_of("dtype"))),
        ("bnb_4bit_quant_storage", "bfloat16"),
    ):
        part.set_from(option, Key(option, default=value))
    part.ignore_rest({}, {})
    keys.absorb(part)


def _attention(keys: DocumentKeys) -> None:
    """Switches of older configurations; the first that is on counts."""
    named = [key for key in _ATTENTION if keys.on(key)]
    for key in named[:1]:
        keys.set("attn_implementation", _ATTENTION[key], key)
    for key in named[1:]:
        keys.ignore(key, f"{named[0]} comes first")


_ATTENTION = {
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}


def _compilation(keys: DocumentKeys) -> None:
    """``auto`` reaches the Trainer as a word that is true (``_configure_torch_compile``)."""
    if keys.document.get("torch_compile") == "auto":
        keys.replace("torch_compile", True)


def _optimizer(keys: DocumentKeys) -> None:
    arguments = keys.take("optim_args")
    if isinstance(arguments, dict):
        arguments = ",".join(f"{key}={value}" for key, value in arguments.items())
    if arguments:
        keys.set("optim_args", str(arguments), "optim_args")
    targets = keys.take("optim_target_modules")
    if targets is not None:
        targets = "all-linear" if targets == "all_linear" else targets
        keys.set("optim_target_modules", targets, "optim_target_modules")


def _kernels(keys: DocumentKeys) -> None:
    """Liger's kernels have a key each; together they are what the Trainer's switch does."""
    names = [key for key in keys.document if key.startswith("liger_")]
    active_keys = [key for key in names if keys.switch(key)]
    if not active_keys:
        keys.pass_over(names, "off")
        return
    loss = "liger_fused_linear_cross_entropy" in active_keys
    parts = ("liger_rope", "liger_rms_norm", "liger_glu_activation")
    if loss and all(key in active_keys for key in parts):
        keys.set("use_liger_kernel", True, "liger_fused_linear_cross_entropy")
        for key in names:
            if key != "liger_fused_linear_cross_entropy":
                keys.ignore(key, "part of Liger's kernels, which are priced together")
    else:
        # logits, or what layers keep that are not recomputed, are much
        much = keys.value_of("checkpointing") == "none" or any(
            key.endswith("cross_entropy") for key in active_keys
        )
        kind = Saving if much else Bounded
        for key in active_keys:
            keys.miss(
                key, kind("some of Liger's kernels: priced are all of them or none; here none")
            )


def _sharding(keys: DocumentKeys) -> None:
    read_deepspeed_value(keys, "deepspeed", keys.take("deepspeed"))
    fsdp = keys.take("fsdp")
    version = keys.whole("fsdp_version")
    part = keys.part("fsdp_config")
    if fsdp or part.document:
        key = "fsdp" if fsdp else "fsdp_config"
        if version is not None:
            keys.ignore("fsdp_version", "with fsdp_config")
        read_fsdp(keys, part, fsdp or True, key, version=version or 1)
    sharded = keys.value_of("fsdp") is not None
    degree = keys.whole("tensor_parallel_size")
    if degree is not None and degree > 1:
        keys.set("tp", degree, "tensor_parallel_size")
        if sharded:
            note_shared_layers(keys, "tensor_parallel_size")
    elif degree is not None:
        keys.ignore("tensor_parallel_size", "off")
    _mesh(keys, max(degree or 1, 1), sharded=sharded)
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        value = keys.whole(key)
        if value is not None and value > 1:
            ring = "ring attention of ring-flash-attn, which is not torch's"
            keys.miss(key, Saving(f"{key} {value}: {ring}"))
        elif value is not None:
            keys.ignore(key, "off")


def _mesh(keys: DocumentKeys, tensor_ranks: int, *, sharded: bool) -> None:
    """How many GPUs share a copy of the model; what is left of those that there are makes copies.

    Source: ``_get_parallel_config_kwargs`` of axolotl 0.19.
    """
    sizes = {name: keys.whole(name) for name in ("dp_shard_size", "dp_replicate_size")}
    shards, copies = (max(size or 1, 1) for size in sizes.values())
    if shards > 1 and sharded:
        keys.set("fsdp_shard_size", shards, "dp_shard_size")
        keys.default("num_gpus", tensor_ranks * shards * copies, "as many as its sizes make")
    for name, size in sizes.items():
        if size is None or (name == "dp_shard_size" and shards > 1 and sharded):
            continue
        if size <= 1 or (shards > 1 and sharded):
            keys.ignore(name, "off" if size <= 1 else "with dp_shard_size")
        else:
            keys.miss(name, Either("--num-gpus and --fsdp-shard-size say it"))


def _model_changes(keys: DocumentKeys) -> None:
    """Entries of the model's configuration, and arguments of its load (``loaders/model.py``)."""
    entries = keys.mapping("overrides_of_model_config")
    change_model(keys, "overrides_of_model_config", entries)
    read_load(keys, "overrides_of_model_kwargs")


def _evaluation(keys: DocumentKeys) -> None:
    """An evaluation runs where there is a set for it and a time."""
    share = keys.scalar("val_set_size")
    tests = keys.document.get("test_datasets")
    strategy, steps = keys.scalar("eval_strategy"), keys.document.get("eval_steps")
    batch = keys.whole("eval_batch_size")
    schedule = steps or keys.document.get("evals_per_epoch") or strategy
    runs = (share or tests) and schedule and str(strategy).lower() != "no"
    key = "val_set_size" if share else "test_datasets"
    if runs and batch is not None:
        keys.set("eval_batch", batch, "eval_batch_size")
    elif runs:
        keys.default("eval_batch", keys.value_of("batch"), "as in training")
        keys.ignore(key, "an evaluation runs")
    else:
        names = """val_set_size eval_strategy eval_batch_size eval_accumulation_steps
            eval_table_size""".split()
        keys.pass_over(names, "no evaluation runs")


def _preference(keys: DocumentKeys) -> None:
    value = keys.take("rl")
    if value and str(value).lower() not in _LEGAL:
        raise not_legal(f"{keys.where('rl')} {value!r}", value, _LEGAL)
    rewards = keys.on("reward_model")
    packs = str(keys.document.get("sample_packing")).lower() == "true"
    other = "reward_model" if rewards else "sample_packing" if packs else ""
    if value and other:
        raise ConfigError(
            f"{keys.where('rl')} {value} and {other} exclude each other, and axolotl stops or "
            "trains another model than is meant: leave one of them out."
        )
    if rewards:
        keys.set("method", "reward", "reward_model")
        keys.set("log_probs", "logits", "reward_model")
    if value:
        word = str(value).lower()
        if word == "simpo":
            # CPOConfig's cpo_alpha is 1: the loss of the chosen answers is computed besides
            word = "simpo" if str(keys.document.get("cpo_alpha")) in ("0", "0.0") else "cpo"
        odd = next((key for key in _ODD_LOSSES if keys.document.get(key)), "")
        if word in _PRICED and not odd:
            keys.set("method", word, "rl")
            keys.set("log_probs", "logits", "rl")  # by the TRL 1.9 that axolotl 0.19 requires
            if word in ("dpo", "ipo"):
                name = "precompute_ref_log_probs"
                keys.set_from(name, Key(name, "enabled"))
            if word in ("kto", "cpo", "simpo") and keys.value_of("peft") is None:
                # setup_reference_model of train.py, whose trainers are not given it
                keys.miss("rl", Bounded("a reference is loaded that nobody asks, and let go of"))
            if word == "kto" and keys.value_of("peft") is None:
                # KTOTrainer loads it itself, as nobody hands it one
                keys.default("ref_dtype", "float32", "TRL's own load of it names no dtype")
            return
        method = METHODS.get(_METHODS.get(word, word), "a loss of its own")
        with_it = f" with {odd}" if odd else ""
        keys.miss("rl", f"{value}{with_it}: {method}; priced is fine-tuning")


_LEGAL = ("dpo", "gdpo", "grpo", "ipo", "orpo", "kto", "simpo", "ebft")
_PRICED = ("dpo", "ipo", "kto", "orpo", "cpo", "simpo")
_ODD_LOSSES = ("dpo_use_liger_kernel", "rl_adapter_ref_model")
"""What makes another step of it; ``dpo_padding_free`` is given to TRL 1.9, which pads anyway."""
_PLUGINS = {
    "CutCrossEntropyPlugin": "its key says it",
    "ExpertParallelPlugin": "its keys say it",
    "KernelsPlugin": "its keys say it",
    "LigerPlugin": "its keys say it",
    "LMEvalPlugin": "evaluates behind the training",
    "SwanLabPlugin": "logging",
}
"""Plugins that have keys of their own, or no part in a step."""
_METHODS = {"ipo": "dpo", "simpo": "cpo", "gdpo": "grpo"}
"""Ways of training that are another's in what lies in memory."""


def _plugins(keys: DocumentKeys) -> None:
    """Plugins whose keys say nothing themselves; cut-cross-entropy is on with its plugin."""
    names = names_of(keys.take("plugins") or (), keys.where("plugins"))
    switch = keys.switch("cut_cross_entropy")
    with_plugin = any("CutCrossEntropy" in name for name in names)
    if switch or (with_plugin and switch is None):
        keys.set("fused_loss", "cce", "cut_cross_entropy" if switch else "plugins")
    elif switch is False:
        keys.ignore("cut_cross_entropy", "off")
    for name in names:
        kind = name.rpartition(".")[2]
        if kind in _PLUGINS:
            keys.ignore("plugins", f"{kind}: {_PLUGINS[kind]}")
        elif kind == "SpectrumPlugin":
            why = "only a share of the layers trains; all are priced: --freeze names the others"
            keys.miss("plugins", Saving(f"{kind}: {why}"))
        else:
            keys.miss("plugins", Either(f"{kind}: what it changes of the training is not read"))


def _packing(keys: DocumentKeys) -> None:
    """Packed samples: one row of the whole micro-batch, or rows of ``sequence_len``.

    Source: axolotl ``core/builders/base.py``: ``multipack_real_batches`` where it is not set is
    ``not (flash_attention or flex_attention or xformers_attention)``.
    """
    rows, key = keys.switch("multipack_real_batches"), "sample_packing"
    if not keys.on(key):
        return
    attention = str(
        keys.document.get("attn_implementation") or keys.value_of("attn_implementation")
    )
    # ATTN_IMPLS_SUPPORTING_PACKING
    kernel = attention.removeprefix("kernels-community/")
    flat = kernel.startswith(("flash", "flex", "xformers", "sage"))
    flat = flat if rows is None else not rows
    keys.set("packing", "bfd" if flat else "wrapped", key)
    if not flat:
        keys.miss(key, "masks between the samples of a row: priced are full rows without")


AXOLOTL = KeyTable(
    defaults={
        "loop": "trainer",
        "max_grad_norm": (1.0, "of transformers, which it leaves alone"),
        # set_pytorch_cuda_alloc_conf of its command line, for torch 2.9 and newer
        "alloc_conf": ("expandable_segments:True", "its command line sets it"),
        "weight_decay": 0.0,
    },
    options={
        "base_model": Key("model", "text"),
        "micro_batch_size": Key("batch", "whole", 1),
        "sequence_len": Key("seq_len", "whole", 512),
        "optimizer": Key("optim", "text", "adamw_torch_fused", words={"adamw_hf": "adamw_torch"}),
    },
    readers=(
        _model_changes,
        _batch,
        _precision,
        _checkpointing,
        _adapter,
        _attention,
        _compilation,
        _optimizer,
        _sharding,
        _kernels,
        _lora_kernels,
        _evaluation,
        _preference,
        _plugins,
        _packing,
        _upcasts,
    ),
    own_names=True,
    ignored_keys=AXOLOTL_IGNORED_KEYS,
    unmodelled_keys=AXOLOTL_UNMODELLED_KEYS,
)
"""What becomes of the keys of its configuration."""
