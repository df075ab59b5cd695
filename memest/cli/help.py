"""``memest help`` and ``memest completion``: pages on topics, scripts for shells.

Examples of every command stand below its help, which is its page.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from memest.cli.console import write_out
from memest.cli.flags import argument, debuggable
from memest.errors import ConfigError, closest

__all__ = ["EXAMPLES", "TOPICS", "completion", "epilog_of", "help_page", "show_help"]

_EXIT_CODES = """\
0    done; for fits and advise: it fits
1    failure: a model that cannot be traced, a recording that differs
2    wrong usage: an option, a value or a file that cannot be
3    tight, too close to call; or fits by releasing cache, slowly (fits, advise)
4    does not fit (fits, advise)
5    unknown model or GPU
6    a package of an extra is missing
7    cannot say: something that is not priced may add memory (fits, advise); replay: no history
130  interrupted
141  the reader of a pipe is gone"""

TOPICS: dict[str, tuple[str, str]] = {
    "exit-codes": (
        "what scripts can rely on",
        f"{_EXIT_CODES}\n\nData goes to standard output, everything else to standard error.",
    ),
    "environment": (
        "variables that are read",
        """\
MEMEST_CACHE       folder of step profiles (memest cache says where)
MEMEST_HOME        folder of calibrations and measurements
HF_HOME, HF_TOKEN, HF_HUB_OFFLINE
                   as the Hugging Face hub takes them
COLUMNS, NO_COLOR  width and colours of reports""",
    ),
    "naming-models": (
        "how a model is named",
        """\
bert-large-uncased              a name of the catalogue (memest models)
meta-llama/Llama-3.1-8B         an id of the Hugging Face hub
./my-model, ./config.json       a folder, or the configuration itself
package.module:factory          anything that returns a torch.nn.Module
'gpt2?n_layer=4&n_embd=256'     any of them with values of its configuration changed""",
    ),
    "sizes": (
        "how sizes of memory are written",
        """\
22GiB, 1343MiB, 512KiB          binary units, as torch and nvidia-smi count
24GB                            decimal, as on the box of a GPU
1048576                         bytes""",
    ),
}

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "estimate": (
        ("memest estimate bert-large-uncased --batch 8 --fp16", "what a run needs, anywhere"),
        ("memest estimate gpt2 --batch 8 --gpu t4 --by layer", "which layers fill the card"),
        ("memest estimate gpt2 --batch 8 --snapshot run.pickle", "for PyTorch's memory_viz"),
        ("memest estimate gpt2 --gpu t4 --out run.html", "a page; .json, .csv and .png too"),
    ),
    "fits": (
        ("memest fits gpt2 --batch 8 --gpu t4 && python train.py", "train only what fits"),
        ("memest fits gpt2 --batch 8 --fail-over 12GiB --quiet", "a budget, the exit code alone"),
    ),
    "max-batch": (
        ("memest max-batch bert-large-uncased --fp16 --gpu rtx-3090", "the largest batch"),
        ("memest max-batch gpt2 --gpu t4 --of seq-len", "the longest sequence"),
    ),
    "compare": (
        ("memest compare gpt2 --batch 8 --vs fp16 --vs checkpointing=full", "and why they differ"),
        ("memest compare gpt2 --batch 8 --vs 'batch=2 grad-accum=4'", "two changes at once"),
    ),
    "advise": (
        ("memest advise gpt2 --gpu t4 --effective-batch 64", "ways to train, the fastest first"),
        ("memest advise gpt2 --gpu t4 -n 64 --any-precision --json", "for a script"),
    ),
    "stages": (
        ("memest stages gpt2-xl --num-gpus 8 --bf16", "DDP, ZeRO and FSDP side by side"),
        ("memest stages gpt2-xl --num-gpus 8 --bf16 --json", "for a script"),
    ),
    "validate": (
        ("memest validate runs.jsonl --out report.html", "errors, verdicts, plots"),
        ("memest validate runs.jsonl --assume software.torch=2.6", "what records do not say"),
    ),
    "sweep": (
        ("memest sweep gpt2 --over batch=1:64:x2 --over seq-len=256,512", "a grid"),
        ("memest sweep gpt2 --over batch=1,2,4 --gpu t4 --heatmap grid.html", "as a heat map"),
    ),
    "explain-oom": (
        ("memest explain-oom slurm-123.out", "whose memory it was"),
        ("memest explain-oom slurm-123.out gpt2 --batch 32 --fp16", "where it stopped, what fits"),
        ("memest explain-oom - < run.log", "from a pipe"),
    ),
    "read": (
        ("memest read run.yaml", "what is understood of it"),
        ("memest read -- torchrun --nproc_per_node 4 train.py --bf16", "of a launch command"),
        ("memest read colab.ipynb", "of a notebook or a training script, which is not run"),
        ("memest read train.slurm", "of the launch command in a shell script"),
    ),
    "replay": (
        ("memest replay run.pickle", "timeline, holes, expandable segments"),
        ("memest replay run.json --alloc-conf max_split_size_mb:128", "other options too"),
    ),
    "models": (
        ("memest models qwen3", "names that hold a word"),
        ("memest models bert-large-uncased --json", "one model"),
    ),
    "gpus": (
        ("memest gpus a100", "cards whose names hold a word"),
        ("memest gpus --json", "all of them"),
    ),
    "app": (
        ("memest app", "the explorer in a browser"),
        ("memest app --port 8600 --no-browser", "on a server"),
    ),
    "mcp": (
        ("memest mcp", "started by an AI assistant, as `claude mcp add memest -- memest mcp` says"),
        ("memest mcp --run-code", "for modules of your own too"),
    ),
    "cache": (
        ("memest cache", "step profiles on disk"),
        ("memest cache --clear", "remove them"),
    ),
    "env": (
        ("memest env", "for a bug report"),
        ("memest env --json", "the same as a document"),
    ),
    "calibrate": (
        ("memest calibrate run --campaign standard", "real training steps; killed, it goes on"),
        ("memest calibrate fit", "a profile that corrects estimates for this GPU"),
    ),
    "completion": (
        ("memest completion bash > ~/.local/share/bash-completion/completions/memest", "bash"),
        ("memest completion zsh > ~/.zfunc/_memest", "zsh, where fpath has ~/.zfunc"),
        ("memest completion fish > ~/.config/fish/completions/memest.fish", "fish"),
    ),
    "help": (
        ("memest help", "commands and topics"),
        ("memest help exit-codes", "what scripts can rely on"),
    ),
}
"""By command: a command line, and what it is for."""
_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_MEMEST_COMPLETE"
"""By its name Typer knows that a shell asks."""


def epilog_of(command: str) -> str | None:
    """What stands below the help of a command; Typer makes a line of each paragraph."""
    examples = EXAMPLES.get(command)
    if not examples:
        return None
    lines = ["Examples:", *(f"{line}   # {purpose}" for line, purpose in examples)]
    return "\n\n".join(lines)


def help_page(root: Any, topic: str | None) -> str:
    """The page of a topic, or the list of all.

    Args:
        root: the command line as Typer makes it.
        topic: None for the list.

    Raises:
        ConfigError: no topic.
    """
    if topic is None:
        return _contents(root)
    if topic in TOPICS:
        purpose, text = TOPICS[topic]
        return f"{_section('NAME', f'{topic} - {purpose}')}\n{_section('DESCRIPTION', text)}"
    legal = [*root.commands, *TOPICS]
    suggestions = closest(topic, legal)
    hint = f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""
    raise ConfigError(
        f"there is no command and no topic {topic!r}.{hint} `memest help` lists them all."
    )


def _section(title: str, text: str) -> str:
    body = "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())
    return f"{title}\n{body}"


def _contents(root: Any) -> str:
    width = max(map(len, (*root.commands, *TOPICS))) + 2
    commands = "\n".join(
        f"{name:<{width}}{(command.help or '').partition(chr(10))[0].strip().rstrip('.')}"
        for name, command in root.commands.items()
    )
    topics = "\n".join(f"{name:<{width}}{purpose}" for name, (purpose, _) in TOPICS.items())
    return (
        f"{_section('NAME', 'memest - how much GPU memory a PyTorch training run will take')}\n"
        f"{_section('COMMANDS', commands)}\n{_section('TOPICS', topics)}\n"
        f"{_section('SEE ALSO', 'memest help COMMAND, memest COMMAND --help')}"
    )


@debuggable
def show_help(
    context: typer.Context,
    topic: Annotated[
        str | None,
        argument("TOPIC", "A command, or a topic; left out, the list."),
    ] = None,
) -> int:
    """Pages on commands and topics, with examples.

    For example: memest help estimate
    """
    root: Any = context.find_root().command
    if topic in root.commands:
        root.main(args=[topic, "--help"], prog_name="memest", standalone_mode=False)
    else:
        write_out(help_page(root, topic))
    return 0


@debuggable
def completion(
    shell: Annotated[str, argument("SHELL", "bash, zsh or fish.")],
) -> int:
    """Print the completion script of a shell, to be put where it looks for such scripts.

    For example: memest completion bash > ~/.local/share/bash-completion/completions/memest
    """
    if shell not in _SHELLS:
        suggestions = closest(shell, _SHELLS, limit=1)
        hint = f" Did you mean {suggestions[0]}?" if suggestions else ""
        raise ConfigError(f"no completion for the shell {shell!r}.{hint} Legal: bash, zsh, fish.")
    from typer._completion_shared import get_completion_script

    script = get_completion_script(prog_name="memest", complete_var=_VARIABLE, shell=shell)
    write_out(f"{script}\n")
    return 0
