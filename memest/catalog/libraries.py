"""Models that a library builds by name: ``timm/resnet50``, ``torchvision/resnet50``.

``transformers/gpt2`` is a family with what its configuration has where nothing is said, for those
who make their own: ``transformers/gpt2?n_layer=6``.

Which libraries there are, and what is missing where one is not installed. None is imported here.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from memest.config.packages import Need, is_there

__all__ = [
    "DEFAULTS",
    "LIBRARIES",
    "is_bare_name",
    "library_need",
    "library_of_model",
    "names_in_libraries",
]

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


def is_bare_name(ref: str) -> bool:
    """Whether a reference may be a name in a library: ``resnet50``, ``resnet50.a1_in1k``."""
    return _BARE.fullmatch(ref) is not None


def names_in_libraries(ref: str) -> tuple[str, ...]:
    """How a model of that name is called that an installed library has a function for.

    Their files are searched for it; to import them loads torch.
    """
    function, tagged, _ = ref.partition(".")
    libraries = LIBRARIES[:1] if tagged else LIBRARIES  # timm alone has several weights of one
    return tuple(
        f"{each}/{ref}" for each in libraries if is_bare_name(ref) and _defines(each, function)
    )


def _defines(library: str, function: str) -> bool:
    spec = find_spec(library) if is_there(library) else None
    folders = [Path(place, "models") for place in (spec and spec.submodule_search_locations) or ()]
    line = f"\ndef {function}(".encode()
    try:
        return any(line in file.read_bytes() for each in folders for file in each.rglob("*.py"))
    except OSError:
        return False


_BARE = re.compile(r"[a-z][a-z0-9_]*\d[a-z0-9_]*(\.\w+)?")
"""Their names are those of functions, and hardly one is without a number."""


def library_need(library: str) -> Need:
    """The package without which its models cannot be built."""
    return Need(
        library,
        f"{library}/... is built by {library}, which is not installed: pip install "
        "'memest-gpu[vision]'.",
    )
