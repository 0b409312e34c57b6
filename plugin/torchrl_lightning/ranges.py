"""Refuse settings that make no sense, before anything is built: one check for each kind of setting.

Each takes a value and what its user calls it, and returns the value: ``integer(8, "size")``. What is refused raises a
``ValueError`` (of :func:`boolean` a ``TypeError``) that names the setting, what came and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from fractions import Fraction
from operator import index
from typing import Any

Check = Callable[[Any, str], Any]


def integer(value: Any, name: str, least: int = 1) -> int:
    """Return an integer of at least ``least``."""
    try:
        number = least - 1 if isinstance(value, bool) else index(value)
    except TypeError:
        number = least - 1
    if number < least:
        wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{name} must be {wanted}, got {_shown(value)}.")
    return number


def budget(value: Any, name: str) -> int:
    """Return a positive integer, also given as a float such as 1e5; or -1, for no end."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    try:
        return -1 if number == -1 else integer(number, name)
    except ValueError as error:
        raise ValueError(f"{name} must be a positive integer, or -1 for no end, got {value!r}.") from error


def positive(value: Any, name: str, hint: str = "") -> float:
    """Return a number above 0, infinity included; the message ends with the hint."""
    if not (number := _number(value)) > 0.0:
        raise ValueError(f"{name} must be above 0, got {_shown(value)}{hint and '; '}{hint}.")
    return number


def not_negative(value: Any, name: str) -> float:
    """Return a finite number of at least 0."""
    if not 0.0 <= (number := _number(value)) < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, got {_shown(value)}.")
    return number


def fraction(value: Any, name: str) -> float:
    """Return a number in ``[0, 1]``, such as a discount."""
    if not 0.0 <= (number := _number(value)) <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {_shown(value)}.")
    return number


def share(value: Any, name: str) -> float:
    """Return a number in ``(0, 1]``, such as a part of what is there."""
    if not 0.0 < (number := _number(value)) <= 1.0:
        raise ValueError(f"{name} must be above 0 and at most 1, got {_shown(value)}.")
    return number


def exact_ratio(value: float) -> Fraction:
    """Return the fraction that a finite number stands for, to count with it without rounding.

    It is a fraction with a small denominator that the number equals up to rounding, else its decimal form.

    Example:
        >>> exact_ratio(0.1), exact_ratio(1 / 3), exact_ratio(1 - 0.07), exact_ratio(1.25e-9)
        (Fraction(1, 10), Fraction(1, 3), Fraction(93, 100), Fraction(1, 800000000))
    """
    if isinstance(value, int | Fraction):
        return Fraction(value)
    value = float(value)
    short = Fraction(value).limit_denominator(1_000_000)
    return short if abs(float(short) - value) <= 4 * math.ulp(value) else Fraction(repr(value))


def boolean(value: Any, name: str) -> bool:
    """Return a boolean."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def one_of(value: Any, name: str, options: Collection[Any]) -> Any:
    """Return one of some options."""
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}.")
    return value


def optional(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return a check that lets ``None`` pass; also of an entry of a saved state."""

    def checked(value: Any, name: str, *here: Any) -> Any:
        return None if value is None else check(value, name, *here)

    return checked


def _shown(value: Any) -> str:
    return f"{value!r}, which is a text, not a number" if isinstance(value, str) else repr(value)


def _number(value: Any) -> float:
    if isinstance(value, str):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan
