"""What is refused before torch is imported: what options, a config.json and packages tell.

Each rule stands where the floors that trace ask it too; here they are put in an order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memest.catalog.libraries import library_need
from memest.config.attention import check_flash_precision, stored_dtype, text_dtype
from memest.config.compatibility import check_scaled, check_stored
from memest.config.compilation import check_release
from memest.config.inputs import ModuleInputs
from memest.config.installed import release
from memest.config.library_sources import default_targets, has_no_plan, linear_names
from memest.config.packages import TORCH, TRANSFORMERS, needs_of
from memest.config.parallelism import check_heads, no_plan
from memest.config.positions import RawConfig, check_lengths
from memest.config.quantization import own_quantization
from memest.config.setup import Attention, Setup, Task
from memest.errors import ConfigError, MissingDependencyError
from memest.estimation.pipeline import parts_of
from memest.estimation.shipped_runs import nearest_run
from memest.workspaces.gpu_limits import check_flash_gpu

if TYPE_CHECKING:
    from memest.catalog.resolve import ModelSource
    from memest.config.adapter import Adapter
    from memest.workspaces.operator_call import GpuTraits

__all__ = ["refuse_early", "say_import", "with_own_base"]

_OF_IMAGES = "AutoModelForImageTextToText"


def refuse_early(
    source: ModelSource | None,
    request: Setup,
    module_inputs: ModuleInputs,
    gpu: GpuTraits | None = None,
) -> None:
    """Refuse what would be refused once the model is built, as far as that is known before.

    Args:
        source: where the model comes from; None for a live module.
        request: as the user gave it.
        module_inputs: what a module of one's own is fed.
        gpu: whose kernels run, where that is known.

    Raises:
        ConfigError: a length, a way to share the model, or options that cannot be.
        MissingDependencyError: a package is not installed.
    """
    setup = request
    if gpu is not None and setup.attn_implementation is Attention.FLASH_ATTENTION_2:
        check_flash_gpu(gpu.capability)  # no dtype helps a card that has no kernels
    if setup.torch_compile:
        check_release(setup.software.torch)
    if source is not None and source.config is not None:
        if module_inputs.model_args:
            raise ConfigError(
                f"--model-arg {module_inputs.model_args[0][0]}: {source.id} is built from its "
                "configuration: write MODEL?name=value to change that. Arguments are for "
                "package.module:factory."
            )
        quantization, _ = own_quantization(source.config, request.quantization)
        setup = replace(request, quantization=quantization)
        if not (source.trust_remote_code and source.config.get("auto_map")):
            if module_inputs.inputs is None:
                check_lengths(source.config, source.auto_class, setup)
            if RawConfig(source.config).reads_text(source.auto_class):
                check_flash_precision(source.config, setup)
                if _trains_as_loaded(setup):
                    check_scaled(setup, (text_dtype(source.config, setup),))
            if _trains_as_loaded(setup):
                check_stored(setup, stored_dtype(source.config), source.id)
            reads_images = source.auto_class == _OF_IMAGES and setup.task is Task.AUTO
            if reads_images and not setup.method.is_supervised:
                replace(setup, task=Task.IMAGE_TEXT_TO_TEXT)  # refuses methods without images
            if setup.distributed.tp > 1 and has_no_plan(source.config):
                raise no_plan(source.id)
            _check_shares(source.config, source.auto_class, setup)
    if source is not None and source.library is not None:
        library_need(source.library[0]).check()
    try:
        TORCH.check()
    except MissingDependencyError as error:
        near = nearest_run(source, request, gpu)
        raise MissingDependencyError(f"{error} {near}".rstrip()) from None
    if source is not None and source.config is not None:
        TRANSFORMERS.check()
    for need in needs_of(setup):
        need.check()
    if source is not None and source.config is not None and setup.adapter is not None:
        own_code = source.trust_remote_code and source.config.get("auto_map")
        if not own_code:
            _check_targets(source.config, setup.adapter)


def _trains_as_loaded(setup: Setup) -> bool:
    """Whether all weights train, in the dtype that they are loaded in."""
    part = setup.freeze or setup.frozen_parts or setup.casts
    return setup.adapter is None and setup.quantization is None and not part


def with_own_base(request: Setup, config: Mapping[str, Any], name: str, *, settled: bool) -> Setup:
    """A setup that quantises nothing, with what a base that is quantised already brings.

    Args:
        request: as the user gave it.
        config: of the model; empty where it has none.
        name: of the model, for messages.
        settled: somebody says what is recomputed.

    Raises:
        ConfigError: a base is to be prepared that nobody quantises.
    """
    quantization, _ = own_quantization(config, None)
    if quantization is None:
        if request.prepare_kbit:
            raise ConfigError(
                f"--prepare-kbit says nothing of {name}, which is not quantised: add "
                "--load-in-4bit or --load-in-8bit."
            )
        return replace(request, prepare_kbit=None)
    if not settled and replace(request, quantization=quantization).prepares_base:
        return replace(request, checkpointing="full")
    return request


def say_import(say: Callable[[str], None]) -> None:
    """Tell that torch is imported, which takes seconds, where it is not there yet."""
    if "torch" not in sys.modules:
        say("importing torch and transformers")


def _check_shares(config: dict[str, Any], auto_class: str | None, setup: Setup) -> None:
    """Whether GPUs can share the heads and the layers that a configuration names at its top.

    Of other models than causal language models it is first whether they can be shared at all.
    """
    if auto_class != "AutoModelForCausalLM" or setup.task not in (Task.AUTO, Task.CAUSAL_LM):
        return
    check_heads(config.get, setup.distributed.tp)
    layers = config.get("num_hidden_layers")
    if setup.distributed.pp > 1 and isinstance(layers, int):
        parts_of(setup.distributed, layers)


def _check_targets(config: Mapping[str, Any], adapter: Adapter) -> None:
    """Whether peft knows which modules it adapts, where nobody names them."""
    if any(
        adapter.settings.get(key) is not None for key in ("target_modules", "target_parameters")
    ):
        return
    if default_targets(adapter.method, config) is not False:
        return
    flag, names = "--lora-target-modules", linear_names(config)
    called = f" Linear layers in its source are called {', '.join(names)}." if names else ""
    every = "" if adapter.method == "ia3" else f", or add {flag} all-linear (all but its head)"
    raise ConfigError(
        f"--peft {adapter.method}: peft {release('peft')} has no modules of its own choice for "
        f"models of type {config['model_type']}: name them with {flag}{every}.{called}"
    )
