"""One table of exit codes: the code's, the help's and the page's."""

from __future__ import annotations

import re

import memest.errors
from memest.cli.exit_codes import ExitCode, error_kinds, kind_of
from memest.errors import MemestError, UnfitGpuError
from support.paths import ROOT

PAGE = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")


def test_the_page_has_the_table_of_the_code():
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert rows == [(str(code.value), code.meaning) for code in ExitCode]


def test_the_help_has_it_too(here):
    text = here("help", "exit-codes").stdout
    for code in ExitCode:
        assert re.search(rf"^ +{code.value} +{re.escape(code.meaning)}$", text, re.MULTILINE)


def test_every_error_ends_with_a_code_of_the_table():
    classes = [
        kind for kind in vars(memest.errors).values()
        if isinstance(kind, type) and issubclass(kind, MemestError)
    ]  # fmt: skip
    assert len(classes) > 10
    for kind in classes:
        assert ExitCode(kind.exit_code) not in (ExitCode.DONE, ExitCode.INTERRUPTED)
        assert kind.__name__ in error_kinds()
        assert f"{kind.__name__} " in memest.errors.__doc__ or f"{kind.__name__}," in (
            memest.errors.__doc__
        )


def test_an_error_of_another_module_has_the_kind_it_is_derived_from():
    class OwnError(UnfitGpuError):
        pass

    assert kind_of(OwnError("")) == "UnfitGpuError"
