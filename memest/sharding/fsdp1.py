"""FSDP1 (``FullyShardedDataParallel``): flat parameters, gathered and reduced unit by unit.

Source: ``torch/distributed/fsdp`` of torch 2.13: ``_flat_param.py`` (one flat parameter for each
unit, its padding and storages), ``_runtime_utils.py`` (unshard, reshard, prefetch, post-backward).
The hooks of modules are where those of FSDP2 are. Parameters are views of the gathered storage, so
nothing is copied out; autograd joins the gradients of a unit in one flat gradient before it is
reduced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memest.distributed import Prefetch
from memest.events import WARM_UP, Category, Phase
from memest.hidden.call import DTYPE_BYTES
from memest.sharding.flat import Flat, flat_of
from memest.sharding.fsdp import ALL_REDUCE_STREAM, Fsdp2, State, Unit
from memest.sharding.shards import num_elements

__all__ = ["Fsdp1"]

_ROOT = ""
_PRE_UNSHARD_STREAM = 4
_UNSHARD_STREAM = 1
_POST_BACKWARD_STREAM = 2


@dataclass(slots=True, kw_only=True)
class Fsdp1(Fsdp2):
    """One rank of FSDP1.

    Attributes:
        original: ``use_orig_params``: the optimizer has parameters, not flat ones.
        full_shard: parameters are given back after every forward, the root's excepted.
        prefetch: when autograd's next unit is gathered.
        whole: ``NO_SHARD``: nothing is cut, and nothing gathered.
        reentrant: layers are recomputed by reentrant checkpoints: what lies in them has no hooks
            for backward before the recomputation.
    """

    original: bool
    full_shard: bool
    prefetch: Prefetch
    whole: bool = False
    reentrant: bool = False
    _flats: dict[Unit, Flat] = field(default_factory=dict)
    _joined: dict[Unit, int] = field(default_factory=dict)
    _lazy: bool = True
    _warm: int | None = None
    _ordered: list[Unit] = field(default_factory=list)
    _place: dict[Unit, int] = field(default_factory=dict)
    _needs: set[Unit] = field(default_factory=set)
    _leaving: list[Unit] = field(default_factory=list)
    _inner: set[Unit] = field(default_factory=set)
    _used: set[Unit] = field(default_factory=set)

    def __post_init__(self) -> None:
        Fsdp2.__post_init__(self)
        for unit in self._units:
            if unit.plan.weights:
                self._flats[unit] = flat_of(
                    unit.plan.weights, self.weights, ranks=self.ranks, aligned=self.original
                )
        trained = [weight.name for weight in self.weights if weight.trains and weight.has_grad]
        for unit in self._units:
            path = unit.plan.modules[0]
            if any(around in self._by_module for around in _prefixes(path)[:-1]):
                self._inner.add(unit)
            if path == _ROOT or any(name.startswith(f"{path}.") for name in trained):
                self._used.add(unit)
        if self.ranks > 1 and not self.whole:
            self.notes.append(
                "FSDP1 records streams: what a kernel still reads is reused when the GPU is done "
                "with it; reserved is priced as if it were at once."
            )

    # -- sizes

    def _compute(self, unit: Unit) -> int:
        """Bytes of an element that computes."""
        return DTYPE_BYTES[self.weights[unit.plan.weights[0]].dtype]

    def _kept(self, unit: Unit) -> int:
        """Bytes of an element that is stored."""
        return max(DTYPE_BYTES[self.stored[weight]] for weight in unit.plan.weights)

    def _in_module_order(self) -> list[Unit]:
        if not self._ordered:
            self._ordered = Fsdp2._in_module_order(self)
        return self._ordered

    # -- construction

    def allocates(self, number: int) -> bool:
        """See :meth:`Wrapper.allocates`; nothing is loaded onto the device but to be quantised."""
        loads = self.to.phase is Phase.LOAD and not self.on_device
        if loads and self.to.out.label_names[self.to.out.labels[number]] == WARM_UP:
            self._warm = number
            return False
        return Fsdp2.allocates(self, number)

    def frees(self, number: int) -> bool:
        """See :meth:`Wrapper.frees`."""
        if number == self._warm:
            self._warm = None
            return False
        return Fsdp2.frees(self, number)

    def _construct(self) -> None:
        """Unit by unit: whole, flat, cut, and let go of."""
        to = self.to
        self.copy_unplaced()
        for unit in self._units:
            if not unit.plan.weights:
                continue
            flat, item = self._flats[unit], self._kept(unit)
            whole = [self._whole(weight) for weight in flat.weights]
            label = "fsdp: flat parameter"
            module = self.module_of(flat.weights[0])
            if self.whole:
                joined = to.alloc(flat.elements * item, Category.PARAMETERS, label, module=module)
            else:
                joined = to.alloc(flat.elements * item, Category.COMMUNICATION, label)
            for number in whole:
                to.free(number)
            held = flat.elements
            if not self.whole:
                held = flat.shard_elements
                shard = to.alloc(held * item, Category.PARAMETERS, "fsdp: shard", module=module)
                to.free(joined)
                joined = shard
            if self.offloads:
                to.free(joined)
                # the gradient has a place of its own beside it
                to.out.host_bytes += 2 * held * item

    def _initialise(self) -> None:
        """``init_flat_param_attributes``: storages are made, and freed until they are needed."""
        for unit in self._in_module_order():
            if not unit.plan.weights:
                continue
            flat = self._flats[unit]
            full, part = self.ranks * flat.shard_elements, flat.shard_elements
            casts = self._kept(unit) != self._compute(unit)
            sizes = [] if self.whole else [full * self._compute(unit)]
            if casts:
                sizes.insert(0, (flat.elements if self.whole else part) * self._compute(unit))
            if casts and not self.whole:
                sizes.append(full * self._kept(unit))
            for nbytes in sizes:
                self.to.free(self._alloc(nbytes, "fsdp: storage", 0))

    # -- hooks of modules

    def leaves(self, phase: Phase) -> None:
        """See :meth:`Wrapper.leaves`."""
        if self.whole and phase is Phase.FORWARD:
            for unit in self._by_module.get(_ROOT, ()):
                self._reshard(unit)

    def _enter(self, module: str, *, fed: bool) -> None:
        """``_pre_forward``; where layers are recomputed, units inside them have it once more.

        The checkpoint lies inside a layer's own unit: autograd has come to that before.
        """
        if self._lazy:
            self._lazy = False
            self._initialise()
        for unit in self._by_module.get(module, ()):
            if unit.state is State.PRE_BACKWARD:
                continue
            if self._in_backward and unit not in self._inner:
                self._pre_backward(unit)
                continue
            if unit.is_root:
                self._reset_gradients()
            unit.state = State.FORWARD
            self._unshard(unit)
            # the hook behind a gradient is there in any case, else there is one on the inputs
            unit.fed_by = module if fed or self._trains(unit) else None
            unit.reached = False
            if fed:
                self._used.add(unit)

    def _leave(self, module: str) -> None:
        """``_post_forward``."""
        for unit in self._by_module.get(module, ()):
            if unit.state is not State.FORWARD:
                continue
            # accelerate's conversion of the outputs comes before this hook of the root
            ends = not (unit.is_root and self.to.phase is Phase.FORWARD)
            if unit.plan.reshards or (self.whole and ends):
                self._reshard(unit)
            if unit.plan.weights:
                # a place that is not the first is kept (``record_post_forward``)
                if not self._place.get(unit):
                    self._place[unit] = len(self._order)
                self._order.append(unit)
            hidden = self.reentrant and not self._in_backward and unit in self._inner
            if unit in self._used and not hidden:
                self._needs.add(unit)
            unit.state = State.IDLE

    def _autograd_at(self, module: str) -> None:
        if not self._began:
            self._began = True
            for unit in self._by_module.get(_ROOT, ()):
                self._pre_backward(unit)
        frozen = []
        for unit in reversed(list(self._leaving)):
            assert unit.fed_by is not None
            if self._is_inside(module, unit.fed_by) or not self._complete(unit):
                continue
            self._leaving.remove(unit)
            unit.fed_by = None
            if self._trains(unit):
                self._post_backward(unit)
            else:
                frozen.append(unit)
        for path in _prefixes(module):
            for unit in self._by_module.get(path, ()):
                if unit.state is State.IDLE and unit in self._needs:
                    self._pre_backward(unit)
                if unit.fed_by is not None and unit not in self._leaving:
                    self._leaving.append(unit)
        for unit in frozen:
            # the hook on its inputs, behind that on the outputs of the unit that they come from
            self._post_backward(unit)

    def _trains(self, unit: Unit) -> bool:
        return any(self.weights[weight].trains for weight in unit.plan.weights)

    @staticmethod
    def _is_inside(module: str, outer: str) -> bool:
        return outer == _ROOT or module == outer or module.startswith(f"{outer}.")

    def _complete(self, unit: Unit) -> bool:
        """Whether its flat gradient is there: what is used twice has both."""
        return all(
            weight in self.gradients
            for weight in unit.plan.weights
            if self.weights[weight].trains and self.weights[weight].has_grad
        )

    # -- gradients

    def zeroed(self, weight: int) -> None:
        """``zero_grad``: parameters one by one, or the flat ones, those of outer modules first."""
        if self.original:
            # the flat parameter has its own reference, which the next forward drops
            self._unit_of[weight].dropped.add(weight)
            return
        for unit in self._in_module_order():
            while unit.sharded_gradients:
                self.to.free(unit.sharded_gradients.pop())

    def _reset_gradients(self) -> None:
        """``_reset_flat_param_grad_info_if_needed``, in ``_root_pre_forward``."""
        for unit in self._in_module_order():
            trained = {w for w in unit.plan.weights if self.weights[w].has_grad}
            if trained and unit.dropped >= trained:
                while unit.sharded_gradients:
                    self.to.free(unit.sharded_gradients.pop())
                unit.dropped.clear()

    # -- what a unit does

    def _unshard(self, unit: Unit) -> None:
        """``_unshard``: the shard in the dtype of the forward, then the whole."""
        if unit.full or not unit.plan.weights:
            return
        flat, item = self._flats[unit], self._compute(unit)
        first, held, local = flat.weights[0], flat.shard_elements, []
        if self.whole:
            held = flat.elements
        if self.offloads:
            size = held * self._kept(unit)
            local.append(self._alloc(size, "fsdp: shard from the host", _PRE_UNSHARD_STREAM))
        if self._kept(unit) != item:
            half = self._alloc(held * item, "fsdp: shard in half precision", _PRE_UNSHARD_STREAM)
            for number in local:
                self.to.free(number)
            local = [half]
        if self.whole:
            # what there is is what computes
            if local:
                unit.full[first] = local.pop()
            return
        unit.full[first] = self.to.alloc(
            self.ranks * flat.shard_elements * item, Category.COMMUNICATION,
            "fsdp: gathered parameters", module=self.module_of(first),
            stream=_UNSHARD_STREAM,
        )  # fmt: skip
        for number in local:
            self.to.free(number)

    def _wait(self, unit: Unit) -> None:
        """Parameters are views of what was gathered."""

    def _prefetch_behind(self, unit: Unit) -> None:
        """``get_handle_to_backward_prefetch``: who came before it in the order of forwards."""
        index = self._place.get(unit)
        if index:
            before = self._order[index - 1]
            if before in self._needs:
                self._unshard(before)

    def _pre_backward(self, unit: Unit) -> None:
        unit.state = State.PRE_BACKWARD
        self._unshard(unit)
        self._needs.discard(unit)
        if self.prefetch is Prefetch.BACKWARD_PRE:
            self._prefetch_behind(unit)

    def _post_backward(self, unit: Unit) -> None:
        """The flat gradient is there (``_post_backward_hook``)."""
        unit.state = State.POST_BACKWARD
        flat = self._flats[unit]
        computed = [w for w in flat.weights if w in self.gradients]
        added = self._join(unit, flat) if computed else None
        if self._syncs or self.full_shard or self.whole:
            self._reshard(unit)
        if self.prefetch is Prefetch.BACKWARD_POST:
            self._prefetch_behind(unit)
        if unit in self._joined and self._syncs:
            self._reduce_flat(unit, self._joined.pop(unit), flat)
        if added is not None:
            # autograd has a reference until the hook has run
            self.to.free(added)

    def _join(self, unit: Unit, flat: Flat) -> int | None:
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
            module=self.module_of(flat.weights[0]),
        )  # fmt: skip
        for nothing in passing:
            self.to.free(nothing)
        for weight in flat.weights:
            if weight in self.gradients:
                self.consume(weight)
        if unit in self._joined:
            return joined  # added to what earlier micro-steps left
        if self.whole and unit.sharded_gradients:
            # reduced where it lies, after every micro-step
            return joined
        self._joined[unit] = joined
        return None

    def _reduce_flat(self, unit: Unit, gradient: int, flat: Flat) -> None:
        """``_reduce_grad``."""
        to, item = self.to, self._compute(unit)
        if self.whole:
            self._keep_flat(unit, gradient, flat)
            return
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

    def _keep_flat(self, unit: Unit, gradient: int, flat: Flat) -> None:
        """``_reduce_grad_no_shard``: reduced where it is, and made what the parameter is."""
        if self._kept(unit) != self._compute(unit):
            cast = self.to.alloc(
                flat.elements * self._kept(unit), Category.GRADIENTS, "fsdp: reduced gradients",
                stream=_POST_BACKWARD_STREAM,
            )  # fmt: skip
            self.to.free(gradient)
            gradient = cast
        unit.sharded_gradients.append(gradient)
        unit.dropped.clear()

    def _final_callback(self) -> None:
        """``_post_backward_final_callback``; no hook came for inputs without gradients."""
        if not self._began:
            return
        self._began = False
        self._leaving.clear()
        for unit in self._in_module_order():
            done = unit.state is State.POST_BACKWARD or not unit.plan.weights
            if not done and any(weight in self.gradients for weight in unit.plan.weights):
                self._post_backward(unit)
            elif unit.full and (self._syncs or self.full_shard or self.whole):
                self._reshard(unit)
            unit.state = State.IDLE
            unit.fed_by = None
        self._needs.clear()
        self._place.clear()
        self._order.clear()


def _prefixes(module: str) -> list[str]:
    """A path and those around it, the outermost first; the root is not among them."""
    parts = module.split(".") if module else []
    return [".".join(parts[: n + 1]) for n in range(len(parts))]
