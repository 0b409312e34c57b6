"""A plugin of pytest: how long each test has taken, and the fixtures that it made."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ and report.passed:
        with open(os.environ["GUARD_WORK"] + "/seconds", "a") as file:
            file.write(f"{report.duration}\t{report.when}\t{report.nodeid}\n")
