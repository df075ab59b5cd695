"""Case records of a tiny model."""

from __future__ import annotations

SETUP = {
    "batch": 4, "seq_len": 64, "precision": "fp32", "optim": "adamw_torch",
    "checkpointing": "none", "loop": "plain",
}  # fmt: skip


def record(**changes):
    """A complete record of bert-tiny on an RTX 3090; ``setup_`` and ``software_`` go inside."""
    setup = {**SETUP, **changes.pop("setup_", {})}
    software = {"torch": "2.6", "transformers": "4.51", **changes.pop("software_", {})}
    base = {
        "id": "one", "model": "prajjwal1/bert-tiny", "task": "sequence-classification",
        "setup": setup, "gpu": "RTX 3090", "metric": "reserved", "measured_bytes": 100 << 20,
        "source": "made for this test", "software": software,
    }  # fmt: skip
    return {**base, **changes}
