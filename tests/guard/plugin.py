"""A plugin of pytest: how long each test takes; of the tests of a list, if there is one, those alone, in its order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

WORK = Path(os.environ["GUARD_WORK"])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "GUARD_TESTS" in os.environ:
        wanted = {test: place for place, test in enumerate(Path(os.environ["GUARD_TESTS"]).read_text().splitlines())}
        items[:] = sorted((item for item in items if item.nodeid in wanted), key=lambda item: wanted[item.nodeid])


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count what makes fixtures, too."""
    if report.failed:
        (WORK / "failed").write_text(report.nodeid)
    elif report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        with (WORK / "seconds").open("a") as file:
            file.write(f"{report.duration}\t{report.when}\t{report.nodeid}\n")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        (WORK / "failed").write_text(f"collecting {report.nodeid}")
