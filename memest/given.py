"""Configurations of other libraries, in whatever form people have them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memest.errors import ConfigError
from memest.files import read_json

__all__ = ["mapping_given"]


def mapping_given(given: Any, option: str, *, takes: str, instead: str) -> dict[str, Any]:
    """The values of a mapping, of an object with ``to_dict``, of JSON, or of a file that holds it.

    Args:
        given: any of these.
        option: how messages call it.
        takes: what to give, said of anything else.
        instead: what to give, said where a file cannot be read.

    Raises:
        ConfigError: it is none of these, or holds no JSON object.
    """
    if isinstance(given, Mapping):
        return dict(given)
    as_dict = getattr(given, "to_dict", None)
    if callable(as_dict):
        found = as_dict()
        if isinstance(found, Mapping):
            return dict(found)
    if not isinstance(given, (str, Path)):
        raise ConfigError(f"{option} is a {type(given).__name__}: {takes}.")
    try:
        values = read_json(given)
    except OSError as error:
        raise ConfigError(
            f"{option} {str(given)!r} cannot be read ({error.strerror}): {instead}."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{option} {str(given)!r} is not text.") from None
    except ValueError as error:
        raise ConfigError(f"{option} {str(given)!r} is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{option} {str(given)!r} holds no JSON object.")
    return values
