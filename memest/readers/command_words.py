"""The words of a launch command, taken apart; nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memest.errors import ConfigError
from memest.readers.documents import plain_value
from memest.readers.litgpt import LITGPT_COMMANDS

__all__ = [
    "PROCESS_STARTERS",
    "SHELL_SUFFIXES",
    "Command",
    "Launcher",
    "begins_launch",
    "read_arguments",
    "split_command",
    "starts_program",
    "words_of",
]

PROCESS_STARTERS = tuple(
    "srun mpirun mpiexec horovodrun jsrun aprun composer colossalai fabric lightning".split()
)
"""What starts several processes of a program, as many as it is told."""
SHELL_SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm")

_SHELLS = ("bash", "sh", "zsh")
_WRAPPERS = (*_SHELLS, "env", "nohup", "uv")
"""What starts one program, which is named behind it."""
_SHELL = re.compile(r"(\d*>>?|&>>?)(?!=)|[|&;]+$|<$")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_LAUNCHERS = ("accelerate", "accelerate-launch", "torchrun", "deepspeed")
_PROGRAMS = {
    "llamafactory-cli": "llamafactory-cli",
    "lmf": "llamafactory-cli",
    "axolotl": "axolotl",
    "tune": "tune",
    "trl": "trl",
    "swift": "swift",
    "litgpt": "litgpt",
    "megatron": "megatron",
}
_SUBCOMMANDS = {
    "llamafactory-cli": ("train", "sft", "dpo", "rm"),
    "axolotl": ("train",),
    "tune": ("run",),
    "litgpt": LITGPT_COMMANDS,
    "swift": ("sft", "pt", "rlhf", "dpo", "orpo", "simpo"),
}
_NO_TRAINING = {"trl": ("vllm-serve", "vllm_serve", "chat", "env")}
_NOT_PRICED = {
    "megatron": "trains with Megatron-Core, which memest does not model; swift trains the same "
    "models with transformers",
}
"""Programs that train by what memest has not, and what there is to say of them."""
_SCRIPTS = re.compile(r"(?:.*/)?(swift)/cli/(\w+)\.py")
"""Scripts that are what a framework's command runs: its name, and the command."""
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "torch.distributed.elastic": "torchrun",
    "accelerate.commands.launch": "accelerate-launch",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
    "llamafactory.cli": "llamafactory-cli",
    "llamafactory.launcher": "llamafactory-cli",
    "axolotl.cli.main": "axolotl",
    "trl.cli": "trl",
    "trl": "trl",
    "torchtune._cli.tune": "tune",
    "swift.cli.main": "swift",
}
_SWITCHES = {
    "accelerate": """multi_gpu cpu tpu use_deepspeed use_fsdp use_megatron_lm
        use_parallelism_config quiet q debug module m no_python dynamo_use_fullgraph
        dynamo_use_dynamic dynamo_use_regional_compilation same_network downcast_bf16 tpu_cluster
        no_tpu_cluster tpu_use_sudo enable_cpu_affinity""".split(),
    "torchrun": """standalone module m no_python run_path use_env virtual_local_rank""".split(),
    "deepspeed": """no_python module no_local_rank no_ssh_check force_multi save_pid
        bind_cores_to_rank elastic_training m""".split(),
}
_SHORT = {"deepspeed": {"i": "include", "e": "exclude", "H": "hostfile"}}
"""What launchers call short."""
_VALUES = {
    "torchrun": """nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts
        monitor_interval start_method event_log_handler role log_dir redirects tee node_rank
        local_ranks_filter duplicate_stdout_filters duplicate_stderr_filters master_addr master_port
        local_addr logs_specs numa_binding signals_to_handle shutdown_timeout""".split(),
    "deepspeed": """hostfile include exclude num_nodes min_elastic_nodes max_elastic_nodes num_gpus
        master_port node_rank master_addr launcher launcher_args autotuning ssh_port venv_script
        enable_each_rank_log bind_core_list""".split(),
}
"""Arguments with a value of launchers that take beginnings of them, as argparse does; accelerate's
takes none (``allow_abbrev=False``)."""
_MAX_WORDS = 2000


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher with its own arguments.

    Attributes:
        name: ``accelerate``, ``torchrun`` or ``deepspeed``.
        values: by name, with underscores.
    """

    name: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A launch command, taken apart.

    Attributes:
        environment: assignments before it.
        launchers: from the outside in.
        program: a script, a module, or a framework's command: ``trl sft``.
        words: arguments of the program.
        skipped_words: words before all that and behind it, of schedulers and shells.
    """

    environment: dict[str, str] = field(default_factory=dict)
    launchers: tuple[Launcher, ...] = ()
    program: str
    words: tuple[str, ...] = ()
    skipped_words: tuple[str, ...] = ()


def words_of(command: str | Sequence[str]) -> list[str]:
    """The words of a command that is one text, or has them already.

    Raises:
        ConfigError: quotes that do not end, or far too many words.
    """
    if isinstance(command, str):
        try:
            words = shlex.split(command.replace("\\\n", " "))
        except ValueError as error:
            raise ConfigError(f"--launch {command!r} cannot be read: {error}.") from None
    else:
        words = [str(word) for word in command]
    if len(words) > _MAX_WORDS:
        raise ConfigError(f"the launch command has more than {_MAX_WORDS} words.")
    return words


def split_command(words: Sequence[str]) -> Command:
    """Take a command apart.

    Raises:
        ConfigError: it starts no training that memest knows how to read.
    """
    environment: dict[str, str] = {}
    skipped_words: list[str] = []
    queue = list(words)
    while queue and not starts_program(queue):
        word = queue.pop(0)
        if _ASSIGNMENT.match(word):
            name, _, value = word.partition("=")
            environment[name] = value.removesuffix(";")
            continue
        in_shell = [each for each in skipped_words if each.rpartition("/")[2] in _SHELLS]
        if queue and (word == "--wrap" or (in_shell and re.fullmatch(r"-\w*c", word))):
            queue = [*words_of(queue[0]), *queue[1:]]  # a command that is one word of another
        skipped_words.append(word)
    if not queue:
        text = shlex.join(words)
        text = text if len(text) < 100 else f"{text[:97]}..."
        raise ConfigError(
            f"the launch command {text!r} names no script (train.py) and no launcher that memest "
            "knows: python, accelerate launch, torchrun, deepspeed, trl, llamafactory-cli, "
            "axolotl, tune, swift."
        )
    queue, trailing_words = _before_shell(queue)
    _check_alone(queue, trailing_words)
    skipped_words += trailing_words
    launchers: list[Launcher] = []
    program, rest = _follow(queue, launchers)
    return Command(
        environment=environment,
        launchers=tuple(launchers),
        program=program,
        words=tuple(rest),
        skipped_words=tuple(skipped_words),
    )


def _before_shell(words: list[str]) -> tuple[list[str], list[str]]:
    """A command without what the shell makes of its output, and what comes behind it.

    Example:
        >>> _before_shell(["train.py", "--bf16", ">", "log.txt", "2>&1", "&"])
        (['train.py', '--bf16'], ['>', 'log.txt', '2>&1', '&'])
    """
    for place, word in enumerate(words):
        if _SHELL.match(word):
            return words[:place], words[place:]
        if len(word) > 1 and word.endswith(";"):
            return [*words[:place], word[:-1]], words[place + 1 :]
    return words, []


def _check_alone(words: Sequence[str], trailing_words: Sequence[str]) -> None:
    """Refuse a second program behind a command: nothing says which of them is meant.

    Raises:
        ConfigError: there is one.
    """
    for place in range(len(trailing_words)):
        rest = trailing_words[place:]
        before = trailing_words[place - 1] if place else ";"
        if starts_program(rest) and not re.fullmatch(r"\||\d*>>?|&>>?|tee|-a", before):
            raise ConfigError(
                "the launch command starts several programs, one after another: "
                f"{shlex.join(words[:4])} ... and {shlex.join(rest[:4])} .... Give the one that "
                "trains."
            )


def starts_program(words: Sequence[str]) -> bool:
    """Whether a command's words begin with a launcher, a framework's command or a script.

    Example:
        >>> starts_program(["trl", "sft"]), starts_program(["trl", "python", "train.py"])
        (True, False)
    """
    word, following = words[0], "".join(words[1:2])
    name = word.rpartition("/")[2]
    if name in _PROGRAMS:
        # as an environment or a package it may be the value of a flag before the program
        return not (following.startswith("-") or (following and starts_program(words[1:])))
    is_program = name in _LAUNCHERS or _PYTHON.fullmatch(name)
    is_script = word.endswith((".py", *SHELL_SUFFIXES)) and " " not in word
    return bool(is_program) or is_script


def begins_launch(words: Sequence[str]) -> bool:
    """Whether words are surely a launch command: a launcher, or a program with what it starts.

    A script alone is none: it stands in the place of a model as well.

    Example:
        >>> begins_launch(["CUDA_VISIBLE_DEVICES=0", "python3", "train.py"])
        True
        >>> begins_launch(["train.py", "--bf16"]), begins_launch(["deepspeed"])
        (False, False)
        >>> begins_launch(["uv", "run", "train.py"]), begins_launch(["bash", "--bf16"])
        (True, False)
    """
    words = list(words)
    while words and _ASSIGNMENT.match(words[0]):
        words.pop(0)
    if len(words) < 2:
        return False
    name = words[0].rpartition("/")[2]
    if name in _WRAPPERS:
        return any(starts_program(words[place:]) for place in range(1, len(words)))
    is_script = words[0].endswith((".py", *SHELL_SUFFIXES))
    return name in PROCESS_STARTERS or (starts_program(words) and not is_script)


def _follow(words: list[str], launchers: list[Launcher]) -> tuple[str, list[str]]:
    """The program at the end of launchers that start each other."""
    while words:
        word = words.pop(0)
        name = word.rpartition("/")[2]
        if _PYTHON.fullmatch(name):
            name = _by_script(_python(words), words)
            if name not in _LAUNCHERS and name not in _PROGRAMS:
                return name, words
        if name in ("accelerate", "accelerate-launch"):
            if name == "accelerate" and (not words or words.pop(0) != "launch"):
                raise ConfigError(
                    "the launch command: of accelerate's commands, launch starts a training."
                )
            name = "accelerate"
        if name in ("accelerate", "torchrun", "deepspeed"):
            values = _launcher_arguments(name, words)
            launchers.append(Launcher(name, values))
            if values.pop("module", False) or values.pop("m", False):
                if not words:
                    return "", []
                name = _by_script(_MODULES.get(words[0], words.pop(0)), words)
                return _framework(name, words, launchers) if name in _PROGRAMS else (name, words)
            if not words:
                raise ConfigError(f"the launch command: {name} is given no script.")
            continue
        name = _by_script(word, words) if name not in _PROGRAMS else name
        if name in _PROGRAMS:
            return _framework(_PROGRAMS[name], words, launchers)
        return word, words
    raise ConfigError("the launch command is given no script.")


def _by_script(program: str, words: list[str]) -> str:
    """A framework's name for a script or a module of its own, whose command comes before words."""
    is_module = not program.endswith(".py") and "/" not in program
    match = _SCRIPTS.fullmatch(f"{program.replace('.', '/')}.py" if is_module else program)
    if match is None:
        return program
    words.insert(0, match[2].replace("_", "-"))
    return match[1]


def _python(words: list[str]) -> str:
    """What Python runs: a script, a module, or the launcher that a module is."""
    while words:
        word = words.pop(0)
        if word == "-m" and words:
            module = words.pop(0)
            return _MODULES.get(module, module)
        if word == "-c":
            raise ConfigError("the launch command runs python -c, which memest does not read.")
        if word in ("-W", "-X") and words:
            words.pop(0)
        elif not word.startswith("-"):
            return word
    raise ConfigError("the launch command: python is given no script.")


def _framework(name: str, words: list[str], launchers: list[Launcher]) -> tuple[str, list[str]]:
    legal = _SUBCOMMANDS.get(name)
    if not words:
        raise ConfigError(f"the launch command: {name} is given no command, for example train.")
    sub = words.pop(0)
    if name in _NOT_PRICED:
        raise ConfigError(f"the launch command: {name} {sub} {_NOT_PRICED[name]}.")
    if sub in _NO_TRAINING.get(name, ()):
        raise ConfigError(f"the launch command: {name} {sub} does not train.")
    if legal is not None and sub not in legal:
        raise ConfigError(
            f"the launch command: {name} {sub} does not train; {name} {legal[0]} does."
        )
    if name == "tune":
        launchers.append(Launcher("torchrun", _launcher_arguments("torchrun", words)))
    return f"{name} {sub}", words


def _launcher_arguments(name: str, words: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    while words and words[0].startswith("-"):
        flag, equals, text = words.pop(0).partition("=")
        if flag == "--":
            break
        key = flag.lstrip("-").replace("-", "_")
        key = _SHORT.get(name, {}).get(key, key)
        every = (*_SWITCHES[name], *_VALUES.get(name, ()))
        begun = [each for each in every if flag.startswith("--") and each.startswith(key)]
        if name in _VALUES and key not in every and len(begun) == 1:
            key = begun[0]
        if equals:
            values[key] = plain_value(text)
        elif key in _SWITCHES[name]:
            values[key] = True
        elif words:
            values[key] = plain_value(words.pop(0))
    return values


def read_arguments(words: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Arguments of a program as HfArgumentParser and OmegaConf read them.

    Returns:
        ``--name value`` by name with underscores, ``name=value`` by name, and loose words.

    Example:
        >>> read_arguments(["--bf16", "--lora-r=8", "a.yaml", "lr=1", "--x", "a", "b"])
        ({'bf16': True, 'lora_r': 8, 'x': ['a', 'b']}, {'lr': 1}, ['a.yaml'])
    """
    arguments: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    positionals: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word.startswith("--") and len(word) > 2:
            flag, equals, text = word[2:].partition("=")
            key = flag.replace("-", "_")
            if equals:
                arguments[key] = plain_value(text)
                continue
            values: list[str] = []
            while queue and not queue[0].startswith("--") and not _short(queue[0]):
                if values and re.match(r"[A-Za-z_][\w.]*=|~", queue[0]):
                    break
                values.append(queue.pop(0))
            items = [plain_value(value) for value in values]
            arguments[key] = True if not items else items[0] if len(items) == 1 else items
        elif word.startswith("-") and len(word) > 1:
            arguments[word.lstrip("-")] = True
        elif re.match(r"[A-Za-z_+~][\w./@+]*=", word):
            key, _, value = word.partition("=")
            overrides[key.lstrip("+~")] = plain_value(value)
        else:
            positionals.append(word)
    return arguments, overrides, positionals


def _short(word: str) -> bool:
    return bool(re.fullmatch(r"-[A-Za-z]\w*", word))
