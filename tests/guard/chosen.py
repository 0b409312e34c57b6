"""A plugin of pytest: run the tests of a list, in its order, and write the first that fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = {test: place for place, test in enumerate(Path(os.environ["GUARD_TESTS"]).read_text().splitlines())}
    items[:] = sorted((item for item in items if item.nodeid in wanted), key=lambda item: wanted[item.nodeid])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        Path(os.environ["GUARD_WORK"], "failed").write_text(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        Path(os.environ["GUARD_WORK"], "failed").write_text(f"collecting {report.nodeid}")
