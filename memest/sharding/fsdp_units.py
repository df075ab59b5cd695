"""Units of FSDP: which modules gather their parameters together, in which order.

Sources: ``fsdp2_prepare_model`` of accelerate 1.15 (which the Trainer uses): layers, input
embeddings, final norm with output embeddings, and the rest with the root; and the recipe of
PyTorch's FSDP2 tutorial: layers, and the rest with the root.

Packed 4-bit weights are sharded as the tensor that holds them (``bnb_4bit_quant_storage``); scales,
tables and offsets hang on the layer, whole on every rank. FSDP1 flattens them with the other
weights of a layer, which must have that dtype too (``_validate_tensors_to_flatten`` of torch,
``fix_4bit_weight_quant_state_from_module`` of bitsandbytes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from memest.config.compatibility import reader_of_head
from memest.config.installed import installed_version
from memest.config.kinds import LogProbs
from memest.config.parallelism import Fsdp
from memest.config.setup import Dtype, Loop, Precision, Setup
from memest.errors import ConfigError, closest
from memest.events import Landmarks, Weight
from memest.sharding.engine import num_elements, weight_bytes
from memest.units import format_size

__all__ = [
    "ROOT",
    "UnitPlan",
    "check_head_is_gathered",
    "loaded_dtype",
    "padded_elements",
    "plan_units",
    "sharded_plans",
    "stored_dtype",
    "units_of",
]

ROOT = ""
_PROMPTS = ("CartridgeEncoder", "PrefixEncoder", "PromptEncoder", "PromptEmbedding")
"""Classes of peft that its policy always wraps."""
_COMPLETES_GROUPS = (2, 13)
"""The release of torch in which that was read; none earlier was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """A call of ``fully_shard``.

    Attributes:
        modules: paths of the modules it was given.
        weights: numbers of the parameters that it manages, in its order.
        reshards: parameters are given back after its forward.
        ranks: that share it; None = as many as share the others.
    """

    modules: tuple[str, ...]
    weights: tuple[int, ...]
    reshards: bool
    ranks: int | None = None


def units_of(setup: Setup, weights: Sequence[Weight], landmarks: Landmarks) -> tuple[UnitPlan, ...]:
    """The units of a run.

    FSDP1's policies wrap layers alone (``transformer_auto_wrap_policy``); what is left is the
    root's, with accelerate too. Beside adapters it is peft's ``fsdp_auto_wrap_policy``, which the
    Trainer sets and peft's documentation asks of scripts: what trains is apart from what is frozen.
    """
    distributed = setup.distributed
    if distributed.tp > 1 and distributed.ep == 1 and setup.loop is not Loop.PLAIN:
        _check_untied(landmarks)
    if distributed.ep > 1 or setup.is_sharded_at_load:
        return _own_units(landmarks, weights, distributed.expert_shard_ranks)
    apart: set[str] = set()
    if setup.adapter is not None and distributed.fsdp_version == 1:
        apart = _peft_units(landmarks.kinds, weights)
    elif setup.log_probs is LogProbs.VERL and distributed.fsdp_version == 2:
        apart = _verl_units(landmarks)
    return plan_units(
        landmarks,
        weights,
        classes=distributed.fsdp_wrap,
        reshards=distributed.fsdp is Fsdp.FULL_SHARD,
        as_accelerate=distributed.fsdp_version == 2
        and (setup.loop is not Loop.PLAIN or distributed.fsdp_wrap_ends),
        apart=apart,
    )


def check_head_is_gathered(
    setup: Setup, plans: Sequence[UnitPlan], weights: Sequence[Weight], landmarks: Landmarks
) -> None:
    """A loss that reads the head's weight needs it gathered, which its own unit does not do.

    The root's unit is gathered from the beginning of the forward; a group of the final norm and
    the head is by the norm. torch completes such a group where the head was not called
    (``_force_complete_incomplete_states`` of torch 2.13, pull request 180428 of April 2026).

    Raises:
        ConfigError: the head lies in another unit, or torch was told to be an earlier one.
    """
    reads, head = reader_of_head(setup), landmarks.head
    if not reads or head is None:
        return
    head_names = {landmarks.shared_paths.get(f"{head}.weight", f"{head}.weight")}
    own = {
        number
        for number, weight in enumerate(weights)
        if weight.name in head_names or weight.name.startswith(f"{head}.")
    }
    torch = setup.software.torch or installed_version("torch")
    for plan in plans:
        if plan.modules == (ROOT,) or not own.intersection(plan.weights):
            continue
        trains = any(weights[number].trains for number in own)
        if len(plan.modules) == 1 and setup.head_is_gathered_by_loss and not trains:
            continue
        if len(plan.modules) == 1:
            raise ConfigError(
                f"{reads} reads the weight of {head} without calling it, and {plan.modules[0]} is "
                "an FSDP unit, which is gathered where it is called: the loss would have a part of "
                "the weight. Let the root have it: leave its class out of --fsdp-wrap, and the "
                f"head out of what an adapter copies, or leave {reads.partition(' ')[0]} out."
            )
        if torch is not None and torch < _COMPLETES_GROUPS:
            version = ".".join(map(str, torch))
            raise ConfigError(
                f"{reads} leaves {head} uncalled, which accelerate makes one FSDP unit with the "
                f"final norm, and torch {version} does not end such a unit: the second forward "
                "stops. Use --software torch=2.13, or --fsdp-version 1."
            )


def sharded_plans(
    plans: Sequence[UnitPlan], weights: Sequence[Weight], setup: Setup
) -> tuple[tuple[UnitPlan, ...], list[str]]:
    """The units of a run without what is left whole on every rank, and what there is to say of it.

    Args:
        plans: units with all weights.
        weights: of the model.
        setup: the run.

    Raises:
        ConfigError: weights of several dtypes train in a unit, which ``fully_shard`` refuses, or
            lie in one of FSDP1's.
    """
    notes: list[str] = []
    if setup.quantization is not None:
        whole = {n for n, weight in enumerate(weights) if "int" in weight.dtype}
        if whole:
            plans = [
                replace(plan, weights=tuple(w for w in plan.weights if w not in whole))
                for plan in plans
            ]
            nbytes = sum(weight_bytes(weights[n]) for n in whole)
            half = "float16" if setup.precision is Precision.FP16 else "bfloat16"
            notes.append(
                f"{format_size(nbytes)} of packed weights are whole on every GPU: accelerate does "
                "not shard 4-bit weights that are stored as uint8. --bnb-4bit-quant-storage "
                f"{half} shards them."
            )
    if setup.distributed.fsdp_version == 1:
        for plan in plans:
            _check_flat(plan, weights, setup)
        return tuple(plans), notes
    for plan in plans:
        dtypes = sorted(
            {stored_dtype(weights[w], setup) for w in plan.weights if weights[w].trains}
        )
        if len(dtypes) > 1:
            raise ConfigError(
                f"--fsdp: weights of {' and '.join(dtypes)} train in one unit "
                f"({plan.modules[0] or 'the model itself'}), where fully_shard stops: FSDP expects "
                "uniform original parameter dtype. Add --no-autocast-adapter-dtype, which leaves "
                "adapters in the dtype of the model."
            )
    return tuple(plans), notes


def _check_flat(plan: UnitPlan, weights: Sequence[Weight], setup: Setup) -> None:
    """One flat parameter has one dtype.

    Raises:
        ConfigError: weights of a unit came with several, which FSDP1 refuses.
    """
    first: dict[str, str] = {}
    for number in plan.weights:
        first.setdefault(loaded_dtype(weights[number], setup), weights[number].name)
    if len(first) < 2:
        return
    dtype_names = " and ".join(f"{dtype} ({name})" for dtype, name in sorted(first.items()))
    hint = "Use --fsdp-version 2, which takes each weight by itself."
    if setup.quantization is not None:
        hint = (
            "Give --bnb-4bit-quant-storage and --dtype the same dtype, and --no-prepare-kbit, "
            "which leaves the rest in it; or use --fsdp-version 2."
        )
    raise ConfigError(
        f"--fsdp-version 1 flattens the weights of a unit into one, and those of "
        f"{plan.modules[0] or 'the model itself'} come as {dtype_names}: the run stops there "
        f'(torch: "Must flatten tensors with uniform dtype"). {hint}'
    )


def plan_units(
    landmarks: Landmarks,
    weights: Sequence[Weight],
    *,
    classes: Sequence[str],
    reshards: bool,
    as_accelerate: bool,
    apart: Set[str] = frozenset(),
) -> tuple[UnitPlan, ...]:
    """The units of a model, in the order in which they are made; the root is the last.

    Args:
        landmarks: of the model.
        weights: its parameters.
        classes: of the modules that become units; empty = those that may not be split.
        reshards: what was asked for (``reshard_after_forward``).
        as_accelerate: with units for embeddings and head.
        apart: paths of modules that are units besides.

    Raises:
        ConfigError: a class that no module has.
    """
    class_of = landmarks.kinds
    wrap_classes = _check_classes(classes, class_of) if classes else set(landmarks.blocks)
    order = _bottom_up(list(class_of))
    groups: list[tuple[tuple[str, ...], bool]] = [
        ((name,), reshards)
        for name in order
        if name != ROOT and (class_of[name] in wrap_classes or name in apart)
    ]
    if as_accelerate:
        groups += _ends(landmarks, {name for (name,), _ in groups}, reshards)
    # the root never reshards: its backward would gather again at once
    groups.append(((ROOT,), False))
    if as_accelerate:
        _check_embeddings(landmarks, groups)
    return _fill_units(landmarks, weights, groups)


def _fill_units(
    landmarks: Landmarks,
    weights: Sequence[Weight],
    groups: Sequence[tuple[tuple[str, ...], bool]],
) -> tuple[UnitPlan, ...]:
    """Units with the parameters that are theirs; those without any, but for the root, are none."""
    order = _bottom_up(list(landmarks.kinds))
    owner = {name: number for number, (names, _) in enumerate(groups) for name in names}
    members: list[list[int]] = [[] for _ in groups]
    place = {name: number for number, name in enumerate(order)}
    for index, weight in enumerate(weights):
        members[_owner_of(weight.name, owner)].append(index)
    for (names, _), group in zip(groups, members, strict=True):
        group.sort(key=lambda index: _rank(weights[index].name, names, place, index))
    return tuple(
        UnitPlan(modules=names, weights=tuple(group), reshards=own)
        for (names, own), group in zip(groups, members, strict=True)
        if group or names == (ROOT,)
    )


def _peft_units(class_of: Mapping[str, str], weights: Sequence[Weight]) -> set[str]:
    """What ``fsdp_auto_wrap_policy`` of peft 0.21 wraps beside the layers of the model."""
    parents = {_parent(name) for name in class_of if name != ROOT}
    trained_names = {weight.name for weight in weights if weight.trains}
    return {
        name
        for name, kind in class_of.items()
        if kind in _PROMPTS or (name not in parents and f"{name}.weight" in trained_names)
    }


def _verl_units(landmarks: Landmarks) -> set[str]:
    """Embeddings and head, each by itself, unless they share a weight, or would with a head.

    Source: ``_select_fsdp2_wrap_targets`` of verl 0.9.1 ``utils/fsdp_utils.py``.
    """
    ends = {name for name in (landmarks.embeddings, landmarks.head) if name is not None}
    return set() if _is_tied(landmarks) or landmarks.ties else ends


def _own_units(
    landmarks: Landmarks, weights: Sequence[Weight], expert_ranks: int
) -> tuple[UnitPlan, ...]:
    """Units that transformers makes by its own plan: experts, the rest of the layers, the ends.

    Source: ``apply_fully_sharded_data_parallelism`` of transformers 5.23.
    """
    groups = [*landmarks.units, ((ROOT,), False, False)]
    plans = _fill_units(landmarks, weights, [(names, own) for names, own, _ in groups])
    experts = {names for names, _, of_experts in groups if of_experts}
    return tuple(
        replace(plan, ranks=expert_ranks) if plan.modules in experts else plan for plan in plans
    )


def _is_tied(landmarks: Landmarks) -> bool:
    """Whether input and output embeddings have one weight, adapters around them or not."""
    embeddings, head = (
        {f"{end}.weight", f"{end}.base_layer.weight"}
        for end in (landmarks.embeddings, landmarks.head)
    )
    shared_paths = landmarks.shared_paths.items()
    return any(
        (alias in head and name in embeddings) or (alias in embeddings and name in head)
        for alias, name in shared_paths
    )


def _check_untied(landmarks: Landmarks) -> None:
    """Sharded layers are tied once they are loaded, when FSDP2 has both weights.

    Raises:
        ConfigError: the model ties its embeddings.
    """
    if _is_tied(landmarks):
        raise ConfigError(
            f"--tp with --fsdp under accelerate and the Trainer is not priced for models that tie "
            f"{landmarks.embeddings} and {landmarks.head}: the library ties them behind the "
            "sharding, when two FSDP units have a weight each. Add --loop plain, or leave --tp or "
            "--fsdp out."
        )


def _ends(
    landmarks: Landmarks, unit_names: set[str], reshards: bool
) -> list[tuple[tuple[str, ...], bool]]:
    """Input embeddings, and the final norm with the output embeddings."""
    embeddings, head = landmarks.embeddings, landmarks.head
    tied = _is_tied(landmarks)
    out: list[tuple[tuple[str, ...], bool]] = []
    if embeddings is not None and not tied and embeddings not in unit_names:
        out.append(((embeddings,), reshards))
        unit_names = unit_names | {embeddings}
    ends = (landmarks.norm, embeddings, head) if tied else (landmarks.norm, head)
    tail = tuple(dict.fromkeys(n for n in ends if n is not None and n not in unit_names))
    if tail:
        out.append((tail, False))
    return out


def _check_embeddings(landmarks: Landmarks, groups: Sequence[tuple[tuple[str, ...], bool]]) -> None:
    """Input embeddings inside another unit are sharded twice, which FSDP refuses.

    Raises:
        ConfigError: the run would stop.
    """
    embeddings = landmarks.embeddings
    if embeddings is None or not any(embeddings in names for names, _ in groups):
        return
    for (outer, *_), _ in groups:
        if outer != ROOT and embeddings.startswith(f"{outer}."):
            kind = landmarks.kinds[outer]
            others = [name for name in landmarks.blocks if name != kind]
            raise ConfigError(
                f"accelerate makes the input embeddings ({embeddings}) an FSDP unit of their own, "
                f"and they lie in {outer}, which is one already ({kind}): the run stops there. "
                f"Leave {kind} out: --fsdp-wrap {others[0] if others else 'CLASS'}."
            )


def _check_classes(classes: Sequence[str], class_of: Mapping[str, str]) -> set[str]:
    class_names = sorted(set(class_of.values()))
    for name in classes:
        if name not in class_names:
            near = closest(name, class_names)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"--fsdp-wrap {name!r}: the model has no module of this class.{hint} It has: "
                f"{', '.join(class_names)}."
            )
    return set(classes)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _owner_of(name: str, owner: Mapping[str, int]) -> int:
    """The innermost unit around a parameter."""
    path = _parent(name)
    while path not in owner:
        path = _parent(path)
    return owner[path]


def _rank(
    weight: str, modules: Sequence[str], place: Mapping[str, int], index: int
) -> tuple[int, int, int]:
    """The order of a group's parameters: its modules one after the other, each bottom up."""
    path = _parent(weight)
    first = next(n for n, m in enumerate(modules) if m in (ROOT, path) or path.startswith(f"{m}."))
    return first, place.get(path, 0), index


def _bottom_up(names: Sequence[str]) -> list[str]:
    """Paths in the order of a walk that visits children first.

    Args:
        names: parents before children, as ``named_modules`` has them.
    """
    children: dict[str, list[str]] = {}
    for name in names:
        if name != ROOT:
            children.setdefault(_parent(name), []).append(name)
    out: list[str] = []
    stack: list[tuple[str, bool]] = [(ROOT, False)]
    while stack:
        name, done = stack.pop()
        if done:
            out.append(name)
            continue
        stack.append((name, True))
        stack.extend((child, False) for child in reversed(children.get(name, ())))
    return out


def padded_elements(weight: Weight, ranks: int) -> int:
    """Elements of a rank's storage for its part of a weight.

    Source: ``FSDPParam._init_sharded_param`` of torch 2.13: ``torch.chunk`` along the first
    dimension; every rank's storage has the size of the first chunk, whatever part of it is used.

    Raises:
        ConfigError: a number without dimensions, which FSDP refuses.
    """
    if not weight.shape:
        raise ConfigError(
            f"FSDP2 cannot shard {weight.name}, a parameter without dimensions: make it a tensor "
            "of one element in the model, or use --zero 3 or plain DDP."
        )
    first, *rest = weight.shape
    return -(-first // ranks) * num_elements(rest)


def stored_dtype(weight: Weight, setup: Setup) -> str:
    """The dtype in which FSDP stores a weight that computes in ``weight.dtype``.

    What does not train is stored as it was loaded, and so is all of it beside autocast.
    """
    if not setup.computes_in_half:
        return weight.dtype
    if weight.trains and setup.trains_in_full:
        return Dtype.FLOAT32.value
    return loaded_dtype(weight, setup)


def loaded_dtype(weight: Weight, setup: Setup) -> str:
    """The dtype in which a weight came to FSDP."""
    if not setup.computes_in_half:
        return weight.dtype
    in_full = setup.loaded_dtype is Dtype.FLOAT32
    if weight.kept_dtype and not (in_full and setup.quantization is None):
        return weight.kept_dtype  # else it was traced as a half one, which adapters found there
    return Dtype.FLOAT32.value if in_full else weight.dtype
