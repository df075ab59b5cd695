"""What a peer is asked: a measured run, as far as peers can understand it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memest.calibration.validation.records import CaseRecord
from memest.catalog.resolve import resolve_model
from memest.config.setup import Setup

__all__ = ["NotForThisError", "Question", "Shape"]


class NotForThisError(Exception):
    """The peer does not cover this run; says why."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder or encoder of equal blocks, as formulas see it."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Question:
    """A run.

    Attributes:
        record: as it was measured.
        setup: of it.
        config: of the model.
        parameters: how many.
    """

    record: CaseRecord
    setup: Setup
    config: dict[str, Any]
    parameters: int

    @property
    def mixed(self) -> bool:
        """Whether it runs in 16 bit, by autocast or by the weights' own dtype."""
        return self.half != ""

    @property
    def half(self) -> str:
        """The 16-bit dtype that it computes in, ``fp16`` or ``bf16``; empty for float32."""
        if self.setup.precision.value != "fp32":
            return self.setup.precision.value
        return {"float16": "fp16", "bfloat16": "bf16"}.get(self.setup.dtype.value, "")

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.setup.seq_len or 512

    @property
    def checkpointed(self) -> bool:
        """Whether layers are recomputed."""
        return str(self.setup.checkpointing) != "none"

    def must_be(self, *, full: bool = True, one_gpu: bool = True) -> None:
        """What the peer is about.

        Args:
            full: every weight is trained, none is quantised.
            one_gpu: nothing is divided.

        Raises:
            NotForThisError: the run is not that, or makes no optimizer step: all peers count one.
        """
        if self.setup.optim == "none":
            raise NotForThisError("steps with an optimizer only")
        if full and (self.setup.adapter is not None or self.setup.quantization is not None):
            raise NotForThisError("full fine-tuning only")
        if one_gpu and self.setup.distributed.num_gpus > 1:
            raise NotForThisError("one GPU only")

    def shape(self) -> Shape:
        """The blocks of the model.

        Raises:
            NotForThisError: it is no stack of equal blocks.
        """
        config = self.config
        if config.get("is_encoder_decoder") or config.get("model_type") in ("t5", "bart"):
            raise NotForThisError("one stack of blocks only, no encoder with a decoder")

        def one(*names: str) -> int:
            for name in names:
                if isinstance(config.get(name), int):
                    return int(config[name])
            raise NotForThisError(f"the config has no {names[0]}")

        hidden, heads = (
            one("hidden_size", "n_embd"),
            one("num_attention_heads", "n_head", "num_heads"),
        )
        inner = config.get("intermediate_size") or config.get("n_inner") or config.get("ffn_dim")
        return Shape(
            hidden=hidden,
            layers=one("num_hidden_layers", "n_layer", "num_layers"),
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            inner=inner or 4 * hidden,
            vocab=one("vocab_size"),
        )

    @classmethod
    def of(cls, record: CaseRecord, setup: Setup, parameters: int) -> Question:
        """The question of a record."""
        return cls(record, setup, dict(resolve_model(record.model).config or {}), parameters)
