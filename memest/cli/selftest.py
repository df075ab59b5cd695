"""``memest selftest``: whether memest is installed right, each finding with what to do about it."""

from __future__ import annotations

import enum
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from memest.cli.console import Output, write_document
from memest.cli.exit_codes import ExitCode
from memest.cli.flags import shows, switch
from memest.config.installed import DISTRIBUTION, VERIFIED, release, unverified_note
from memest.config.packages import (
    TORCH,
    TRANSFORMERS,
    build_again,
    is_there,
    other_build,
    pinned,
)
from memest.errors import DeviceError, MemestError, MissingDependencyError, NotKnownError
from memest.units import format_size

if TYPE_CHECKING:
    from memest.calibration.drift import Drift

__all__ = ["Finding", "State", "findings", "selftest"]

KNOWN_MODEL = "bert-large-uncased"
KNOWN_BYTES = 8_978_183_680
"""The allocated peak of that run, as it comes with memest."""
TINY_MODEL = "gpt2?n_layer=1&n_embd=64&n_head=2&n_positions=128&vocab_size=1000"
TINY_PARAMETERS = (1000 + 128) * 64 + (12 * 64**2 + 13 * 64) + 2 * 64
"""Embeddings of words and positions; a layer's matrices, biases and norms; the last norm."""
_BYTES_OF_FLOAT32 = 4
_EXTRAS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("torch", ("torch", "transformers"), "models that do not come with memest"),
    ("gpu", ("pynvml",), "reading the GPUs of this machine"),
    ("peft", ("peft", "bitsandbytes"), "adapters and quantised bases"),
    ("calibration", ("accelerate", "sklearn"), "memest calibrate"),
    ("vision", ("timm", "torchvision"), "models of timm and torchvision by name"),
    ("plot", ("matplotlib",), "pictures"),
    ("app", ("streamlit",), "memest app"),
    ("mcp", ("mcp",), "memest mcp"),
    ("notebook", ("pandas",), "frames in notebooks"),
    ("ray", ("ray",), "sweeps on a cluster"),
)
"""Extras, by what is imported, and what for; the packages of ``optim`` are named when asked for."""


class State(enum.StrEnum):
    """What a check came to."""

    OK = "ok"
    WARNING = "warning"
    """Something cannot be done here; everything else can."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check.

    Attributes:
        check: what was looked at.
        state: what it came to.
        found: in words.
        remedy: what to type or do; empty where nothing is to be done.
    """

    check: str
    state: State
    found: str
    remedy: str = ""


def findings(say: Callable[[str], None]) -> Iterator[Finding]:
    """All checks, one after the other.

    Args:
        say: told what is being done.
    """
    yield _versions()
    say("asking for a model that comes with memest")
    yield _shipped_answer()
    say("tracing a tiny model; importing torch takes most of the time")
    yield _tiny_trace()
    yield _writable_cache()
    yield _writable_home()
    yield _gpus()
    yield from map(_extra, _EXTRAS)


def _versions() -> Finding:
    names = (DISTRIBUTION, *VERIFIED)
    found = ", ".join(f"{name} {release(name) or 'not installed'}" for name in names)
    found += f", Python {platform.python_version()}"
    note = unverified_note()
    if note:
        return Finding(check="versions", state=State.WARNING, found=f"{found}; {note}",
                       remedy="memest selftest --full")  # fmt: skip
    return Finding(check="versions", state=State.OK, found=found)


def _shipped_answer() -> Finding:
    """One answer of those that come with memest, beside the figure that it must have."""
    import memest

    check, words = "known answer", f"{KNOWN_MODEL}, batch 8, fp16"
    model = memest.profile(KNOWN_MODEL)
    try:
        with model.known_alone():
            peak_bytes = model.spot(batch=8, precision="fp16", gpu="t4").peak.allocated_bytes
    except NotKnownError:
        found = (
            f"{words}: not known to what comes with memest, which was traced with other releases "
            "of torch and transformers than are installed: every model is traced here once"
        )
        return Finding(check=check, state=State.WARNING, found=found)
    except MemestError as error:
        return Finding(check=check, state=State.FAILED, found=f"{words}: {error}",
                       remedy=_REINSTALL)  # fmt: skip
    if peak_bytes == KNOWN_BYTES:
        found = f"{words}: {format_size(peak_bytes)} allocated at the peak, as it must be"
        return Finding(check=check, state=State.OK, found=found)
    found = f"{words}: {peak_bytes:,} bytes allocated at the peak, and it must be {KNOWN_BYTES:,}"
    return Finding(check=check, state=State.FAILED, found=found, remedy=_REINSTALL)


_REINSTALL = "pip install --force-reinstall --no-deps memest-gpu; memest cache --clear"


def _tiny_trace() -> Finding:
    """A model that is traced here, beside what its sizes come to on paper."""
    from memest.catalog.resolve import resolve_model
    from memest.estimation.profiler import Profiler
    from memest.events import Category

    check = "own trace"
    if not (is_there(TORCH.module) and is_there(TRANSFORMERS.module)):
        found = "torch or transformers is not installed: models that come with memest alone"
        return Finding(check=check, state=State.WARNING, found=found,
                       remedy="pip install 'memest-gpu[torch]'")  # fmt: skip
    from memest.config.options import setup_from_options
    from memest.estimation.estimate import answer

    setup = setup_from_options(batch=2, seq_len=16, optim="sgd_momentum", loop="plain")
    try:
        profiler = Profiler(source=resolve_model(TINY_MODEL), stores=())  # traced anew, not kept
        estimate = answer(profiler, setup, max_batch=False, common=False)
    except MissingDependencyError as error:  # which says what to do
        return Finding(check=check, state=State.FAILED, found=str(error))
    except Exception as error:  # noqa: BLE001 - whatever is installed may be broken in any way
        found = f"a tiny gpt2 cannot be traced: {type(error).__name__}: {error}"
        return Finding(check=check, state=State.FAILED, found=found,
                       remedy="pip install --upgrade 'memest-gpu[torch]'")  # fmt: skip
    sizes = {row.category: row.bytes for row in estimate.breakdown}
    expected_bytes = TINY_PARAMETERS * _BYTES_OF_FLOAT32
    wrong = [
        f"{category.value} {sizes.get(category, 0):,} bytes in place of {expected_bytes:,}"
        for category in (Category.PARAMETERS, Category.OPTIMIZER_STATES)
        if sizes.get(category, 0) != expected_bytes
    ]
    if wrong:
        return Finding(check=check, state=State.FAILED, found=f"a tiny gpt2: {'; '.join(wrong)}",
                       remedy="memest selftest --full")  # fmt: skip
    found = f"a tiny gpt2: {TINY_PARAMETERS:,} parameters and their momentum, to the byte"
    return Finding(check=check, state=State.OK, found=found)


def _writable_cache() -> Finding:
    from memest.profiles.cache import cache_folder

    folder = cache_folder()
    if folder is None:
        found = "this user has no home folder that is known: what is traced is not kept"
        return Finding(check="cache", state=State.WARNING, found=found, remedy=_CACHE)
    return _writable("cache", folder, _CACHE)


def _writable_home() -> Finding:
    from memest.files.folders import user_folder

    try:
        folder = user_folder()
    except MemestError as error:
        return Finding(check="home", state=State.WARNING, found=str(error), remedy=_HOME)
    return _writable("home", folder, _HOME)


_CACHE = "set MEMEST_CACHE to a folder that can be written"
_HOME = "set MEMEST_HOME to a folder that can be written"


def _writable(check: str, folder: Path, remedy: str) -> Finding:
    """Whether a file can be made in a folder, or in the nearest one above it that is there."""
    place = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        found = f"{folder} cannot be written: {error.strerror or error}"
        return Finding(check=check, state=State.WARNING, found=found, remedy=remedy)
    return Finding(check=check, state=State.OK, found=f"{folder} can be written")


def _gpus() -> Finding:
    from memest.catalog.nvml import local_gpus

    name_one = "name a card, for example --gpu rtx-4090"
    try:
        cards = local_gpus()
    except MissingDependencyError:
        found = "the driver cannot be asked without nvidia-ml-py"
        return Finding(check="GPU", state=State.WARNING, found=found,
                       remedy=f"pip install 'memest-gpu[gpu]', or {name_one}")  # fmt: skip
    except DeviceError as error:
        return Finding(check="GPU", state=State.WARNING, found=str(error))
    if not cards:
        found = "the driver sees no GPU"
        return Finding(check="GPU", state=State.WARNING, found=found, remedy=name_one)
    found = ", ".join(f"{card.name}, {format_size(card.total_bytes)}" for card in cards)
    return Finding(check="GPU", state=State.OK, found=found)


def _extra(row: tuple[str, tuple[str, ...], str]) -> Finding:
    """Whether the packages of an extra are there."""
    name, modules, purpose = row
    missing = [module for module in modules if not is_there(module)]
    for module in modules:
        if words := other_build(module):
            return Finding(check=f"extra {name}", state=State.FAILED,
                           found=f"{words}, so that it cannot be imported: for {purpose}",
                           remedy=build_again(module))  # fmt: skip
    if not missing:
        return Finding(check=f"extra {name}", state=State.OK, found=f"for {purpose}")
    found = f"{' and '.join(missing)} not installed: for {purpose}"
    return Finding(check=f"extra {name}", state=State.WARNING, found=found,
                   remedy=pinned(f"pip install 'memest-gpu[{name}]'"))  # fmt: skip


@shows()
def selftest(
    *,
    output: Output,
    full: Annotated[
        bool,
        switch(
            "--full",
            "Run a few small models on the CPU besides and compare them with their traces: whether "
            "memest still holds with the torch and transformers installed. Minutes.",
        ),
    ] = False,
) -> int:
    """Whether memest is installed right: versions, a known answer, a tiny trace, folders, extras.

    Exit code 0: nothing failed, 1: something did. Takes some 20 seconds where torch is installed.
    """
    drift: Drift | None = None
    if full:
        _check_installed()
    with output.working() as show:
        say = show or (lambda _: None)
        found = list(findings(say))
        if full:
            from memest.calibration.drift import check_drift

            drift = check_drift(say)
    found += _drift_findings(drift)
    failed = any(finding.state is State.FAILED for finding in found)
    if output.as_json:
        document: dict[str, Any] = {
            "schema_version": 1, "ok": not failed, "checks": [asdict(each) for each in found],
        }  # fmt: skip
        write_document(document | ({} if drift is None else {"drift": drift.to_dict()}))
    else:
        output.table(_rows(found), ("", "check", "found"), ("left", "left", "left"))
    return ExitCode.FAILURE if failed else ExitCode.DONE


def _rows(found: Sequence[Finding]) -> Iterator[tuple[str, str, str]]:
    for each in found:
        remedy = f". Do: {each.remedy}" if each.remedy else ""
        yield each.state.value, each.check, f"{each.found}{remedy}"


def _check_installed() -> None:
    for package in VERIFIED:
        if release(package) is None:
            raise MissingDependencyError(
                f"--full runs training steps, which need {package}, and it is not installed: "
                "pip install 'memest-gpu[torch]'"
            )


def _drift_findings(drift: Drift | None) -> Iterator[Finding]:
    """Each model that really ran, and what became of all."""
    if drift is None:
        return
    for case, (name, words) in zip(drift.cases, drift.lines(), strict=True):
        state = State.OK if case.agrees else State.FAILED
        yield Finding(check=name, state=state, found=words)
    verdict = "traces differ from what is installed" if drift.found else "traces hold"
    yield Finding(
        check="traces",
        state=State.FAILED if drift.found else State.OK,
        found=f"{verdict}: torch {drift.torch}, transformers {drift.transformers}",
    )
