"""TorchInductor without a GPU: its own graphs, partition, schedule and buffer plan, no kernels.

``torch.compile`` of a run is compiled here as PyTorch compiles it, up to the point at which Triton
would be asked for machine code: Dynamo's graphs with their breaks, AOTAutograd's joint graphs with
Inductor's decompositions, the min-cut partitioner's choice of what is saved, Inductor's fusion,
in-place reuse and buffer plan for CUDA. What comes out is the Python that Inductor writes for a
GPU, ``empty_strided_cuda``, ``extern_kernels.mm(..., out=)``, ``del``. ``inductor_code`` runs it on
meta tensors.

Graphs carry a device. Autograd cannot run on fake CUDA tensors without CUDA, so AOTAutograd sees
meta tensors; Inductor's joint-graph passes compute constants, which meta tensors do not have, so
they see the CPU; lowering, scheduling and code generation see ``cuda:0`` with the properties of the
GPU in question.

Source: torch 2.13, ``_inductor/compile_fx.py`` (``compile_fx``, ``partition_fn``,
``compile_fx_inner``), ``_inductor/graph.py``, ``_inductor/scheduler.py``,
``_inductor/fx_passes/joint_graph.py``.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves, tree_map

from memest.trace.cuda.beside import Beside
from memest.trace.cuda.devices import trace_device
from memest.trace.cuda.inductor_code import Code
from memest.trace.cuda.patching import patch_attributes
from memest.trace.cuda.quick_compile import quick_trees, shortcuts
from memest.workspaces.operator_call import GpuTraits

__all__ = ["inductor_without_gpu"]

_CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_META = torch.device("meta")
_REGISTERS = 65536  # of a multiprocessor, every architecture since Kepler
_SHARED_MEMORY = {
    (7, 0): 98304,
    (7, 5): 65536,
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (12, 0): 101376,
}
"""Shared memory that a block may opt in to, bytes (CUDA C++ Programming Guide, table of compute
capabilities); it bounds persistent kernels."""


@contextmanager
def inductor_without_gpu(
    gpu: GpuTraits, on_code: Callable[[Code], None]
) -> Iterator[Callable[..., Any]]:
    """Inductor as a backend of ``torch.compile`` for a GPU that is not there.

    Args:
        gpu: for which code is written.
        on_code: told of each piece of code as it is written.

    Yields:
        A backend for ``torch.compile``. Graphs that are compiled while this is open, those of
        backward too, run on meta tensors.
    """
    import torch._functorch.partitioners as partitioners
    from torch._inductor import config

    with config.patch(compile_threads=1):  # else its import starts processes that compile kernels
        import torch._inductor.compile_fx as compile_fx
    import torch._inductor.fx_passes.reinplace as reinplace
    from torch._inductor.graph import GraphLowering
    from torch._subclasses import FakeTensorMode

    second = Beside()
    original_passes = compile_fx._recursive_joint_graph_passes
    original_compile = compile_fx.compile_fx_inner

    def joint_passes(
        gm: Any,
        skip_invoke_subgraph: bool = False,
        input_device: Any = None,
    ) -> Any:
        cpu_nodes = _relabel(gm, _META, _CPU)
        out = original_passes(gm, skip_invoke_subgraph, _CPU)
        _relabel(out, _CPU, _META, cpu_nodes)
        return out

    def compile_inner(gm: Any, example_inputs: Any, **options: Any) -> Any:
        compile_fx.view_to_reshape(gm)
        _relabel(gm, _META, _CUDA)
        inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        with quick_trees():
            return original_compile(gm, inputs, **options)

    def to_module(graph: Any) -> Any:
        source = None
        if graph.is_backward:
            source = second.backward_code(graph)
        elif second.begin(graph):
            return types.SimpleNamespace(call=_not_run)
        if source is None:
            source = graph.codegen()[0].value
        code = Code(source, {**graph.constants, **graph.torchbind_constants})
        on_code(code)
        return code

    def backend(gm: Any, example_inputs: Any) -> Any:
        _name_meta(gm)
        with quick_trees(), second.kept_in():
            return compile_fx.compile_fx(gm, example_inputs, inner_compile=compile_inner)

    scatter = reinplace._inplace_generalized_scatter
    changes = (
        (compile_fx, "_recursive_joint_graph_passes", joint_passes),
        (compile_fx, "fake_tensor_prop", _values_are_there),
        (compile_fx, "get_cuda_device_context", lambda _: contextlib.nullcontext()),
        (GraphLowering, "compile_to_module", to_module),
        (reinplace, "_inplace_generalized_scatter", _on_meta(scatter)),
        (partitioners, "functionalize_rng_ops", _without_rng_states),
        (FakeTensorMode, "dispatch", _dispatch_on_meta(FakeTensorMode.dispatch)),
    )
    with (
        second.may_work(),
        _device(gpu),
        _composites_differentiable(),
        patch_attributes(*changes),
        shortcuts(),
        # code that was written for another GPU must not be found, nor ours by others
        # and what nobody launches needs no processes that compile kernels
        config.patch(force_disable_caches=True, compile_threads=1),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield backend


def _not_run(_: list[Any]) -> Any:
    raise AssertionError("the second process of a compilation runs no graph")


def _name_meta(gm: Any) -> None:
    """What a model makes on ``cuda`` by name is on meta, as the rest of its graph is."""
    for module in gm.modules():
        graph = getattr(module, "graph", None)
        if graph is None:
            continue
        for node in list(graph.nodes):
            if "device" not in node.kwargs:
                continue
            node.kwargs = {**node.kwargs, "device": trace_device(node.kwargs["device"])}
            if node.target is torch.tensor and node.kwargs["device"] == _META:
                _make_on_host(graph, node)
        module.recompile()


def _make_on_host(graph: Any, node: Any) -> None:
    """A constant is made on the host and moved, as it is on CUDA."""
    node.kwargs = {name: value for name, value in node.kwargs.items() if name != "device"}
    with graph.inserting_after(node):
        moved = graph.call_method("to", (node, _META))
    node.replace_all_uses_with(moved, delete_user_cb=lambda user: user is not moved)


def _without_rng_states(_: Any, fw_module: Any, bw_module: Any, *__: Any) -> Any:
    """In place of ``functionalize_rng_ops``, for which CUDA's generators must be there.

    On CUDA the states that make a recomputation draw alike are generators on the host
    (``graphsafe_rng_functionalization``): no memory of the GPU.
    """
    return fw_module, bw_module


def _values_are_there(
    _: Any, example_inputs: Any, force_allow_non_fake_inputs: bool = False
) -> Any:
    """In place of ``fake_tensor_prop``: the graph's values were carried over, none is missing."""
    from torch._dynamo.utils import detect_fake_mode

    return detect_fake_mode(example_inputs)


def _relabel(
    gm: Any, source: torch.device, target: torch.device, skip: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Move a graph, its values and its constants' devices, from one device to another.

    Args:
        gm: the graph; its subgraphs move too.
        source: type of the device.
        target: the device.
        skip: names of nodes that stay where they are.

    Returns:
        Names of the nodes that were on the target's type before.
    """
    target_nodes = set()
    moved: list[Any] = []

    def device(value: Any) -> Any:
        if not isinstance(value, torch.device) or value.type != source.type:
            return value
        moved.append(value)
        return target

    def move(value: Any) -> Any:
        return _move_fake(value, source, target)

    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type == target.type:
            target_nodes.add(node.name)
        if node.name in skip:
            continue
        moved.clear()
        args, kwargs = map_aggregate(node.args, device), map_aggregate(node.kwargs, device)
        if moved:  # to set them, changed or not, goes through all nodes that they name
            node.args, node.kwargs = args, kwargs
        for key in ("val", "example_value", "eager_input_vals"):
            if key in node.meta:
                node.meta[key] = tree_map(move, node.meta[key])
    for _, child in gm.named_children():
        if isinstance(child, torch.fx.GraphModule):
            target_nodes |= _relabel(child, source, target, skip)
    gm.recompile()
    return frozenset(target_nodes)


@contextmanager
def _composites_differentiable() -> Iterator[None]:
    """Composite operators with a Python kernel for meta keep their derivatives, as on CUDA.

    The Python dispatcher takes such a kernel (``nll_loss``) for the operator's own, and an
    operator with kernels of its own has no derivative by being composed.
    """
    from torch._decomp import global_decomposition_table

    meta, composite_key = torch._C.DispatchKey.Meta, "CompositeImplicitAutograd"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    removed_kernels = []
    for op in {op for table in global_decomposition_table.values() for op in table}:
        kernels = getattr(op, "py_kernels", {})
        if (
            meta in kernels
            and has_kernel(op.name(), composite_key)
            and not has_kernel(op.name(), "AutogradMeta")
        ):
            removed_kernels.append((op, kernels.pop(meta)))
            op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernel in removed_kernels:
            op.py_kernels[meta] = kernel
            op._dispatch_cache.clear()


def _move_fake(value: Any, source: torch.device, target: torch.device) -> Any:
    """A fake tensor of the same layout on another device; anything else as it is.

    Made as ``FakeTensorMode`` makes them, without its dispatch: that takes five times as long, and
    graphs have thousands of values.
    """
    if not _is_fake(value) or value.device.type != source.type:
        return value
    with torch._C._DisableTorchDispatch():
        layout = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    return torch._subclasses.FakeTensor(value.fake_mode, layout, target)


def _dispatch_on_meta(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """``FakeTensorMode.dispatch`` that runs operators of fake CUDA tensors as of meta ones.

    Decompositions are Python that slices and negates, which asks CUDA for a device guard.
    """

    def call(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fakes = [t for t in tree_leaves((args, kwargs)) if _is_fake(t) and t.fake_device == _CUDA]
        if not fakes:
            return dispatch(mode, func, types, args, kwargs)
        for tensor in fakes:
            tensor.fake_device = _META
        try:
            out = dispatch(mode, func, types, args, kwargs)
        finally:
            for tensor in fakes:
                tensor.fake_device = _CUDA
        for tensor in tree_leaves(out):
            if _is_fake(tensor) and tensor.fake_device == _META:
                tensor.fake_device = _CUDA
        return out

    return call


def _is_fake(value: Any) -> bool:
    return isinstance(value, torch._subclasses.FakeTensor)


def _on_meta(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of fake tensors that writes into them, which fake CUDA tensors do not allow."""

    def call(*args: Any) -> Any:
        on_meta = tree_map(lambda value: _move_fake(value, _CUDA, _META), args)
        return tree_map(lambda value: _move_fake(value, _META, _CUDA), function(*on_meta))

    return call


def _device(gpu: GpuTraits) -> AbstractContextManager[None]:
    """Answer Inductor's questions about the GPU and about Triton."""
    import torch._inductor.scheduler as scheduler
    import torch.utils._triton as triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime.hints import DeviceProperties

    major, minor = gpu.capability
    common = {
        "major": major,
        "multi_processor_count": gpu.sm_count,
        "regs_per_multiprocessor": _REGISTERS,
        "max_threads_per_multi_processor": gpu.max_threads_per_sm,
        "max_threads_per_block": 1024,
        "warp_size": 32,
    }
    properties = types.SimpleNamespace(
        name="GPU",
        minor=minor,
        shared_memory_per_block_optin=_shared_memory(gpu.capability),
        gcnArchName="",
        **common,
    )
    hints = DeviceProperties(type="cuda", index=0, cc=10 * major + minor, **common)

    def cpu_or_gpu(device: Any) -> Any:
        return create(device) if device.type == "cpu" else hints

    create = DeviceProperties.create

    def always(value: Any) -> Any:
        return lambda *_, **__: value

    def static(value: Any) -> Any:
        return staticmethod(always(value))

    return patch_attributes(
        (torch.cuda, "get_device_properties", always(properties)),
        (torch.cuda, "get_device_capability", always(gpu.capability)),
        (torch.cuda, "current_device", always(0)),
        (torch.cuda, "device_count", always(1)),
        (torch.cuda, "set_device", always(None)),
        (torch.cuda, "_DeviceGuard", always(contextlib.nullcontext())),
        (scheduler, "has_triton", always(True)),
        (triton, "triton_hash_with_backend", always("")),
        (DeviceProperties, "create", cpu_or_gpu),
        (CudaInterface, "get_device_properties", static(properties)),
        (CudaInterface.Worker, "get_device_properties", static(properties)),
        (CudaInterface, "current_device", static(0)),
        (CudaInterface, "is_bf16_supported", static(gpu.capability >= (8, 0))),
        (CudaInterface, "raise_if_triton_unavailable", static(None)),
    )


def _shared_memory(capability: tuple[int, int]) -> int:
    sizes = [size for at_least, size in sorted(_SHARED_MEMORY.items()) if at_least <= capability]
    return sizes[-1] if sizes else 49152
