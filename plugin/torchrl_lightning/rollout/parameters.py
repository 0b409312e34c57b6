"""Checks of a buffer's parameters, the same when it is built and when they are changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrl_lightning.entries import nested_keys

Check = Callable[[Any, str], Any]


def check_unit(value: float, name: str) -> float:
    """Return a discount that is in ``[0, 1]``.

    Raises:
        ValueError: it is not.
    """
    if not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {value!r}.")
    return float(value)


def check_threshold(value: float, name: str) -> float:
    """Return a threshold above 0; infinity clips nothing.

    Raises:
        ValueError: it is not above 0.
    """
    if not float(value) > 0.0:
        raise ValueError(f"{name} must be above 0, got {value!r}; float('inf') clips nothing.")
    return float(value)


def check_flag(value: bool, name: str) -> bool:
    """Return a boolean.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def check_count(value: int, name: str) -> int:
    """Return a positive integer.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}.")
    return value


def check_keys(value: Any, name: str) -> Any:
    """Return a list of keys as a tuple.

    Raises:
        TypeError: one of them is no key.
    """
    return nested_keys(value)


def any_object(value: Any, name: str) -> Any:
    """Return the value as it is."""
    return value


def or_none(check: Check) -> Check:
    """Return a check that lets ``None`` pass.

    Example:
        >>> or_none(check_unit)(None, "gamma"), or_none(check_unit)(1, "gamma")
        (None, 1.0)
    """

    def checked(value: Any, name: str) -> Any:
        return None if value is None else check(value, name)

    return checked
