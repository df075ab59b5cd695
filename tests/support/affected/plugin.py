"""The option ``--touched`` of pytest: of the slow tests only those that the change can touch."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from support.affected.checkout import Checkout
from support.affected.rules import TouchedTests, touched_tests
from support.tiers import is_slow


class SlowTestsTouched:
    """Leaves out slow tests that nothing which changed can touch, and says which and why."""

    def __init__(self, config: pytest.Config) -> None:
        """Choose once for the run and its workers."""
        message = getattr(config, "workerinput", {}).get("touched")
        self.selection = (
            TouchedTests(**json.loads(message))
            if message
            else touched_tests(Checkout(config.rootpath))
        )
        self.counts: dict[str, Counter[str]] = {"run": Counter(), "left out": Counter()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker that is about to start."""
        node.workerinput["touched"] = self.selection.dumps()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        """Take out what is not touched; tests that are not slow always stay."""
        left = []
        for item in items:
            if not is_slow(item):
                continue
            reason = self.selection.reason(item.nodeid)
            folder = item.nodeid.partition("::")[0].rpartition("/")[0]
            if reason is None:
                left.append(item)
                self.counts["left out"][folder] += 1
            else:
                self.counts["run"][f"{folder}: {reason}"] += 1
        if left:
            left_out = set(left)
            items[:] = [item for item in items if item not in left_out]
            config.hook.pytest_deselected(items=left)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tell the process that started this worker; all workers choose the same."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["touched"] = {
                key: dict(counter) for key, counter in self.counts.items()
            }

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Hear what a worker left out."""
        message = getattr(node, "workeroutput", {}).get("touched")
        if message:
            self.counts = {key: Counter(counter) for key, counter in message.items()}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """What was left out, by folder, and what was run, by change."""
        say = terminalreporter.write_line
        run, left = self.counts["run"], self.counts["left out"]
        terminalreporter.section("slow tests")
        if self.selection.everything:
            say(f"all {run.total()} run: {self.selection.everything}")
            return
        say(f"{run.total()} run, by what differs from {self.selection.since}:")
        for place, number in sorted(run.items()):
            say(f"  {number} in {place}")
        say(f"{left.total()} left out, which depend on nothing that differs:")
        for folder, number in sorted(left.items()):
            say(f"  {number} in {folder}")
