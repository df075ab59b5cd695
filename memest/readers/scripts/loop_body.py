"""What a loop of a script's own does beside forward, backward and update: nothing goes unsaid.

A step is priced as one forward of the batch that the loader makes, the loss of the model itself,
one backward and the update. What is known to add nothing to that, or is read elsewhere, is listed
here; every other call between two steps is named, and leaves the verdict open.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from memest.readers.scripts.calling import SLICE, root_of
from memest.readers.scripts.calls import SCRIPT_LOOPS, is_optimizer
from memest.readers.scripts.document import CallDocument
from memest.readers.scripts.found import Found
from memest.readers.scripts.things import Call, Unknown
from memest.readers.scripts.vision import is_vision_load
from memest.readers.values import LOSS, Either

__all__ = ["is_forward", "keeps_tensors", "read_body"]

_STEP = frozenset(
    """backward step zero_grad clip_grad_norm_ clip_grad_value_ clip_gradients accumulate autocast
    no_sync no_grad inference_mode set_grad_enabled enable_grad scale unscale_ update get_scale
    GradScaler
    autocast_mode maybe_autocast nullcontext scale_loss train eval join_uneven_inputs set_epoch
    prepare unwrap_model optimizer_step record parameters ctx
    set_requires_gradient_sync step_update suppress get_tracker get_state_dict
    to_device""".split()
)
"""What a step consists of, or switches."""
_MOVES = frozenset(
    """to cuda cpu items keys values copy pop get pin_memory non_blocking contiguous numpy tolist
    item detach long int bool size dim numel squeeze unsqueeze view view_as reshape
    zfill masked_select batch_decode decode""".split()
)
"""Methods that move what there is, or look at it."""
_COUNTS = frozenset(
    """sum mean max min argmax eq ne add_ abs sqrt isnan isfinite isinf any all round topk accuracy
    norm count_nonzero nonzero get_last_lr get_lr reduce all_reduce gather gather_for_metrics
    barrier wait_for_everyone synchronize add_batch add compute perf_counter time monotonic
    memory_allocated memory_reserved max_memory_allocated max_memory_reserved memory_summary
    reset_peak_memory_stats empty_cache mem_get_info collect Event elapsed_time query
    get_accelerator device_count get_world_size get_rank is_initialized exp log format join
    startswith endswith split strip replace lower upper ljust rjust isoformat now""".split()
)
"""What looks at losses, predictions and clocks: numbers, not tensors of a batch's size."""
_SAYS = re.compile(
    r"_*(print|log|save|write|show|report|record|track|debug|info|warning|warn|error|set_|tqdm|"
    r"update|add_scalar|add_image|display|progress|trange|close|flush|makedirs|mkdir|exists|"
    r"critical|advance|description|refresh|pbar|bar|tick|profile|mark|check_|should_|is_|has_|"
    r"remove|rm|unlink|rmtree|dump|notify|checkpoint_|plot|evaluate|eval_|validate|test|"
    r"get_lr|adjust_learning_rate|load_state_dict|state_dict|start|stop|enter|exit|reset)"
)
"""Starts of names of functions that tell of a step, keep it, or evaluate behind it."""
_PYTHON = frozenset(
    """append extend next iter enumerate range zip len islice cycle chain seed choice shuffle random
    randint sample sleep exit""".split()
)
_HOSTS = frozenset(
    "logging wandb tqdm time numpy sklearn contextlib math os json shutil sys random".split()
)
"""Libraries that hold no memory of a GPU."""
_PARTS_OF_TORCH = ("torch.cuda.", "torch.distributed.", "torch.profiler.", "torch.backends.")
"""Parts of torch that make no tensors."""
_LOSS = re.compile(r"(?i)cross_?entropy|loss|kl_div|nll|log_softmax|softmax|logsumexp|logsigmoid")
_NUMBERS = re.compile(
    r"\.(item|cpu|tolist|numpy|detach)\(|^(float|int|len|str|time)\b|time|epoch|step|lr\b|mem"
)
"""Words of expressions that are numbers, or lie on the host."""
_COMPARED = re.compile(r"==|argmax|mask|loss|correct|acc|detach")


def read_body(document: CallDocument, found: Found) -> None:
    """Name what the loop that trains does besides."""
    said: set[str] = set()
    for line, what, why in _besides(found):
        if what not in said:
            said.add(what)
            document.miss(line, what, Either(why))


def _besides(found: Found) -> Iterator[tuple[int, str, str]]:
    backwards = [call for call in found.calls if call.name == "backward" and call.loops]
    if not backwards:
        return
    loops = backwards[0].loops
    body = [c for c in found.calls if c.loops[: len(loops)] == loops and not c.without_grad]
    yield from _forwards(found, body, loops)
    for call in body:
        kept = call.keywords.get("retain_graph")
        if call.name == "backward" and kept is not None and kept.data is not False:
            yield call.line, "retain_graph", "the graph of a step is kept beside the next one's"
        elif call.name in ("append", "extend") and keeps_tensors(call):
            yield call.line, call.name, "tensors of every step are kept: priced without"
        elif call.path == SLICE:
            yield call.line, "slice", "a part of a tensor is taken: priced is the whole batch"
        elif _is_loss(call):
            if not _is_priced_loss(call, found):
                why = "what it makes of the outputs is not read: the model's is priced"
                why += "" if found.load is not None else "; --loss says it"
                yield call.line, LOSS, why
        elif not _is_known(call, found):
            name = call.path.removeprefix("?.")
            yield call.line, name, "what the loop makes with it is not read: priced without"


def _forwards(
    found: Found, body: Sequence[Call], loops: tuple[int, ...]
) -> Iterator[tuple[int, str, str]]:
    """More than one forward before a backward, and outputs that were asked for."""
    since: list[Call] = []
    for call in body:
        if call.name == "backward":
            if len(since) > 1:
                why = f"{len(since)} forwards before one backward: one is priced"
                yield since[1].line, "forward", why
            since = []
        elif is_forward(call, found):
            if len(call.loops) > len(loops):
                yield call.line, "forward", "a forward in a loop of its own: one is priced"
            elif not call.conditional:
                since.append(call)
            for name in ("output_hidden_states", "output_attentions"):
                value = call.keywords.get(name)
                if value is not None and value.data is not False:
                    yield call.line, name, "every layer's output is kept with the outputs"


def is_forward(call: Call, found: Found) -> bool:
    """Whether a call is one of the model that trains."""
    if call.path == "?.model":
        return True
    root = root_of(call.receiver) if call.path == "()" else None
    return root is not None and root in (root_of(found.model), found.load)


def _is_loss(call: Call) -> bool:
    """Whether it is a loss, or a part of one, that is not the model's own."""
    root = root_of(call.receiver) if call.path == "()" else None
    if isinstance(root, Call):
        return root.library == "torch" and bool(_LOSS.search(root.name))
    return call.library == "torch" and bool(_LOSS.search(call.name))


def _is_priced_loss(call: Call, found: Found) -> bool:
    """Whether it is the loss that is priced of a vision model: a cross entropy."""
    root = root_of(call.receiver) if call.path == "()" else call
    is_entropy = isinstance(root, Call) and root.name in ("CrossEntropyLoss", "cross_entropy")
    return is_entropy and found.load is not None and is_vision_load(found.load)


def keeps_tensors(call: Call) -> bool:
    """Whether a list of the script's gets what may be a tensor of the GPU."""
    return any(
        (isinstance(data, Unknown) and not _NUMBERS.search(data.why))
        or (isinstance(data, Call) and data.name not in _MOVES)
        for value in call.arguments
        for data in (value.data if isinstance(value.data, list) else [value.data])
    )


def _is_known(call: Call, found: Found) -> bool:
    """Whether a call adds nothing to a step, or is read elsewhere."""
    name = call.name
    if call.path.startswith("=") or call.path == "()" or name in _STEP:
        return True
    if call.library == "torch" and not is_optimizer(call):
        counts = name in _COUNTS or name in ("tensor", "device", "manual_seed", "save", "load")
        return counts or call.path.startswith(_PARTS_OF_TORCH) or name.endswith(("LR", "Scheduler"))
    if name == "float" and isinstance(call.receiver, Unknown):
        return bool(_COMPARED.search(call.receiver.why))
    if name in _MOVES or name in _COUNTS or name in _PYTHON or _SAYS.match(name):
        return True
    if call.library in _HOSTS or call.library in SCRIPT_LOOPS or is_optimizer(call):
        return True
    if name.endswith(("Scheduler", "LR", "Meter", "Dataset", "Sampler", "Error", "DataLoader")):
        return True
    if name in ("Subset", "set_seed", "device", "model", "get_scheduler"):
        return True
    root = root_of(call.receiver)
    return root is not None and root in (root_of(found.model), found.load)
