"""What is known of a model once it was built, whatever it is asked about."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memest.config.setup import Attention, Task

__all__ = ["ModelCard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model as it was built for a setup.

    Attributes:
        class_name: of the model.
        task: which head it got.
        attention: the implementation that was asked of transformers.
        checkpointing: as asked for, or as a live module has it on already.
        batch: that of example inputs; None where the setup's holds.
        about: what was built, for the report.
        remarks: what there is to say about it.
    """

    class_name: str
    task: Task
    attention: Attention
    checkpointing: str
    batch: int | None
    about: tuple[str, ...]
    remarks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> ModelCard:
        """Read what :meth:`to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is no such document.
        """
        texts = {key: tuple(map(str, document[key])) for key in ("about", "remarks")}
        batch = document["batch"]
        if batch is not None and not isinstance(batch, int):
            raise TypeError("batch")
        return cls(
            class_name=str(document["class_name"]),
            task=Task(document["task"]),
            attention=Attention(document["attention"]),
            checkpointing=str(document["checkpointing"]),
            batch=batch,
            **texts,
        )
