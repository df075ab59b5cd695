"""DeepSpeed ZeRO-3: partitioned parameters, gradients and optimizer states.

Source: ``deepspeed/runtime/zero`` of DeepSpeed 0.19.8: ``stage3.py`` (partitions, buckets, update),
``partition_parameters.py`` (``zero.Init``), ``parameter_offload.py`` (hooks of modules),
``partitioned_param_coordinator.py`` (what is gathered when: :mod:`memest.sharding.zero3_fetch`).
Names here are those there. The model is built under ``zero.Init``, as transformers'
``from_pretrained`` does where stage 3 is configured: each module is whole on the device when it is
made, and partitioned at once; ``F.linear`` saves the parameter, not a view of what was gathered.
A quantized model is loaded without that: it is whole on every GPU, the engine casts what is not
packed (``_cast_module_mixed_precision``), and its parameters are partitioned where they lie, one
after the other (``DeepSpeedZeRoOffload._convert_to_zero_parameters``). Packed weights are
parameters like others, of the dtype that holds them; scales, tables and offsets of bitsandbytes
hang on the parameter objects, which keep them while their data comes and goes: whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memest.config.rollouts import Engine
from memest.events import Category, CueKind, Landmarks, Mark, Phase, Weight
from memest.sharding.zero3_fetch import Fetcher
from memest.sharding.zero_groups import MASTER_BYTES, NORM_BYTES, ZeroRank
from memest.workspaces.operator_call import DTYPE_BYTES

__all__ = ["Zero3", "owned_by_module"]


def owned_by_module(
    weights: Sequence[Weight], names: Sequence[str], landmarks: Landmarks
) -> dict[int, tuple[int, ...]]:
    """The parameters that each module has itself, by number of the module; shared ones in each.

    Args:
        weights: parameters, once each, by their first names.
        names: of the modules.
        landmarks: which other names lead to the same parameters.
    """
    place = {name: number for number, name in enumerate(names)}
    index = {weight.name: number for number, weight in enumerate(weights)}
    out: dict[int, set[int]] = {}
    for name, number in index.items():
        out.setdefault(place.get(name.rpartition(".")[0], -1), set()).add(number)
    for alias, name in landmarks.shared_paths.items():
        if name in index:
            out.setdefault(place.get(alias.rpartition(".")[0], -1), set()).add(index[name])
    return {module: tuple(sorted(own)) for module, own in out.items() if module >= 0}


@dataclass(slots=True, kw_only=True)
class Zero3(ZeroRank):
    """One rank of ZeRO-3; all of them need the same.

    Attributes:
        fetcher: gathers and gives back.
        contiguous: ``contiguous_gradients``: gradients are copied into one bucket as they come.
        offloads_params: shards are in host memory.
        scaled: the loss is scaled, so gradients are searched for infinities.
        wire_dtype: in which gradients are reduced, and that of the bucket
            (``communication_data_type``): the engine's, whatever the parameters have; float32 where
            ranks share sequences (``seq_parallel_communication_data_type``).
        kept_dtype: of the partition's gradients (``gradient_accumulation_dtype``): the engine's.
        root: path of the model that the engine was given.
        writer: who writes the completions that a step learns from, and has the weights for it; None
            where nobody does.
        merged: the dtype of adapters that are merged for an engine, before it is given weights; ""
            where it is given what trains.
    """

    fetcher: Fetcher
    contiguous: bool
    offloads_params: bool
    scaled: bool
    wire_dtype: str
    kept_dtype: str
    root: str = ""
    writer: Engine | None = None
    merged: str = ""

    def __post_init__(self) -> None:
        self.on_host = "what is offloaded, pinned where DeepSpeed pins it"
        if self.overlaps and self.ranks > 1:
            self.notes.append(
                "ZeRO-3 with overlap_comm: buffers of gathers that a kernel still reads are reused "
                "when the GPU is done with them; reserved is priced as if it were at once, and may "
                "be more where the host runs far ahead."
            )

    # -- what the stream brings

    def begins(self, mark: Mark) -> None:
        """See :meth:`Wrapper.begins`."""
        ZeroRank.begins(self, mark)
        if mark.phase is Phase.OPTIMIZER:
            self._begin_update()
        elif mark.phase is Phase.BATCH and not mark.micro_step and self.writer is not None:
            self._hand_out(self.writer)
        elif mark.phase is Phase.GENERATION and self.writer is Engine.MODEL:
            self.fetcher.gather_all()

    def leaves(self, phase: Phase) -> None:
        """See :meth:`Wrapper.leaves`."""
        ZeroRank.leaves(self, phase)
        if phase is Phase.OPTIMIZER:
            self.fetcher.gather_persistent()

    def hook(self, kind: CueKind, index: int) -> None:
        """See :meth:`ShardedRank.hook`."""
        if self.writer is Engine.MODEL and self.to.phase is Phase.GENERATION:
            return  # hooks are taken off (``remove_hooks``)
        if kind is CueKind.PRE_FORWARD:
            if not self.in_backward and self.to.out.module_names[index] == self.root:
                self.fetcher.begin()
            self.fetcher.enter(index, backward=False, recomputing=self.in_backward)
        elif kind is CueKind.POST_FORWARD:
            self.fetcher.leave(index, backward=False)
        elif kind is CueKind.PRE_BACKWARD:
            self.fetcher.enter(index, backward=True)
        elif kind is CueKind.POST_BACKWARD:
            self.fetcher.leave(index, backward=True)
        elif kind is CueKind.HELD:
            self.fetcher.hold(index)
        elif kind is CueKind.READ:
            self.fetcher.read(index)
        elif kind is CueKind.LET_GO:
            self.fetcher.let_go(index)
        elif kind is CueKind.LET_GO_NEWEST:
            self.fetcher.let_go(index, newest=True)
        else:
            ZeroRank.hook(self, kind, index)

    def _hand_out(self, writer: Engine) -> None:
        """Completions are written before a step.

        Source: TRL 1.16 ``_unwrap_model_for_generation`` of ``models/utils.py``, which gathers all
        (``ds3_gather_for_generation``), and ``_iter_named_params`` of
        ``generation/vllm_generation.py``.
        """
        if writer is not Engine.MODEL and not self.merged:
            self.fetcher.hand_out()
            return
        self.fetcher.gather_all()
        if self.merged:
            for _ in ("merge_adapter", "unmerge_adapter"):
                self._merge()
        self.fetcher.partition_all(forgets=writer is Engine.MODEL)

    def _merge(self) -> None:
        """What LoRA changes of each weight, and the same scaled, in the dtype of adapters.

        Source: peft 0.21 ``LoraLayer.get_delta_weight``; that is added in place.
        """
        for index, weight in enumerate(self.weights):
            if weight.name.endswith(".base_layer.weight"):
                size = self.elements(index) * DTYPE_BYTES[self.merged]
                label = "peft: change by adapters"
                pair = [self.to.alloc(size, Category.TEMPORARIES, label) for _ in range(2)]
                self.to.free(*pair)

    # -- construction

    def construct(self) -> None:
        """``zero.Init``, the checkpoint, and the optimizer (``_setup_for_real_optimizer``)."""
        to = self.to
        self.fetcher.homes.update((w, self.module_of(w)) for w in self.storages)
        if not self.leaves_out:
            shards = self._cut()
        else:
            shards = self._build()
            for members in self._by_owner():
                # a module is gathered while its part of the checkpoint is read
                whole_parameters = [self._alloc_whole(weight, padded=True) for weight in members]
                to.free(*whole_parameters)
        self._join_shards(shards)
        if not self._trained_weights:
            return
        self._make_masters()
        if self.contiguous:
            to.alloc(
                self.bucket_elements * DTYPE_BYTES[self.wire_dtype],
                Category.COMMUNICATION,
                "zero: bucket of gradients",
            )
        gradients = sum(map(self._kept_bytes, self._trained_weights))
        if self.offloads_optimizer:
            to.out.host_bytes += gradients
        else:
            to.alloc(gradients, Category.GRADIENTS, "zero: gradients of the partition")
        if self.ranks > 1:
            self.fetcher.gather_one_by_one(self._trained_weights)

    @property
    def _trained_weights(self) -> list[int]:
        """What the optimizer has, sub-group by sub-group."""
        return [weight for group in self.groups for weight in group.weights]

    def _kept_bytes(self, weight: int) -> int:
        """Of the part of a gradient that a rank keeps."""
        return self.fetcher.shard_elements(weight) * DTYPE_BYTES[self.kept_dtype]

    def _alloc_whole(self, weight: int, *, padded: bool = False) -> int:
        fetcher = self.fetcher
        elements = fetcher.elements(weight)
        if padded:
            elements = self.ranks * fetcher.shard_elements(weight)
        nbytes = elements * DTYPE_BYTES[self.weights[weight].dtype]
        return self.to.alloc(
            nbytes,
            Category.COMMUNICATION,
            "zero: whole parameter",
            module=fetcher.homes[weight],
        )

    def _by_owner(self) -> list[list[int]]:
        """Parameters of the same module together, in their order."""
        out: dict[str, list[int]] = {}
        for index, weight in enumerate(self.weights):
            out.setdefault(weight.name.rpartition(".")[0], []).append(index)
        return list(out.values())

    def _build(self) -> dict[int, int]:
        """Modules made whole, and partitioned one after the other."""
        to, shards = self.to, {}
        for members in self._by_owner():
            whole = {weight: self._alloc_whole(weight) for weight in members}
            for weight, number in whole.items():
                stays = not self.offloads_params or weight in self.fetcher.persistent
                if stays:
                    shards[weight] = self._shard(weight)
                else:
                    to.out.host_bytes += self.fetcher.shard_bytes(weight)
                to.free(number)
        return shards

    def _cut(self) -> dict[int, int]:
        """Parameters that lie there are partitioned in their order, small ones like the others.

        ``_partition_param``: what is to stay small and whole is marked later
        (``mark_persistent_parameters``), so with ``offload_param`` all shards are the host's.
        """
        shards = {}
        for weight in range(len(self.weights)):
            if self.offloads_params:
                self.to.out.host_bytes += self.fetcher.shard_bytes(weight)
            else:
                shards[weight] = self._shard(weight)
            self.to.free(self.storages[weight])
        return shards

    def _shard(self, weight: int) -> int:
        return self.to.alloc(
            self.fetcher.shard_bytes(weight),
            self.kept_as,
            "zero: shard",
            module=self.fetcher.homes[weight],
        )

    def _join_shards(self, shards: Mapping[int, int]) -> None:
        """``defragment``: what trains becomes one block, over the host; the cache is emptied."""
        if not self._trained_weights:
            return
        for weight in self._trained_weights:
            if weight in shards:
                self.to.free(shards[weight])
                if self.offloads_params:
                    self.to.out.host_bytes += self.fetcher.shard_bytes(weight)
        if not self.offloads_params:
            self.to.empty_cache()
            total = sum(self.fetcher.shard_bytes(weight) for weight in self._trained_weights)
            self.to.alloc(total, Category.PARAMETERS, "zero: shards in one")

    def _make_masters(self) -> None:
        """``_create_fp32_partitions``: converted, and copied once more.

        What is float32 already is copied too: the branch that would share it compares a
        ``torch.device`` with the name of one, which is never equal.
        """
        to = self.to
        if self.offloads_optimizer:
            for group in self.groups:
                # master weights, their gradients, Adam's two moments
                to.out.host_bytes += group.partition_elements * 4 * MASTER_BYTES
            return
        previous = None
        for group in self.groups:
            size = group.partition_elements * MASTER_BYTES
            current = None
            if group.dtype != "float32" or self.offloads_params:
                current = to.alloc(size, Category.MASTER_WEIGHTS, "zero: converted parameters")
            if previous is not None:
                to.free(previous)
            to.alloc(size, Category.MASTER_WEIGHTS, "zero: master weights")
            previous = current
        if previous is not None:
            to.free(previous)
        largest = max(group.partition_elements for group in self.groups)
        self.alloc_and_free(largest * MASTER_BYTES, "zero: gradients")

    # -- gradients

    def ready(self, weight: int) -> None:
        """``reduce_independent_p_g_buckets_and_remove_grads``."""
        self.to_bucket(weight, copied=self.contiguous)

    def reduce(self, members: list[int]) -> None:
        """``__reduce_and_partition_ipg_grads``."""
        members.sort()
        buffers = self._join(members)
        if self.offloads_optimizer:
            self._to_host(members)
        self.take_gradients(members)
        self.to.free(*buffers)

    def _join(self, members: Sequence[int]) -> list[int]:
        """``__avg_scatter_grads``: what lives until the parts are where they are kept.

        Gradients that found no place in the bucket are converted to the dtype of the wire, and the
        parts to that in which they are kept.
        """
        whole = [
            self._alloc_buffer(
                self.fetcher.elements(weight) * DTYPE_BYTES[self.wire_dtype],
                f"zero: gradient in {self.wire_dtype}",
            )
            for weight in members
            if weight in self.gradients and self.weights[weight].dtype != self.wire_dtype
        ]
        joined_parts = self._side_by_side(members)
        if self.wire_dtype == self.kept_dtype:
            if not joined_parts:
                return whole  # reduced where it is: the part is a slice of it
            self.to.free(*reversed(whole))
            return joined_parts
        parts = [
            self._alloc_buffer(self._kept_bytes(weight), "zero: part of a gradient")
            for weight in members
        ]
        # lists are let go of from their ends
        self.to.free(*joined_parts, *reversed(whole))
        return parts[::-1]

    def _side_by_side(self, members: Sequence[int]) -> list[int]:
        """``reduce_scatter_coalesced``: parts for the same rank side by side, padded."""
        ranks, fetcher = self.ranks, self.fetcher
        if len(members) == 1 and fetcher.elements(members[0]) % ranks == 0:
            return []
        out, total, item = [], 0, DTYPE_BYTES[self.wire_dtype]
        pads: list[tuple[int, int]] = []
        for weight in members:
            part, size = fetcher.shard_elements(weight), fetcher.elements(weight)
            total += ranks * part * item
            pads += [
                (rank, min(part, (rank + 1) * part - size) * item)
                for rank in range(size // part, ranks)
            ]
        for _, nbytes in sorted(pads, key=lambda pad: pad[0]):
            out.append(self._alloc_buffer(nbytes, "zero: padding of gradients"))
        buffer = self._alloc_buffer(total, "zero: joined gradients")
        self.to.free(*out)
        return [buffer]

    def _alloc_buffer(self, nbytes: int, label: str) -> int:
        """A storage of a reduction."""
        return self.to.alloc(nbytes, Category.COMMUNICATION, label, stream=self.stream)

    def _to_host(self, members: Sequence[int]) -> None:
        """``partition_grads`` with a buffer in host memory: copies pass through the device."""
        last = None
        for weight in members:
            size = self.fetcher.shard_elements(weight)
            copy = self._alloc_buffer(self._kept_bytes(weight), "zero: gradients from the host")
            if last is not None:
                self.to.free(last)
            last = copy
            if self.is_boundary:
                buffers = [(size * NORM_BYTES, "zero: norm")]
                if self.kept_dtype != "float32":
                    buffers.append((size * MASTER_BYTES, "zero: gradient in float32"))
                for nbytes, label in buffers:
                    self.to.free(self._alloc_buffer(nbytes, label))
        if last is not None:
            self.to.free(last)

    def end_backward(self) -> None:
        """What is left is reduced, and nothing stays gathered behind the last micro-step."""
        self.flush()
        self.take_gradients(list(self.gradients))
        self.fetcher.backward_done()
        if self.is_boundary and self.offloads_optimizer:
            self.fetcher.release_all()
            self.fetcher.gather_persistent()

    # -- update

    def _begin_update(self) -> None:
        """``step``: everything is given back, norms are taken, sub-groups follow one by one."""
        self.fetcher.release_all()
        gradients = sum(map(self.fetcher.shard_elements, self._trained_weights))
        if self.scaled and self.groups and self.groups[0].dtype == "float16":
            item = DTYPE_BYTES[self.kept_dtype]
            # isinf compares the absolute values, isnan the values themselves
            for nbytes in (gradients * (item + 1), gradients):
                number = self.to.alloc(
                    nbytes, Category.COMMUNICATION, "zero: search for infinities"
                )
                self.to.free(number)
        for weight in self._trained_weights:
            size = self.fetcher.shard_elements(weight) * NORM_BYTES
            self.alloc_and_free(size, "zero: norm of a gradient")

    def begin_group(self, index: int) -> None:
        """See :meth:`ZeroRank.begin_group`."""
        self.flatten(index, len(self.groups[index].weights), self.kept_dtype)
