"""FSDP2 (``fully_shard``): the state machine of its hooks, with allocations for its tensors.

Source: ``torch/distributed/fsdp/_fully_shard`` of torch 2.13: ``_fsdp_state.py`` (hooks of modules,
the final callback), ``_fsdp_param_group.py`` (unshard, wait, reshard, post-backward, prefetch),
``_fsdp_collectives.py`` (buffers), ``_fsdp_param.py`` (shards). Names here are those there; what
2.15 does otherwise was read in the same files.

What is freed later than its last use is freed where the library lets go of its reference: the
gathered buffer of a forward with the next gather, the input of a reduce-scatter with the
post-backward of the next unit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from memest.config.rollouts import Engine
from memest.events import Category, CueKind, Mark, Phase
from memest.sharding.engine import DEFAULT_STREAM, weight_bytes
from memest.sharding.fsdp import ALL_REDUCE_STREAM, FsdpRank, FsdpUnit, State, is_inside
from memest.sharding.fsdp_units import ROOT, padded_elements
from memest.workspaces.operator_call import DTYPE_BYTES

__all__ = ["Fsdp2", "StageFsdp2"]

_COPY_IN_STREAM = 1
_REDUCE_SCATTER_STREAM = 2
_LETS_GO = (2, 15)
"""First torch that lets go of what was copied out before the next copies, of the last gradient with
the others, and of what was gathered for nothing behind the last unit's backward."""
_HANDED_OUT = "fsdp: whole weight for the engine"
_MERGED = "peft: change by adapters"
_OF_ADAPTERS = re.compile(r"\.lora_|\.original_module\.")
"""Parts of adapted models that an engine does not get."""


@dataclass(slots=True, kw_only=True)
class Fsdp2(FsdpRank):
    """One rank of FSDP2.

    Attributes:
        tensor_ranks: that share layers by tensor parallelism; ``weights`` are what one of them has.
        reduce_dtype: of gradients while they are reduced; empty for the dtype that computes.
        gather_stream: where buffers of gathers are made.
        torch: (major, minor) of the release whose code runs.
        writer: who writes the completions that a step learns from; None where nobody does.
        is_last_backward: backwards give parameters back, and end what is under way
            (``set_is_last_backward``, ``set_reshard_after_backward``).
    """

    tensor_ranks: int = 1
    reduce_dtype: str = ""
    gather_stream: int = _COPY_IN_STREAM
    torch: tuple[int, int] = (2, 13)
    writer: Engine | None = None
    is_last_backward: bool = True
    _copied_buffer: int | None = None
    _reduce_inputs: list[int] = field(default_factory=list)
    _all_reduce_buffers: dict[FsdpUnit, list[int]] = field(default_factory=dict)
    _rank_parts: dict[int, int] = field(default_factory=dict)
    _on_host: set[FsdpUnit] = field(default_factory=set)
    _forward_root: FsdpUnit | None = None
    _makes_graph: bool = True
    _called_units: set[FsdpUnit] = field(default_factory=set)
    _awaited_modules: dict[FsdpUnit, set[str]] = field(default_factory=dict)
    _ended_by_root: list[FsdpUnit] = field(default_factory=list)
    _indices: dict[FsdpUnit, list[int]] = field(default_factory=dict)
    _reached_units: set[FsdpUnit] = field(default_factory=set)
    _around: dict[str, list[FsdpUnit]] = field(default_factory=dict)

    # -- sizes

    def _ranks(self, unit: FsdpUnit) -> int:
        return unit.plan.ranks or self.ranks

    def _shard_bytes(self, weight: int, dtype: str) -> int:
        ranks = self._ranks(self._unit_of[weight])
        return padded_elements(self.weights[weight], ranks) * DTYPE_BYTES[dtype]

    def _computed_bytes(self, weight: int) -> int:
        """Of a shard in the dtype that computes."""
        return self._shard_bytes(weight, self.weights[weight].dtype)

    def _stored_bytes(self, weight: int) -> int:
        """Of a shard in the dtype that it is stored in."""
        return self._shard_bytes(weight, self.stored_dtypes[weight])

    def _reduced_dtype(self, weight: int) -> str:
        return self.reduce_dtype or self.weights[weight].dtype

    def _reduced_bytes(self, weight: int) -> int:
        """Of the gradient of a shard in the dtype that is reduced."""
        return self._shard_bytes(weight, self._reduced_dtype(weight))

    def _full_bytes(self, weight: int) -> int:
        return self._ranks(self._unit_of[weight]) * self._computed_bytes(weight)

    def _casts(self, weight: int) -> bool:
        return self.stored_dtypes[weight] != self.weights[weight].dtype

    # -- construction

    def construct(self) -> None:
        """``fully_shard``, unit by unit: whole on the device, cut, and let go of."""
        to = self.to
        for unit in self.units:
            whole = [self.whole(weight) for weight in unit.plan.weights]
            for weight in unit.plan.weights:
                nbytes = self._stored_bytes(weight)
                module = self.module_of(weight)
                shard = to.alloc(nbytes, self.kept_as, "fsdp: shard", module=module)
                if self.offloads:
                    to.free(shard)
                    to.out.host_bytes += nbytes
            to.free(*whole)

    # -- completions that are written before a step

    def begins(self, mark: Mark) -> None:
        """See :meth:`Wrapper.begins`."""
        FsdpRank.begins(self, mark)
        if self.writer is None or mark.phase is not Phase.BATCH or mark.micro_step:
            return
        if self.writer is Engine.MODEL:
            self._write()
        else:
            self._hand_out()

    def _write(self) -> None:
        """``generate`` of the model itself: what its last forward gathers, and leaves behind.

        What it computes is played behind the steps, once.
        """
        names = {name: place for place, name in enumerate(self.to.out.module_names)}
        modules = {module for unit in self.units for module in unit.plan.modules} - {ROOT}
        self._makes_graph = False
        self.enter(ROOT, fed=False)
        for module in sorted(modules, key=lambda name: names.get(name, 0)):
            self.enter(module, fed=False)
            self.leave(module)
        self.leave(ROOT)

    def _hand_out(self) -> None:
        """Every weight is made whole by itself (``full_tensor``); adapters are merged meanwhile.

        Who reads a weight has a name for it, which is the next one's when that is there.

        Source: ``_iter_named_params`` of TRL 1.16 ``generation/vllm_generation.py``.
        """
        self._merge(casts=False)
        last: list[int] = []
        for weight, facts in enumerate(self.weights):
            if _OF_ADAPTERS.search(facts.name):
                continue
            shard = [self._alloc_shard(weight)] if self.offloads else []
            whole = self._ranks(self._unit_of[weight]) * self._stored_bytes(weight)
            number = self.alloc_buffer(whole, _HANDED_OUT, DEFAULT_STREAM)
            self.to.free(*shard, *last)
            last = [number]
        self._merge(casts=True)
        self.to.free(*last)

    def _alloc_shard(self, weight: int) -> int:
        """A shard that comes from the host to be read."""
        return self.alloc_buffer(self._stored_bytes(weight), _HANDED_OUT, DEFAULT_STREAM)

    def _merge(self, *, casts: bool) -> None:
        """What LoRA changes of a shard: all of A, B's part of the product, the same scaled.

        Source: peft 0.21 ``Linear.merge`` and ``unmerge`` of ``tuners/lora/layer.py``, of DTensors;
        what is added in place is as it was computed, and what is taken out again is cast.
        """
        numbers = {weight.name: number for number, weight in enumerate(self.weights)}
        for base, weight in enumerate(self.weights):
            stem = weight.name.removesuffix("base_layer.weight")
            pair = [numbers.get(f"{stem}lora_{side}.default.weight") for side in "AB"]
            first, second = pair
            if first is None or second is None:
                continue
            ranks = self._ranks(self._unit_of[first])
            inner = self.alloc_buffer(
                ranks * self._stored_bytes(first), "fsdp: whole adapter", DEFAULT_STREAM
            )
            size = self._shard_bytes(base, self.stored_dtypes[second])
            product = self.to.alloc(size, Category.TEMPORARIES, _MERGED)
            self.to.free(inner)
            scaled = self.to.alloc(size, Category.TEMPORARIES, _MERGED)
            self.to.free(product)
            if casts and self.stored_dtypes[base] != self.stored_dtypes[second]:
                self.to.free(self.to.alloc(self._stored_bytes(base), Category.TEMPORARIES, _MERGED))
            self.to.free(scaled)

    # -- hooks of modules

    def hook(self, kind: CueKind, index: int) -> None:
        """See :meth:`ShardedRank.hook`."""
        if kind is CueKind.NO_GRAPH:
            self._makes_graph = False
        else:
            FsdpRank.hook(self, kind, index)

    def enter(self, module: str, *, fed: bool) -> None:
        """``pre_forward``."""
        for unit in self._units_at.get(module, ()):
            if unit.state is State.PRE_BACKWARD:
                if not unit.full:
                    self.gather(unit)
                    self._wait(unit)
                continue
            first = unit.state is not State.FORWARD
            if not self._awaited_modules.get(unit):
                self._awaited_modules[unit] = set(unit.plan.modules)
            unit.state = State.FORWARD
            if first and self._forward_root is None:
                self._forward_root = unit
            self.gather(unit)
            self._wait(unit)
            # hooks of an earlier forward stay on what it returned
            if first and self._makes_graph:
                if fed and unit in self._called_units and not self.in_backward:
                    self._note_second_call(module)
                self._called_units.add(unit)
                unit.fed_by = module if fed else None
                self._reached_units.discard(unit)

    def _note_second_call(self, module: str) -> None:
        note = (
            f"{module} is called more than once in a forward: its gradients are reduced after each "
            "call, and are priced as reduced once."
        )
        # under a pipeline every micro-batch calls every module before the last one's backward
        if self.is_last_backward and note not in self.notes:
            self.notes.append(note)

    def leave(self, module: str) -> None:
        """``post_forward``, once all modules of a group have run."""
        for unit in self._units_at.get(module, ()):
            if unit.state is State.PRE_BACKWARD:
                continue
            awaited_modules = self._awaited_modules.get(unit, set())
            awaited_modules.discard(module)
            if awaited_modules:
                continue
            self._post_forward(unit)
            if unit is self._forward_root:
                self._complete_partial()
                self._drop_copied_buffer()
                self._forward_root = None
                self._makes_graph = True

    def _post_forward(self, unit: FsdpUnit) -> None:
        if not self.in_backward:
            if unit.plan.reshards:
                self.reshard(unit)
            if unit.plan.weights:
                self._indices.setdefault(unit, []).append(len(self._order))
                self._order.append(unit)
        unit.state = State.IDLE

    def _complete_partial(self) -> None:
        """``_force_complete_incomplete_states``: groups of which not every module has run.

        A loss that multiplies by the head's weight leaves the head itself uncalled. Its group,
        which the norm has gathered, ends with the root, and has its hook on the root's outputs.
        """
        for unit in reversed(self.in_module_order()):
            if self._awaited_modules.get(unit) and not unit.is_root:
                self._awaited_modules[unit].clear()
                self._post_forward(unit)
                if self._makes_graph:
                    self._ended_by_root.append(unit)

    def autograd_at(self, module: str) -> None:
        """Hooks of outputs and of inputs: units begin and end their backward."""
        if not self.has_begun:
            self.has_begun = True
            for unit in self.units:
                if unit.is_root:
                    self.pre_backward(unit)
            for unit in self._ended_by_root:
                self.pre_backward(unit)
            self._ended_by_root.clear()
        for unit in sorted(self._reached_units, key=self._number_of.__getitem__):
            if unit.fed_by is not None and not is_inside(module, unit.fed_by):
                self._forget_input(unit)
                self._post_backward(unit)
        for unit in self._units_around(module):
            if unit.state is State.IDLE and self._indices.get(unit):
                self.pre_backward(unit)
            if unit.fed_by is not None and is_inside(module, unit.fed_by):
                self._reached_units.add(unit)

    def _units_around(self, module: str) -> list[FsdpUnit]:
        """The units that a module lies in, the root left out: asked at every step of autograd."""
        around = self._around.get(module)
        if around is None:
            units: set[FsdpUnit] = set()
            path = module
            while path != ROOT:
                units.update(self._units_at.get(path, ()))
                path = path.rpartition(".")[0]
            inside = (unit for unit in units if not unit.is_root)
            around = self._around[module] = sorted(inside, key=self._number_of.__getitem__)
        return around

    def _forget_input(self, unit: FsdpUnit) -> None:
        unit.fed_by = None
        self._reached_units.discard(unit)

    def zero_grad(self, weight: int) -> None:
        """``zero_grad`` drops the gradient of a shard; their storage is that of the unit."""
        unit = self._unit_of[weight]
        unit.dropped_gradients.add(weight)
        self.drop_if_zeroed(unit)

    # -- what a unit does

    def gather(self, unit: FsdpUnit) -> None:
        """``foreach_all_gather``: inputs in one buffer, of which this rank's part is a slice."""
        if unit.gather_buffer is not None or unit.full or not unit.plan.weights:
            return
        if self._ranks(unit) == 1:
            return
        inputs = self._from_host(unit) if self.offloads else self._in_half(unit)
        nbytes = sum(map(self._full_bytes, unit.plan.weights))
        unit.gather_buffer = self.alloc_buffer(nbytes, "fsdp: all-gather", self.gather_stream)
        self.to.free(*inputs)

    def _from_host(self, unit: FsdpUnit) -> list[int]:
        """Shards that come from host memory, one by one."""
        out, stream = [], self.gather_stream
        for weight in unit.plan.weights:
            number = self.alloc_buffer(
                self._stored_bytes(weight), "fsdp: shard from the host", stream
            )
            if self._casts(weight):
                nbytes = self._computed_bytes(weight)
                cast = self.alloc_buffer(nbytes, "fsdp: shard in half precision", stream)
                self.to.free(number)
                number = cast
            out.append(number)
        return out

    def _in_half(self, unit: FsdpUnit) -> list[int]:
        """Shards that are not stored as they compute, together."""
        halves = [weight for weight in unit.plan.weights if self._casts(weight)]
        if not halves:
            return []
        nbytes = sum(map(self._computed_bytes, halves))
        return [self.alloc_buffer(nbytes, "fsdp: shards in half precision", self.gather_stream)]

    def _wait(self, unit: FsdpUnit) -> None:
        """``wait_for_unshard``: every parameter is copied out of the buffer."""
        if unit.full or not unit.plan.weights:
            return
        drops, buffer = unit.state is State.FORWARD, unit.gather_buffer
        alone = self._ranks(unit) == 1
        if buffer is None and not alone:
            return
        if drops and self.torch >= _LETS_GO:
            self._drop_copied_buffer()
        if alone:
            self._copy_alone(unit)
            if drops:
                self._drop_copied_buffer()
            return
        assert buffer is not None
        for weight in unit.plan.weights:
            self._alloc_full(unit, weight)
        if drops:
            # until 2.14 a local name keeps the one before until the return
            self._drop_copied_buffer()
            self._copied_buffer = buffer
        else:
            self.to.free(buffer)
        unit.gather_buffer = None

    def _copy_alone(self, unit: FsdpUnit) -> None:
        """A group of one rank copies without communication."""
        for weight in unit.plan.weights:
            cast = None
            if self._casts(weight):
                nbytes = self._computed_bytes(weight)
                cast = self.alloc_buffer(nbytes, "fsdp: shard in half precision", DEFAULT_STREAM)
            self._alloc_full(unit, weight)
            if cast is not None:
                self.to.free(cast)

    def _alloc_full(self, unit: FsdpUnit, weight: int) -> None:
        unit.full[weight] = self.to.alloc(
            self._full_bytes(weight),
            Category.COMMUNICATION,
            "fsdp: gathered parameter",
            module=self.module_of(weight),
        )

    def _drop_copied_buffer(self) -> None:
        if self._copied_buffer is not None:
            self.to.free(self._copied_buffer)
            self._copied_buffer = None

    def pre_backward(self, unit: FsdpUnit) -> None:
        """Gathers a unit, and ahead of its turn the one whose forward was before this one's."""
        unit.state = State.PRE_BACKWARD
        self.gather(unit)
        self._wait(unit)
        if not self._indices.get(unit):
            return
        index = self._indices[unit].pop()
        if index > 0:
            self.gather(self._order[index - 1])

    def _post_backward(self, unit: FsdpUnit) -> None:
        unit.state = State.POST_BACKWARD
        if not self.syncs:
            if self.is_last_backward:
                self.reshard(unit)
            return
        gradients = [weight for weight in unit.plan.weights if weight in self.gradients]
        self._redistribute(gradients)
        self.reshard(unit)
        while self._reduce_inputs:
            self.to.free(self._reduce_inputs.pop(0))
        if gradients:
            self._reduce(unit, gradients)

    def _redistribute(self, gradients: Sequence[int]) -> None:
        """Gradients that are whole where tensor parallelism shares the weight: the rank's part.

        Source: ``FSDPParam._get_grad_inner_tensor`` of torch 2.13. An embedding's is whole.
        """
        if self.tensor_ranks == 1:
            return
        for weight in gradients:
            own = weight_bytes(self.weights[weight])
            if self.to.size(self.gradients[weight]) > own:
                self._rank_parts[weight] = self.to.alloc(
                    own, Category.GRADIENTS, "fsdp: the rank's part of a whole gradient"
                )
                self.take_gradient(weight)

    def _reduce(self, unit: FsdpUnit, gradients: list[int]) -> None:
        """``foreach_reduce``: one input, one output; the shards' gradients are views of it."""
        to = self.to
        shard = sum(map(self._reduced_bytes, gradients))
        ranks = self._ranks(unit)
        source = self.alloc_buffer(ranks * shard, "fsdp: reduce-scatter input", DEFAULT_STREAM)
        # until 2.14 a loop variable of foreach_reduce keeps the last one until it returns
        last = gradients[-1:] if ranks > 1 and self.torch < _LETS_GO else []
        # list.clear() begins at the end
        for weight in reversed(gradients[: len(gradients) - len(last)]):
            self._let_go(weight)
        result = to.alloc(
            shard, Category.GRADIENTS, "fsdp: reduce-scatter output", stream=_REDUCE_SCATTER_STREAM
        )
        if ranks == 1 and unit.plan.ranks is not None:
            # the batches of other ranks are in these gradients too: divided before they are copied
            to.free(self.alloc_buffer(shard, "fsdp: divided gradients", _REDUCE_SCATTER_STREAM))
        if any(self.stored_dtypes[w] != self._reduced_dtype(w) for w in gradients):
            own = sum(map(self._stored_bytes, gradients))
            stream = ALL_REDUCE_STREAM if self.replicated else _REDUCE_SCATTER_STREAM
            cast = to.alloc(own, Category.GRADIENTS, "fsdp: reduced gradients", stream=stream)
            self._pass(unit, result)
            result = cast
        for weight in last:
            self._let_go(weight)
        if self.offloads:
            if unit not in self._on_host:
                self._on_host.add(unit)
                to.out.host_bytes += sum(map(self._stored_bytes, gradients))
            self._pass(unit, result)
        elif unit.sharded_gradient is not None:
            self._pass(unit, result)
        else:
            self.keep_gradient(unit, result)
        self._reduce_inputs.append(source)

    def _pass(self, unit: FsdpUnit, number: int) -> None:
        """What is reduced and not kept goes, with replicas at the end of the backward.

        Until then a reference keeps the all-reduce's buffer (``AllReduceState``).
        """
        if self.replicated:
            self._all_reduce_buffers.setdefault(unit, []).append(number)
        else:
            self.to.free(number)

    def _let_go(self, weight: int) -> None:
        if weight in self._rank_parts:
            self.to.free(self._rank_parts.pop(weight))
        else:
            self.take_gradient(weight)

    def end_backward(self) -> None:
        """``_root_post_backward_final_callback``, over all units in the order of the modules."""
        if not self.has_begun:
            return
        self.has_begun = False
        for unit in self.in_module_order():
            if unit.state is not State.POST_BACKWARD and unit.plan.weights:
                self._post_backward(unit)
            unit.state = State.IDLE
            self._forget_input(unit)
            if self.is_last_backward and self.torch < _LETS_GO:
                self._finalize(unit)
        if self.is_last_backward:
            for unit in self.in_module_order() if self.torch >= _LETS_GO else ():
                self._finalize(unit)
            self._order.clear()
            while self._reduce_inputs:
                self.to.free(self._reduce_inputs.pop(0))

    def _finalize(self, unit: FsdpUnit) -> None:
        """``finalize_backward``: what was prefetched for nothing goes, and all-reduces end."""
        self._indices.pop(unit, None)
        self._called_units.discard(unit)
        self._awaited_modules.pop(unit, None)
        self.to.free(*self._all_reduce_buffers.pop(unit, ()))
        if unit.gather_buffer is not None:
            self.to.free(unit.gather_buffer)
            unit.gather_buffer = None


@dataclass(slots=True, kw_only=True)
class StageFsdp2(Fsdp2):
    """FSDP2 around a stage of a pipeline, some of whose hooks are the schedule's matter.

    No backward reduces gradients or gives parameters back (``set_requires_gradient_sync``,
    ``set_reshard_after_backward``, ``set_is_last_backward``, all False); gradients stay whole until
    the schedule asks for them.
    """

    is_last_backward: bool = False
    _gathering: bool = False

    def enter_stage(self) -> None:
        """The forward of the stage begins: its module is the root of the units."""
        self.enter(ROOT, fed=False)

    def cue(self, kind: CueKind, index: int, number: int) -> None:
        """See :meth:`Wrapper.cue`; the root is the stage, whatever part of it the trace calls."""
        if kind is CueKind.STAGE_WORK:
            if self._gathering:
                self.wait_for_all()
            self._gathering = False
        elif kind is CueKind.STAGE_LEFT:
            self.leave(ROOT)
        elif kind is CueKind.STAGE_UNSHARD:
            self.gather_all()
            self._gathering = True
        elif kind is CueKind.STAGE_RESHARD:
            for unit in self.in_module_order():
                self.reshard(unit)
        elif kind is CueKind.STAGE_REDUCE:
            self.reduce_all()
        elif kind is CueKind.OUTPUT_REACHED:
            self.has_begun = True
            for unit in self.units:
                if unit.is_root:
                    self.pre_backward(unit)
        else:
            if kind in (CueKind.BACKWARD, CueKind.DONE):
                self.has_begun = True  # the loss is none of the root's
            calls = kind in (CueKind.ENTER, CueKind.ENTER_FED, CueKind.LEAVE)
            if not (calls and self.name(index) == ROOT):
                Fsdp2.cue(self, kind, index, number)

    # -- what schedules of pipelines ask for

    def gather_all(self) -> None:
        """``unshard(async_op=True)`` of every unit: buffers lie in the stream of the kernels."""
        self.gather_stream = DEFAULT_STREAM
        for unit in self.in_module_order():
            self.gather(unit)
        self.gather_stream = _COPY_IN_STREAM

    def wait_for_all(self) -> None:
        """What is being gathered is waited for before anything is computed."""
        for unit in self.in_module_order():
            self._wait(unit)

    def reduce_all(self) -> None:
        """``perform_reduce_grad``: gradients of all units, in the order of the modules."""
        self.syncs = self.is_last_backward = True
        for unit in self.in_module_order():
            self._post_backward(unit)
        self.has_begun = True
        self.end_backward()
        self.syncs = self.is_last_backward = False
