"""Models that a library builds by name: ``timm/resnet50``, ``torchvision/resnet50``.

``transformers/gpt2`` is a family with what its configuration has where nothing is said, for those
who make their own: ``transformers/gpt2?n_layer=6``.

Which libraries there are, and what is missing where one is not installed. None is imported here.
"""

from __future__ import annotations

from memest.config.packages import Need

__all__ = ["DEFAULTS", "LIBRARIES", "library_need", "library_of_model"]

LIBRARIES = ("timm", "torchvision")
"""First parts of a name, which are the modules too."""
DEFAULTS = "transformers"
"""First part of the name of a family with its configuration's own defaults."""


def library_of_model(ref: str) -> tuple[str, str] | None:
    """The library and the name in it; None for names of other kinds.

    Example:
        >>> library_of_model("timm/resnet50"), library_of_model("google/vit-base")
        (('timm', 'resnet50'), None)
    """
    library, slash, name = ref.partition("/")
    if not slash or not name or "/" in name or library not in LIBRARIES:
        return None
    return library, name


def library_need(library: str) -> Need:
    """The package without which its models cannot be built."""
    return Need(
        library,
        f"{library}/... is built by {library}, which is not installed: pip install "
        "'memest-gpu[vision]'.",
    )
