"""``memest replay``: a recorded CUDA memory snapshot through the model of the allocator."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from memest.cli.console import Output, write_document
from memest.cli.exit_codes import ExitCode
from memest.cli.flags import argument, shows, value_flag
from memest.errors import ConfigError, ReplayError

if TYPE_CHECKING:
    from memest.replay.conf import AllocatorConf
    from memest.replay.inspection import CachePicture, Inspection

__all__ = ["replay"]

_EXPANDABLE = "expandable_segments"


def _other_confs(
    conf_texts: list[str], recorded_conf: AllocatorConf
) -> list[tuple[str, AllocatorConf]]:
    """The options to play the recording again with: the other kind of segments, those asked for."""
    from memest.replay.conf import parse_alloc_conf

    expandable = not recorded_conf.expandable_segments
    results = [
        (
            f"{_EXPANDABLE}:{expandable}",
            dataclasses.replace(recorded_conf, expandable_segments=expandable),
        )
    ]
    for text in conf_texts:
        try:
            results.append((text, parse_alloc_conf(text)))
        except ConfigError as error:
            raise ConfigError(f"--alloc-conf {text!r}: {error}") from None
    return results


def _picture(picture: CachePicture) -> dict[str, Any]:
    return dataclasses.asdict(picture) | {"cached_bytes": picture.cached_bytes}


def _document(device: Inspection) -> dict[str, Any]:
    comparison = device.comparison
    return {
        **dataclasses.asdict(comparison),
        "is_exact": comparison.is_exact,
        "timeline": [dataclasses.asdict(point) for point in device.timeline],
        "cache": [_picture(picture) for picture in device.pictures],
        "other_options": [dataclasses.asdict(row) for row in device.options],
        "allocated_before_bytes": device.earlier_bytes,
        "limit_bytes": device.limit_bytes,
    }


@shows()
def replay(
    snapshot: Annotated[
        Path,
        argument(
            "SNAPSHOT",
            "A file of torch.cuda.memory._dump_snapshot, or what `memest estimate --snapshot` "
            "wrote, as .pickle or .json. Read as data, never executed.",
        ),
    ],
    *,
    alloc_conf: Annotated[
        list[str] | None,
        value_flag(
            "--alloc-conf",
            "OPTIONS",
            "Play it again with these options of the allocator, as PYTORCH_CUDA_ALLOC_CONF "
            "has them. Repeatable; the other kind of segments is always tried.",
        ),
    ] = None,
    output: Output,
) -> int:
    """Replay a recorded snapshot: timeline, holes, other options.

    Exit code 0: the replay makes every choice of the recording, 1: something differs, 7: the
    recording has no history, so nothing was compared.
    For example: memest replay run.pickle --alloc-conf max_split_size_mb:128
    """
    from memest.replay import load_snapshot
    from memest.replay.inspection import cache_at_end, inspect

    with output.working() as show:
        say = show or (lambda _: None)
        say(f"reading {snapshot}")
        recording = load_snapshot(snapshot)
        say("replaying it, as recorded and with other options")
        devices = inspect(recording, _other_confs(alloc_conf or [], recording.conf))
        segments = {} if devices else cache_at_end(recording)
    if not devices and not segments:
        raise ReplayError(
            f"{snapshot} holds neither an allocator history nor a segment: record one with "
            "torch.cuda.memory._record_memory_history() before the run, on the GPU."
        )
    if output.as_json:
        document: dict[str, Any] = {"schema_version": 1, "snapshot": str(snapshot)}
        document["devices"] = [_document(device) for device in devices]
        if segments:
            document["segments"] = [{"device": d} | _picture(p) for d, p in segments.items()]
        write_document(document)
    else:
        from memest.report.snapshot import render_inspections, render_segments

        output.show(
            render_segments(segments)
            if segments
            else render_inspections(devices, width=output.console().width, ascii_only=output.plain)
        )
    if not any(device.comparison.has_choices for device in devices):
        return ExitCode.CANNOT_SAY
    exact = all(device.comparison.is_exact for device in devices)
    return ExitCode.DONE if exact else ExitCode.FAILURE
