"""How a script loads its model, quantises it and puts adapters beside it."""

from __future__ import annotations

from memest.catalog.changes import with_changes
from memest.catalog.libraries import DEFAULTS
from memest.catalog.mirrors import is_named_quantised
from memest.catalog.models import family_of_config
from memest.config.quantization import METHODS as PACKED
from memest.config.quantization import is_key_of_bases
from memest.readers.mapping import DocumentKeys, Key, KeyTable, by_key, read_table
from memest.readers.scripts.calling import root_of
from memest.readers.scripts.calls import (
    ADAPTERS,
    TRAINERS,
    is_config,
    is_made_of_config,
    task_of,
)
from memest.readers.scripts.document import MODEL_KEY, CallDocument
from memest.readers.scripts.found import Found
from memest.readers.scripts.images import put_pixels
from memest.readers.scripts.things import (
    Call,
    Class,
    Symbol,
    Unknown,
    Value,
    is_unknown,
    known,
)
from memest.readers.scripts.unsloth import is_unsloth, read_unsloth
from memest.readers.scripts.vision import is_vision_load, put_image_size, put_vision_model
from memest.readers.training_arguments import (
    IGNORED_KEYS,
    MODELS,
    SCRIPT_KEYS,
    UNMODELLED_KEYS,
    read_checkpointing,
    read_device_map,
    read_peft_adapter,
    read_script_spellings,
)
from memest.readers.trl import PREPARING, note_adapters
from memest.readers.values import DocumentReading, Either, Saving, option_called

__all__ = ["is_old_trl", "read_adapter", "read_loading"]

_TABLE = KeyTable(
    options={
        **MODELS,
        "torch_dtype": Key("dtype"),
    },
    readers=(read_checkpointing, read_script_spellings, read_device_map),
    own_names=True,
    ignored_keys=by_key(
        {
            "how the model is loaded": """device_map trust_remote_code revision token use_auth_token
                cache_dir low_cpu_mem_usage use_safetensors local_files_only force_download
                subfolder variant config id2label label2id ignore_mismatched_sizes from_tf
                problem_type code_revision state_dict pad_token_id return_dict
                finetuning_task bos_token_id eos_token_id sep_token_id n_ctx""",
        }
    ),
    unmodelled_keys={
        "max_memory": Saving("weights are placed on several devices"),
        "offload_folder": Saving("weights are placed on several devices"),
        "output_hidden_states": "every layer's output is kept with the outputs",
        "output_attentions": "every layer's attention is kept with the outputs",
        "reference_compile": "compilation",
        "tp_plan": Saving("weights are shared between GPUs; --tp says it"),
    },
)
"""Arguments of ``from_pretrained`` and of a config's."""


_OF_IMAGES = ("image-classification", "image-segmentation", "masked-image-modeling")


def read_loading(found: Found) -> tuple[DocumentReading, set[str]]:
    """The model that trains, with the arguments that it is loaded with.

    Raises:
        ConfigError: a value that cannot be.
    """
    document = CallDocument(
        found.source,
        "transformers",
        ignored_keys={**IGNORED_KEYS, **_TABLE.ignored_keys},
        unmodelled_keys={**UNMODELLED_KEYS, **_TABLE.unmodelled_keys},
    )
    load = found.load
    task = None
    if load is not None and is_vision_load(load):
        put_vision_model(document, load, found.head)
        put_image_size(document, load, found.calls)
    elif load is not None:
        task = _load(document, load)
        if task in _OF_IMAGES:
            put_image_size(document, load, found.calls)
    elif isinstance(found.model, str) and found.model:
        assert found.trainer is not None
        document.put(MODEL_KEY, Value(found.model), found.trainer)
    if load is not None and (is_made_of_config(load) or is_vision_load(load)):
        _made(document, found, load)
    trainer = found.trainer
    quantization = trainer.keywords.get("quantization_config") if trainer is not None else None
    if quantization is not None and isinstance(quantization.data, Call):
        _quantization(document, quantization.data)
    if load is not None and is_unsloth(load):
        keys = read_unsloth(document, found, load)
    else:
        if load is not None or quantization is not None:
            _prepared(document, found)
        _change(document, found)
        _cast(document, found)
        _name_entries(document)
        keys = document.keys()
        read_table(keys, _TABLE)
        if found.adapts and _trainer_of_trl(found) == "sft":
            quantised = _is_quantised(document)
            note_adapters(keys, quantised=quantised, by_trainer=found.trainer_adapts)
    if load is not None and not is_vision_load(load):
        put_pixels(keys, document, found)
    if load is not None and task:
        keys.set_at("task", task, document.origin(load.line, None, load.kind))
    return document.reading(keys), document.used


def _load(document: CallDocument, load: Call) -> str | None:
    """Put down what a load is given; returns the head that its class gives."""
    first = load.argument(
        0, "pretrained_model_name_or_path", "model_name", "model_name_or_path", "config", "model"
    )
    config = load.keywords.get("config")
    for value in (config, first):
        if value is not None and is_config(value.data):
            _config(document, value.data)
    if isinstance(load.receiver, Class):
        document.miss(load.line, load.receiver.name, Either("a model of the script's own"))
    if first is not None and not isinstance(first.data, Call):
        nothing = first.data in ("", None)
        flags = ", ".join((*first.given, *first.defaults)) or "a name"
        why = Unknown(f"{flags}, which is empty", load.line)
        document.put(MODEL_KEY, first.with_data(why) if nothing else first, load)
    names = (MODEL_KEY, "pretrained_model_name_or_path", "model_name", "model", "config")
    for key, value in load.keywords.items():
        if key == "quantization_config" and isinstance(value.data, Call):
            _quantization(document, value.data)
        elif key not in names and key != "**":
            _put(document, key, value, load)
        elif key == "**":
            document.miss(load.line, load.path, Either("further arguments cannot be told: **"))
    kind = load.kind
    task = task_of(kind)
    if task is None and not isinstance(load.receiver, Class):
        document.miss(load.line, kind, Either("its head is not priced: the model's own is"))
    return task


def _config(document: CallDocument, config: Call) -> None:
    """``AutoConfig.from_pretrained(name, num_labels=2)`` beside the model, or in its place.

    One that is made of values alone, ``GPT2Config(n_layer=6)``, changes its class's defaults.
    """
    name = config.argument(0, "pretrained_model_name_or_path", "model_type")
    values = config.arguments[1:]
    if config.name != "from_pretrained":
        values = values if config.name == "for_model" else config.arguments
        family = family_of_config(config.kind) if config.name == config.kind else None
        if config.name == "for_model" and name is not None and isinstance(name.data, str):
            family = name.data
        name = None if family is None else Value(f"{DEFAULTS}/{family}")
    if name is None or values:
        document.miss(
            config.line, config.path, Either("values of a configuration that is made here")
        )
        return
    if MODEL_KEY not in document:
        document.put(MODEL_KEY, name, config)
    for key, value in (*config.keywords.items(), *config.attributes.items()):
        if key == "**":
            document.miss(config.line, config.name, Either("further arguments cannot be told: **"))
        elif key not in ("pretrained_model_name_or_path", "model_type"):
            _put(document, key, value, config)


_NO_ENTRIES = frozenset(
    (*_TABLE.ignored_keys, *_TABLE.unmodelled_keys, *_TABLE.options, *IGNORED_KEYS)
) | frozenset((*UNMODELLED_KEYS, *SCRIPT_KEYS))
"""Arguments of a load that are no entries of the model's configuration."""


def _put(document: CallDocument, key: str, value: Value, call: Call) -> None:
    """An argument of a load; what nobody knows is an entry of the model's configuration."""
    own = option_called(key) is not None or "checkpointing" in key
    if own or key in _NO_ENTRIES or is_unsloth(call):
        document.put(key, value, call)
        return
    document.used.update(value.given)
    data = known(value.data)
    if is_unknown(data) or call.conditional:
        why = "an entry of the model's configuration that cannot be told: priced without it"
        document.miss(call.line, key, Either(why))
    else:
        document.entries[key] = data


def _name_entries(document: CallDocument) -> None:
    """Entries of the configuration behind the model's name, ``gpt2?n_layer=2``."""
    name = document.get(MODEL_KEY)
    if isinstance(name, str) and document.entries:
        document.change(MODEL_KEY, with_changes(name, document.entries))


def _made(document: CallDocument, found: Found, load: Call) -> None:
    """Parameters that a class makes, and none loads, have PyTorch's default dtype."""
    for call in found.calls:
        dtype = call.argument(0, "d") if call.path == "torch.set_default_dtype" else None
        if dtype is not None and call in found.early((call,)):
            document.put("dtype", dtype, call)
    document.say_default("dtype", "float32", f"{load.kind or load.name} makes its parameters")


def _is_quantised(document: CallDocument) -> bool:
    config = document.get("quantization_config")
    names = ("load_in_4bit", "load_in_8bit")
    if is_named_quantised(str(document.get(MODEL_KEY))):
        return True  # transformers takes what the checkpoint brings, whatever is asked for
    if isinstance(config, dict) and config and set(config) <= {*names, *_OF_4BIT}:
        return any(config.get(name) is not False and name in config for name in names)
    return any(document.get(key) not in (None, False) for key in ("quantization_config", *names))


def _trainer_of_trl(found: Found) -> str:
    """The trainer of TRL's, as releases since 0.20 have it; "" where it is none."""
    trainer = found.trainer
    return "" if trainer is None or is_old_trl(found) else TRAINERS[trainer.name]


def _cast(document: CallDocument, found: Found) -> None:
    """TRL's trainers make what trains beside a quantised base bfloat16 (``sft_trainer.py``)."""
    trainer, kind = found.trainer, _trainer_of_trl(found)
    if trainer is None or not kind or not _is_quantised(document) or not found.adapts:
        return
    if kind not in PREPARING:
        document.say("cast_weights", ["trainable=bfloat16"], trainer.line)
    elif not found.trainer_adapts and document.get("prepare_kbit"):
        # what the trainer makes bfloat16 again, it was not given
        document.say("cast_weights", ["lm_head|embed_tokens|wte|wpe=float32"], trainer.line)


def _quantization(document: CallDocument, config: Call) -> None:
    """``BitsAndBytesConfig`` and its relatives as transformers' ``quantization_config``."""
    if config.path == "trl.get_quantization_config":
        document.ignore(config.line, config.name, "of the arguments of ModelConfig")
        return
    values = dict(config.keywords)
    method = config.name.removesuffix("Config").lower()
    if config.name != "BitsAndBytesConfig":
        values["quant_method"] = Value(method)
    if config.name == "BitsAndBytesConfig" or method in PACKED:
        data = {name: value.data for name, value in values.items() if name != "**"}
        for name in [each for each in data if config.name == "BitsAndBytesConfig"]:
            if not is_key_of_bases(name):
                del data[name]
                document.ignore(config.line, name, "BitsAndBytesConfig does not know it, and warns")
        parts = Value(data).beside(*values.values())
        document.put("quantization_config", parts, config)
    else:
        document.miss(
            config.line, config.name, Saving("weights quantised by it: priced as they are")
        )


def _prepared(document: CallDocument, found: Found) -> None:
    """``prepare_model_for_kbit_training``: float32 around 4-bit weights, and checkpointing.

    Source: peft 0.21 ``utils/other.py``: ``use_gradient_checkpointing=True`` unless named.
    """
    names = ("prepare_model_for_kbit_training", "prepare_model_for_int8_training")
    calls = [call for call in found.on_model(*names) if call.receiver is None]
    quantised = _is_quantised(document)
    for call in calls[:1]:
        if call.conditional:
            why = "under a condition that cannot be told: priced without; --prepare-kbit says it"
            document.miss(call.line, call.name, why)
            document.say("prepare_kbit", False, call.line)
            continue
        if not quantised:
            # it freezes all weights, and makes float32 of those in half precision
            document.say("dtype", "float32", call.line)
            continue
        document.say("prepare_kbit", True, call.line)
        value = call.argument(1, "use_gradient_checkpointing")
        if value is None or value.data is not False:
            document.put("gradient_checkpointing", value or Value(True), call)
            kwargs = call.argument(2, "gradient_checkpointing_kwargs")
            if kwargs is not None and kwargs.data:
                document.put("gradient_checkpointing_kwargs", kwargs, call)
    trainer = found.trainer
    prepares = trainer is not None and TRAINERS[trainer.name] in PREPARING and found.trainer_adapts
    if quantised and not calls and not is_old_trl(found) and not prepares:
        document.say_default("prepare_kbit", False, "nothing calls prepare_model_for_kbit_training")


_OF_4BIT = frozenset(
    """bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_compute_dtype bnb_4bit_quant_storage
    llm_int8_threshold llm_int8_skip_modules llm_int8_enable_fp32_cpu_offload
    llm_int8_has_fp16_weight""".split()
)
"""What says nothing of a base that is quantised by neither switch."""
_DTYPES = {"half": "float16", "bfloat16": "bfloat16", "float": "float32"}


def _change(document: CallDocument, found: Found) -> None:
    """What is made of the model between its load and its training."""
    early = found.early(found.calls)
    for call in early:
        first = call.arguments[0].data if call.arguments else None
        if call.path in ("=config.use_cache", "=use_cache"):
            document.put("use_cache", call.arguments[0], call)
        elif call.path in ("=config.gradient_checkpointing", "=gradient_checkpointing"):
            document.put("gradient_checkpointing", call.arguments[0], call)
        elif call.path == "torch.compile" and first is not None and found.compiles(call):
            document.put("torch_compile", Value(True), call)
            for name in ("mode", "backend"):
                if (value := call.keywords.get(name)) is not None:
                    document.put(f"torch_compile_{name}", value, call)
        elif call.path in ("=config._attn_implementation", "=_attn_implementation"):
            document.put("attn_implementation", call.arguments[0], call)
    for call in found.on_model("set_attn_implementation"):
        if (value := call.argument(0, "attn_implementation")) is not None:
            document.put("attn_implementation", value, call)
    for call in found.on_model("gradient_checkpointing_enable", "gradient_checkpointing_disable"):
        on = call.name.endswith("enable")
        document.put("gradient_checkpointing", Value(on), call)
        kwargs = call.argument(0, "gradient_checkpointing_kwargs")
        if on and kwargs is not None and kwargs.data:
            document.put("gradient_checkpointing_kwargs", kwargs, call)
    for call in found.on_model("compile"):
        if call.receiver is not None and not call.arguments:
            document.put("torch_compile", Value(True), call)
    for call in found.on_model(*_DTYPES, "to"):
        if (
            call.receiver is None
            or call not in early
            or not isinstance(root_of(call.receiver), Call)
        ):
            continue
        if call.name in _DTYPES:
            document.put("dtype", Value(_DTYPES[call.name]), call)
        for dtype in (call.argument(0, "dtype"), call.argument(1)):
            if dtype is not None and isinstance(dtype.data, Symbol) and "float" in dtype.data.name:
                document.put("dtype", dtype, call)


def is_old_trl(found: Found) -> bool:
    """Whether TRL's trainer is called as releases before 0.20 had it.

    Source: TRL: ``max_seq_length`` of SFTConfig was ``max_length`` from 0.20 on; ``tokenizer``,
    ``packing`` and ``max_seq_length`` of SFTTrainer itself went in 0.16 and before.
    """
    trainer = found.trainer
    if trainer is None or trainer.library != "trl":
        return False
    config = trainer.argument(-1, "args")
    data = None if config is None else config.data
    old_config = isinstance(data, Call) and "max_seq_length" in data.keywords
    old = ("max_seq_length", "packing", "tokenizer", "dataset_text_field")
    return old_config or any(name in trainer.keywords for name in old)


def read_adapter(found: Found) -> tuple[DocumentReading, set[str]]:
    """Adapters of peft that the script puts beside the model.

    Raises:
        ConfigError: a value that cannot be.
    """
    document = CallDocument(found.source, "transformers")
    keys = document.keys()
    names = ("get_peft_model", "add_adapter")
    of_model = list(found.on_model(*names))
    for call in found.named(*names):
        if call not in of_model:
            why = "adapters of a model that cannot be told: all weights are priced"
            document.miss(call.line, call.name, Saving(why))
    for call in of_model:
        if call.library == "unsloth" or call.maker.startswith("Fast"):
            continue
        value = call.argument(1, "peft_config") if call.name == "get_peft_model" else None
        value = value or call.argument(0 if call.receiver is not None else 1, "adapter_config")
        keys = _adapter(document, value, call)
        cast = call.keywords.get("autocast_adapter_dtype")
        if cast is not None and isinstance(cast.data, bool) and keys.has("peft_type"):
            document.say("autocast_adapter_dtype", cast.data, call.line)
        elif _trainer_of_trl(found) and keys.has("peft_type"):
            document.say("autocast_adapter_dtype", True, call.line)  # peft's own, not the trainer's
    if found.trainer is not None:
        value = found.trainer.keywords.get("peft_config")
        if value is not None and value.data is not None:
            keys = _adapter(document, value, found.trainer)
    for call in found.calls:
        if call.maker.startswith(("PeftModel", "AutoPeftModel")) and call in found.early((call,)):
            document.miss(call.line, call.maker, "adapters that are there already: their sizes")
    if keys.document:
        keys = document.keys()
        read_peft_adapter(keys)
    return document.reading(keys), document.used


def _adapter(document: CallDocument, value: Value | None, call: Call) -> DocumentKeys:
    """Put the configuration of adapters down."""
    config = None if value is None else value.data
    kind = ADAPTERS.get(config.name) if isinstance(config, Call) else None
    if call.conditional or not isinstance(config, Call) or config.conditional:
        why = (
            "adapters under a condition that cannot be told"
            if call.conditional
            else ("adapters that cannot be told without running")
        )
        document.miss(
            call.line, call.name, Saving(f"{why}: all weights are priced; --peft lora says it")
        )
    elif kind is None and config.path == "trl.get_peft_config":
        document.ignore(config.line, config.name, "of the arguments of ModelConfig")
    elif kind is None:
        document.miss(config.line, config.name, Saving("adapters that memest does not know"))
    else:
        document.put_all(config, without=("base_model_name_or_path",))
        for key, changed in config.attributes.items():
            document.put(key, changed, config)
        document.say("peft_type", kind, config.line)
    return document.keys()
