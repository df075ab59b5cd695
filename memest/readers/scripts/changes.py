"""What a script makes of its model between load and training: nothing of it goes unsaid.

What is known to change no size, or is read elsewhere, is listed here; every other call that is made
of the model or is given it, and everything that is put into it or into its configuration, is named
as not priced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from memest.readers.scripts.calling import COPIES_OF_WEIGHTS, WRAPPERS, root_of
from memest.readers.scripts.calls import SCRIPT_LOOPS, TRAINERS, is_load, is_optimizer
from memest.readers.scripts.document import CallDocument
from memest.readers.scripts.found import Found
from memest.readers.scripts.lightning import MODULE_METHODS, lightning_of
from memest.readers.scripts.things import Call, Unknown, Value
from memest.readers.values import Either, Saving

__all__ = ["read_changes"]

_METHODS = frozenset(
    """to cuda cpu train eval half bfloat16 float double parameters named_parameters modules
    named_modules children named_children buffers named_buffers state_dict load_state_dict
    save_pretrained push_to_hub num_parameters get_memory_footprint print_trainable_parameters
    get_nb_trainable_parameters enable_input_require_grads gradient_checkpointing_enable
    gradient_checkpointing_disable zero_grad requires_grad_ tie_weights get_input_embeddings
    get_output_embeddings generate compile resize_token_embeddings merge_and_unload apply forward
    set_attn_implementation add_adapter set_adapter enable_adapters active_adapters backward step
    save_checkpoint trainable_parameters get_parameter get_submodule init_weights post_init
    get_classifier get_model_status from_pretrained from_config no_sync""".split()
)
"""Methods of a model that change no size, or are read elsewhere."""
_FUNCTIONS = WRAPPERS | frozenset(
    """summary watch save unwrap_model clip_grad_norm_ clip_grad_value_ clip_gradients
    get_peft_model_state_dict
    set_peft_model_state_dict register_for_checkpointing save_model save_state save_pretrained
    DataLoader named_parameters find_all_linear_names get_parameter_names get_decay_parameter_names
    infer_auto_device_map dispatch_model no_grad autocast info debug warning log exp join device
    from_pretrained Accelerator extract_model_from_parallel accumulate clone_chat_template
    set_seed resolve_data_config resolve_model_data_config create_optimizer_v2""".split()
)
"""Functions that may be given a model, and are known."""
_HARMLESS = re.compile(r"_*(print|log|save|count|show|evaluate|test|get_num|num_)")
"""Starts of names of functions that only look at a model."""
_ENTRIES = frozenset(
    """use_cache gradient_checkpointing pretraining_tp pad_token_id eos_token_id bos_token_id
    decoder_start_token_id is_parallelizable model_parallel name_or_path label2id id2label
    problem_type forced_decoder_ids suppress_tokens max_length min_length num_beams temperature
    top_p top_k do_sample padding_side forced_bos_token_id early_stopping length_penalty
    no_repeat_ngram_size generation_config language task warnings_issued requires_grad
    _attn_implementation attn_implementation torch_dtype print_trainable_parameters
    keys_to_ignore_at_inference begin_suppress_tokens apply_spec_augment return_dict
    """.split()
)
"""What is put into a model or its configuration, and changes no size or is read elsewhere."""
_KEPT = frozenset(("output_hidden_states", "output_attentions"))
_AVERAGES = re.compile(r"(?i)(model_?)?ema(v\d|model|_model)?|exponentialmoving\w*|averagedmodel")


def read_changes(document: CallDocument, found: Found) -> None:
    """Name what is made of the model and is not priced."""
    document.miss_each(
        # it may as well take something away
        (call.line, what, Either(why) if "priced without" in why else why)
        for call, what, why in _changes(found, adapts=found.adapts)
    )


def _changes(found: Found, *, adapts: bool) -> Iterator[tuple[Call, str, str]]:
    models = [root for root in (root_of(found.model), found.load) if isinstance(root, Call)]
    models = models or list(found.loads)
    configurations = _configurations(models)
    lightning = lightning_of(found)
    fit = None if lightning is None else lightning.fit
    harmless = _METHODS if lightning is None else _METHODS | MODULE_METHODS

    def is_model(data: Any) -> bool:
        return any(root_of(data) is model for model in models)

    for call in found.early(found.calls):
        name, receiver = call.name, root_of(call.receiver)
        if _AVERAGES.fullmatch(name) and call.receiver is None:
            yield call, name, "averages of the weights, a copy of them"
        elif call.path == COPIES_OF_WEIGHTS:
            yield call, "weights", "copies of the weights are kept"
        elif call.path.startswith("?.type("):
            yield call, call.path[2:], "a further model in memory"
        elif call.path == "transformers.pipeline":
            yield call, "pipeline", "a further model in memory"
        elif call.path == "torch.nn.DataParallel":
            yield call, name, "a model on every GPU that is there, the first gathers: one is priced"
        elif call.path.startswith("="):
            # what a module of the script's own consists of is named as a whole
            inside = receiver is not found.wrapper and is_model(call.receiver)
            is_head = found.head is not None and call.arguments[0].data is found.head
            if receiver not in configurations and not is_head:  # what goes with the model's name
                yield from _put(call, inside, adapts)
        elif name.startswith("freeze_") and (is_model(call.receiver) or call.receiver is None):
            if not adapts:
                yield call, name, Saving("parts do not train: all are priced; --freeze says it")
        elif call.receiver is not None and is_model(call.receiver):
            if name not in harmless and call.path != "()":
                yield call, name, "what it makes of the model is not read: priced without"
        elif call is found.reference:
            continue  # a copy, which is priced
        elif call is not fit and _is_given(call, is_model) and not _is_known(call):
            what = "copies of the weights" if name in ("deepcopy", "copy") else ""
            yield call, name, what or "what it makes of the model is not read: priced without"


def _configurations(models: list[Call]) -> list[Call]:
    """Configurations that models are made of."""
    values = [value for model in models for value in (*model.arguments, *model.keywords.values())]
    return [value.data for value in values if isinstance(value.data, Call)]


def _put(call: Call, of_model: bool, adapts: bool) -> Iterator[tuple[Call, str, str]]:
    """Something is put into the model, its configuration, or a parameter of it."""
    path = call.path[1:]
    entry = path.rpartition(".")[2]
    value = call.arguments[0].data if call.arguments else None
    if entry == "requires_grad" and not of_model:
        if value is True and adapts:
            yield call, "requires_grad", "more parameters train than adapters: priced without"
        elif value is not True and value is not False and not adapts:
            why = "which parameters train: all are priced; --freeze says it"
            yield call, "requires_grad", Saving(why)
    elif entry == "data" and not of_model and isinstance(call.receiver, Unknown):
        # of a weight in a loop; what is made in the script, as a data set, may have data of its own
        yield call, "data", "what is made of weights is not read: priced without"
    elif of_model and entry in _KEPT:
        if value is not False:
            yield call, path, "every layer's output is kept with the outputs"
    elif of_model and entry not in _ENTRIES and not path.startswith("generation_config"):
        yield call, path, "it is changed in the model or its configuration: priced without"


def _is_given(call: Call, is_model: Any) -> bool:
    """Whether a call is given the model, or its weights."""
    for value in (*call.arguments, *call.keywords.values()):
        data = value.data if isinstance(value, Value) else value
        of_weights = isinstance(data, Call) and data.name in (
            "parameters",
            "state_dict",
            "named_parameters",
            "modules",
        )
        if is_model(data) or (of_weights and is_model(data.receiver)):
            return True
    return False


def _is_known(call: Call) -> bool:
    """Whether what a call makes of a model is read elsewhere, or nothing."""
    name = call.name
    return (
        name in _FUNCTIONS
        or name in TRAINERS
        or name.endswith(("Trainer", "Callback", "Scheduler", "LR"))
        or "DataCollator" in name
        or bool(_HARMLESS.match(name))
        or call.path in ("()", "torch.compile")
        or call.library in SCRIPT_LOOPS
        or call.library in ("logging", "wandb", "torchinfo", "torchsummary")
        or is_load(call)
        or is_optimizer(call)
        or isinstance(call.receiver, Unknown)
    )
