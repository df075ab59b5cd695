"""What an evaluation of the Trainer keeps on the GPU, as a script says it.

Source: ``Trainer.evaluate`` and ``evaluation_loop`` of transformers 5.23: the loss alone without
``compute_metrics`` or with ``prediction_loss_only``, else what the model returns and the labels; in
place of what the model returns, what ``preprocess_logits_for_metrics`` makes of it. With
``predict_with_generate`` ``Seq2SeqTrainer.prediction_step`` keeps what was generated, no logits.
"""

from __future__ import annotations

import ast
import re

from memest.readers.scripts.document import CallDocument
from memest.readers.scripts.things import Call, Function, Unknown, Value
from memest.readers.values import Bounded, Saving

__all__ = ["put_predictions"]

_SAID = "; --eval-samples says it"
_RANGE = re.compile(r"range\((\d+)\)")
_SAME_ROWS = frozenset(
    """shuffle with_format with_transform remove_columns rename_column rename_columns cast_column
    select_columns""".split()
)
"""Methods of ``datasets`` that leave as many rows as there were; a ``map`` of batches may not."""


def put_predictions(document: CallDocument, trainer: Call) -> None:
    """Put down how many predictions are kept, or that they are not priced."""
    evaluates = document.get("eval_strategy") or document.get("evaluation_strategy")
    metrics = trainer.keywords.get("compute_metrics")
    if metrics is None or metrics.data is None or evaluates in (None, "no"):
        return
    if document.get("prediction_loss_only") is True:
        return
    if document.get("predict_with_generate") is True:
        why = "tokens that are generated and labels are kept (8 bytes each): priced without"
        document.miss(trainer.line, "compute_metrics", Bounded(why))
        return
    made = trainer.keywords.get("preprocess_logits_for_metrics")
    if made is not None and made.data is not None:
        indices = "indices of predictions (8 bytes each)"
        what = indices if _indexes(made) else "what it makes of predictions"
        why = f"{what} and labels pile up on the GPU in the evaluation: priced without{_SAID}"
        # what it needs on the way is of one batch, whose loss has as much beside the predictions
        whole = Saving(f"whole predictions are priced: the run keeps {what}")
        document.miss(trainer.line, "preprocess_logits_for_metrics", why, once_said=whole)
        return
    count = _rows(trainer.keywords.get("eval_dataset"))
    if count is not None:
        document.say("eval_samples", count, trainer.line)
        return
    document.miss(
        trainer.line,
        "compute_metrics",
        f"predictions of the evaluation pile up on the GPU: priced without{_SAID}",
    )


def _indexes(made: Value) -> bool:
    """Whether a function of the script returns nothing but the places of the largest scores."""
    if not isinstance(made.data, Function):
        return False
    node = made.data.node
    if isinstance(node, ast.Lambda):
        returned: list[ast.expr | None] = [node.body]
    else:
        returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
    return bool(returned) and all(
        isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and each.func.attr == "argmax"
        for each in returned
    )


def _rows(dataset: Value | None) -> int | None:
    """How many rows a dataset has, where the script cuts it to a number; None otherwise.

    A slice of a split (``split="test[:200]"``) says the most alone: ``datasets`` takes the rows
    that are there (``_rel_to_abs_instr`` of ``arrow_reader.py``). ``select`` fails without them.
    """
    call = None if dataset is None else dataset.data
    while isinstance(call, Call):
        if call.name == "select":
            chosen = call.argument(0, "indices")
            rows = None if chosen is None else chosen.data
            if isinstance(rows, list):
                return len(rows)
            cut = _RANGE.fullmatch(rows.why) if isinstance(rows, Unknown) else None
            return int(cut[1]) if cut else None
        batched = call.keywords.get("batched")
        by_row = call.name == "map" and (batched is None or batched.data is False)
        if not (by_row or call.name in _SAME_ROWS):
            return None
        call = call.receiver
    return None
