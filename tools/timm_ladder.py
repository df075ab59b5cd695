"""The largest batch of 504 vision models beside what timm's benchmark measured on an RTX 3090.

    python tools/timm_ladder.py              the rows that were not predicted yet, a summary
    python tools/timm_ladder.py --half first those of one half alone (``first``, ``second``)
    python tools/timm_ladder.py --again      all of them anew
    python tools/timm_ladder.py --page       none: the summary alone, into ``docs/accuracy.md``
    python tools/timm_ladder.py --only vgg   those whose name has a text

``data/accuracy/timm_batches.csv`` has the readings: for each model and memory format the batch that
ran, of ``LADDER``; the next larger one had failed. They are timm's own (``results/benchmark-train-
amp-{nchw,nhwc}-pt112-cu113-rtx3090.csv``: timm 0.6.7, torch 1.12, CUDA 11.3, autocast to fp16,
SGD with Nesterov's momentum, ``cudnn.benchmark``). Its ``benchmark.py`` goes down the ladder in one
process and empties the cache before each try. Predictions are kept in
``data/accuracy/timm_ladder.jsonl`` after each row, so a run that was stopped goes on.

Needs timm. Models are those of the installed release. Names that it has no more are listed, and so
are those under which it builds another network today, which the number of parameters tells (and of
TResNet timm 0.6.7's own source).
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from page_sections import write_sections

from memest.catalog.resolve import resolve_model
from memest.config.options import merge_options
from memest.config.setup import Setup
from memest.errors import MemestError, UnknownModelError
from memest.estimation.gpu_target import target_gpus
from memest.estimation.profiler import Profiler
from memest.estimation.run import Run
from memest.estimation.verdict import LargestSizeSearch
from memest.estimation.whole_run import resolve_run
from memest.replay.conf import parse_alloc_conf

ROOT = Path(__file__).parents[1]
READINGS = ROOT / "data" / "accuracy" / "timm_batches.csv"
PREDICTIONS = ROOT / "data" / "accuracy" / "timm_ladder.jsonl"
PAGE = ROOT / "docs" / "accuracy.md"
LADDER = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Batches that were tried, from the top (``decay_batch_exp`` of timm)."""
SEED = 26
"""Of the draw of the models whose rows may be looked at for causes; the others stay blind."""
SAME_NETWORK = 0.005
"""The share by which the number of parameters may differ where a network is the same."""
INPLACE_ABN = "tresnet_"
"""Networks that timm 0.6.7 built with mapillary's InplaceABN (its ``models/tresnet.py``), which
keeps the output of a normalisation and its activation alone; today they have batch norms."""
OPTIONS = {
    "precision": "fp16",
    "loop": "plain",
    "optim": "sgd_momentum_loop",
    "optim_args": "nesterov=True",
    "software": "torch=1.12,cuda=11.3",
    "zero_grad_at": "before-forward",
    "del_outputs": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A row of the benchmark: the batch that ran."""

    model: str
    layout: str
    image_size: int
    param_millions: float
    ran: int

    @property
    def failed(self) -> int | None:
        """The next larger batch, which failed; None where the largest of all ran."""
        place = LADDER.index(self.ran)
        return LADDER[place - 1] if place else None

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from the others."""
        return self.model, self.layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What memest says of a row.

    Attributes:
        model: its name in timm.
        layout: ``nchw`` or ``nhwc``.
        largest: the largest batch that runs, ``LADDER[0]`` where more would; None where there is
            no answer.
        param_millions: parameters of the network that the installed release builds.
        why: there is none; empty otherwise.
        seconds: that the answer took.
    """

    model: str
    layout: str
    largest: int | None
    param_millions: float = 0.0
    why: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from the others."""
        return self.model, self.layout


def readings() -> list[Reading]:
    """All rows, in the order of their names."""
    with READINGS.open(encoding="utf-8", newline="") as file:
        return [
            Reading(
                model=row["model"],
                layout=row["layout"],
                image_size=int(row["image_size"]),
                param_millions=float(row["param_millions"]),
                ran=int(row["ran"]),
            )
            for row in csv.DictReader(file)
        ]


def first_half(rows: Iterable[Reading]) -> frozenset[str]:
    """The models whose rows may be looked at; both rows of a model are in one half."""
    models = sorted({row.model for row in rows})
    random.Random(SEED).shuffle(models)  # noqa: S311 - a draw that can be made again
    return frozenset(models[: len(models) // 2])


def predict(row: Reading) -> Prediction:
    """The largest batch of a row, or why there is none."""
    began = time.monotonic()
    options = OPTIONS | {
        "image_size": row.image_size,
        "channels_last": row.layout == "nhwc",
        "batch": LADDER[0],
    }
    try:
        largest, parameters = largest_batch(f"timm/{row.model}", merge_options(None, options))
    except UnknownModelError:
        return Prediction(model=row.model, layout=row.layout, largest=None, why="no such name")
    except MemestError as error:
        return Prediction(model=row.model, layout=row.layout, largest=None, why=str(error)[:200])
    except Exception as error:  # noqa: BLE001 - one model of many: said, and the next is asked
        why = f"{type(error).__name__}: {error}"[:200]
        return Prediction(model=row.model, layout=row.layout, largest=None, why=why)
    seconds = round(time.monotonic() - began, 1)
    millions = parameters / 1e6
    off = abs(millions - row.param_millions) > SAME_NETWORK * row.param_millions
    if off or row.model.startswith(INPLACE_ABN):
        return Prediction(
            model=row.model,
            layout=row.layout,
            largest=None,
            param_millions=round(millions, 2),
            why="another network today",
        )
    return Prediction(
        model=row.model,
        layout=row.layout,
        largest=largest,
        param_millions=round(millions, 2),
        seconds=seconds,
    )


def largest_batch(model: str, setup: Setup) -> tuple[int, int]:
    """The largest batch that runs on the card, and how many parameters the model has."""
    profiler = Profiler(source=resolve_model(model), stores=())
    (target,) = target_gpus(setup, gpu="rtx-3090", calibration="none").named_gpus

    def run_at(batch: int) -> Run:
        # where the largest of the ladder runs no other is asked for: one trace is enough
        vary = None if batch == LADDER[0] else ("batch",)
        return resolve_run(profiler, replace(setup, batch=batch), target.traits, vary)

    replays = profiler.replays(parse_alloc_conf(setup.alloc_conf))
    largest = LargestSizeSearch(target, replays, run_at, LADDER[0]).largest_running(setup.batch)
    return largest, run_at(max(largest, 1)).counts[0]


# -- scores ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How right some predictions are.

    Attributes:
        rows: that were predicted.
        inside: of them, those whose largest batch lies from what ran to below what failed.
        too_low: those below what ran.
        too_high: those at what failed, or above.
        place: mean of (largest - ran) / (failed - ran) over rows with both ends, 0.5 without bias.
    """

    rows: int
    inside: int
    too_low: int
    too_high: int
    place: float

    @property
    def share(self) -> float:
        """Of the rows that are inside."""
        return self.inside / self.rows if self.rows else 0.0


def score(pairs: Sequence[tuple[Reading, int]]) -> Score:
    """The score of rows with their predicted largest batches."""
    too_low = sum(largest < row.ran for row, largest in pairs)
    too_high = sum(row.failed is not None and largest >= row.failed for row, largest in pairs)
    places = [
        (largest - row.ran) / (row.failed - row.ran)
        for row, largest in pairs
        if row.failed is not None
    ]
    return Score(
        rows=len(pairs),
        inside=len(pairs) - too_low - too_high,
        too_low=too_low,
        too_high=too_high,
        place=fmean(places) if places else 0.0,
    )


# -- what is kept ----------------------------------------------------------------------------------


def kept() -> dict[tuple[str, str], Prediction]:
    """Predictions so far, by model and memory format; the last one of each holds."""
    if not PREDICTIONS.exists():
        return {}
    lines = PREDICTIONS.read_text(encoding="utf-8").splitlines()
    predictions = (Prediction(**json.loads(line)) for line in lines)
    return {prediction.key: prediction for prediction in predictions}


def keep(prediction: Prediction) -> None:
    """Add a prediction."""
    with PREDICTIONS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(prediction)) + "\n")


def tidy(predictions: Iterable[Prediction]) -> None:
    """Write the predictions in order, each once."""
    lines = (json.dumps(asdict(each)) for each in sorted(predictions, key=lambda p: p.key))
    PREDICTIONS.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def summary(rows: Sequence[Reading], predictions: dict[tuple[str, str], Prediction]) -> str:
    """The scores as a table, and the rows without an answer."""
    first = first_half(rows)
    groups = {
        "all": rows,
        "half that was looked at": [row for row in rows if row.model in first],
        "half kept blind": [row for row in rows if row.model not in first],
        "NCHW": [row for row in rows if row.layout == "nchw"],
        "NHWC": [row for row in rows if row.layout == "nhwc"],
    }
    lines = [
        "| rows | predicted | inside | share | too low | too high | mean place |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, members in groups.items():
        pairs = [
            (row, largest)
            for row in members
            if (found := predictions.get(row.key)) and (largest := found.largest) is not None
        ]
        result = score(pairs)
        lines.append(
            f"| {name} | {result.rows} of {len(members)} | {result.inside} | {result.share:.1%} | "
            f"{result.too_low} | {result.too_high} | {result.place:.2f} |"
        )
    lines += _misses(rows, predictions)
    without = [each for each in predictions.values() if each.largest is None]
    reasons = Counter(each.why for each in without)
    for why, count in reasons.most_common():
        names = sorted({each.model for each in without if each.why == why})
        lines += ["", f"Without an answer, {why} ({count} rows): {', '.join(names)}."]
    return "\n".join(lines)


def _misses(
    rows: Sequence[Reading], predictions: dict[tuple[str, str], Prediction]
) -> Iterator[str]:
    """Rows that are not inside, by name, with what was predicted and what ran."""
    found = [(row, p.largest) for row in rows if (p := predictions.get(row.key)) and p.largest]
    low = [(row, largest) for row, largest in found if largest < row.ran]
    high = [(row, largest) for row, largest in found if row.failed and largest >= row.failed]
    for words, members in (("Too low", low), ("Too high", high)):
        if members:
            texts = (
                f"{row.model} {row.layout.upper()} {largest} (ran {row.ran})"
                for row, largest in members
            )
            yield ""
            yield f"{words}: {', '.join(texts)}."


def main() -> None:
    """Predict what is asked for, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--half", choices=("first", "second"))
    parser.add_argument("--only", default="")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    rows, predictions = readings(), kept()
    first = first_half(rows)
    halves = {"first": lambda name: name in first, "second": lambda name: name not in first}
    in_half = halves.get(options.half or "", lambda _: True)
    asked = [row for row in rows if in_half(row.model) and options.only in row.model]
    random.Random(SEED).shuffle(asked)  # noqa: S311 - so that a part stands for the whole
    end = time.monotonic() + options.seconds
    for number, row in enumerate(asked, 1):
        if options.page or time.monotonic() > end:
            break
        if row.key in predictions and not options.again:
            continue
        prediction = predictions[row.key] = predict(row)
        keep(prediction)
        print(
            f"{number}/{len(asked)} {row.model} {row.layout}: {row.ran}..{row.failed or ''} "
            f"predicted {prediction.largest} {prediction.why} ({prediction.seconds} s)",
            flush=True,
        )
    tidy(predictions.values())
    text = summary(rows, predictions)
    write_sections(PAGE, {"timm": text})
    print(text)


if __name__ == "__main__":
    main()
