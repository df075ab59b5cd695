"""What memest answers to the line that a reader of a published figure would write.

    python tools/descriptions.py             all published runs that can be described, and the page
    python tools/descriptions.py --page      none, the page anew from what was kept

``tools/published.py`` predicts published runs with all that is known of them: their code, the
releases of their time, every option. Here each is asked again as its page describes it: a name of
the catalogue, the options, releases or month that the page states, whose loop it is, nothing else;
where the page prints the command or names the tool's own configuration, that is what is asked.
Then each thing that the description lacks is added to it by itself, and what that changes is its
cost. Answers are kept in ``data/accuracy/descriptions.jsonl``, tables in ``docs/accuracy.md``.
Where torchvision is not installed, its models keep the answer that they had.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from page_sections import write_sections

from memest import read_command
from memest.calibration.validation import CaseRecord, read_records
from memest.calibration.validation.predict import Predictor
from memest.config.software import Software
from memest.files.code_digest import made_with
from memest.readers.run_config import RunConfig

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "data" / "reference"
KEPT = ROOT / "data" / "accuracy" / "descriptions.jsonl"
PAGE = ROOT / "docs" / "accuracy.md"
SOFTWARE, CODE, CONTEXT = "releases of its time", "the script's own code", "context of the card"


@dataclass(frozen=True)
class Description:
    """What the pages of a set state.

    Attributes:
        options: that they state, by the names of records.
        releases: of packages that they state.
        month: that they state, by a part of the rows' names: what was out then is priced.
        stated: options that rows state whose code has them, by a part of the rows' names.
        models: names for models that records name by their code, by what the record calls them.
        command: the launch command that the page prints, or means by its tool's name; what it says
            is read, and nothing of the record is.
        unsaid: rows that no words of memest describe, by their names, and why.
    """

    options: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()
    month: Mapping[str, str] = field(default_factory=dict)
    stated: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    models: Mapping[str, str] | None = None
    command: Callable[[CaseRecord], RunConfig] | None = None
    unsaid: Mapping[str, str] = field(default_factory=dict)

    def of(self, record: CaseRecord) -> CaseRecord | None:
        """A record as described; None where no name of the catalogue stands for its model."""
        model = record.model
        options = {name: record.setup[name] for name in self.options if name in record.setup}
        software: dict[str, str] = {}
        for part, month in self.month.items():
            software |= Software.parse(month).to_dict() if part in record.id else {}
        software |= {
            name: record.software[name] for name in self.releases if name in record.software
        }
        for part, more in self.stated.items():
            options |= more if part in record.id else {}
        if self.command is not None:
            run = self.command(record)
            model, options = str(run.model), {**run.options, **options}
        elif self.models is not None:
            called = dict(record.model_args).get("name") or model.rpartition(":")[2]
            if called not in self.models:
                return None
            model = self.models[called]
        if self.command is None and options.get("optim") in USUAL_OPTIMIZERS:
            del options["optim"]  # nobody names what is the default
        return replace(
            record, model=model, setup=options, software=software, context_bytes=None,
            limit_bytes=None, lengths=None, inputs=(), loss=None, step=None, model_args=(), code="",
        )  # fmt: skip


def _of_fsdp_qlora(record: CaseRecord) -> RunConfig:
    """The command that its page prints, with what its tables change."""
    setup = record.setup
    words = {
        "model_name": record.model,
        "batch_size": setup["batch"],
        "context_length": setup["seq_len"],
        "train_type": "qlora" if setup.get("load_in_4bit") else "lora",
        "use_gradient_checkpointing": True,
        "reentrant_checkpointing": True,
        "use_cpu_offload": bool(setup.get("fsdp_offload")),
        "log_to": "wandb",
        "dataset": "dummy",
        "dataset_samples": 1024,
    }
    if setup["fsdp"] == "no_shard":
        words["sharding_strategy"] = "ddp"
    said = " ".join(f"--{name} {value}" for name, value in words.items())
    return read_command(f"python train.py {said}")


_TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 1
seq_len = 8192
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[optimizer]
name = "AdamW"
"""
"""What ``train_configs/llama3_8b.toml`` of its repository says that memory depends on."""


def _of_torchtitan(record: CaseRecord) -> RunConfig:
    """Its launch script with its configuration, and what the page says besides."""
    words = f"--training.batch_size {record.setup['batch']}"
    if record.setup["fsdp"] == "shard_grad_op":
        words += " --training.fsdp_reshard_after_forward never"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "llama3_8b.toml"
        file.write_text(_TITAN, encoding="utf-8")
        return read_command(
            f"NGPU={record.setup['num_gpus']} CONFIG_FILE={file} ./run_train.sh {words}"
        )


LARGEST_SET = "xmem"
"""Its runs are alike and most of all, so the others are summed up without it too."""
USUAL_OPTIMIZERS = ("adamw_hf", "adamw_torch")
DESCRIPTIONS = {
    # the page prints nvidia-smi's "Tue Jan 11 08:58:05 2022"; the notebook names no time
    "bert_large": Description(
        ("batch", "seq_len", "grad_accum", "checkpointing", "precision", "optim"),
        month={"hf-doc-": "2022-01"},
    ),
    # "These benchmarks were done in February and March 2024", on two cards
    "fsdp_qlora": Description(
        month={"": "2024-03"}, stated={"": {"num_gpus": 2}}, command=_of_fsdp_qlora
    ),
    # "PyTorch 2.1.0+cu121", "--precision bf16-true"; torch 2.4 nightly and lightning of 2024
    "litgpt": Description(
        ("batch", "seq_len", "num_gpus", "fsdp", "loop"),
        ("torch", "cuda"),
        stated={
            "": {"dtype": "bfloat16"},
            "-lora-": {"peft": "lora"},
        },
        models={
            "phi-1_5": "microsoft/phi-1_5",
            "Llama-2-7b-hf": "meta-llama/Llama-2-7b-hf",
            "tiny-llama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        },
    ),
    "optimum": Description(("batch", "seq_len")),
    "torchtitan": Description(
        releases=("torch",),
        command=_of_torchtitan,
        unsaid={"titan-8b-ce-chunked": "a loss in pieces that torchtitan's settings do not name"},
    ),
    # "torch: 2.1.0.dev20230623+cu118"; the scripts import torchvision's model, with ten classes
    "vision": Description(
        ("batch", "optim", "loop"),
        ("torch", "cuda"),
        stated={"bf16": {"dtype": "bfloat16"}, "raschka": {"num_labels": 10}},
        models={"vit_l_16": "torchvision/vit_l_16"},
    ),
    "xmem": Description(("batch", "seq_len", "optim", "loop"), ("torch", "transformers")),
}
"""Sets whose pages describe runs by a model's name and options; the others publish code alone."""


def answer(record: CaseRecord, description: Description, known: int | None) -> dict[str, Any]:
    """The kept line of a record.

    Args:
        record: with all that is known.
        description: of its set.
        known: bytes predicted from all that is known.
    """
    line: dict[str, Any] = {
        "id": record.id, "set": record.group, "metric": record.metric,
        "measured_bytes": record.measured_bytes, "known_bytes": known, "made_with": made_with(),
    }  # fmt: skip
    if (why := description.unsaid.get(record.id)) is not None:
        return line | {"failure": why}
    described = description.of(record)
    if described is None:
        return line | {"failure": "no name of the catalogue"}
    line |= {"model": described.model, "options": dict(described.setup)}
    outcome = Predictor().predict(described)
    if outcome.predicted_bytes is None:
        return line | {"failure": outcome.failure}
    lacks = {}
    for name, more in lacking(record, described):
        other = Predictor(trust_code=True).predict(more)
        if other.predicted_bytes is not None:
            lacks[name] = other.predicted_bytes - outcome.predicted_bytes
    return line | {"described_bytes": outcome.predicted_bytes, "lacks": lacks}


def lacking(record: CaseRecord, described: CaseRecord) -> Iterator[tuple[str, CaseRecord]]:
    """The description with one thing more each time, and what that is."""
    if record.metric == "device" and record.context_bytes is not None:
        yield CONTEXT, replace(described, context_bytes=record.context_bytes)
    if record.software != described.software:
        yield SOFTWARE, replace(described, software=record.software)
    if record.model != described.model:
        return  # options of the script's own code are part of it
    for name, value in record.setup.items():
        if name not in described.setup:
            yield name, replace(described, setup={**described.setup, name: value})


# -- the page -------------------------------------------------------------------------------------


def error_of(line: dict[str, Any]) -> float:
    """Signed, 0.01 for one percent too high."""
    return float(line["described_bytes"] / line["measured_bytes"] - 1)


def scores(lines: list[dict[str, Any]]) -> Iterator[str]:
    """The rows of how right descriptions are answered."""
    yield "| set | runs | median error | p90 | worst | all known: median | not described |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["set"]].append(line)
        groups["**all**"].append(line)
        if line["set"] != LARGEST_SET:
            groups[f"**all but {LARGEST_SET}**"].append(line)
    for name, group in sorted(groups.items()):
        answered = [line for line in group if "described_bytes" in line]
        if not answered:
            yield f"| {name} | 0 | - | - | - | - | {len(group)} |"
            continue
        errors = sorted(abs(error_of(line)) for line in answered)
        known = [
            abs(line["known_bytes"] / line["measured_bytes"] - 1)
            for line in answered
            if line["known_bytes"]
        ]
        yield (
            f"| {name} | {len(errors)} | {statistics.median(errors):.1%} | "
            f"{errors[round(0.9 * (len(errors) - 1))]:.1%} | {errors[-1]:.1%} | "
            f"{statistics.median(known):.1%} | {len(group) - len(answered)} |"
        ).replace("%", " %")


def costs(lines: list[dict[str, Any]]) -> Iterator[str]:
    """The rows of what descriptions lacked, the dearest first."""
    yield "| what was not said | runs | more than 1 % in | median of these | most |"
    yield "|---|---:|---:|---:|---:|"
    shares: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        for name, size in line.get("lacks", {}).items():
            shares[name].append(size / line["measured_bytes"])
    rows = []
    for name, values in shares.items():
        large = [value for value in values if abs(value) > 0.01]
        if large:
            most = max(large, key=abs)
            median = statistics.median(large)
            row = f"| {name} | {len(values)} | {len(large)} | {median:+.1%} | {most:+.1%} |"
            rows.append((len(large) * abs(median), row.replace("%", " %")))
    yield from (row for _, row in sorted(rows, reverse=True))
    nothing = sorted(name for name, values in shares.items() if max(map(abs, values)) <= 0.01)
    if nothing:
        yield f"| {', '.join(nothing)} | | 0 | | |"


def main() -> None:
    """Answer the descriptions, and write their tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="run none: the page from what is kept")
    parser.add_argument(
        "--only", default="", help="part of id, model, GPU or set; nothing is written"
    )
    options = parser.parse_args()
    if options.page:
        lines = [json.loads(text) for text in KEPT.read_text("utf-8").splitlines()]
    else:
        outcomes = (ROOT / "data" / "accuracy" / "outcomes.jsonl").read_text("utf-8").splitlines()
        known = {line["id"]: line for line in map(json.loads, outcomes)}
        kept = {line["id"]: line for line in map(json.loads, KEPT.read_text("utf-8").splitlines())}
        lines = []
        for record in read_records(sorted(RECORDS.glob("*.jsonl")), only=options.only).complete:
            row = known.get(record.id)
            if record.group not in DESCRIPTIONS or row is None or row["low_bytes"] or record.oom:
                continue
            if record.metric == "device" and not row["scored"]:
                continue
            line = answer(record, DESCRIPTIONS[record.group], row["predicted_bytes"])
            library = str(line.get("model", "")).partition("/")[0]
            if library == "torchvision" and find_spec(library) is None and record.id in kept:
                line = kept[record.id]
            told = f"{error_of(line):+.2%}" if "described_bytes" in line else line["failure"]
            print(record.id, told, line.get("lacks", ""), flush=True)
            lines.append(line)
    tables = {"described": "\n".join(scores(lines)), "costs": "\n".join(costs(lines))}
    print("\n\n".join(tables.values()))
    if options.only:
        return
    KEPT.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    write_sections(PAGE, tables)


if __name__ == "__main__":
    main()
