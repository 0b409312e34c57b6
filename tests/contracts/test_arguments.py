"""Constructors take what is sound, and say what is not."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from contracts import arguments, effects, learners
from contracts.arguments import Refused

SOUND = {**arguments.SOUND, **learners.SOUND}
ROWS = {
    ValueError: (*arguments.VALUES, *learners.VALUES),
    TypeError: (*arguments.TYPES, *learners.TYPES),
    KeyError: arguments.KEYS,
    (ValueError, TypeError): effects.ROWS,
}
CASES = [
    pytest.param(error, row, id=f"{getattr(row.kind, '__name__', 'part')}: {row.says}")
    for error, rows in ROWS.items()
    for row in rows
]


@pytest.mark.parametrize(("error", "row"), CASES)
def test_what_a_constructor_refuses_is_named_in_one_line(error: type[Exception], row: Refused) -> None:
    with pytest.raises(error, match=row.says) as refusal:
        row.kind(**{**SOUND.get(row.kind, {}), **row.given})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("make", "settings"), effects.TAKEN)
def test_settings_with_an_effect_are_taken(make: Any, settings: dict[str, Any]) -> None:
    made = make(**settings)
    if hasattr(made, "shutdown"):
        made.shutdown()


@pytest.mark.parametrize("kind", dict.fromkeys(row.kind for rows in ROWS.values() for row in rows))
def test_what_it_takes_is_taken_and_that_it_refuses_is_documented(kind: Any) -> None:
    if inspect.isclass(kind):
        kind(**SOUND.get(kind, {}))
        documented = "".join(base.__doc__ or "" for base in kind.__mro__ if base.__module__.startswith("torchrl_"))
        assert "ValueError: " in documented
