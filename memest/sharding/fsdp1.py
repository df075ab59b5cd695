"""FSDP1 (``FullyShardedDataParallel``): flat parameters, gathered and reduced unit by unit.

Source: ``torch/distributed/fsdp`` of torch 2.13: ``_flat_param.py`` (one flat parameter for each
unit, its padding and storages), ``_runtime_utils.py`` (unshard, reshard, prefetch, post-backward).
The hooks of modules are where those of FSDP2 are. Parameters are views of the gathered storage, so
nothing is copied out; autograd joins the gradients of a unit in one flat gradient before it is
reduced.

The views are made on the stream of the gather (``_unshard``), so autograd adds their gradients up
and joins them there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memest.config.parallelism import Fsdp, Prefetch
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.events import WARM_UP, Category, CueKind, Landmarks, Phase, Weight, plain_name
from memest.sharding.engine import DEFAULT_STREAM, num_elements
from memest.sharding.fsdp import ALL_REDUCE_STREAM, FsdpRank, FsdpUnit, State, is_inside
from memest.sharding.fsdp_units import ROOT, stored_dtype, units_of
from memest.workspaces.operator_call import DTYPE_BYTES

__all__ = ["Flat", "Fsdp1", "flat_of", "flat_weights", "keeps_whole"]

_PRE_UNSHARD_STREAM = 4
_UNSHARD_STREAM = 1
_POST_BACKWARD_STREAM = 2
_SUM = "aten.add.Tensor"
_FULL_ITEM = DTYPE_BYTES["float32"]
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
        frozen_name = next(weights[index].name for index in members if not weights[index].trains)
        trained_name = next(weights[index].name for index in members if weights[index].trains)
        raise ConfigError(
            f"--fsdp-version 1 is not modelled where a unit has frozen parameters ({frozen_name}) "
            f"beside those that train ({trained_name}): without use_orig_params the run stops "
            "there, with it gradients of both are computed. Use --fsdp-version 2, which takes each "
            "by itself."
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


def keeps_whole(setup: Setup) -> bool:
    """``NO_SHARD``: asked for, or what FSDP1 makes of any strategy where there is one GPU."""
    distributed = setup.distributed
    return distributed.fsdp is Fsdp.NO_SHARD or distributed.shard_ranks == 1


def flat_weights(
    weights: Sequence[Weight], setup: Setup, landmarks: Landmarks
) -> tuple[Weight, ...]:
    """What the optimizer of rank 0 has: its part of every flat parameter, whole or in pieces.

    Args:
        weights: as they were traced.
        setup: of the run.
        landmarks: of the model.
    """
    ranks, use_orig_params = setup.distributed.shard_ranks, setup.keeps_parameters
    out: list[tuple[int, Weight]] = []
    place = {name: number for number, name in enumerate(landmarks.kinds)}
    for plan in units_of(setup, weights, landmarks):
        if not plan.weights:
            continue
        flat = flat_of(plan.weights, weights, ranks=ranks, aligned=use_orig_params)
        first = weights[flat.weights[0]]
        dtype = stored_dtype(first, setup)
        elements = flat.elements if keeps_whole(setup) else flat.shard_elements
        if not use_orig_params:
            trains = any(weights[index].trains for index in flat.weights)
            # modules before those inside them, as ``parameters`` has them
            order = place.get(plan.modules[0], 0)
            # nobody finds a parameter of the model in it, by name or by identity
            weight = replace(first, name=f"{plan.modules[0]}._flat_param".lstrip("."))
            out.append((order, _piece(weight, elements, dtype, trains=trains)))
            continue
        for index, offset in zip(flat.weights, flat.offsets, strict=True):
            weight = weights[index]
            size = min(num_elements(weight.shape), max(elements - offset, 0))
            if size:
                out.append((index, _piece(weight, size, dtype, trains=weight.trains)))
    return tuple(weight for _, weight in sorted(out, key=lambda pair: pair[0]))


def _piece(weight: Weight, elements: int, dtype: str, *, trains: bool) -> Weight:
    return replace(
        weight,
        shape=(elements,),
        stride=(1,),
        dtype=dtype,
        trains=trains,
        has_grad=trains,
    )


@dataclass(slots=True, kw_only=True)
class Fsdp1(FsdpRank):
    """One rank of FSDP1.

    Attributes:
        use_orig_params: as for the library: the optimizer has parameters, not flat ones.
        full_shard: parameters are given back after every forward, the root's excepted.
        prefetch: when autograd's next unit is gathered.
        keeps_whole: ``NO_SHARD``: nothing is cut, and nothing gathered.
        reentrant: layers are recomputed by reentrant checkpoints: what lies in them has no hooks
            for backward before the recomputation.
        reduces_in_full: gradients are reduced in float32, whatever computes (``reduce_dtype``).
    """

    use_orig_params: bool
    full_shard: bool
    prefetch: Prefetch
    keeps_whole: bool = False
    reentrant: bool = False
    reduces_in_full: bool = False
    _flats: dict[FsdpUnit, Flat] = field(default_factory=dict)
    _flat_gradients: dict[FsdpUnit, int] = field(default_factory=dict)
    _lazy: bool = True
    _warm_up: int | None = None
    _order_index: dict[FsdpUnit, int] = field(default_factory=dict)
    _hooked_units: set[FsdpUnit] = field(default_factory=set)
    _leaving_units: list[FsdpUnit] = field(default_factory=list)
    _inner_units: set[FsdpUnit] = field(default_factory=set)
    _used_units: set[FsdpUnit] = field(default_factory=set)

    def __post_init__(self) -> None:
        FsdpRank.__post_init__(self)
        trained_names = [
            weight.name for weight in self.weights if weight.trains and weight.has_grad
        ]
        for unit in self.units:
            if unit.plan.weights:
                self._flats[unit] = flat_of(
                    unit.plan.weights, self.weights, ranks=self.ranks, aligned=self.use_orig_params
                )
            path = unit.plan.modules[0]
            if any(around in self._units_at for around in _prefixes(path)[:-1]):
                self._inner_units.add(unit)
            if path == ROOT or any(name.startswith(f"{path}.") for name in trained_names):
                self._used_units.add(unit)
        if self.ranks > 1 and not self.keeps_whole:
            self.notes.append(
                "FSDP1 records streams: what a kernel still reads is reused when the GPU is done "
                "with it; reserved is priced as if it were at once."
            )

    # -- sizes

    def _computed_item(self, unit: FsdpUnit) -> int:
        """Bytes of an element that computes."""
        return DTYPE_BYTES[self.weights[unit.plan.weights[0]].dtype]

    def _stored_item(self, unit: FsdpUnit) -> int:
        """Bytes of an element that is stored."""
        return max(DTYPE_BYTES[self.stored_dtypes[weight]] for weight in unit.plan.weights)

    def _rank_elements(self, unit: FsdpUnit) -> int:
        """Elements that a rank has of a unit."""
        flat = self._flats[unit]
        return flat.elements if self.keeps_whole else flat.shard_elements

    # -- construction

    def allocates(self, number: int) -> bool:
        """See :meth:`Wrapper.allocates`; nothing is loaded onto the device but to be quantized."""
        loads = self.to.phase is Phase.LOAD and not self.on_device
        if loads and self.to.label(number) == WARM_UP:
            self._warm_up = number
            return False
        return FsdpRank.allocates(self, number)

    def frees(self, number: int) -> bool:
        """See :meth:`Wrapper.frees`."""
        if number == self._warm_up:
            self._warm_up = None
            return False
        return FsdpRank.frees(self, number)

    def construct(self) -> None:
        """Unit by unit: whole, flat, cut, and let go of.

        ``_move_module_to_device`` goes through the modules level by level. What was flattened is
        let go of behind the cut: with ``use_orig_params`` as each parameter becomes a view of the
        shard, without as the list of them ends.
        """
        to = self.to
        for unit, flat in self._flats.items():
            item = self._stored_item(unit)
            by_level = sorted(flat.weights, key=lambda w: (self.weights[w].name.count("."), w))
            places = {weight: self.whole(weight) for weight in by_level}
            whole = [places[weight] for weight in flat.weights]
            if not self.use_orig_params:
                whole.reverse()
            label = "fsdp: flat parameter"
            module = self.module_of(flat.weights[0])
            if self.keeps_whole:
                parameter = to.alloc(
                    flat.elements * item, Category.PARAMETERS, label, module=module
                )
            else:
                flat_buffer = to.alloc(flat.elements * item, Category.COMMUNICATION, label)
            nbytes = self._rank_elements(unit) * item
            if not self.keeps_whole:
                parameter = to.alloc(nbytes, Category.PARAMETERS, "fsdp: shard", module=module)
                to.free(flat_buffer)
            to.free(*whole)
            if self.offloads:
                to.free(parameter)
                # the gradient has a place of its own beside it
                to.out.host_bytes += 2 * nbytes

    def _initialise(self) -> None:
        """``init_flat_param_attributes``: storages are made, and freed until they are needed."""
        for unit in self.in_module_order():
            if not unit.plan.weights:
                continue
            computed_item, stored_item = self._computed_item(unit), self._stored_item(unit)
            gathered_elements = self.ranks * self._flats[unit].shard_elements
            sizes = [] if self.keeps_whole else [gathered_elements * computed_item]
            if stored_item != computed_item:
                sizes.insert(0, self._rank_elements(unit) * computed_item)
                if not self.keeps_whole:
                    sizes.append(gathered_elements * stored_item)
            for nbytes in sizes:
                self.to.free(self.alloc_buffer(nbytes, "fsdp: storage", DEFAULT_STREAM))

    # -- hooks of modules

    def leaves(self, phase: Phase) -> None:
        """See :meth:`Wrapper.leaves`."""
        if self.keeps_whole and phase is Phase.FORWARD:
            for unit in self._units_at.get(ROOT, ()):
                self.reshard(unit)

    def enter(self, module: str, *, fed: bool) -> None:
        """``_pre_forward``; where layers are recomputed, units inside them have it once more.

        The checkpoint lies inside a layer's own unit: autograd has come to that before.
        """
        if self._lazy:
            self._lazy = False
            self._initialise()
        for unit in self._units_at.get(module, ()):
            if unit.state is State.PRE_BACKWARD:
                continue
            if self.in_backward and unit not in self._inner_units:
                self._pre_backward(unit)
                continue
            if unit.is_root:
                self._drop_zeroed()
            unit.state = State.FORWARD
            self.gather(unit)
            # the hook behind a gradient is there in any case, else there is one on the inputs
            unit.fed_by = module if fed or self._trains(unit) else None
            if fed:
                self._used_units.add(unit)

    def leave(self, module: str) -> None:
        """``_post_forward``."""
        for unit in self._units_at.get(module, ()):
            if unit.state is not State.FORWARD:
                continue
            # accelerate's conversion of the outputs comes before this hook of the root
            ends = not (unit.is_root and self.to.phase is Phase.FORWARD)
            if unit.plan.reshards or (self.keeps_whole and ends):
                self.reshard(unit)
            if unit.plan.weights:
                # a place that is not the first is kept (``record_post_forward``)
                if not self._order_index.get(unit):
                    self._order_index[unit] = len(self._order)
                self._order.append(unit)
            hidden = self.reentrant and not self.in_backward and unit in self._inner_units
            if unit in self._used_units and not hidden:
                self._hooked_units.add(unit)
            unit.state = State.IDLE

    def autograd_at(self, module: str) -> None:
        """Hooks of outputs, of flat gradients and of inputs."""
        if not self.has_begun:
            self.has_begun = True
            self._drop_zeroed()
            for unit in self._units_at.get(ROOT, ()):
                self._pre_backward(unit)
        frozen = []
        for unit in reversed(list(self._leaving_units)):
            assert unit.fed_by is not None
            if is_inside(module, unit.fed_by) or not self._is_complete(unit):
                continue
            self._leaving_units.remove(unit)
            unit.fed_by = None
            if self._trains(unit):
                self._post_backward(unit)
            else:
                frozen.append(unit)
        for path in _prefixes(module):
            for unit in self._units_at.get(path, ()):
                if unit.state is State.IDLE and unit in self._hooked_units:
                    self._pre_backward(unit)
                if unit.fed_by is not None and unit not in self._leaving_units:
                    self._leaving_units.append(unit)
        for unit in frozen:
            # the hook on its inputs, behind that on the outputs of the unit that they come from
            self._post_backward(unit)

    def _drop_zeroed(self) -> None:
        """``_reset_flat_param_grad_info_if_needed``, as a forward begins and as a backward does."""
        for unit in self.in_module_order():
            self.drop_if_zeroed(unit)

    def _trains(self, unit: FsdpUnit) -> bool:
        return any(self.weights[weight].trains for weight in unit.plan.weights)

    def _is_complete(self, unit: FsdpUnit) -> bool:
        """Whether its flat gradient is there: what is used twice has both."""
        return all(
            weight in self.gradients
            for weight in unit.plan.weights
            if self.weights[weight].trains and self.weights[weight].has_grad
        )

    def zero_grad(self, weight: int) -> None:
        """``zero_grad``: parameters one by one, or the flat ones, those of outer modules first."""
        if self.use_orig_params:
            # the flat parameter has its own reference, which the next forward or backward drops
            self._unit_of[weight].dropped_gradients.add(weight)
            return
        for unit in self.in_module_order():
            self.drop_gradient(unit)

    # -- what a unit does

    def gather(self, unit: FsdpUnit) -> None:
        """``_unshard``: the shard in the dtype of the forward, then the whole."""
        if unit.full or not unit.plan.weights:
            return
        computed_item, stored_item = self._computed_item(unit), self._stored_item(unit)
        elements, first = self._rank_elements(unit), self._flats[unit].weights[0]
        shard = None
        if self.offloads:
            label = "fsdp: shard from the host"
            shard = self.alloc_buffer(elements * stored_item, label, _PRE_UNSHARD_STREAM)
        if stored_item != computed_item:
            label = "fsdp: shard in half precision"
            half = self.alloc_buffer(elements * computed_item, label, _PRE_UNSHARD_STREAM)
            if shard is not None:
                self.to.free(shard)
            shard = half
        if self.keeps_whole:
            # what there is is what computes
            if shard is not None:
                unit.full[first] = shard
            return
        unit.full[first] = self.to.alloc(
            self.ranks * elements * computed_item,
            Category.COMMUNICATION,
            "fsdp: gathered parameters",
            module=self.module_of(first),
            stream=_UNSHARD_STREAM,
        )
        if shard is not None:
            self.to.free(shard)

    def cue(self, kind: CueKind, index: int, number: int) -> None:
        """See :meth:`Wrapper.cue`; gradients of what is used twice are added where they are joined.

        ``InputBuffer::add`` adds on the stream of the node that takes them.
        """
        is_gradient = kind is CueKind.GRADIENT and number >= 0
        if is_gradient and plain_name(self.to.label(number)) == _SUM:
            self.to.move(number, _UNSHARD_STREAM)
        FsdpRank.cue(self, kind, index, number)

    def _prefetch_behind(self, unit: FsdpUnit) -> None:
        """``get_handle_to_backward_prefetch``: who came before it in the order of forwards."""
        index = self._order_index.get(unit)
        if index:
            before = self._order[index - 1]
            if before in self._hooked_units:
                self.gather(before)

    def _pre_backward(self, unit: FsdpUnit) -> None:
        unit.state = State.PRE_BACKWARD
        self.gather(unit)
        self._hooked_units.discard(unit)
        if self.prefetch is Prefetch.BACKWARD_PRE:
            self._prefetch_behind(unit)

    def _post_backward(self, unit: FsdpUnit) -> None:
        """The flat gradient is there (``_post_backward_hook``)."""
        unit.state = State.POST_BACKWARD
        gradient_weights = [w for w in unit.plan.weights if w in self.gradients]
        flat_gradient = self._join(unit) if gradient_weights else None
        if self._reshards:
            self.reshard(unit)
        if self.prefetch is Prefetch.BACKWARD_POST:
            self._prefetch_behind(unit)
        if unit in self._flat_gradients and self.syncs:
            self._reduce(unit, self._flat_gradients.pop(unit))
        if flat_gradient is not None:
            # autograd has a reference until the hook has run
            self.to.free(flat_gradient)

    @property
    def _reshards(self) -> bool:
        """Parameters are given back behind this backward."""
        return self.syncs or self.full_shard or self.keeps_whole

    def _join(self, unit: FsdpUnit) -> int | None:
        """``split_with_sizes_backward``: what has no gradient, and padding, is zeros.

        Returns:
            The flat gradient where it is added to one that is there already.
        """
        flat, item, gradients = self._flats[unit], self._computed_item(unit), self.gradients
        zeros, at = [], 0
        for weight, offset in zip(flat.weights, flat.offsets, strict=True):
            elements = num_elements(self.weights[weight].shape)
            if offset > at:
                zeros.append((offset - at) * item)
            if weight not in gradients:
                zeros.append(elements * item)
            at = offset + elements
        if self.use_orig_params and flat.elements > at:
            zeros.append((flat.elements - at) * item)
        zero_buffers = [
            self.to.alloc(
                nbytes,
                Category.TEMPORARIES,
                "fsdp: zeros for a flat gradient",
                stream=_UNSHARD_STREAM,
            )
            for nbytes in zeros
        ]
        flat_gradient = self.to.alloc(
            flat.elements * item,
            Category.GRADIENTS,
            "fsdp: flat gradient",
            module=self.module_of(flat.weights[0]),
            stream=_UNSHARD_STREAM,
        )
        self.to.free(*zero_buffers)
        for weight in flat.weights:
            self.take_gradient(weight)
        # added to what earlier micro-steps left, or, whole, reduced where it lies after each
        if unit in self._flat_gradients or (self.keeps_whole and unit.sharded_gradient is not None):
            return flat_gradient
        self._flat_gradients[unit] = flat_gradient
        return None

    def _reduce(self, unit: FsdpUnit, gradient: int) -> None:
        """``_reduce_grad``; ``_reduce_grad_no_shard`` reduces where the gradient is."""
        computed_item, stored_item = self._computed_item(unit), self._stored_item(unit)
        flat, buffers, result = self._flats[unit], [gradient], gradient
        in_full: list[int] = []
        if self.reduces_in_full and computed_item != _FULL_ITEM:
            # beside autograd's own, to which the hook has a name
            computed_item = _FULL_ITEM
            result = self._alloc_reduced(flat.elements * computed_item, _POST_BACKWARD_STREAM)
            in_full = [gradient if self.keeps_whole else result]
        if not self.keeps_whole:
            gathered_elements = flat.shard_elements * self.ranks
            if gathered_elements != flat.elements:
                nbytes = gathered_elements * computed_item
                buffers.append(
                    self.alloc_buffer(nbytes, "fsdp: padded gradient", _POST_BACKWARD_STREAM)
                )
            result = self._alloc_reduced(flat.shard_elements * computed_item, _POST_BACKWARD_STREAM)
        if computed_item != stored_item:
            stream = ALL_REDUCE_STREAM if self.replicated else _POST_BACKWARD_STREAM
            if self.keeps_whole:
                stream = _POST_BACKWARD_STREAM
            cast = self._alloc_reduced(self._rank_elements(unit) * stored_item, stream)
            self.to.free(result)
            result = cast
        self.to.free(*in_full)
        if self.keeps_whole:
            self.keep_gradient(unit, result)
            return
        if self.offloads or unit.sharded_gradient is not None:
            self.to.free(result)
        else:
            self.keep_gradient(unit, result)
        self.to.free(*reversed(buffers))

    def _alloc_reduced(self, nbytes: int, stream: int) -> int:
        return self.to.alloc(nbytes, Category.GRADIENTS, "fsdp: reduced gradients", stream=stream)

    def end_backward(self) -> None:
        """``_post_backward_final_callback``; no hook came for inputs without gradients."""
        if not self.has_begun:
            return
        self.has_begun = False
        self._leaving_units.clear()
        for unit in self.in_module_order():
            done = unit.state is State.POST_BACKWARD or not unit.plan.weights
            if not done and any(weight in self.gradients for weight in unit.plan.weights):
                self._post_backward(unit)
            elif unit.full and self._reshards:
                self.reshard(unit)
            unit.state = State.IDLE
            unit.fed_by = None
        self._hooked_units.clear()
        self._order_index.clear()
        self._order.clear()


def _prefixes(module: str) -> list[str]:
    """A path and those around it, the outermost first; the root is not among them."""
    parts = module.split(".") if module else []
    return [".".join(parts[: n + 1]) for n in range(len(parts))]
