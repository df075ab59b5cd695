"""peft's ``adapter_config.json``: what ``--peft-config`` takes, with the base model it names."""

from __future__ import annotations

from memest.readers.sheet import Sheet

__all__ = ["read_peft_adapter"]


def read_peft_adapter(sheet: Sheet) -> None:
    """Fill in a sheet of an adapter's configuration; :mod:`memest.adapter` judges the values."""
    base = sheet.take("base_model_name_or_path")
    if base:
        sheet.say("model", str(base), "base_model_name_or_path")
    document = dict(sheet.document)
    for key in sheet.left:
        sheet.take(key)
    sheet.say("adapter", document, "peft_type")
