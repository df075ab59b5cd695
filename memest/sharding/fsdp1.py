"""FSDP1 (``FullyShardedDataParallel``): flat parameters, gathered and reduced unit by unit.

Source: ``torch/distributed/fsdp`` of torch 2.13: ``_flat_param.py`` (one flat parameter for each
unit, its padding and storages), ``_runtime_utils.py`` (unshard, reshard, prefetch, post-backward).
The hooks of modules are where those of FSDP2 are. Parameters are views of the gathered storage, so
nothing is copied out; autograd joins the gradients of a unit in one flat gradient before it is
reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memest.distributed import Prefetch
from memest.errors import ConfigError
from memest.events import Category, Landmarks, Weight
from memest.hidden.call import DTYPE_BYTES
from memest.setup import Loop, Setup
from memest.sharding.fsdp import ALL_REDUCE_STREAM, Fsdp2, State, Unit
from memest.sharding.shards import num_elements, stored_dtype
from memest.sharding.units import units_of

__all__ = ["Flat", "Fsdp1", "flat_of", "flat_weights", "keeps_parameters"]

_PRE_UNSHARD_STREAM = 4
_UNSHARD_STREAM = 1
_POST_BACKWARD_STREAM = 2
_ALIGNED_BYTES = 16
"""``_get_aligned_numel``: with ``use_orig_params`` every parameter begins at such an address."""


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat parameter.

    Attributes:
        weights: numbers of its parameters, in order.
        offsets: first element of each.
        elements: of all of them with the padding between.
        shard_elements: of a rank.
    """

    weights: tuple[int, ...]
    offsets: tuple[int, ...]
    elements: int
    shard_elements: int


def flat_of(
    members: Sequence[int], weights: Sequence[Weight], *, ranks: int, aligned: bool
) -> Flat:
    """How the parameters of a unit lie in its flat parameter.

    Source: ``FlatParamHandle._init_flat_param_and_metadata``.

    Args:
        members: numbers of the parameters.
        weights: of the model, in the dtype that they compute in.
        ranks: that share it.
        aligned: ``use_orig_params``: with padding between parameters.

    Raises:
        ConfigError: parameters of several dtypes, or frozen ones beside others.
    """
    dtypes = sorted({weights[index].dtype for index in members})
    if len(dtypes) > 1:
        raise ConfigError(
            "--fsdp-version 1 flattens the parameters of a unit into one, and these have "
            f"{' and '.join(dtypes)}: the run stops there. Use --fsdp-version 2."
        )
    if len({weights[index].trains for index in members}) > 1:
        frozen = next(weights[index].name for index in members if not weights[index].trains)
        raise ConfigError(
            f"--fsdp-version 1 is not modelled where a unit has frozen parameters ({frozen}) "
            "beside those that train: without use_orig_params the run stops there, with it "
            "gradients of both are computed. Use --fsdp-version 2, which takes each by itself."
        )
    offsets, at = [], 0
    unit = _ALIGNED_BYTES // DTYPE_BYTES[dtypes[0]] if aligned and members else 1
    for index in sorted(members):
        at = -(-at // unit) * unit
        offsets.append(at)
        at += num_elements(weights[index].shape)
    if aligned:
        at = -(-at // ranks) * ranks
    return Flat(tuple(sorted(members)), tuple(offsets), at, -(-at // ranks))


def keeps_parameters(setup: Setup) -> bool:
    """``use_orig_params``: the Trainer says yes unless told otherwise, accelerate and torch no."""
    asked = setup.distributed.fsdp_use_orig_params
    return setup.loop is Loop.TRAINER if asked is None else asked


def flat_weights(
    weights: Sequence[Weight], setup: Setup, landmarks: Landmarks
) -> tuple[Weight, ...]:
    """What the optimizer of rank 0 has: its part of every flat parameter, whole or in pieces.

    Args:
        weights: as they were traced.
        setup: of the run.
        landmarks: of the model.
    """
    ranks, original = setup.distributed.shard_ranks, keeps_parameters(setup)
    out: list[tuple[int, Weight]] = []
    place = {name: number for number, name in enumerate(landmarks.kinds)}
    for plan in units_of(setup, weights, landmarks):
        if not plan.weights:
            continue
        flat = flat_of(plan.weights, weights, ranks=ranks, aligned=original)
        first = weights[flat.weights[0]]
        dtype = stored_dtype(first, setup)
        if not original:
            trains = any(weights[index].trains for index in flat.weights)
            # modules before those inside them, as ``parameters`` has them
            order = place.get(plan.modules[0], 0)
            out.append((order, _piece(first, flat.shard_elements, dtype, trains=trains)))
            continue
        for index, offset in zip(flat.weights, flat.offsets, strict=True):
            weight = weights[index]
            size = min(num_elements(weight.shape), max(flat.shard_elements - offset, 0))
            if size:
                out.append((index, _piece(weight, size, dtype, trains=weight.trains)))
    return tuple(weight for _, weight in sorted(out, key=lambda pair: pair[0]))


def _piece(weight: Weight, elements: int, dtype: str, *, trains: bool) -> Weight:
    return replace(
        weight, shape=(elements,), stride=(1,), dtype=dtype, trains=trains,
        has_grad=trains,
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Fsdp1(Fsdp2):
    """One rank of FSDP1.

    Attributes:
        original: ``use_orig_params``: the optimizer has parameters, not flat ones.
        full_shard: parameters are given back after every forward, the root's excepted.
        prefetch: when autograd's next unit is gathered.
    """

    original: bool
    full_shard: bool
    prefetch: Prefetch
    _flats: dict[int, Flat] = field(default_factory=dict)
    _joined: dict[int, int] = field(default_factory=dict)
    _lazy: bool = True

    def __post_init__(self) -> None:
        Fsdp2.__post_init__(self)
        for number, unit in enumerate(self._units):
            if unit.plan.weights:
                self._flats[number] = flat_of(
                    unit.plan.weights, self.weights, ranks=self.ranks, aligned=self.original
                )
        if self.ranks > 1:
            self.notes.append(
                "FSDP1 records streams: what a kernel still reads is reused when the GPU is done "
                "with it; reserved is priced as if it were at once."
            )

    # -- sizes

    def _number(self, unit: Unit) -> int:
        return next(n for n, own in enumerate(self._units) if own is unit)

    def _flat(self, unit: Unit) -> Flat:
        return self._flats[self._number(unit)]

    def _compute(self, unit: Unit) -> int:
        """Bytes of an element that computes."""
        return DTYPE_BYTES[self.weights[unit.plan.weights[0]].dtype]

    def _kept(self, unit: Unit) -> int:
        """Bytes of an element that is stored."""
        return max(DTYPE_BYTES[self.stored[weight]] for weight in unit.plan.weights)

    # -- construction

    def _construct(self) -> None:
        """Unit by unit: whole, flat, cut, and let go of."""
        to = self.to
        placed = set(self._placed.values())
        for number in self._left_out:
            if number not in placed:
                to.copy(number)
        for unit in self._units:
            if not unit.plan.weights:
                continue
            flat, item = self._flat(unit), self._kept(unit)
            whole = [
                to.alloc(
                    num_elements(self.weights[w].shape) * item, Category.COMMUNICATION,
                    "fsdp: whole parameter",
                )
                for w in flat.weights
            ]  # fmt: skip
            joined = to.alloc(flat.elements * item, Category.COMMUNICATION, "fsdp: flat parameter")
            for number in whole:
                to.free(number)
            shard = to.alloc(
                flat.shard_elements * item, Category.PARAMETERS, "fsdp: shard",
                module=to.out.modules[self._placed[flat.weights[0]]],
            )  # fmt: skip
            to.free(joined)
            if self.offloads:
                to.free(shard)
                # the gradient has a place of its own beside it
                to.out.host_bytes += 2 * flat.shard_elements * item

    def _enter(self, module: str, *, fed: bool) -> None:
        if self._lazy:
            self._lazy = False
            self._initialise()
        if not self._in_backward and any(u.is_root for u in self._by_module.get(module, ())):
            self._reset_gradients()
        Fsdp2._enter(self, module, fed=fed)

    def _initialise(self) -> None:
        """``init_flat_param_attributes``: storages are made, and freed until they are needed."""
        for unit in self._in_module_order():
            if not unit.plan.weights:
                continue
            flat = self._flat(unit)
            whole = self.ranks * flat.shard_elements
            sizes = [whole * self._compute(unit)]
            if self._kept(unit) != self._compute(unit):
                sizes = [flat.shard_elements * self._compute(unit), *sizes]
                sizes.append(whole * self._kept(unit))
            for nbytes in sizes:
                self.to.free(self._alloc(nbytes, "fsdp: storage", 0))

    def zeroed(self, weight: int) -> None:
        """``zero_grad``: parameters one by one, or the flat ones, those of outer modules first."""
        if self.original:
            # the flat parameter has its own reference, which the next forward drops
            self._unit_of[weight].dropped.add(weight)
            return
        for unit in self._in_module_order():
            while unit.sharded_gradients:
                self.to.free(unit.sharded_gradients.pop())

    # -- what a unit does

    def _unshard(self, unit: Unit) -> None:
        """``_unshard``: the shard in the dtype of the forward, then the whole."""
        if unit.full or not unit.plan.weights:
            return
        flat, item = self._flat(unit), self._compute(unit)
        local = []
        if self.offloads:
            size = flat.shard_elements * self._kept(unit)
            local.append(self._alloc(size, "fsdp: shard from the host", _PRE_UNSHARD_STREAM))
        if self._kept(unit) != item:
            half = self._alloc(
                flat.shard_elements * item, "fsdp: shard in half precision", _PRE_UNSHARD_STREAM
            )
            for number in local:
                self.to.free(number)
            local = [half]
        first = flat.weights[0]
        unit.full[first] = self.to.alloc(
            self.ranks * flat.shard_elements * item, Category.COMMUNICATION,
            "fsdp: gathered parameters", module=self.to.out.modules[self._placed[first]],
            stream=_UNSHARD_STREAM,
        )  # fmt: skip
        for number in local:
            self.to.free(number)

    def _wait(self, unit: Unit) -> None:
        """Parameters are views of what was gathered."""

    def _prefetch_behind(self, unit: Unit) -> None:
        if unit.indices:
            index = unit.indices[-1]
            # one that autograd came to already needs nothing (``_needs_pre_backward_unshard``)
            if index > 0 and self._order[index - 1].state is State.IDLE:
                self._unshard(self._order[index - 1])

    def _pre_backward(self, unit: Unit) -> None:
        unit.state = State.PRE_BACKWARD
        self._unshard(unit)
        if self.prefetch is Prefetch.BACKWARD_PRE:
            self._prefetch_behind(unit)

    def _reset_gradients(self) -> None:
        """``_reset_flat_param_grad_info_if_needed``, in ``_root_pre_forward``."""
        for unit in self._in_module_order():
            trained = {w for w in unit.plan.weights if self.weights[w].has_grad}
            if trained and unit.dropped >= trained:
                while unit.sharded_gradients:
                    self.to.free(unit.sharded_gradients.pop())
                unit.dropped.clear()

    def _post_backward(self, unit: Unit) -> None:
        """The flat gradient is there (``_post_backward_hook``)."""
        unit.state = State.POST_BACKWARD
        number, flat = self._number(unit), self._flat(unit)
        computed = [w for w in flat.weights if w in self.gradients]
        added = self._join(unit, number, flat) if computed else None
        if self._syncs or self.full_shard:
            self._reshard(unit)
        if self.prefetch is Prefetch.BACKWARD_POST:
            self._prefetch_behind(unit)
        if unit.indices:
            unit.indices.pop()
        if number in self._joined and self._syncs:
            self._reduce_flat(unit, self._joined.pop(number), flat)
        if added is not None:
            # autograd has a reference until the hook has run
            self.to.free(added)

    def _join(self, unit: Unit, number: int, flat: Flat) -> int | None:
        """``split_with_sizes_backward``: what has no gradient, and padding, is zeros.

        Returns:
            The flat gradient where it is added to one that is there already.
        """
        item = self._compute(unit)
        zeros, at = [], 0
        for weight, offset in zip(flat.weights, flat.offsets, strict=True):
            elements = num_elements(self.weights[weight].shape)
            if offset > at:
                zeros.append((offset - at) * item)
            if weight not in self.gradients:
                zeros.append(elements * item)
            at = offset + elements
        if self.original and flat.elements > at:
            zeros.append((flat.elements - at) * item)
        passing = [
            self.to.alloc(nbytes, Category.TEMPORARIES, "fsdp: zeros for a flat gradient")
            for nbytes in zeros
        ]
        joined = self.to.alloc(
            flat.elements * item, Category.GRADIENTS, "fsdp: flat gradient",
            module=self.to.out.modules[self._placed[flat.weights[0]]],
        )  # fmt: skip
        for nothing in passing:
            self.to.free(nothing)
        for weight in flat.weights:
            if weight in self.gradients:
                self.consume(weight)
        if number in self._joined:
            return joined  # added to what earlier micro-steps left
        self._joined[number] = joined
        return None

    def _reduce_flat(self, unit: Unit, gradient: int, flat: Flat) -> None:
        """``_reduce_grad``."""
        to, item = self.to, self._compute(unit)
        held = [gradient]
        reduced = DTYPE_BYTES[self.reduce_dtype] if self.reduce_dtype else item
        if reduced != item:
            held.append(
                self._alloc(flat.elements * reduced, "fsdp: cast gradient", _POST_BACKWARD_STREAM)
            )
        if flat.shard_elements * self.ranks != flat.elements:
            held.append(
                self._alloc(
                    flat.shard_elements * self.ranks * reduced, "fsdp: padded gradient",
                    _POST_BACKWARD_STREAM,
                )
            )  # fmt: skip
        result = to.alloc(
            flat.shard_elements * reduced, Category.GRADIENTS, "fsdp: reduced gradients",
            stream=_POST_BACKWARD_STREAM,
        )  # fmt: skip
        if reduced != self._kept(unit):
            stream = ALL_REDUCE_STREAM if self.replicated else _POST_BACKWARD_STREAM
            cast = to.alloc(
                flat.shard_elements * self._kept(unit), Category.GRADIENTS,
                "fsdp: reduced gradients", stream=stream,
            )  # fmt: skip
            to.free(result)
            result = cast
        if self.offloads or unit.sharded_gradients:
            to.free(result)
        else:
            unit.sharded_gradients.append(result)
            unit.dropped.clear()
        for number in reversed(held):
            to.free(number)
