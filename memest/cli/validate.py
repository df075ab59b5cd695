"""``memest validate``: predictions against measured runs."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

from memest.cli.console import Output, emit, write_out
from memest.cli.exit_codes import ExitCode
from memest.cli.flags import argument, shows, switch, value_flag
from memest.errors import ConfigError
from memest.files.texts import check_target

__all__ = ["validate"]


@shows()
def validate(
    files: Annotated[
        list[Path],
        argument(
            "FILE...", "Case records, one JSON object a line; gzip where the name ends in .gz."
        ),
    ],
    *,
    only: Annotated[
        str,
        value_flag(
            "--only", "TEXT", "Records alone whose id, model, GPU, file or optimizer contains this."
        ),
    ] = "",
    assume: Annotated[
        list[str] | None,
        value_flag(
            "--assume",
            "FIELD=VALUE",
            "Declare what records do not say, for example software.torch=2.1 or "
            "setup.seq_len=512; repeatable. The report names it.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        value_flag(
            "--calibration",
            "FILE",
            "Correct predictions with this calibration; else none is taken.",
        ),
    ] = None,
    trust_code: Annotated[
        bool,
        switch(
            "--trust-code",
            "Run the Python that records name for models, steps and losses of their own.",
        ),
    ] = False,
    out: Annotated[
        list[Path] | None,
        value_flag("--out -o", "FILE", "FILE.html with plots, FILE.md or FILE.json, repeatable."),
    ] = None,
    output: Output,
) -> int:
    """Score predictions on measured runs: errors, verdicts, worst cases.

    Exit code 1 where no record could be scored. For example:
    memest validate measurements.jsonl --out report.html
    """
    from memest.calibration.validation.report import blocks
    from memest.calibration.validation.validate import SUFFIXES
    from memest.calibration.validation.validate import validate as score
    from memest.report.page import as_text

    for path in out or ():
        check_target(path, SUFFIXES)
    with output.working() as show:
        validation_result = score(
            files,
            assume=_read_assumptions(assume or []),
            only=only,
            profile=None if profile is None else str(profile),
            trust_code=trust_code,
            progress=show and (lambda number, count, name: show(f"{number} of {count}: {name}")),
        )
    write_error: OSError | None = None  # told when the scores are out
    for path in out or ():
        try:
            validation_result.save(path)
        except OSError as error:
            write_error = write_error or error
        else:
            emit(f"memest: written to {path}.")
    if output.as_json:
        write_out(f"{validation_result.to_json()}\n")
    elif not out or write_error is not None:
        console = output.console()
        width = console.width if console.is_terminal else 100
        write_out(as_text(blocks(validation_result), width=width, ascii_only=output.plain))
    if write_error is not None:
        raise write_error
    return (
        0
        if any(outcome.error is not None for outcome in validation_result.outcomes)
        else ExitCode.FAILURE
    )


def _read_assumptions(texts: list[str]) -> dict[str, Any]:
    """Fields and values; a value that is JSON is taken as it is, anything else as text."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise ConfigError(
                f"--assume {text!r} declares nothing: write FIELD=VALUE, for example "
                "software.torch=2.1."
            )
        try:
            values[name.strip()] = json_module.loads(value)
        except ValueError:
            values[name.strip()] = value
        if name.startswith("software."):
            values[name.strip()] = value  # 2.10 is a version, and no number
    return values
