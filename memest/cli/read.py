"""``memest read``: what is understood of a configuration or a launch command, without an answer."""

from __future__ import annotations

import shlex
from typing import Any

from memest.cli.console import Output, write_document, write_out
from memest.cli.flags import ModelArgument, shows
from memest.cli.parameters import with_options
from memest.errors import ConfigError
from memest.readers.run_config import RunConfig

__all__ = ["read"]


@with_options
@shows(quiet="The command of the estimate alone.")
def read(
    model: ModelArgument = None, *, options: dict[str, Any], run: RunConfig, output: Output
) -> int:
    """What is understood of a configuration, a script or a command.

    For example: memest read run.yaml, memest read train.py, or memest read -- accelerate launch
    train.py --bf16. Scripts and notebooks are read, not run.
    """
    if not run.sources:
        given = "" if model is None else f"{model!r} is nothing that it reads. "
        raise ConfigError(
            f"{given}memest read needs something to read: a configuration, memest read run.yaml, a "
            "script, memest read train.py or run.sh, or after -- a launch command."
        )
    from memest.config.spelling import command_words
    from memest.report.words import render_origins

    place = {name: value for name, value in options.items() if name not in run.options}
    asked = {**place, **run.options, **_open_keys(run)}
    words = command_words("estimate", run.model or model or "MODEL", asked)
    command = shlex.join(words)
    rows = run.named_origins
    if output.as_json:
        write_document(
            {
                "schema_version": 1,
                "sources": list(run.sources),
                "model": run.model,
                "values": [
                    {"option": row.option, "value": row.value, "origin": row.source} for row in rows
                ],
                "not_modelled": [str(remark) for remark in run.not_modelled],
                "unpriced": list(run.setup.unpriced),
                "overpriced": list(run.setup.overpriced),
                "ignored": [str(remark) for remark in run.ignored],
                "command": command,
            }
        )
        return 0
    if not output.quiet:
        write_out(f"read: {', '.join(run.sources)}\n")
        ignored, missing = map(str, run.ignored), map(str, run.not_modelled)
        write_out(render_origins(rows, tuple(ignored), tuple(missing)))
        write_out("\nThe same question:\n")
    write_out(f"{command}\n")
    return 0


def _open_keys(run: RunConfig) -> dict[str, tuple[str, ...]]:
    """What leaves the verdict open by its keys: enough to type, and the table has the rest."""
    keys = {str(remark): remark.key.rpartition(": ")[2] for remark in run.not_modelled}
    values = {name: run.options.get(name, ()) for name in ("unpriced", "overpriced")}
    return {
        name: tuple(dict.fromkeys(keys.get(text, text) for text in texts))
        for name, texts in values.items()
        if texts
    }
