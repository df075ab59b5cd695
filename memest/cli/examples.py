"""Command lines that stand below the help of each command, and what each is for."""

from __future__ import annotations

__all__ = ["EXAMPLES"]

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "estimate": (
        ("memest estimate bert-large-uncased --batch 8 --fp16", "what a run needs"),
        ("memest estimate gpt2 --batch 8 --gpu t4 --by layer", "the biggest layers"),
        ("memest estimate gpt2 --batch 8 --snapshot run.pickle", "for memory_viz"),
        ("memest estimate gpt2 --gpu t4 --out run.html", "a page; .json, .csv and .png too"),
    ),
    "fits": (
        ("memest fits gpt2 --batch 8 --gpu t4 && python train.py", "train only what fits"),
        ("memest fits gpt2 --batch 8 --fail-over 12GiB --quiet", "a budget, and no remarks"),
        ("memest fits run.yaml --gpu a100-80gb", "what another tool's configuration asks for"),
    ),
    "max-batch": (
        ("memest max-batch bert-large-uncased --fp16 --gpu rtx-3090", "the largest batch"),
        ("memest max-batch gpt2 --gpu t4 --of seq-len", "the longest sequence"),
        ("memest max-batch gpt2 --gpu t4 --effective-batch 64", "and the accumulation for 64"),
    ),
    "compare": (
        ("memest compare gpt2 --batch 8 --vs fp16 --vs checkpointing=full", "and why they differ"),
        ("memest compare gpt2 --batch 8 --vs 'batch=2 grad-accum=4'", "two changes at once"),
        ("memest compare gpt2 bert-base-uncased --batch 8", "two models"),
    ),
    "advise": (
        ("memest advise gpt2 --gpu t4 --effective-batch 64", "ways to train, the fastest first"),
        ("memest advise gpt2 --gpu t4 -n 64 --any-precision --json", "for a script"),
        ("memest advise gpt2 --gpu t4 -n 64 --quiet", "the fastest alone"),
    ),
    "stages": (
        ("memest stages gpt2-xl --num-gpus 8 --bf16", "DDP, ZeRO and FSDP side by side"),
        ("memest stages gpt2-xl --num-gpus 8 --bf16 --json", "for a script"),
        ("memest stages gpt2-xl --num-gpus 8 --gpus-per-node 4 --bf16", "on two machines"),
    ),
    "validate": (
        ("memest validate runs.jsonl --out report.html", "errors, verdicts, plots"),
        ("memest validate runs.jsonl --assume software.torch=2.6", "what records do not say"),
    ),
    "sweep": (
        ("memest sweep gpt2 --over batch=1:64:x2 --over seq-len=256,512", "a grid"),
        ("memest sweep gpt2 --over batch=1,2,4 --gpu t4 --heatmap grid.html", "as a heat map"),
        ("memest sweep gpt2 --over batch=1,2,4 --csv", "for a spreadsheet"),
    ),
    "explain-oom": (
        ("memest explain-oom slurm-123.out", "whose memory it was"),
        ("memest explain-oom slurm-123.out gpt2 --batch 32 --fp16", "where it stopped, what fits"),
        ("memest explain-oom - < run.log", "from a pipe"),
    ),
    "explain-growth": (
        ("memest explain-growth run.pickle", "what the steps of a recording keep, and which code"),
        ("memest explain-growth memory.csv --gpu a100", "from a log: when the card is full"),
        ("memest explain-growth memory.csv gpt2 --batch 8 --fp16", "beside what is expected"),
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
    "selftest": (
        ("memest selftest", "is it installed right"),
        ("memest selftest --full", "real steps on the CPU beside their traces, minutes"),
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
        ("memest help tight", "an idea, in twenty lines"),
        ("memest help exit-codes", "what scripts can rely on"),
    ),
}
"""By command: a command line, and what it is for."""
