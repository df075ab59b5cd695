"""Fetch a ``config.json`` from the Hugging Face hub: that file only, never weights.

``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` mean what they mean everywhere;
``huggingface_hub`` reads them. A hub that cannot be reached is found out within seconds.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from memest.catalog.config_file import MAX_CONFIG_BYTES
from memest.catalog.libraries import LIBRARIES, is_bare_name, names_in_libraries
from memest.catalog.models import closest_models, left_out
from memest.errors import ModelLoadError, UnknownModelError
from memest.units import format_size

__all__ = ["CONFIG_NAME", "TIMEOUT_SECONDS", "fetch_config"]

CONFIG_NAME = "config.json"
TIMEOUT_SECONDS = 5.0
_ERRNO = re.compile(r"^\[Errno -?\d+\]")
"""A number that says nothing to people, before what the system says."""


def _other_ways(ref: str) -> str:
    name = ref if is_bare_name(ref) else "NAME"
    return (
        "`memest models` lists the catalogue; the path of a config.json works too, models of other "
        f"libraries are {' or '.join(f'{library}/{name}' for library in LIBRARIES)}, or "
        "package.module:factory (`memest help naming-models`)."
    )


def _nearest(ref: str) -> str:
    of_libraries = names_in_libraries(ref)
    said = f"It is a model of a library: {' or '.join(of_libraries)}. " if of_libraries else ""
    ids = closest_models(ref)
    return f"{said}Nearest in memest's own catalogue: {', '.join(ids)}. " if ids else said


def _suggestion(ref: str) -> str:
    return f"{_nearest(ref)}{_other_ways(ref)}"


def _unknown(ref: str, why: str) -> UnknownModelError:
    reasons = {id_.lower(): f" ({reason})" for id_, reason in left_out().items()}
    reason = reasons.get(ref.lower(), "")
    nearest = _nearest(ref)
    if " " in ref and not nearest:  # a command as one word
        nearest = f"If this is a launch command, it stands behind --: memest estimate -- {ref}. "
    said = f"{ref!r} is neither a file nor in memest's catalogue{reason}, and {why}. {nearest}"
    return UnknownModelError(f"{said}{_other_ways(ref)}", said.rstrip())


def _cached_path(hub: Any, ref: str) -> Path | None:
    path = hub.try_to_load_from_cache(ref, CONFIG_NAME)
    # the cache answers with a marker object where it knows that the file does not exist
    return Path(path) if isinstance(path, str) else None


def _status(error: BaseException) -> int | None:
    code = getattr(getattr(error, "response", None), "status_code", None)
    return code if isinstance(code, int) else None


def _explain(errors: Any, ref: str, error: Exception) -> Exception:
    """The hub's error in one paragraph; gated models exist, so they are not unknown."""
    if isinstance(error, errors.GatedRepoError):
        return ModelLoadError(
            f"{ref!r} is gated on the Hugging Face hub: accept its terms on its page, then set "
            f"HF_TOKEN or run `hf auth login`. {_suggestion(ref)}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return _unknown(
            ref,
            "the Hugging Face hub shows no such model (a private one needs HF_TOKEN or "
            "`hf auth login`)",
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return _unknown(
            ref, "HF_HUB_OFFLINE is set and the local cache of the hub does not have its config"
        )
    # before EntryNotFoundError, whose subclass it is: it says "unreachable", not "no such file"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return _unknown(ref, "the Hugging Face hub cannot be reached")
    if isinstance(error, errors.EntryNotFoundError):
        return ModelLoadError(
            f"{ref!r} exists on the Hugging Face hub but has no {CONFIG_NAME}: of adapters and "
            "GGUF files name the base model, of pipelines see `memest help diffusers`. "
            f"{_suggestion(ref)}"
        )
    code = _status(error)
    if code in (401, 403):
        return ModelLoadError(
            f"the Hugging Face hub refuses {ref!r} (HTTP {code}): check HF_TOKEN or run "
            f"`hf auth login`. {_suggestion(ref)}"
        )
    if code is not None:
        return _unknown(ref, f"the Hugging Face hub answered HTTP {code}")
    reason = _ERRNO.sub("", str(error)).strip() or type(error).__name__
    return _unknown(ref, f"the Hugging Face hub cannot be reached: check the network ({reason})")


def _download(hub: Any, ref: str) -> str:
    return str(hub.hf_hub_download(ref, CONFIG_NAME, etag_timeout=TIMEOUT_SECONDS))


def fetch_config(ref: str) -> tuple[Path, str]:
    """Find the ``config.json`` of a hub id, in the local cache or on the hub.

    Args:
        ref: ``organisation/name``, or a bare name of the hub's early days.

    Returns:
        The file in the hub's cache, and where it came from in words.

    Raises:
        UnknownModelError: no such model, or none that can be asked for (offline, unreachable).
        ModelLoadError: it exists but is gated, refused, without a config or too large.
    """
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        errors: Any = importlib.import_module("huggingface_hub.errors")
    except ImportError as error:
        raise _unknown(
            ref,
            "the hub cannot be asked without the package huggingface_hub "
            "(pip install 'memest-gpu[torch]')",
        ) from error
    try:
        path = _cached_path(hub, ref)
    except ValueError as error:  # HFValidationError: the name cannot be an id
        raise _unknown(ref, "it cannot be an id of the Hugging Face hub either") from error
    if path is not None:
        return path, "config.json in the local cache of the Hugging Face hub"
    try:
        # a bare HEAD first: unlike the download it does not retry for half a minute
        url = hub.hf_hub_url(ref, CONFIG_NAME)
        size = hub.get_hf_file_metadata(url, timeout=TIMEOUT_SECONDS).size or 0
        config_file = "" if size > MAX_CONFIG_BYTES else _download(hub, ref)
    except Exception as error:
        # the client raises errors of its own, of its HTTP library and OSError: all mean "not got"
        raise _explain(errors, ref, error) from error
    if not config_file:
        raise ModelLoadError(
            f"the {CONFIG_NAME} of {ref!r} on the hub has {format_size(size)}, a configuration at "
            f"most {format_size(MAX_CONFIG_BYTES)}: name another model"
        )
    return Path(config_file), "config.json from the Hugging Face hub"
