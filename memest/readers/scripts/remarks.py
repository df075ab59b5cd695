"""What of a script is not priced: further models, other loops, generation, modules of its own."""

from __future__ import annotations

from memest.readers.mapping import DocumentKeys
from memest.readers.scripts.beside_model import read_beside
from memest.readers.scripts.calling import innermost
from memest.readers.scripts.calls import SCRIPT_LOOPS, arguments_of
from memest.readers.scripts.changes import read_changes
from memest.readers.scripts.document import CallDocument
from memest.readers.scripts.found import Found
from memest.readers.scripts.lightning import lightning_of
from memest.readers.scripts.loop_body import is_forward
from memest.readers.scripts.own_module import typed_for
from memest.readers.scripts.sharding import reads_deepspeed
from memest.readers.scripts.things import Call, Unknown
from memest.readers.scripts.unsloth import is_unsloth
from memest.readers.values import FACTORY_SAYS_IT, Bounded, DocumentReading, Either, Saving

__all__ = ["read_remarks"]

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SHARDERS = ("FullyShardedDataParallel", "FSDP", "fully_shard")
_OF_HUB = ("transformers", "peft", "trl", "torch", "unsloth")
_BEHIND = "behind the training, which is what is priced"


def read_remarks(found: Found) -> tuple[DocumentReading, set[str]]:
    """Everything that is named besides."""
    document = CallDocument(found.source, "transformers")
    for line, why in found.source.unread:
        document.miss(line, "cell", f"it is not read: {why.rpartition(': ')[2]}")
    _model(document, found)
    _other_models(document, found)
    _others(document, found)
    _of_model(document, found)
    read_changes(document, found)
    read_beside(document, found)
    lines = [*found.gpu_questions, *_questions_of_unsloth(found)]
    for line in lines[:1]:
        document.miss(
            line,
            "bfloat16",
            Bounded(
                "the GPU decides: taken is one that has it; for an older one (T4, V100) "
                "--fp16 --dtype float16 is what runs"
            ),
        )
    keys = document.keys()
    _allocator(keys, document, found)
    return document.reading(keys), document.used


def _questions_of_unsloth(found: Found) -> tuple[int, ...]:
    """The line where Unsloth chooses the dtype by the GPU."""
    load = found.load
    if load is None or not is_unsloth(load):
        return ()
    dtype = load.keywords.get("dtype")
    return (load.line,) if dtype is None or dtype.data is None else ()


def _model(document: CallDocument, found: Found) -> None:
    """Why the model cannot be told, where it cannot; and what stands around it."""
    wrapper, lightning = found.wrapper, lightning_of(found)
    if lightning is not None:
        for extra in lightning.extras():
            document.miss(extra.line, extra.what, extra.why)
    elif wrapper is not None:
        what = f"a module of the script's own ({wrapper.subclass})"
        around = " around the model: what it adds is not read" if found.load else ""
        why = (
            f"{what}{around}; {typed_for(wrapper, found.source, _tensors(found))}{FACTORY_SAYS_IT}"
        )
        document.miss(wrapper.line, wrapper.subclass, why)
    named = found.load is not None or (isinstance(found.model, str) and found.model)
    if not named:
        root = innermost(found.model)
        line = root.line if isinstance(root, (Call, Unknown)) else 0
        why = (
            root.why
            if isinstance(root, Unknown)
            else getattr(root, "path", "")
            or (f"{len(found.loads)} models are loaded" if found.loads else "none is loaded here")
        )
        if wrapper is not None:
            why = f"{wrapper.subclass}, a module of the script's own"
        elif lightning is None and _may_be_imported(root, found):
            is_made = isinstance(root, Call)
            what = f"a module of another file ({why})" if is_made else "it is made elsewhere"
            typed = typed_for(root, found.source, _tensors(found))
            document.miss(line, "module", f"{what}; {typed}{FACTORY_SAYS_IT}")
        if why.startswith("diffusers."):
            why += ", of several models: `memest help diffusers`"
        document.miss(line, "model", f"cannot be told without running ({why}); MODEL says it")


def _tensors(found: Found) -> int:
    """How many the loop that trains calls the model with, by position."""
    forwards = [call for call in found.calls if call.loops and is_forward(call, found)]
    return max((len(call.arguments) for call in forwards), default=0)


def _may_be_imported(root: object, found: Found) -> bool:
    """Whether what makes a model may be a class or a function that memest can be given."""
    if isinstance(root, Call):
        return root.library not in _OF_HUB
    is_open = root is None or isinstance(root, Unknown)
    return is_open and found.trainer is None and not found.loads


def _other_models(document: CallDocument, found: Found) -> None:
    _reference_by_name(document, found)
    early = found.early(found.loads)
    trains_another = isinstance(innermost(found.model), Call)
    for load in found.loads:
        if load is found.load or load.deleted:
            continue
        if load is found.reference:
            document.ignore(load.line, load.path, "the reference model, which is priced")
            continue
        if load not in early:
            document.ignore(load.line, load.path, _BEHIND)
        elif found.load is not None or len(found.loads) > 1 or trains_another:
            document.miss(load.line, load.path, "a further model in memory")
    early_trainers = found.early(found.other_trainers)
    for trainer in found.other_trainers:
        if trainer in early_trainers:
            document.miss(trainer.line, trainer.name, "another training in the same script")
        elif not _same_arguments(trainer, found.trainer):
            why = "a further training behind the first, which is what is priced"
            document.miss(trainer.line, trainer.name, why)
        else:
            document.ignore(trainer.line, trainer.name, f"{_BEHIND}; it has the same arguments")


def _reference_by_name(document: CallDocument, found: Found) -> None:
    """A reference that a trainer is to load itself, as TRL's did before 1.0, or nobody knows."""
    given, reference = found.given_reference, found.reference
    if reference is not None and reference not in found.loads:
        document.ignore(reference.line, reference.path, "the reference model, which is priced")
    if given is None or given.data is None or isinstance(given.data, Call):
        return
    if isinstance(given.data, str) and given.data == found.name:
        document.ignore(given.line, "ref_model", "the reference model, which is priced")
        return
    which = given.data if isinstance(given.data, str) else "cannot be told"
    why = f"{which}: priced is a copy of the model that is trained, with its weights' dtype"
    document.miss(given.line, "ref_model", Either(why))


def _same_arguments(one: Call, other: Call | None) -> bool:
    """Whether two trainers have one configuration, and the same model."""
    if other is None:
        return False
    models = one.argument(0, "model"), other.argument(0, "model")
    pairs = (models, (arguments_of(one), arguments_of(other)))
    return all(a is not None and b is not None and a.data == b.data for a, b in pairs)


def _others(document: CallDocument, found: Found) -> None:
    """Loops of other libraries, generation, what is shared between GPUs."""
    priced = {"Lightning"} if lightning_of(found) is not None else set()
    if reads_deepspeed(found) is not None:
        priced.add("DeepSpeed")
    for library in dict.fromkeys(call.library for call in found.calls):
        if library in SCRIPT_LOOPS and SCRIPT_LOOPS[library] not in priced:
            call = next(each for each in found.calls if each.library == library)
            document.miss(
                call.line, call.path, f"{SCRIPT_LOOPS[library]}'s loop: priced is a plain one"
            )
    generations = tuple(found.named("generate"))
    early = found.early(generations)
    for call in generations:
        if call in early:
            document.miss(call.line, "generate", "generation besides; --generate says it")
        else:
            document.ignore(call.line, "generate", _BEHIND)
    own = found.trainer is None and not any(found.named("Accelerator"))
    own = own and lightning_of(found) is None
    for call in () if own else found.named(*_SHARDERS):
        why = "FSDP of the script is not read: priced whole on one GPU; --fsdp says it"
        document.miss(call.line, call.name, Saving(why))


def _of_model(document: CallDocument, found: Found) -> None:
    """Changes of the model that no option has."""
    for call in found.on_model("resize_token_embeddings"):
        why = "rows of the embeddings, for tokens that are added"
        size = call.argument(0, "new_num_tokens")
        is_few = size is None or not isinstance(size.data, int)
        is_few = is_few and not any(found.named("add_tokens"))
        document.miss(call.line, call.name, Bounded(f"a few {why}") if is_few else Either(why))
    if found.adapts:
        return  # they freeze the model
    frozen = [
        call
        for call in found.calls
        if (call.path == "requires_grad_" or call.path.startswith("="))
        and call.path.strip("=_").rpartition(".")[2] == "requires_grad"
        and call.arguments
        and call.arguments[0].data is False
    ]
    for call in frozen[:1]:
        document.miss(
            call.line,
            "requires_grad",
            Saving("parameters are frozen: all are priced as training; --freeze says it"),
        )


def _allocator(keys: DocumentKeys, document: CallDocument, found: Found) -> None:
    for call in found.calls:
        if call.path != "os.environ[]" or call.conditional:
            continue
        name, value = call.arguments[0].data, call.arguments[1].data
        if name in _ALLOCATOR_VARIABLES and isinstance(value, str):
            keys.set_at("alloc_conf", value, document.origin(call.line, None, str(name)))
            return
    for call in found.named("set_per_process_memory_fraction"):
        share = call.argument(0, "fraction")
        if share is not None and isinstance(share.data, float) and not call.conditional:
            value = f"per_process_memory_fraction:{share.data}"
            keys.set_at("alloc_conf", value, document.origin(call.line, None, call.name))
        else:
            document.miss(call.line, call.name, "PyTorch is given a share of the card")
