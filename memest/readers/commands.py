"""What a launch command says: launcher, environment and program, each by its own reader."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memest.errors import ConfigError
from memest.readers.accelerate import read_accelerate
from memest.readers.command_words import Command, Launcher, read_arguments
from memest.readers.documents import find_file, read_document
from memest.readers.findings import Level, Reading
from memest.readers.formats import FORMATS, Format, find_format, recognise
from memest.readers.sheet import Place, Sheet, option_called
from memest.readers.torchtune import read_torchtune
from memest.readers.trainer_keys import MATTERS, REASONS, SIZES
from memest.readers.trl import read_trl

__all__ = ["read_launch"]

_CONFIGS = ("config", "config_file", "cfg", "config_path")
_FILES = (".yaml", ".yml", ".json", ".toml")
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_TO_DEEPSPEED = frozenset(
    """zero_stage offload_optimizer_device offload_param_device gradient_accumulation_steps
    gradient_clipping deepspeed_config_file zero3_init_flag zero3_save_16bit_model
    deepspeed_hostfile deepspeed_multinode_launcher offload_optimizer_nvme_path
    offload_param_nvme_path deepspeed_exclusion_filter deepspeed_inclusion_filter
    deepspeed_moe_layer_cls_names""".split()
)
_KINDS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "multi_gpu": "MULTI_GPU",
          "use_megatron_lm": "MEGATRON_LM"}  # fmt: skip
_OF_ACCELERATE = ("accelerate_config", "num_processes", "num_machines", "mixed_precision")


def read_launch(command: Command, *, chosen: Format | None = None) -> list[Reading]:
    """The readings of a command, and of the files that it names.

    Args:
        command: taken apart.
        chosen: the format of the program's own arguments, where the user says it.

    Raises:
        ConfigError: a file that is not there, or a value that cannot be.
    """
    sheet = Sheet({}, source="command", framework="launch command", level=Level.COMMAND)
    _environment(sheet, command)
    named, changes, loose = read_arguments(command.words)
    launchers = list(command.launchers)
    launchers += _hidden_launcher(command, named)
    readings: list[Reading] = []
    for launcher in launchers:
        readings += _launcher(sheet, launcher, command.environment)
    if not launchers:
        _program_alone(sheet, command)
    readings += _program(sheet, command, named, changes, loose, chosen)
    for word in command.skipped:
        sheet.ignore(word, "not of the launcher and its program")
    return [*readings, sheet.reading()]


# -- environment and launchers


def _say_at(sheet: Sheet, option: str, value: Any, where: str) -> None:
    sheet.say_at(option, value, Place(f"command: {where}", Level.COMMAND))


def _environment(sheet: Sheet, command: Command) -> None:
    for name, value in command.environment.items():
        if name in _ALLOCATOR:
            _say_at(sheet, "alloc_conf", value, name)
        elif name == "ACCELERATE_MIXED_PRECISION":
            _say_at(sheet, "precision", "fp32" if value == "no" else value, name)
        elif name in ("CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE", "NNODES", "FORCE_TORCHRUN",
                      "WORLD_SIZE", "NGPU", "CONFIG_FILE", "OPTIM_TORCH"):  # fmt: skip
            sheet.ignore(name, "counted with the launcher")
        elif name.startswith(("TORCH_", "PYTORCH_")) or name == "CUDA_LAUNCH_BLOCKING":
            sheet.miss(name, "a switch of PyTorch that memest does not follow")
        else:
            sheet.ignore(name, "no variable that memory depends on")


def _visible(environment: Mapping[str, str]) -> int | None:
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    return len([each for each in text.split(",") if each.strip() not in ("", "-1")]) or None


def _number(value: Any, where: str) -> int | None:
    """A count, None for ``auto`` and ``gpu``."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= 1 << 16:
            raise ConfigError(f"command: {where} {value} is out of range: it must be 1 or more.")
        return value
    if isinstance(value, str) and value.lower() in ("auto", "gpu"):
        return None
    if isinstance(value, str) and ":" in value:
        last = value.rpartition(":")[2]
        return int(last) if last.isdigit() and len(last) < 6 else None
    raise ConfigError(f"command: {where} {value!r} is not a whole number.")


def _hidden_launcher(command: Command, named: dict[str, Any]) -> list[Launcher]:
    """Frameworks whose command starts a launcher by itself."""
    program = command.program
    if command.launchers:
        return []
    if program.startswith("trl "):
        values = {key: named.pop(key) for key in _OF_ACCELERATE if key in named}
        config = values.pop("accelerate_config", None)
        if config is not None:
            values["config_file"] = config
        return [Launcher("accelerate", values)]
    if program == "axolotl train":
        values = {key: named.pop(key) for key in _OF_ACCELERATE if key in named}
        if named.pop("launcher", "accelerate") == "python":
            return []
        return [Launcher("accelerate", values)]
    if program == "llamafactory-cli train":
        environment = command.environment
        visible = _visible(environment)
        forced = environment.get("FORCE_TORCHRUN", "0").lower() in ("1", "true", "y")
        if not forced and (visible or 1) == 1:
            return []
        values = {"nproc_per_node": environment.get("NPROC_PER_NODE", "gpu"),
                  "nnodes": environment.get("NNODES", "1")}  # fmt: skip
        plain = {k: int(v) if v.isdigit() and len(v) < 6 else v for k, v in values.items()}
        return [Launcher("torchrun", plain)]
    return []


def _launcher(sheet: Sheet, launcher: Launcher, environment: Mapping[str, str]) -> list[Reading]:
    if launcher.name == "accelerate":
        return [_accelerate(sheet, launcher, environment)]
    values = dict(launcher.values)
    if launcher.name == "torchrun":
        key, each = "nproc_per_node", values.pop("nproc_per_node", 1)
        nodes = values.pop("nnodes", 1)
    else:
        key, each = "num_gpus", values.pop("num_gpus", None)
        nodes = values.pop("num_nodes", 1)
        include = values.pop("include", None)
        if include is not None and each is None:
            key, each = "include", _included(str(include))
    per_node = "gpu" if each is None else each
    count = _number(per_node, f"--{key}")
    if count is None:
        count, key = _visible(environment), "CUDA_VISIBLE_DEVICES"
    machines = _number(nodes, "--nnodes" if launcher.name == "torchrun" else "--num_nodes") or 1
    if count is None:
        sheet.miss(launcher.name, "as many processes as the machine has GPUs: 1 is taken; "
                           "--num-gpus says it")  # fmt: skip
    else:
        where = key if key.isupper() else f"--{key}"
        _say_at(sheet, "num_gpus", count * machines, f"{launcher.name} {where}")
    for name in values:
        sheet.ignore(f"--{name}", f"how {launcher.name} starts processes")
    return []


def _included(text: str) -> Any:
    """``host1:0,1@host2:0`` of DeepSpeed's launcher."""
    slots = [part.partition(":")[2] for part in text.split("@")]
    return sum(len(each.split(",")) for each in slots) if all(slots) else "gpu"


def _accelerate(sheet: Sheet, launcher: Launcher, environment: Mapping[str, str]) -> Reading:
    values = dict(launcher.values)
    file = values.pop("config_file", None)
    document: dict[str, Any] = {}
    source, folder = "command", None
    if file is not None:
        path = find_file(str(file), beside=None, origin="command: --config_file")
        document, source, folder = read_document(path, str(file)), str(file), path.parent
    places: dict[str, Place] = {}
    for key, value in values.items():
        place = Place(f"command: accelerate --{key}", Level.COMMAND)
        if key in _KINDS:
            document["distributed_type"], places["distributed_type"] = _KINDS[key], place
            continue
        part = ("deepspeed_config" if key in _TO_DEEPSPEED else
                "fsdp_config" if key.startswith("fsdp_") else
                "dynamo_config" if key.startswith("dynamo_") else
                "parallelism_config" if key.startswith("parallelism_config_") else
                "fp8_config" if key.startswith("fp8_") else None)  # fmt: skip
        if part is None:
            document[key], places[key] = value, place
        else:
            inner = document.get(part)
            document[part] = {**(inner if isinstance(inner, dict) else {}), key: value}
            places[f"{part}.{key}"] = place
    if document.get("num_processes") in (None, -1) and document.get("distributed_type") not in (
        "NO", False,
    ):  # fmt: skip
        count = _visible(environment)
        if count is not None:
            document["num_processes"] = count
            places["num_processes"] = Place("command: CUDA_VISIBLE_DEVICES", Level.COMMAND)
        else:
            document.pop("num_processes", None)
            sheet.miss("accelerate", "as many processes as the machine has GPUs: 1 is "
                               "taken; --num-gpus says it")  # fmt: skip
    level = Level.COMMAND if file is None else Level.FILE
    part_sheet = Sheet(
        document, source=source, framework="accelerate", places=places, folder=folder, level=level
    )
    read_accelerate(part_sheet)
    return part_sheet.reading()


def _program_alone(sheet: Sheet, command: Command) -> None:
    """Python starts one process; the Trainer puts several visible GPUs into DataParallel."""
    visible = _visible(command.environment)
    if command.program.endswith(".sh"):
        return
    if visible is not None and visible > 1:
        sheet.miss("CUDA_VISIBLE_DEVICES", f"{visible} GPUs and one process: DataParallel; priced "
                   "is one GPU")  # fmt: skip
    sheet.say_at("num_gpus", 1, Place("command: python starts one process", Level.DEFAULT))


# -- the program


def _program(
    sheet: Sheet, command: Command, named: dict[str, Any], changes: dict[str, Any],
    loose: list[str], chosen: Format | None,
) -> list[Reading]:  # fmt: skip
    program = command.program
    framework, _, method = program.partition(" ")
    if framework == "trl":
        return [_trl(sheet, named, loose, method)]
    if framework in ("llamafactory-cli", "axolotl"):
        each = find_format("llama-factory" if framework == "llamafactory-cli" else "axolotl")
        if framework == "llamafactory-cli":
            _expandable(sheet, command)
        return [_with_file(sheet, each, named, changes, loose, required=program)]
    if framework == "tune":
        return [_tune(sheet, named, changes, loose)]
    if program.endswith(".sh") or any(key.startswith(("job.", "training.")) for key in named):
        return [_titan(sheet, command, named, loose)]
    return _script(sheet, command, named, changes, loose, chosen)


def _expandable(sheet: Sheet, command: Command) -> None:
    """Where it starts torchrun itself, it switches expandable segments on (``launcher.py``)."""
    environment = command.environment
    forced = environment.get("FORCE_TORCHRUN", "0").lower() in ("1", "true", "y")
    several = forced or (_visible(environment) or 1) > 1
    if several and environment.get("OPTIM_TORCH", "1").lower() in ("1", "true", "y"):
        sheet.say_at(
            "alloc_conf", "expandable_segments:True",
            Place("default of LLaMA-Factory (OPTIM_TORCH of its launcher)", Level.COMMAND),
        )  # fmt: skip


def _file_among(named: dict[str, Any], loose: list[str]) -> tuple[str | None, str]:
    """The configuration file among a program's arguments."""
    for key in _CONFIGS:
        value = named.get(key)
        if isinstance(value, str) and value.lower().endswith(_FILES):
            named.pop(key)
            return value, f"command: --{key}"
    for word in loose:
        if word.lower().endswith(_FILES):
            loose.remove(word)
            return word, f"command: {word}"
    return None, ""


def _read_named(named: dict[str, Any], loose: list[str]) -> tuple[dict[str, Any], str, Path | None]:
    """The document that the arguments name, what it is called, and its folder; else nothing."""
    file, origin = _file_among(named, loose)
    if file is None:
        return {}, "command", None
    path = find_file(file, beside=None, origin=origin)
    return read_document(path, file), file, path.parent


def _merged(
    document: Mapping[str, Any], named: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Place]]:
    """A file's document with what the command line changes, and where that stands."""
    out = dict(document)
    places: dict[str, Place] = {}
    for values, mark in ((named, "--"), (changes, "")):
        for key, value in values.items():
            places[key] = Place(f"command: {mark}{key}", Level.COMMAND)
            if "." not in key:
                out[key] = value
                continue
            inner = out
            for part in key.split(".")[:-1]:
                below = inner.get(part)
                inner[part] = dict(below) if isinstance(below, Mapping) else {}
                inner = inner[part]
            inner[key.rpartition(".")[2]] = value
    return out, places


def _negated(named: dict[str, Any]) -> dict[str, Any]:
    """``--no_flag`` of HfArgumentParser."""
    out: dict[str, Any] = {}
    for key, value in named.items():
        name = key.removeprefix("no_")
        known = option_called(name) or name in REASONS or name in MATTERS
        out[name if name != key and known and value is True else key] = (
            False if name != key and known and value is True else value
        )
    return out


def _loose(sheet: Sheet, words: list[str]) -> None:
    for word in words:
        sheet.ignore(word, "memest does not know it")


def _read(
    each: Format, document: dict[str, Any], places: dict[str, Place], source: str,
    folder: Path | None,
) -> Reading:  # fmt: skip
    level = Level.COMMAND if source == "command" else Level.FILE
    part = Sheet(
        document, source=source, framework=each.title, places=places, folder=folder, level=level
    )
    each.read(part)
    return part.reading()


def _with_file(
    sheet: Sheet, each: Format, named: dict[str, Any], changes: dict[str, Any], loose: list[str],
    *, required: str,
) -> Reading:  # fmt: skip
    document, source, folder = _read_named(named, loose)
    if folder is None and not named and not changes:
        raise ConfigError(f"the launch command: {required} names no configuration, run.yaml.")
    document, places = _merged(document, _negated(named), changes)
    _loose(sheet, loose)
    return _read(each, document, places, source, folder)


def _trl(sheet: Sheet, named: dict[str, Any], loose: list[str], method: str) -> Reading:
    document, source, folder = _read_named(named, loose)
    document, places = _merged(document, _negated(named), {})
    _loose(sheet, loose)
    level = Level.COMMAND if folder is None else Level.FILE
    part = Sheet(
        document, source=source, framework="TRL", places=places, folder=folder, level=level
    )
    read_trl(part, method=method)
    return part.reading()


def _tune(
    sheet: Sheet, named: dict[str, Any], changes: dict[str, Any], loose: list[str]
) -> Reading:  # fmt: skip
    recipe = loose.pop(0) if loose else ""
    config = named.pop("config", None)
    if not isinstance(config, str):
        raise ConfigError(f"the launch command: tune run {recipe} names no --config.")
    if not config.lower().endswith((".yaml", ".yml")):
        raise ConfigError(
            f"the launch command: --config {config} is one that comes with torchtune: copy it, "
            f"tune cp {config} run.yaml, and name the file."
        )
    path = find_file(config, beside=None, origin="command: --config")
    document, places = _merged(read_document(path, config), named, changes)
    _loose(sheet, loose)
    part = Sheet(document, source=config, framework="torchtune", places=places, folder=path.parent)
    read_torchtune(part, distributed="distributed" in recipe)
    if recipe and not recipe.startswith(("full_finetune", "lora_finetune", "qat")):
        part.miss_default(f"recipe {recipe}", "priced is fine-tuning")
    return part.reading()


def _titan(
    sheet: Sheet, command: Command, named: dict[str, Any], loose: list[str]
) -> Reading:  # fmt: skip
    file = named.pop("job.config_file", None) or command.environment.get("CONFIG_FILE")
    gpus = command.environment.get("NGPU", "")
    if gpus.isdigit() and 0 < int(gpus[:6]) <= 1 << 16:
        _say_at(sheet, "num_gpus", int(gpus), "NGPU")
    if not isinstance(file, str):
        if command.program.endswith(".sh"):
            raise ConfigError(
                f"the launch command runs {command.program}, and memest reads no shell scripts: "
                "give the command that it runs, or its configuration with --config."
            )
        file = ""
    if not command.program.endswith(".sh") and not set(_ALLOCATOR) & set(command.environment):
        _say_at(sheet, "alloc_conf", "", "no run_train.sh, which sets PYTORCH_CUDA_ALLOC_CONF")
    document: dict[str, Any] = {}
    folder = None
    if file:
        path = find_file(file, beside=None, origin="command: --job.config_file")
        document, folder = read_document(path, file), path.parent
    document, places = _merged(document, named, {})
    _loose(sheet, loose)
    return _read(find_format("torchtitan"), document, places, file or "command", folder)


def _script(
    sheet: Sheet, command: Command, named: dict[str, Any], changes: dict[str, Any],
    loose: list[str], chosen: Format | None,
) -> list[Reading]:  # fmt: skip
    """A training script: its arguments are taken for what their names say."""
    program = command.program
    file, origin = _file_among(named, loose)
    out: list[Reading] = []
    own = named.pop("deepspeed_config", None)
    if isinstance(own, str):
        # DeepSpeed's own arguments (add_config_arguments): a switch, and the file beside it
        named.pop("deepspeed", None)
        path = find_file(own, beside=None, origin="command: --deepspeed_config")
        found = read_document(path, own)
        out.append(_read(find_format("deepspeed"), found, {}, own, path.parent))
    named = _negated(named)
    document: dict[str, Any] = {}
    source, folder, each = "command", None, chosen
    if file is not None:
        path = find_file(file, beside=None, origin=origin)
        found = read_document(path, file)
        kind = chosen or recognise(found, file)
        if kind.name in ("accelerate", "deepspeed", "peft"):
            out.append(_read(kind, found, {}, file, path.parent))
        else:
            document, source, folder, each = found, file, path.parent, kind
    if each is None:
        each = _format_of(named)
    if each is None:
        for key in (*named, *changes):
            sheet.ignore(f"--{key}" if key in named else key, "memest does not know it")
    else:
        document, places = _merged(document, named, changes)
        out.append(_read(each, document, places, source, folder))
    what = (
        "its arguments say nothing that memest knows"
        if each is None
        else (f"taken for one on {each.title}")
    )
    sheet.miss(program, f"the script is not read: {what}; --loop and --config-format say "
                       "otherwise")  # fmt: skip
    _loose(sheet, loose)
    return out


def _format_of(named: Mapping[str, Any]) -> Format | None:
    """Training arguments, or those of a framework whose marks are among them."""
    keys = set(named)
    scores = {
        each: len(each.marks & keys) for each in FORMATS
        if each.name in ("trl", "llama-factory", "axolotl")
    }  # fmt: skip
    best = max(scores, key=lambda each: scores[each])
    if scores[best] and (best.name != "axolotl" or "base_model" in keys):
        return best
    known = {"model_name_or_path", "model_name", "output_dir", "deepspeed", "fsdp", *SIZES}
    if any(key in known or option_called(key) for key in keys):
        return FORMATS[0]
    return None
