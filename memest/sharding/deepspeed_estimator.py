"""DeepSpeed's own estimates of model states, to be set beside what a run needs.

Source: ``estimate_zero2_model_states_mem_needs`` (``stage_1_and_2.py``) and
``estimate_zero3_model_states_mem_needs`` (``stage3.py``) of DeepSpeed 0.19.8, number for number.
They count parameters, gradients and optimizer states in mixed precision with Adam, and nothing
else.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModelStates", "zero2_model_states", "zero3_model_states"]

_BUFFER_FACTOR = 1.5
"""``additional_buffer_factor``: on everything that is in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """An estimate of DeepSpeed's, in bytes.

    Attributes:
        host_bytes: of each node.
        gpu_bytes: of each GPU.
    """

    host_bytes: int
    gpu_bytes: int


def zero2_model_states(
    parameters: int, *, gpus_per_node: int, nodes: int = 1, offloads_optimizer: bool
) -> ModelStates:
    """ZeRO-2: 2 bytes a parameter, and 18 (2 + 4 of gradients, 4 + 8 of states) shared by all."""
    gpus = nodes * gpus_per_node
    if offloads_optimizer:
        gpu: float = 2 * parameters
        host = parameters * max(4 * gpus, 16) * _BUFFER_FACTOR
    else:
        gpu = 2 * parameters + int(18 * parameters / gpus)
        host = parameters * 4 * gpus_per_node * _BUFFER_FACTOR
    return ModelStates(host_bytes=int(host), gpu_bytes=int(gpu))


def zero3_model_states(
    parameters: int,
    largest_layer: int,
    *,
    gpus_per_node: int,
    nodes: int = 1,
    offloads_optimizer: bool,
    offloads_params: bool = False,
    zero_init: bool = True,
) -> ModelStates:
    """ZeRO-3: 4 bytes a parameter of the largest layer, and 18 for each shared by all.

    Args:
        parameters: of the model.
        largest_layer: parameters of the module that has the most itself.
        gpus_per_node: processes of a node.
        nodes: of the run.
        offloads_optimizer: states in host memory.
        offloads_params: parameters too; has no effect without the former, as in DeepSpeed.
        zero_init: the model is built in parts.
    """
    share, largest = 1 / nodes, 4 * largest_layer
    if offloads_optimizer:
        each = 18 if offloads_params else 16
        gpu = (
            largest if offloads_params else largest + int(2 * parameters / (nodes * gpus_per_node))
        )
        host = parameters * each * share * _BUFFER_FACTOR
        if not zero_init:
            host = parameters * max(4 * gpus_per_node, each * share) * _BUFFER_FACTOR
    else:
        gpu = largest + int(18 * parameters / (nodes * gpus_per_node))
        whole = largest_layer if zero_init else parameters
        host = whole * 4 * gpus_per_node * _BUFFER_FACTOR
    return ModelStates(host_bytes=int(host), gpu_bytes=int(gpu))
