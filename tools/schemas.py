"""Write docs/schemas/*.json: what each command prints with ``--json``, as JSON Schema.

python tools/schemas.py          # rewrite them
python tools/schemas.py --check  # fail if one has drifted

Documents that are results of memest are derived from their dataclasses; those that a command puts
together stand here. Keys may be added in later releases, so further keys are legal everywhere;
what is taken away or changes its meaning raises ``schema_version``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from schema_of import (
    ANY,
    NUMBER,
    SWITCH,
    TEXT,
    TEXTS,
    WHOLE,
    Definitions,
    Schema,
    array,
    by_name,
    choice,
    first_line,
    or_null,
    record,
    said,
)

from memest.calibration.drift import CheckedCase
from memest.calibration.measurement import Environment, Failure, MemoryReading, Status, StepReading
from memest.calibration.running.verify import Expectation
from memest.catalog.models import CatalogueEntry
from memest.catalog.spec import GpuSpec
from memest.cli.exit_codes import ExitCode, error_kinds
from memest.cli.selftest import Finding
from memest.config.parallelism import Distributed
from memest.config.setup import Setup
from memest.estimation.calibration import KIND, Calibration
from memest.replay.inspection import CachePicture, OtherOptions, TimelinePoint
from memest.replay.retrace import SnapshotReplay
from memest.report.findings import Comparison, Plan, Reasons, Scenario
from memest.report.growth_result import GrowthExplanation
from memest.report.life_result import RunLife
from memest.report.max_batch_result import EffectiveBatch, Largest, MaxBatch
from memest.report.oom_message import MessageSize, OomMessage
from memest.report.oom_result import Change, MessageMatch, OomExplanation
from memest.report.result import (
    Estimate,
    ModelFacts,
    Origin,
    Peak,
    PeakMoment,
    Verdict,
)
from memest.report.stages_result import StageRow, StageTable
from memest.report.suggestions import Suggestion, Suggestions
from memest.search.points import Sweep, SweepPoint

FOLDER = Path(__file__).parents[1] / "docs" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_VERSION: Schema = {"const": 1, "description": "Of the document; another one reads otherwise."}
_UTC: Schema = {"type": ["string", "null"], "description": "Moment in UTC, ISO 8601."}


def _error(_: Definitions) -> Schema:
    codes = [code.value for code in ExitCode if 0 < code < ExitCode.INTERRUPTED]
    error = record({
        "kind": said(choice(error_kinds()), "What went wrong, for programs."),
        "message": said(TEXT, "What was wrong, what is legal, what to type next; for people."),
        "exit_code": {"type": "integer", "enum": codes},
    })  # fmt: skip
    return record({"schema_version": _VERSION, "error": error}, description="There is no answer.")


def _setup(defs: Definitions) -> Schema:
    told = ("unpriced", "overpriced", "rollouts", "life")  # where there is something to tell
    options = defs.of(Setup, without=("distributed",), optional=told)
    spread = defs.of(Distributed)
    parts = ("adapter", "quantization", "batching", "data_loading", "generation", "rollouts",
             "software", "life")  # fmt: skip
    properties = options["properties"] | spread["properties"]
    written = {**Setup().to_dict(), **dict.fromkeys(told)}
    for name in parts:
        text = properties[name].get("description", "")
        properties[name] = said({"type": ["object", "null"]}, text)
    properties = {name: properties.get(name, ANY) for name in written}
    properties["zero_settings"] = by_name(ANY, properties["zero_settings"].get("description", ""))
    required = [name for name in written if name not in told]
    return {"type": "object", "description": "The run, every option with its value; "
            "docs/options.md says what each is.", "properties": properties,
            "required": required}  # fmt: skip


def _model(defs: Definitions) -> Schema:
    return defs.of(ModelFacts, renamed={"class_name": "class"}, without=("family",))


def _three_peaks(defs: Definitions) -> Schema:
    """The peaks where those in managed memory have no place."""
    return defs.of(Peak, without=("managed_bytes",), optional=("engine_bytes",))


def _peak(defs: Definitions) -> Schema:
    more = {"device_with_managed_bytes": said(WHOLE, "Both, where all of it is on the GPU.")}
    return defs.of(Peak, more=more, optional=("engine_bytes",))


def _origin(defs: Definitions) -> Schema:
    return defs.of(Origin, renamed={"source": "origin"})


def _estimate(defs: Definitions) -> Schema:
    """What ``Estimate.to_dict`` writes; the largest batch is there where a GPU is named."""
    return defs.of(
        Estimate,
        without=("traced", "left_open", "usual", "logits_bytes"),
        more={"schema_version": _VERSION,
              "verdict_reason": said(TEXT, "Why, where it is neither; empty otherwise.")},
        optional=("ranks", "life", "max_batch", "safe_batch"),
    )  # fmt: skip


def _reasons(defs: Definitions) -> Schema:
    return defs.of(
        Reasons, renamed={"delta_bytes": "allocated_delta_bytes"}, without=("before", "after"),
        more={"peak_moved": said(SWITCH, "Whether the peak is in another phase or micro-step.")},
    )  # fmt: skip


def _scenario(defs: Definitions) -> Schema:
    return defs.of(
        Scenario,
        renamed={"relative_time": "relative_time_per_sample", "flops": "flops_per_step",
                 "launches": "launches_per_step", "reasons": "against_first"},
        more={"changes": by_name(TEXT, "Options that differ from the base, as text."),
              "effective_batch": said(WHOLE, "Samples of one optimizer step.")},
    )  # fmt: skip


def _plan(defs: Definitions) -> Schema:
    peaks = _three_peaks(defs)["properties"]
    setup = defs.of(Setup, without=("distributed",))["properties"]
    names = ("checkpointing", "precision", "optim", "attn_implementation")
    range_ = record({"low_bytes": WHOLE, "high_bytes": WHOLE}, description="Of the device peak.")
    more = {
        "verdict": defs.typed(Verdict), "effective_batch": WHOLE, **peaks,
        **{name: setup[name] for name in names}, "headroom_bytes": or_null(WHOLE),
        "interval": range_,
    }  # fmt: skip
    renamed = {"relative_time": "relative_time_per_sample"}
    return defs.of(
        Plan,
        without=("estimate",),
        renamed=renamed,
        more=more,
        optional=("engine_bytes", "engine"),
    )


def _card() -> Schema:
    usable = said(WHOLE, "What PyTorch can have of it, in bytes.")
    return record({"name": TEXT, "usable_bytes": usable})


def _largest(defs: Definitions) -> Schema:
    return defs.of(
        Largest, without=("usable_bytes",), renamed={"end": "ended_by"}, more={"gpu": _card()}
    )


def _effective(defs: Definitions) -> Schema:
    return defs.of(EffectiveBatch, more={"samples": said(WHOLE, "Of an optimizer step.")})


def _largest_setup(defs: Definitions) -> Schema:
    """The setup without the size that was looked for."""
    setup = _setup(defs)
    sizes = ("batch", "seq_len", "image_size")
    return setup | {"required": [name for name in setup["required"] if name not in sizes]}


def _max_batch(defs: Definitions) -> Schema:
    more = {"schema_version": _VERSION, "setup": _largest_setup(defs)}
    return defs.of(MaxBatch, more=more)


def _advice(defs: Definitions) -> Schema:
    plan = defs.ref(Plan)
    return record({
        "schema_version": _VERSION, "model": TEXT, "gpu": _card(), "effective_batch": WHOLE,
        "verdict": defs.typed(Verdict), "unpriced": TEXTS, "overpriced": TEXTS,
        "plans": array(plan), "closest": or_null(plan), "miss_bytes": WHOLE, "time_basis": TEXT,
        "otherwise": or_null(defs.ref(Suggestions)), "notes": TEXTS,
    })  # fmt: skip


def _suggestion(defs: Definitions) -> Schema:
    return defs.of(Suggestion, more={"options": by_name(ANY, "What is given besides, by keyword.")})


def _suggestions(defs: Definitions) -> Schema:
    return defs.of(Suggestions, more={"schema_version": _VERSION})


def _sweep_point(defs: Definitions) -> Schema:
    range_ = record({"low_bytes": WHOLE, "high_bytes": WHOLE}, description="Of the device peak.")
    return record({
        "model": TEXT, "options": by_name(ANY, "What was asked, by keyword."),
        "peak": or_null(defs.add("ThreePeaks", _three_peaks(defs))), "interval": or_null(range_),
        "gpu": or_null(_card()), "verdict": or_null(defs.typed(Verdict)),
        "headroom_bytes": or_null(WHOLE),
        "error": said(or_null(TEXT), "Why there is no answer; null where there is one."),
    }, description=f"{first_line(SweepPoint)} Also a line of --jsonl.")  # fmt: skip


def _sweep(defs: Definitions) -> Schema:
    return record({
        "schema_version": _VERSION, "models": TEXTS,
        "axes": array(record({"name": TEXT, "values": array(ANY)})),
        "options": by_name(ANY, "Those that are the same everywhere, by keyword."),
        "points": array(defs.ref(SweepPoint)),
    }, description=first_line(Sweep))  # fmt: skip


def _stage(defs: Definitions) -> Schema:
    names = ("parameters", "gradients", "optimizer", "activations", "communication", "other",
             "cached", "process")  # fmt: skip
    parts = record(dict.fromkeys(names, WHOLE), description="Of one GPU; they add up to the peak.")
    stage = record({
        "name": TEXT, "options": by_name(ANY, "That say so, by keyword."),
        "refused": said(TEXT, "Why there are no figures; then none of those below is there."),
        "peak": defs.add("ThreePeaks", _three_peaks(defs)), "bytes": parts,
        "host_bytes": said(WHOLE, "Of the fullest process at the fullest moment, in bytes."),
        "host": defs.typed(RunLife), "verdict": or_null(defs.typed(Verdict)),
    }, optional=("refused", "peak", "bytes", "host_bytes", "host", "verdict"),
        description=first_line(StageRow))  # fmt: skip
    figures = ["peak", "bytes", "host_bytes", "host", "verdict"]
    return stage | {"anyOf": [{"required": ["refused"]}, {"required": figures}]}


def _stages(defs: Definitions) -> Schema:
    official = record({"name": TEXT, "gpu_bytes": WHOLE, "host_bytes_per_node": WHOLE,
                       "difference": TEXT})  # fmt: skip
    return record({
        "schema_version": _VERSION, "model": record({"id": TEXT, "parameters": WHOLE}),
        "num_gpus": WHOLE, "stages": array(defs.ref(StageRow)),
        "deepspeed_estimator": array(official), "notes": TEXTS,
    }, description=first_line(StageTable))  # fmt: skip


def _moment(defs: Definitions, *, sized: bool) -> Schema:
    more = {"allocated_bytes": WHOLE} if sized else {}
    return or_null(defs.of(PeakMoment, more=more))


def _match(defs: Definitions) -> Schema:
    without = ("stopped_allocated_bytes", "out_allocated_bytes", "gpu_name")
    renamed = {"reached_at": "allocated_reached_at", "out_at": "out_of_memory_at"}
    more = {"stopped_at": _moment(defs, sized=True),
            "allocated_reached_at": _moment(defs, sized=False),
            "out_of_memory_at": _moment(defs, sized=True),
            "peak": defs.add("ThreePeaks", _three_peaks(defs))}  # fmt: skip
    return defs.of(MessageMatch, without=without, renamed=renamed, more=more)


def _oom(defs: Definitions) -> Schema:
    size = defs.ref(MessageSize)
    pid = record({"pid": WHOLE, "low_bytes": WHOLE, "high_bytes": WHOLE})
    share = record({"name": TEXT, "low_bytes": WHOLE, "high_bytes": WHOLE})
    more = {"reserved": or_null(size), "processes": array(pid), "shares": array(share),
            "gpus": said(TEXTS, "Cards with so much memory."), "limit": or_null(size),
            "fragmented": or_null(SWITCH), "other_processes": or_null(size),
            "sentences": TEXTS}  # fmt: skip
    message = defs.add("Message", defs.of(OomMessage, more=more))
    return record({"schema_version": _VERSION, "messages": array(message),
                   "run": or_null(defs.ref(MessageMatch))},
                  description=first_line(OomExplanation))  # fmt: skip


def _fits(defs: Definitions) -> Schema:
    whole = _estimate(defs)
    budget = record({"bytes": WHOLE, "verdict": defs.typed(Verdict)},
                    description="Of --fail-over.")  # fmt: skip
    limit = record({
        "of": said(TEXT, "A GPU, or --fail-over."),
        "free_bytes": said(WHOLE, "What the run may take."),
        "required_bytes": said(WHOLE, "The expected device peak on it."),
        "required_low_bytes": WHOLE, "required_high_bytes": WHOLE,
        "margin_bytes": said(WHOLE, "free - required; below 0 what is missing."),
        "safe_margin_bytes": said(WHOLE, "free - the upper end of the range."),
        "verdict": defs.typed(Verdict), "reason": TEXT, "sentence": TEXT,
    }, description="Of a GPU that was named, or of the budget.")  # fmt: skip
    code = said(WHOLE, "Of the worst verdict, as the process ends with.")
    more = {"limits": array(limit), "exit_code": code}
    required = [*whole["required"], *more]
    return whole | {
        "properties": whole["properties"] | {"fail_over": budget} | more, "required": required
    }  # fmt: skip


def _read(_: Definitions) -> Schema:
    value = record({"option": TEXT, "value": ANY, "origin": TEXT})
    return record({
        "schema_version": _VERSION, "sources": TEXTS, "model": or_null(TEXT),
        "values": array(value), "not_modelled": TEXTS, "unpriced": TEXTS, "overpriced": TEXTS,
        "ignored": TEXTS, "command": said(TEXT, "The same question as a command line."),
    })  # fmt: skip


def _replay(defs: Definitions) -> Schema:
    picture = defs.of(CachePicture, more={"cached_bytes": WHOLE})
    device = defs.of(SnapshotReplay, more={
        "is_exact": said(SWITCH, "Whether nothing differs."),
        "timeline": array(defs.ref(TimelinePoint)), "cache": array(defs.add("Cache", picture)),
        "other_options": array(defs.ref(OtherOptions)), "allocated_before_bytes": WHOLE,
        "limit_bytes": or_null(WHOLE),
    })  # fmt: skip
    segments = picture | {"properties": {"device": WHOLE} | picture["properties"]}
    return record({"schema_version": _VERSION, "snapshot": TEXT, "devices": array(device),
                   "segments": said(array(segments), "Of a recording without a history.")},
                  optional=("segments",))  # fmt: skip


def _validate(_: Definitions) -> Schema:
    share, size = or_null(NUMBER), or_null(WHOLE)
    score = record({
        "name": TEXT, "runs": WHOLE, "median_error": share, "p90_error": share,
        "worst_error": share, "median_signed_error": share, "share_too_low": share,
        "in_range": size, "ranged": size,
    }, description="Relative errors of predictions, as parts of the measured figure.")  # fmt: skip
    test = record({
        "tried": WHOLE, "right": WHOLE, "wrong": array(record({"id": TEXT, "said": TEXT})),
        "too_close": TEXTS, "below_bound": WHOLE, "unproven": TEXTS, "failure_least": share,
        "failure_most": share,
    })  # fmt: skip
    one = record({
        **dict.fromkeys(("id", "source", "model"), TEXT),
        **dict.fromkeys(("family", "gpu", "precision", "optimizer", "metric"), or_null(TEXT)),
        **dict.fromkeys(("measured_bytes", "predicted_bytes", "low_bytes"), size),
        "error": share, "bound_bytes": size, "inside": or_null(SWITCH), "oom": or_null(SWITCH),
        "predicted_oom": or_null(SWITCH), "peak_at": or_null(TEXT), "taken": TEXTS,
        "declared": TEXTS, "cause": or_null(TEXT), "failure": or_null(TEXT),
    })  # fmt: skip
    return record({
        "schema_version": _VERSION, "profile": or_null(TEXT), "scores": array(score),
        "groups": by_name(array(score)), "verdict_test": test, "records": array(one),
        "incomplete": array(record({"id": TEXT, "missing": TEXTS})), "problems": TEXTS,
        "without_figure": by_name(TEXT),
    })  # fmt: skip


def _models(defs: Definitions) -> Schema:
    more = {"without_torch": said(SWITCH, "Whether runs of it come with the package.")}
    return record({"schema_version": _VERSION, "models": array(defs.of(CatalogueEntry, more=more))})


def _gpus(defs: Definitions) -> Schema:
    more = {"slug": TEXT, "kind": choice(("geforce", "workstation", "datacenter", "unified")),
            "usable_bytes": said(or_null(WHOLE), "What PyTorch can have of it, in bytes."),
            "usable_basis": TEXT}  # fmt: skip
    return record({"schema_version": _VERSION, "gpus": array(defs.of(GpuSpec, more=more))})


def _cache(_: Definitions) -> Schema:
    entry = record({
        "digest": TEXT, "model": TEXT, "setup": by_name(ANY, "What is not as by default."),
        "torch": or_null(TEXT), "transformers": or_null(TEXT), "documents": WHOLE,
        "traced_layers": TEXT, "bytes": WHOLE, "used": _UTC,
    })  # fmt: skip
    sums = record({"entries": WHOLE, "documents": WHOLE, "bytes": WHOLE, "used": _UTC})
    contents = record({
        "schema_version": _VERSION, "path": TEXT, "problem": or_null(TEXT), "total_bytes": WHOLE,
        "limit_bytes": WHOLE, "profiles": array(entry), "optimizers": sums, "unknown": sums,
        "other_files": WHOLE,
    }, description="What the folder holds.")  # fmt: skip
    cleared = record({"schema_version": _VERSION, "path": TEXT, "freed_bytes": WHOLE,
                      "left_bytes": WHOLE}, description="Of --clear.")  # fmt: skip
    path = record({"schema_version": _VERSION, "path": TEXT}, description="Of --path.")
    path |= {"maxProperties": 2}
    return {"anyOf": [contents, cleared, path]}


def _env(_: Definitions) -> Schema:
    gpu = record({"index": WHOLE, "name": TEXT, "total_bytes": WHOLE, "used_bytes": WHOLE,
                  "driver": TEXT, "mig": SWITCH})  # fmt: skip
    return record({
        "schema_version": _VERSION, "python": TEXT, "platform": TEXT,
        "packages": by_name(or_null(TEXT), "Releases; null where one is not installed."),
        "releases": record({"verified": by_name(TEXTS), "note": TEXT}),
        "gpus": array(gpu), "gpus_note": TEXT, "paths": by_name(TEXT),
        "cache": record({"path": or_null(TEXT), "entries": WHOLE, "bytes": WHOLE}),
        "variables": by_name(TEXT),
    })  # fmt: skip


def _selftest(defs: Definitions) -> Schema:
    case = defs.of(CheckedCase, more={"error": or_null(NUMBER), "agrees": SWITCH})
    drift = record({"torch": TEXT, "transformers": TEXT, "tolerance": NUMBER, "drift": SWITCH,
                    "cases": array(case)}, description="Of --full.")  # fmt: skip
    return record({"schema_version": _VERSION, "ok": said(SWITCH, "Whether nothing failed."),
                   "checks": array(defs.ref(Finding)), "drift": drift},
                  optional=("drift",))  # fmt: skip


def _calibrate_run(defs: Definitions) -> Schema:
    size = or_null(WHOLE)
    one = record({"run": TEXT, "case": TEXT, "status": defs.typed(Status), "allocated_bytes": size,
                  "reserved_bytes": size, "device_bytes": size})  # fmt: skip
    summary = record({"environment": defs.ref(Environment), "measured": array(one),
                      "skipped": WHOLE, "left": WHOLE, "seconds": NUMBER})  # fmt: skip
    return record({"schema_version": _VERSION, "campaign": TEXT, "store": TEXT,
                   "runs": array(summary)})  # fmt: skip


def _calibrate_verify(defs: Definitions) -> Schema:
    trial = record({
        "kind": TEXT, "case": TEXT, "memory_bytes": WHOLE, "cap_bytes": or_null(WHOLE),
        "expected": defs.typed(Expectation), "status": defs.typed(Status),
        "right": or_null(SWITCH), "run": TEXT,
    })  # fmt: skip
    return record({"schema_version": _VERSION, "environment": defs.ref(Environment),
                   "trials": array(trial), "skipped": by_name(TEXT), "left": WHOLE})  # fmt: skip


def _calibrate_fit(defs: Definitions) -> Schema:
    more = {"schema_version": _VERSION, "kind": {"const": KIND}}
    return defs.of(Calibration, more=more)


def _calibrate_show(defs: Definitions) -> Schema:
    def sparse(kind: type) -> Schema:
        """What is None or empty is left out."""
        whole = defs.of(kind)
        keeps = {"name", "kind", "message", "gpu", "seconds", "meter"}
        return whole | {"required": [n for n in whole["required"] if n in keeps]}

    one = record({
        "run": TEXT, "case": by_name(ANY, "What ran, with its id."), "status": defs.typed(Status),
        "environment": sparse(Environment), "started": _UTC, "seconds": NUMBER,
        "parameters": WHOLE, "trainable": WHOLE, "readings": array(sparse(MemoryReading)),
        "steps": array(sparse(StepReading)), "failure": sparse(Failure), "events": TEXT,
        "rank": WHOLE, "remarks": TEXTS,
    }, optional=("environment", "parameters", "trainable", "readings", "steps", "failure",
                 "events", "remarks"))  # fmt: skip
    return record({"schema_version": _VERSION, "store": TEXT, "running": WHOLE,
                   "measurements": array(one)})  # fmt: skip


def _calibrate_taken(_: Definitions) -> Schema:
    one = record({"path": TEXT, "new": WHOLE, "known": WHOLE,
                  "contradictions": said(TEXTS, "Runs that are there with another content."),
                  "problems": TEXTS})  # fmt: skip
    return record({"schema_version": _VERSION, "store": TEXT, "files": array(one)})


def _change(defs: Definitions) -> Schema:
    return defs.of(Change, more={"options": by_name(ANY, "By keyword.")})


_SPECIAL: dict[type, Callable[[Definitions], Schema]] = {
    Setup: _setup, ModelFacts: _model, Peak: _peak, Origin: _origin, Estimate: _estimate,
    Reasons: _reasons, Scenario: _scenario, Plan: _plan, Largest: _largest,
    Suggestion: _suggestion, Suggestions: _suggestions,
    EffectiveBatch: _effective, SweepPoint: _sweep_point, StageRow: _stage,
    MessageMatch: _match, Change: _change,
}  # fmt: skip
"""Classes whose documents are no mirror of their fields."""

COMMANDS: dict[str, Callable[[Definitions], Schema]] = {
    "estimate": _estimate, "fits": _fits, "max-batch": _max_batch,
    "compare": lambda defs: defs.of(Comparison, more={"schema_version": _VERSION}),
    "advise": _advice, "sweep": _sweep, "stages": _stages, "explain-oom": _oom,
    "explain-growth": lambda defs: defs.of(GrowthExplanation, more={"schema_version": _VERSION}),
    "read": _read,
    "replay": _replay, "validate": _validate, "models": _models, "gpus": _gpus, "cache": _cache,
    "env": _env, "selftest": _selftest, "calibrate-run": _calibrate_run,
    "calibrate-verify": _calibrate_verify, "calibrate-fit": _calibrate_fit,
    "calibrate-show": _calibrate_show, "calibrate-import": _calibrate_taken,
    "calibrate-merge": _calibrate_taken,
}  # fmt: skip
"""Every command that has ``--json``, with the schema of its answer."""


def schema(command: str) -> Schema:
    """The schema of a command's document, whether it has an answer or an error."""
    defs = Definitions(_SPECIAL)
    answer = COMMANDS[command](defs)
    words = command.replace("calibrate-", "calibrate ")
    return {
        "$schema": DIALECT,
        "$id": f"urn:memest:schema:{command}:1",
        "title": f"memest {words} --json",
        "description": "Sizes are whole numbers of bytes. An answer, or where there is none, an "
        "error. Keys may be added in later releases.",
        "type": "object",
        "if": {"required": ["error"]},
        "then": {"$ref": "#/$defs/Error"},
        "else": {"$ref": "#/$defs/Answer"},
        "$defs": {"Answer": answer, "Error": _error(defs), **_named(answer, defs.schemas)},
    }


def _named(schema: Schema, schemas: dict[str, Schema]) -> dict[str, Schema]:
    """Those that a schema refers to, and that these refer to."""
    found: dict[str, Schema] = {}
    texts = [json.dumps(schema)]
    while texts:
        text = texts.pop()
        for name in schemas.keys() - found.keys():
            if f'"#/$defs/{name}"' in text:
                found[name] = schemas[name]
                texts.append(json.dumps(schemas[name]))
    return dict(sorted(found.items()))


def pages() -> dict[Path, str]:
    """Every file as it should be."""
    return {
        FOLDER / f"{command}.json": f"{json.dumps(schema(command), indent=2)}\n"
        for command in COMMANDS
    }


def main() -> int:
    """Rewrite or check the files."""
    wanted = pages()
    if "--check" in sys.argv[1:]:
        there = set(FOLDER.glob("*.json")) == set(wanted)
        same = there and all(p.read_text(encoding="utf-8") == t for p, t in wanted.items())
        return 0 if same else 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in set(FOLDER.glob("*.json")) - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
