"""Cases: whole runs of the explorer's first page on the server (Streamlit's AppTest).

A run is inputs, estimate, largest batch, common cards and tables.
"""

from __future__ import annotations

from typing import Any

from speed.case import Bench, Case, Work

QUERY = {"model": "bert-large-uncased", "gpu": "rtx-4090"}


def open_page() -> Any:
    from streamlit.testing.v1 import AppTest

    app = AppTest.from_string("from memest.app.main import run\nrun()", default_timeout=300)
    for key, value in QUERY.items():
        app.query_params[key] = value
    app.run()
    assert not app.exception
    return app


def change(key: str):
    def prepare(bench: Bench) -> Work:
        app = open_page()

        def work() -> None:
            app.number_input(key=key).set_value(next(bench.fresh))
            app.run()
            assert not app.exception

        return work

    return prepare


CASES = (
    Case(
        "page",
        "the explorer's page opened",
        "python-1",
        lambda _: lambda: open_page() and None,
        version=2,
    ),
    Case("page-batch", "another batch on the page", "python-1", change("batch"), version=2),
    Case(
        "page-accumulation",
        "another accumulation on the page",
        "python-1",
        change("grad_accum"),
        version=2,
    ),
)
