"""Constructors take what is sound, and say what is not."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from contracts.arguments import ARGUMENTS, Refused
from contracts.learners import LEARNERS

CASES = [
    pytest.param(row, says, given, id=f"{getattr(row.kind, '__name__', 'part')}: {says}")
    for row in (*ARGUMENTS, *LEARNERS)
    for says, given in row.cases()
]


@pytest.mark.parametrize(("row", "says", "given"), CASES)
def test_what_a_constructor_refuses_is_named(row: Refused, says: str, given: dict[str, Any]) -> None:
    with pytest.raises(row.error, match=says):
        row.kind(**given)


CLASSES = [row for row in (*ARGUMENTS, *LEARNERS) if inspect.isclass(row.kind)]


@pytest.mark.parametrize("row", CLASSES, ids=lambda row: row.kind.__name__)
def test_what_it_takes_is_taken_and_that_it_refuses_is_documented(row: Refused) -> None:
    row.kind(**row.sound)
    if row.error is ValueError:
        documented = "".join(base.__doc__ or "" for base in row.kind.__mro__ if base.__module__.startswith("torchrl_"))
        assert "ValueError: " in documented
