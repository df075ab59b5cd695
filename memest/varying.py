"""Which sizes of a question a family shall vary, and where one was looked for in vain."""

from __future__ import annotations

from collections.abc import Sequence

from memest.sizes import Sizes
from memest.steps.family import Family
from memest.store import digest_of

__all__ = ["place_of", "worth_varying"]


def worth_varying(
    near: Sequence[Family], sizes: Sizes, vary: Sequence[str], own: Family
) -> tuple[str, ...]:
    """The sizes that shall vary: those asked for, and those in which questions differed before."""
    # images and sounds are cut into patches and frames: their families are small, and rarely there
    costly = {"image_size", "audio_ms"} - set(vary)
    axes = {axis for axis in vary if axis in sizes}
    for family in near:
        if family.reach.names != set(sizes):
            continue
        axes.update(family.axes)
        axes.update(n for n, v in family.fixed.items() if sizes[n] != v and n not in costly)
    axes.update(own.axes)
    if sizes["batch"] == 1:
        axes.discard("batch")
    if "target_len" in axes and sizes.get("target_len") == sizes.get("seq_len"):
        axes.discard("target_len")
        axes.add("seq_len")
    return tuple(
        a for a in ("batch", "seq_len", "target_len", "image_size", "audio_ms") if a in axes
    )


def place_of(axes: tuple[str, ...], sizes: Sizes, family: Family) -> str:
    """Where a family was looked for: other sizes of these axes would not find it either."""
    rest = {n: v for n, v in sizes.items() if n not in axes}
    remainder = {a: sizes[a] % 128 for a in axes if a != "batch"}
    kinds = [kind for _, kind in family.skeleton.attention_choices]
    return digest_of([axes, rest, remainder, sizes["batch"] == 1, kinds])
