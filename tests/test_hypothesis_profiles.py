"""Property-based tests draw the same examples in every run, and others on request."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def drawn(profile: str) -> list[int]:
    """Return the examples that a property-based test draws in a profile."""
    numbers: list[int] = []

    @settings(settings.get_profile(profile), max_examples=20)
    @given(st.integers(0, 2**60))
    def draw(number: int) -> None:
        numbers.append(number)

    draw()
    return numbers


def test_default_profile_draws_the_same_examples_in_each_run() -> None:
    assert drawn("repeatable") == drawn("repeatable")


def test_exploring_profile_draws_others_in_each_run() -> None:
    assert drawn("explore") != drawn("explore")


def test_tests_run_in_the_profile_that_the_command_names(request: pytest.FixtureRequest) -> None:
    profile = request.config.getoption("--hypothesis-profile") or "repeatable"
    assert settings.default is not None
    assert settings.default.derandomize is (profile == "repeatable")
    assert settings.default.deadline is None  # a test must not fail because the machine is slow
