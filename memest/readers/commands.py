"""What a launch command says: launcher, environment and program, each by its own reader."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from memest.errors import ConfigError
from memest.readers.command_documents import (
    CONFIG_SUFFIXES,
    document_among,
    ignore_words,
    merge_arguments,
    open_document,
    read_as,
    read_negations,
)
from memest.readers.command_script import read_script_command
from memest.readers.command_words import (
    PROCESS_STARTERS,
    SHELL_SUFFIXES,
    Command,
    Launcher,
    read_arguments,
)
from memest.readers.documents import read_document
from memest.readers.formats import FileFormat, find_format
from memest.readers.llama_factory_v1 import read_llama_factory_v1
from memest.readers.mapping import DocumentKeys
from memest.readers.ms_swift import read_ms_swift
from memest.readers.ms_swift_keys import IMAGE_CAP, IMAGE_VARIABLES
from memest.readers.shell_script import find_launch
from memest.readers.torchtitan_functions import (
    read_function,
    registry_file,
    take_checkpointing,
)
from memest.readers.torchtune import installed_config, read_torchtune
from memest.readers.trl import predefined_config, read_trl
from memest.readers.values import (
    IMAGES,
    NOT_HERE,
    PIXELS,
    PROCESSES,
    Bounded,
    DocumentReading,
    KeyOrigin,
    Level,
    Remark,
    Saving,
)
from memest.readers.verl import read_verl
from memest.readers.verl_keys import VERL_CONFIGS, is_verl

__all__ = ["read_launch"]

_READ_VARIABLES = frozenset(
    """CUDA_VISIBLE_DEVICES NPROC_PER_NODE NNODES FORCE_TORCHRUN WORLD_SIZE NGPU CONFIG_FILE
    OPTIM_TORCH MODULE CONFIG""".split()
)
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_OF_ACCELERATE = tuple(
    """ACCELERATE_USE_ ACCELERATE_DEEPSPEED_ ACCELERATE_GRADIENT_ ACCELERATE_DYNAMO_ FSDP_
    PARALLELISM_CONFIG_""".split()
)
"""How variables begin by which accelerate is told what its launcher is told by arguments."""
_DEEPSPEED_KEYS = frozenset(
    """zero_stage offload_optimizer_device offload_param_device gradient_accumulation_steps
    gradient_clipping deepspeed_config_file zero3_init_flag zero3_save_16bit_model
    deepspeed_hostfile deepspeed_multinode_launcher offload_optimizer_nvme_path
    offload_param_nvme_path deepspeed_exclusion_filter deepspeed_inclusion_filter
    deepspeed_moe_layer_cls_names""".split()
)
_SECTIONS = {
    "fsdp_": "fsdp_config",
    "dynamo_": "dynamo_config",
    "parallelism_config_": "parallelism_config",
    "fp8_": "fp8_config",
}
"""Sections of accelerate's configuration, by the start of the flags that set them."""
_DISTRIBUTED_TYPES = {
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "multi_gpu": "MULTI_GPU",
    "use_megatron_lm": "MEGATRON_LM",
}
_ALL_GPUS = "as many processes as the machine has GPUs: 1 is taken; --num-gpus says it"
_OF_LAUNCHER = (*(_DEEPSPEED_KEYS - {"gradient_accumulation_steps"}), *_DISTRIBUTED_TYPES)
_MAX_SCRIPTS = 3
"""Shell scripts that start each other."""
_ACCELERATE_ARGUMENTS = ("accelerate_config", "num_processes", "num_machines", "mixed_precision")


def read_launch(
    command: Command, *, file_format: FileFormat | None = None
) -> list[DocumentReading]:
    """The readings of a command, and of the files that it names.

    Args:
        command: taken apart.
        file_format: the format of the program's own arguments, where the user says it.

    Raises:
        ConfigError: a file that is not there, or a value that cannot be.
    """
    keys = DocumentKeys({}, source="command", framework="launch command", level=Level.COMMAND)
    scripts: list[DocumentReading] = []
    while (path := _shell_script(command)) is not None:
        if len(scripts) > _MAX_SCRIPTS:
            raise ConfigError(f"the launch command: {command.program} starts itself again.")
        scripts.append(DocumentReading(source=command.program, format="shell script"))
        command = find_launch(
            path, command.program, environment=command.environment, arguments=command.words
        )
    _environment(keys, command)
    arguments, overrides, positionals = read_arguments(command.words)
    launchers = list(command.launchers)
    launchers += _hidden_launcher(command, arguments)
    readings: list[DocumentReading] = []
    for launcher in launchers:
        readings += _launcher(keys, launcher, command.environment)
    readings += _program(keys, command, arguments, overrides, positionals, file_format)
    by_itself = any(each.why == PROCESSES for part in readings for each in part.not_modelled)
    if not launchers and not by_itself and not is_verl(command.program):
        _program_alone(keys, command)
    for word in command.skipped_words:
        keys.ignore(word, "not of the launcher and its program")
    return [*scripts, *readings, keys.reading()]


def _shell_script(command: Command) -> Path | None:
    """The shell script that a command starts, where it is here; torchtitan's own has a reader."""
    path = Path(command.program)
    if path.suffix not in SHELL_SUFFIXES or command.launchers:
        return None
    is_titan = path.name == "run_train.sh" and {"CONFIG_FILE", "CONFIG"} & set(command.environment)
    try:
        return None if is_titan or not path.expanduser().is_file() else path.expanduser()
    except (OSError, RuntimeError, ValueError):
        return None


# -- environment and launchers


def _say_at(keys: DocumentKeys, option: str, value: Any, place: str) -> None:
    keys.set_at(option, value, KeyOrigin(f"command: {place}", Level.COMMAND))


def _environment(keys: DocumentKeys, command: Command) -> None:
    for name, value in command.environment.items():
        if name in _ALLOCATOR_VARIABLES:
            _say_at(keys, "alloc_conf", value, name)
        elif name == "ACCELERATE_MIXED_PRECISION":
            _say_at(keys, "precision", "fp32" if value == "no" else value, name)
        elif name in _READ_VARIABLES:
            keys.ignore(name, "counted with the launcher")
        elif name == IMAGE_CAP and value.isdigit():
            _say_at(keys, PIXELS, int(value), name)
        elif name in IMAGE_VARIABLES:
            keys.miss(name, IMAGES)
        elif name.startswith(_OF_ACCELERATE):
            keys.miss(name, "a setting of accelerate's; its launcher's arguments are read")
        elif name.startswith(("TORCH_", "PYTORCH_")) or name == "CUDA_LAUNCH_BLOCKING":
            keys.miss(name, Bounded("a switch of PyTorch that memest does not follow"))
        else:
            keys.ignore(name, "no variable that memory depends on")


def _visible(environment: Mapping[str, str]) -> int | None:
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    return len([each for each in text.split(",") if each.strip() not in ("", "-1")]) or None


def _number(value: Any, place: str) -> int | None:
    """A count, None for ``auto`` and ``gpu``."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= 1 << 16:
            raise ConfigError(f"command: {place} {value} is out of range: it must be 1 or more.")
        return value
    if isinstance(value, str) and value.lower() in ("auto", "gpu"):
        return None
    raise ConfigError(f"command: {place} {value!r} is not a whole number.")


def _hidden_launcher(command: Command, arguments: dict[str, Any]) -> list[Launcher]:
    """Frameworks whose command starts a launcher by itself."""
    program = command.program
    if command.launchers:
        return []
    if program.startswith("trl ") or program == "axolotl train":
        names: tuple[str, ...] = _ACCELERATE_ARGUMENTS
        if program != "axolotl train":
            # TRL hands on what its own arguments do not have (accelerate_launcher.py)
            names = (*names, *_OF_LAUNCHER)
        values = {key: arguments.pop(key) for key in names if key in arguments}
        if program == "axolotl train" and arguments.pop("launcher", "accelerate") == "python":
            return []
        config = values.pop("accelerate_config", None) if program != "axolotl train" else None
        if config is not None:
            values["config_file"] = predefined_config(str(config)) or config
        return [Launcher("accelerate", values)]
    environment = command.environment
    of_swift = program.startswith("swift ") and {"NPROC_PER_NODE", "NNODES"} & set(environment)
    # LLaMA-Factory counts the GPUs of the machine, where nothing else does
    of_factory = program.startswith("llamafactory-cli ")
    if of_swift or (
        of_factory and (_visible(environment) is None or _starts_torchrun(environment))
    ):
        values = {
            "nproc_per_node": environment.get("NPROC_PER_NODE", "1" if of_swift else "gpu"),
            "nnodes": environment.get("NNODES", "1"),
        }
        plain_values = {k: int(v) if v.isdigit() and len(v) < 6 else v for k, v in values.items()}
        return [Launcher("torchrun", plain_values)]
    return []


def _launcher(
    keys: DocumentKeys, launcher: Launcher, environment: Mapping[str, str]
) -> list[DocumentReading]:
    if launcher.name == "accelerate":
        return [_accelerate(keys, launcher, environment)]
    values = dict(launcher.values)
    if launcher.name == "torchrun":
        key, processes = "nproc_per_node", values.pop("nproc_per_node", 1)
        nodes = values.pop("nnodes", 1)
        nodes_said = include = None
    else:
        key, processes = "num_gpus", values.pop("num_gpus", None)
        nodes_said = values.pop("num_nodes", None)
        nodes = nodes_said or 1
        include = values.pop("include", None)
        if include is not None and processes is None:
            key, processes = "include", _count_slots(str(include))
    per_node = "gpu" if processes is None else processes
    count = _number(per_node, f"--{key}")
    if count is None:
        count, key = _visible(environment), "CUDA_VISIBLE_DEVICES"
    key_of_nodes = "--nnodes" if launcher.name == "torchrun" else "--num_nodes"
    if isinstance(nodes, str) and re.fullmatch(r"\d{1,5}:\d{1,5}", nodes):
        keys.miss(
            key_of_nodes, Bounded(f"{nodes} nodes: the fewest are taken, where each needs the most")
        )
        nodes = int(nodes.partition(":")[0])
    machines = _number(nodes, key_of_nodes) or 1
    if "hostfile" in values and not (nodes_said or include):
        values.pop("hostfile")
        keys.miss("--hostfile", "as many nodes as it names: 1 GPU is taken; --num-gpus says it")
    elif count is None:
        keys.miss(launcher.name, _ALL_GPUS)
    else:
        flag = key if key.isupper() else f"--{key}"
        _say_at(keys, "num_gpus", count * machines, f"{launcher.name} {flag}")
        if machines > 1:
            _say_at(keys, "processes_per_node", count, f"{launcher.name} {flag}")
    for name in values:
        keys.ignore(f"--{name}", f"how {launcher.name} starts processes")
    return []


def _count_slots(text: str) -> Any:
    """``host1:0,1@host2:0-3`` of DeepSpeed's launcher.

    Example:
        >>> _count_slots("host1:0,1@host2:0-3"), _count_slots("host1@host2:0")
        (6, 'gpu')
    """
    slots = [part.partition(":")[2] for part in text.split("@")]
    spans = [span.partition("-") for each in slots for span in each.split(",")]
    if not all(slots) or not all((first + last).isdigit() for first, _, last in spans):
        return "gpu"
    return sum(1 + int(last or first) - int(first) for first, _, last in spans)


def _accelerate(
    keys: DocumentKeys, launcher: Launcher, environment: Mapping[str, str]
) -> DocumentReading:
    values = dict(launcher.values)
    file = values.pop("config_file", None)
    document: dict[str, Any] = {}
    source, folder = "command", None
    if file is not None:
        source = str(file)
        document, folder = open_document(source, "command: --config_file")
    origins: dict[str, KeyOrigin] = {}
    for key, value in values.items():
        origin = KeyOrigin(f"command: accelerate --{key}", Level.COMMAND)
        if key in _DISTRIBUTED_TYPES:
            document["distributed_type"], origins["distributed_type"] = (
                _DISTRIBUTED_TYPES[key],
                origin,
            )
            continue
        part = next((part for start, part in _SECTIONS.items() if key.startswith(start)), None)
        part = "deepspeed_config" if key in _DEEPSPEED_KEYS else part
        if part is None:
            document[key], origins[key] = value, origin
        else:
            section = document.get(part)
            document[part] = {**(section if isinstance(section, dict) else {}), key: value}
            origins[f"{part}.{key}"] = origin
    is_single = document.get("distributed_type") in ("NO", False)
    if document.get("num_processes") in (None, -1) and not is_single:
        count = _visible(environment)
        if count is not None:
            document["num_processes"] = count
            origins["num_processes"] = KeyOrigin("command: CUDA_VISIBLE_DEVICES", Level.COMMAND)
        else:
            document.pop("num_processes", None)
            keys.miss("accelerate", _ALL_GPUS)
    return read_as(find_format("accelerate"), document, origins, source, folder)


def _program_alone(keys: DocumentKeys, command: Command) -> None:
    """Python starts one process; the Trainer puts several visible GPUs into DataParallel."""
    visible = _visible(command.environment)
    names = [word.rpartition("/")[2].partition(".")[0] for word in command.skipped_words]
    starters = [name for name in names if name in PROCESS_STARTERS]
    if command.environment.get("WORLD_SIZE", "1") != "1":
        starters.append("WORLD_SIZE")
    if starters:
        keys.miss(starters[0], PROCESSES)
        return
    if command.program.endswith(SHELL_SUFFIXES):
        return
    if visible is not None and visible > 1 and command.program.startswith("swift "):
        keys.miss(
            "CUDA_VISIBLE_DEVICES",
            Saving(f"the model is spread over {visible} GPUs; all of it is priced on one"),
        )
    elif visible is not None and visible > 1:
        keys.miss(
            "CUDA_VISIBLE_DEVICES",
            f"{visible} GPUs and one process: DataParallel; priced is one GPU",
        )
    keys.set_at("num_gpus", 1, KeyOrigin("command: python starts one process", Level.DEFAULT))


# -- the program


def _program(
    keys: DocumentKeys,
    command: Command,
    arguments: dict[str, Any],
    overrides: dict[str, Any],
    positionals: list[str],
    file_format: FileFormat | None,
) -> list[DocumentReading]:
    program = command.program
    framework, _, method = program.partition(" ")
    if framework == "trl":
        read_method = partial(read_trl, method=method)
        return [_with_file(keys, find_format("trl"), arguments, {}, positionals, read_method)]
    if framework == "swift":
        return [_swift(keys, command, arguments, overrides, positionals, method)]
    if framework == "litgpt":
        if positionals and not positionals[0].lower().endswith(CONFIG_SUFFIXES):
            arguments.setdefault("checkpoint_dir", positionals.pop(0))
        return [_with_file(keys, find_format("litgpt"), arguments, overrides, positionals)]
    if framework in ("llamafactory-cli", "axolotl"):
        read = None
        framework_format = find_format(
            "llama-factory" if framework == "llamafactory-cli" else "axolotl"
        )
        if framework == "llamafactory-cli" and (
            method != "train" or _is_on(command.environment, "USE_V1", "0")
        ):
            framework_format = find_format("llama-factory-v1")
            read = partial(read_llama_factory_v1, method=method)
        if framework == "llamafactory-cli":
            _expandable(keys, command)
        if (
            not arguments
            and not overrides
            and not any(word.lower().endswith(CONFIG_SUFFIXES) for word in positionals)
        ):
            raise ConfigError(f"the launch command: {program} names no configuration, run.yaml.")
        return [_with_file(keys, framework_format, arguments, overrides, positionals, read)]
    if is_verl(program):
        return [_verl(keys, arguments, overrides, positionals)]
    if framework == "tune":
        return [_tune(keys, arguments, overrides, positionals)]
    if program.endswith((*SHELL_SUFFIXES, "torchtitan.train")) or any(
        key.startswith(("job.", "training.")) for key in arguments
    ):
        return [_titan(keys, command, arguments, positionals)]
    return read_script_command(keys, command, arguments, overrides, positionals, file_format)


def _starts_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether LLaMA-Factory's command starts torchrun itself."""
    return _is_on(environment, "FORCE_TORCHRUN", "0") or (_visible(environment) or 1) > 1


def _is_on(environment: Mapping[str, str], name: str, default: str) -> bool:
    return environment.get(name, default).lower() in ("1", "true", "y")


def _expandable(keys: DocumentKeys, command: Command) -> None:
    """Where it starts torchrun itself, it switches expandable segments on (``launcher.py``)."""
    environment = command.environment
    if _starts_torchrun(environment) and _is_on(environment, "OPTIM_TORCH", "1"):
        keys.set_at(
            "alloc_conf",
            "expandable_segments:True",
            KeyOrigin("default of LLaMA-Factory (OPTIM_TORCH of its launcher)", Level.COMMAND),
        )


def _with_file(
    keys: DocumentKeys,
    file_format: FileFormat,
    arguments: dict[str, Any],
    overrides: dict[str, Any],
    positionals: list[str],
    read: Callable[[DocumentKeys], None] | None = None,
) -> DocumentReading:
    document, source, folder = document_among(arguments, positionals)
    document, origins = merge_arguments(document, read_negations(arguments), overrides)
    ignore_words(keys, positionals)
    return read_as(file_format, document, origins, source, folder, read)


def _swift(
    keys: DocumentKeys,
    command: Command,
    arguments: dict[str, Any],
    overrides: dict[str, Any],
    positionals: list[str],
    method: str,
) -> DocumentReading:
    """ms-swift; of its second release, ways to prefer are commands of their own."""
    if method not in ("sft", "pt", "rlhf"):
        arguments, method = {"rlhf_type": method, **arguments}, "rlhf"
    is_distributed = bool(command.launchers or _hidden_launcher(command, arguments))
    read = partial(read_ms_swift, method=method, distributed=is_distributed)
    return _with_file(keys, find_format("ms-swift"), arguments, overrides, positionals, read)


def _verl(
    keys: DocumentKeys, arguments: dict[str, Any], overrides: dict[str, Any], positionals: list[str]
) -> DocumentReading:
    """What hydra puts together: a configuration by name, and what the command changes in it."""
    name = str(arguments.pop("config_name", "")).removesuffix(".yaml")
    folder = arguments.pop("config_path", None)
    path = Path(str(folder or ".")) / f"{name}.yaml"
    document: dict[str, Any] = {}
    source, place = "command", None
    if name and path.is_file():
        document, place = open_document(str(path), "command: --config-name")
        source = path.name
    elif name and name not in VERL_CONFIGS:
        why = f"{name}.yaml {NOT_HERE}: what the command names beside verl's defaults is read"
        keys.miss("--config-name", why)
    document, origins = merge_arguments(document, {}, overrides)
    ignore_words(keys, [*positionals, *(f"--{key}" for key in arguments)])
    read = partial(read_verl, config=name)
    return read_as(find_format("verl"), document, origins, source, place, read)


def _tune(
    keys: DocumentKeys, arguments: dict[str, Any], overrides: dict[str, Any], positionals: list[str]
) -> DocumentReading:
    recipe = positionals.pop(0) if positionals else ""
    if recipe in _NO_TRAINING:
        raise ConfigError(f"the launch command: tune run {recipe} trains nothing.")
    config = arguments.pop("config", None)
    if not isinstance(config, str):
        raise ConfigError(f"the launch command: tune run {recipe} names no --config.")
    if config.lower().endswith((".yaml", ".yml")):
        document, folder = open_document(config, "command: --config")
    else:
        path = installed_config(config)
        if path is None:
            command = shlex.join(("tune", "run", recipe, "--config", "run.yaml"))
            raise ConfigError(
                f"the launch command: --config {config} is a file of torchtune, which is not "
                f"installed beside memest. Copy it, tune cp {config} run.yaml, and ask again with "
                f"the copy: {command}."
            )
        document, folder = read_document(path, config), path.parent
    for word in [word for word in positionals if word.startswith("~")]:
        positionals.remove(word)
        document = _without(document, word[1:].split("."))
    # model=NAME stands for model._component_=NAME (config/_utils.py)
    overrides = {
        f"{key}._component_" if _is_component(document.get(key), value) else key: value
        for key, value in overrides.items()
    }
    document, origins = merge_arguments(document, arguments, overrides)
    ignore_words(keys, positionals)
    return read_as(
        find_format("torchtune"),
        document,
        origins,
        config,
        folder,
        partial(read_torchtune, recipe=recipe),
    )


def _without(document: Mapping[str, Any], path: list[str]) -> dict[str, Any]:
    """A document without a key, which may lie in a part of it."""
    first, *rest = path
    section = document.get(first)
    if rest and isinstance(section, Mapping):
        return {**document, first: _without(section, rest)}
    return {key: value for key, value in document.items() if key != first}


def _is_component(section: Any, value: Any) -> bool:
    return isinstance(section, Mapping) and "_component_" in section and isinstance(value, str)


def _titan(
    keys: DocumentKeys, command: Command, arguments: dict[str, Any], positionals: list[str]
) -> DocumentReading:
    file = arguments.pop("job.config_file", None) or command.environment.get("CONFIG_FILE")
    gpus = command.environment.get("NGPU", "")
    if gpus.isdigit() and 0 < int(gpus[:6]) <= 1 << 16:
        _say_at(keys, "num_gpus", int(gpus), "NGPU")
    sets_allocator = bool(set(_ALLOCATOR_VARIABLES) & set(command.environment))
    if not command.program.endswith(SHELL_SUFFIXES) and not sets_allocator:
        _say_at(keys, "alloc_conf", "", "no run_train.sh, which sets PYTORCH_CUDA_ALLOC_CONF")
    function = arguments.pop("config", None) or command.environment.get("CONFIG")
    module = arguments.pop("module", None) or command.environment.get("MODULE")
    arguments |= take_checkpointing(arguments, positionals)
    arguments = dict(_switched_off(key, value) for key, value in arguments.items())
    document: dict[str, Any] = {}
    unknown: tuple[Remark, ...] = ()
    source, folder = "command", None
    if isinstance(file, str):
        document, folder = open_document(file, "command: --job.config_file")
        source = file
    elif function is not None:
        path = registry_file(str(module or "llama3"), str(function))
        document, unknown = read_function(path, str(function), str(path))
        source, folder = path.name, path.parent
    elif command.program.endswith(SHELL_SUFFIXES):
        raise ConfigError(
            f"the launch command runs {command.program}, which is not on this machine: "
            "give the command that it runs, or its configuration with --config."
        )
    document, origins = merge_arguments(document, arguments, {})
    ignore_words(keys, positionals)
    reading = read_as(find_format("torchtitan"), document, origins, source, folder)
    return replace(reading, not_modelled=(*reading.not_modelled, *unknown))


def _switched_off(key: str, value: Any) -> tuple[str, Any]:
    """``--training.no-enable-cpu-offload``, which is how tyro switches off.

    Example:
        >>> _switched_off("compile.no_enable", True)
        ('compile.enable', False)
    """
    section, dot, name = key.rpartition(".")
    if value is True and name.startswith("no_"):
        return f"{section}{dot}{name.removeprefix('no_')}", False
    return key, value


_NO_TRAINING = ("generate", "dev/generate_v2", "eleuther_eval", "quantize")
"""Recipes of torchtune that only use a model."""
