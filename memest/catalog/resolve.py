"""From what the user typed to a model configuration, without torch.

In this order: a file or folder of this machine, ``package.module:factory``, the catalogue, a
library's model (``timm/resnet50``), the Hugging Face hub.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memest.catalog.changes import split_changes
from memest.catalog.config_file import check_config, guess_auto_class, read_config
from memest.catalog.hub import CONFIG_NAME, fetch_config
from memest.catalog.libraries import DEFAULTS, library_of_model
from memest.catalog.mirrors import copy_in_4bit, mirror_note, original_of_copy
from memest.catalog.models import CatalogueEntry, lookup, model_types
from memest.errors import ConfigError, ModelLoadError, UnknownModelError, closest
from memest.files.texts import of_windows, printable

__all__ = [
    "ModelSource",
    "leads_to_file",
    "looks_like_path",
    "name_of_module",
    "names_factory",
    "resolve_model",
]

_FACTORY = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
_PAGE_OF_HUB = re.compile(
    r"(?:https?://)?(?:www\.)?"
    r"(?:(?:huggingface|hf)\.co/(?!(?:collections|papers|blog|docs|spaces)/|models\b)|modelscope\.\w+/models/)"
    r"([\w.-]+(?:/[\w.-]+)?)"
)
_DATA = re.compile(
    r"(?:https?://)?(?:[\w-]+\.)*(?:huggingface\.co/|hf\.co/|modelscope\.\w+/)?datasets/"
)
_ADDRESS = re.compile(r"https?://")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        kind: ``catalogue``, ``defaults``, ``file``, ``hub``, ``factory`` or ``library``.
        id: how to call it in results.
        config: the configuration, None for a factory and a library's model. Not part of the
            identity, do not change it.
        path: the file it was read from, None for the catalogue and factories.
        provenance: where the configuration is from, in words for the user.
        factory: ``package.module:attribute``, None otherwise.
        notes: remarks for the user.
        auto_class: the transformers class that builds it, None where the configuration does not
            say.
        trust_remote_code: whether code named by the configuration may run.
        changes: names in the configuration that the user changed.
        library: that builds it by name, and the name; None otherwise.
        arguments: of the library's function, as the user changed them.
    """

    kind: str
    id: str
    config: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    path: Path | None = None
    provenance: str
    factory: str | None = None
    notes: tuple[str, ...] = ()
    auto_class: str | None = None
    trust_remote_code: bool = False
    changes: tuple[str, ...] = ()
    library: tuple[str, str] | None = None
    arguments: tuple[tuple[str, Any], ...] = ()


def looks_like_path(ref: str) -> bool:
    """Whether a reference is taken for a path, whatever is there."""
    # an id has one slash at most, so one slash alone does not make a path
    return (
        ref.lower().endswith(".json")
        or ref.startswith((".", "~", os.sep))
        or ref.count("/") > 1
        or ref.endswith(os.sep)
        or "\\" in ref
    )


def names_factory(ref: str) -> bool:
    """Whether a reference is ``package.module:name``, code of the user's own."""
    return _FACTORY.match(_by_module(ref)) is not None


def name_of_module(folder: Path, file: str) -> str:
    """How a file is imported from the current directory; by its own name where it cannot be."""
    try:
        parts = (folder / file).resolve().relative_to(Path.cwd()).with_suffix("").parts
    except (OSError, ValueError):
        parts = ()
    return ".".join(parts) if parts and all(map(str.isidentifier, parts)) else Path(file).stem


def _by_module(ref: str) -> str:
    """``folder/train.py:Net`` as ``folder.train:Net``; what is no such thing as it is."""
    file, marked, name = ref.partition(".py:")
    path, exists = _path_of(f"{file}.py")
    if not marked or not exists:
        return ref
    return f"{name_of_module(path.parent, path.name)}:{name}"


def leads_to_file(ref: str) -> bool:
    """Whether something on this machine is read for a reference, or would be if it were there.

    Nothing is read to tell.
    """
    path, exists = _path_of(ref)
    lacks_config = exists and path.is_dir() and not (path / CONFIG_NAME).is_file()
    is_model = lacks_config and lookup(ref, exactly=True) is not None
    return looks_like_path(ref) or (exists and not is_model)


def _path_of(ref: str) -> tuple[Path, bool]:
    """A reference as a path, and whether something is there."""
    path = Path(ref)
    try:
        path = path.expanduser()
        return path, path.exists()
    except (OSError, RuntimeError, ValueError):
        # longer than the file system allows, a home of nobody, a NUL byte: no path of ours
        return path, False


def _from_file(path: Path, *, ref: str, trust_remote_code: bool) -> ModelSource:
    if path.is_dir():
        file = path / CONFIG_NAME
        if not file.is_file() and (path / "model_index.json").is_file():
            file = path / "model_index.json"  # of a pipeline of diffusers, which is told as such
        if not file.is_file():
            raise ConfigError(
                f"the folder {ref} has no {CONFIG_NAME}: give the folder that save_pretrained "
                "wrote, or the file itself" + _adapter_hint(path)
            )
        path = file
    name = printable(str(path))
    return _from_config(
        "file", printable(ref), path, name, f"config.json at {name}", trust_remote_code
    )


def _from_config(
    kind: str, id_: str, path: Path, name: str, provenance: str, trust_remote_code: bool
) -> ModelSource:
    """A model whose configuration a file holds, which messages call by a name."""
    config, notes = check_config(
        read_config(path, label=name), label=name, trust_remote_code=trust_remote_code
    )
    return ModelSource(
        kind=kind,
        id=id_,
        config=config,
        path=path,
        provenance=provenance,
        notes=notes,
        auto_class=guess_auto_class(config),
        trust_remote_code=trust_remote_code,
    )


def _adapter_hint(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return "; this one holds an adapter: name its base model, and it with --peft-config"
    return ""


def _from_catalogue(
    entry: CatalogueEntry, config: dict[str, Any], *, ref: str, notes: tuple[str, ...]
) -> ModelSource:
    if entry.provenance == "config.json":
        provenance = f"memest's catalogue: the model's config.json, from {entry.source}"
    else:
        provenance = f"memest's catalogue: rebuilt from published figures ({entry.source})"
        rebuild_note = (
            f"the configuration of {entry.id} was rebuilt from published figures: its size is "
            "right, its dropout, dtype and head counts may be its family's; the path of the real "
            "config.json in place of the name settles it"
        )
        if "dtype" not in str(config):  # torch_dtype or dtype, here or in a part's configuration
            rebuild_note += ". It names no dtype, so --dtype auto means float32"
        notes = (*notes, rebuild_note)
    if note := mirror_note(ref, entry):
        notes = (note, *notes)
    return ModelSource(
        kind="catalogue",
        id=ref if original_of_copy(ref) != ref else entry.id,
        config=config,
        provenance=provenance,
        notes=notes,
        auto_class=entry.auto_class,
    )


def resolve_model(ref: str, *, trust_remote_code: bool = False) -> ModelSource:
    """Find the configuration of a model.

    Args:
        ref: a folder or ``config.json``, ``package.module:factory``, ``timm/NAME`` or
            ``torchvision/NAME``, or an id of the Hugging Face hub; ids of the catalogue need no
            network. ``?name=value&name=value`` after it changes the configuration, or is given to
            the library's function.
        trust_remote_code: allow configurations that name code of their own.

    Returns:
        The configuration and its origin. A factory is neither imported nor called here.

    Raises:
        ModelLoadError: found, but it cannot be used.
        UnknownModelError: the reference leads nowhere; the message names the closest models.
        ConfigError: a file or folder that is not there or holds no configuration; changes of a
            configuration that are none.
    """
    ref = ref.strip()
    whole_ref = ref
    ref, changes = split_changes(_by_module(ref))
    return _with_changes(_resolve(ref, trust_remote_code=trust_remote_code), whole_ref, changes)


def _with_changes(source: ModelSource, ref: str, changes: dict[str, Any]) -> ModelSource:
    """The source with another configuration, under the reference that says so.

    Whether the configuration has such a name is checked when the model is built.
    """
    if not changes:
        return source
    if source.library is not None:
        return replace(source, id=ref, arguments=tuple(changes.items()))
    if source.config is None:
        raise ConfigError(
            f"{ref!r}: a factory has no configuration to change: let it build what you mean."
        )
    _, _, text = ref.partition("?")
    note = f"its configuration was changed: {text.replace('&', ', ')}"
    return replace(
        source,
        id=f"{source.id}?{text}",
        config={**source.config, **changes},
        changes=tuple(changes),
        notes=(*source.notes, note),
    )


def _resolve(ref: str, *, trust_remote_code: bool) -> ModelSource:
    if not ref:
        raise UnknownModelError("no model was named: give an id, for example bert-base-uncased")
    path, exists = _path_of(ref)
    notes: tuple[str, ...] = ()
    if not exists:
        _check_page(ref)
    if looks_like_path(ref) and not exists:
        hint = " (a path of Windows; this system parts folders by /)" if of_windows(ref) else ""
        raise ConfigError(
            f"{ref} does not exist{hint}: give a folder with a {CONFIG_NAME}, the file itself, or "
            "the id of a model, for example bert-base-uncased"
        )
    entry = lookup(ref, exactly=exists)
    lacks_config = exists and path.is_dir() and not (path / CONFIG_NAME).is_file()
    if lacks_config and entry is not None and not looks_like_path(ref):
        notes = (f"the folder {ref} here has no {CONFIG_NAME} and was passed over",)
        exists = False
    if exists:
        return _from_file(path, ref=ref, trust_remote_code=trust_remote_code)
    if _FACTORY.match(ref):
        return ModelSource(
            kind="factory",
            id=ref,
            provenance=f"built by {ref}",
            factory=ref,
            trust_remote_code=trust_remote_code,
        )
    if entry is not None:
        config = copy_in_4bit(ref, entry, entry.config())
        if config is not None:
            return _from_catalogue(entry, config, ref=ref, notes=notes)
    library = library_of_model(ref)
    if library is not None:
        return ModelSource(
            kind="library", id=ref, provenance=f"built by {library[0]}", library=library
        )
    if ref.startswith(f"{DEFAULTS}/"):
        return _of_defaults(ref)
    path, provenance = _fetch(ref, entry)
    name = f"the {CONFIG_NAME} of {ref}"
    return _from_config("hub", ref, path, name, provenance, trust_remote_code)


def _check_page(ref: str) -> None:
    """Refuse the address of a page of the hub in the place of a model.

    Raises:
        ConfigError: it is one, of a model or of something else.
    """
    if _DATA.match(ref):
        raise ConfigError(
            f"{ref} is a data set: name the model that trains, for example bert-base-uncased. "
            "How long its samples are, a file of them says: --dataset FILE."
        )
    if page := _PAGE_OF_HUB.match(ref):
        raise ConfigError(f"{ref} is an address: name the model as its page does, {page[1]}.")
    if _ADDRESS.match(ref):
        raise ConfigError(
            f"{ref} is an address, and of no model: give the id of one, for example "
            "bert-base-uncased."
        )


def _of_defaults(ref: str) -> ModelSource:
    """A family with its configuration's own defaults.

    Raises:
        UnknownModelError: a family that the catalogue has none of.
    """
    family = ref.partition("/")[2]
    if family not in model_types():
        close = closest(family, model_types())
        raise UnknownModelError(
            f"{ref}: {DEFAULTS}/... is a family of models with its configuration's defaults, and "
            f"{family!r} is none that memest knows"
            + (f": is it {' or '.join(close)}?" if close else ". bert, gpt2 and llama are some.")
        )
    return ModelSource(
        kind="defaults",
        id=ref,
        config={"model_type": family},
        provenance=f"the defaults of transformers for {family}",
    )


def _fetch(ref: str, original: CatalogueEntry | None) -> tuple[Path, str]:
    """The configuration of a hub id, and where it is from.

    Raises:
        UnknownModelError: as :func:`fetch_config` does; of a copy in 4 bits with what to type.
        ModelLoadError: likewise.
    """
    try:
        return fetch_config(ref)
    except (UnknownModelError, ModelLoadError) as error:
        if original is None:
            raise
        raise ModelLoadError(
            f"{ref} is a copy of {original.id} of which only some layers are in 4 bits; which, its "
            f"own {CONFIG_NAME} alone says, and the Hugging Face hub does not give it: name the "
            f"path of that file, or take {original.id} with --qlora, all layers in 4 bits, which "
            "needs somewhat less"
        ) from error
