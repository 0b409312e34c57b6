"""Checks that validate settings before anything is built, one for each kind of setting.

A check takes a value and the name of its setting, and returns the value: ``integer(8, "size")``. For an invalid value
it raises a ``ValueError``; only :func:`boolean` raises a ``TypeError``. The message contains the setting, the value and
the expected values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from fractions import Fraction
from operator import index
from typing import TYPE_CHECKING, Any

Check = Callable[[Any, str], Any]
"""Function that takes a value and the name of its setting, and returns the value to store or raises an error."""


class Checked:
    """Attribute that validates every new value; an invalid value changes nothing.

    Reading the attribute costs no call, because the value is stored in the instance's ``__dict__`` under the same name.

    Args:
        check: A ``Check``, or the name of a method with the same arguments and the same result.
        name: Name of the setting in messages; the attribute's name by default.

    Examples:
        >>> class Loss:
        ...     gamma = Checked(fraction)
        >>> loss = Loss()
        >>> loss.gamma = 0.9
        >>> loss.gamma = 2.0
        Traceback (most recent call last):
            ...
        ValueError: gamma must be between 0 and 1, got 2.0.
        >>> loss.gamma
        0.9
    """

    def __init__(self, check: Check | str, name: str = "") -> None:
        self._check, self._setting, self._name = check, name, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._setting = name, self._setting or name

    def add_to(self, owner: type, name: str) -> None:
        """Add this attribute to an existing class."""
        self.__set_name__(owner, name)
        setattr(owner, name, self)

    def __delete__(self, instance: Any) -> None:
        try:
            del vars(instance)[self._name]
        except KeyError:
            raise AttributeError(f"{type(instance).__name__} has no attribute {self._name!r}.") from None

    def __set__(self, instance: Any, value: Any) -> None:
        check = getattr(instance, self._check) if isinstance(self._check, str) else self._check
        vars(instance)[self._name] = check(value, self._setting)

    if TYPE_CHECKING:

        def __get__(self, instance: Any, owner: type | None = None) -> Any: ...


def integer(value: Any, name: str, minimum: int = 1) -> int:
    """Return an integer of at least ``minimum``."""
    try:
        number = minimum - 1 if isinstance(value, bool) else index(value)
    except TypeError:
        number = minimum - 1
    if number < minimum:
        expected = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
        raise ValueError(f"{name} must be {expected}, got {_format_value(value)}.")
    return number


def _from_float(value: Any) -> Any:
    """Convert a float such as 1e5 to an integer; return other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def frames(value: Any, name: str) -> int:
    """Return a number of frames of at least 0; accept a float such as 1e5."""
    return integer(_from_float(value), name, 0)


def budget(value: Any, name: str) -> int:
    """Return a positive integer, or -1 for no limit; accept a float such as 1e5."""
    number = _from_float(value)
    try:
        return -1 if number == -1 else integer(number, name)
    except ValueError as error:
        raise ValueError(f"{name} must be a positive integer, or -1 for no limit, got {value!r}.") from error


def positive(value: Any, name: str, hint: str = "") -> float:
    """Return a number above 0, infinity included; the message ends with the hint."""
    if not (number := _number(value)) > 0.0:
        raise ValueError(f"{name} must be above 0, got {_format_value(value)}{hint and '; '}{hint}.")
    return number


def non_negative(value: Any, name: str) -> float:
    """Return a finite number of at least 0."""
    if not 0.0 <= (number := _number(value)) < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, got {_format_value(value)}.")
    return number


def finite(value: Any, name: str) -> float:
    """Return a finite number of either sign, such as a weight."""
    if not math.isfinite(number := _number(value)):
        raise ValueError(f"{name} must be a finite number, got {_format_value(value)}.")
    return number


def finite_positive(value: Any, name: str) -> float:
    """Return a finite number above 0, such as a learning rate."""
    return finite(positive(value, name), name)


def fraction(value: Any, name: str) -> float:
    """Return a number in ``[0, 1]``, such as a discount."""
    if not 0.0 <= (number := _number(value)) <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {_format_value(value)}.")
    return number


def positive_fraction(value: Any, name: str) -> float:
    """Return a number in ``(0, 1]``, such as a proportion."""
    if not 0.0 < (number := _number(value)) <= 1.0:
        raise ValueError(f"{name} must be above 0 and at most 1, got {_format_value(value)}.")
    return number


def exact_ratio(value: float) -> Fraction:
    """Return a finite number as a fraction, for counting without rounding.

    If a fraction with a denominator of at most a million equals the number up to rounding, return this fraction.
    Otherwise return the decimal form of the number as a fraction.

    Examples:
        >>> exact_ratio(0.1), exact_ratio(1 / 3), exact_ratio(1 - 0.07), exact_ratio(1.25e-9)
        (Fraction(1, 10), Fraction(1, 3), Fraction(93, 100), Fraction(1, 800000000))
    """
    if isinstance(value, int | Fraction):
        return Fraction(value)
    value = float(value)
    simple = Fraction(value).limit_denominator(1_000_000)
    return simple if abs(float(simple) - value) <= 4 * math.ulp(value) else Fraction(repr(value))


def boolean(value: Any, name: str) -> bool:
    """Return a boolean."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def one_of(value: Any, name: str, options: Collection[Any]) -> Any:
    """Return a value that is one of the options."""
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}.")
    return value


def optional(check: Check) -> Check:
    """Return a check that also accepts ``None``; it works for settings and for entries of saved states."""

    def checked(value: Any, name: str) -> Any:
        return None if value is None else check(value, name)

    return checked


def check_defaults(condition: str, remedy: str, **settings: tuple[Any, Any]) -> None:
    """Validate that settings without effect have their default values; raise ValueError for the first invalid setting.

    Args:
        condition: The reason why the settings do nothing, such as ``"without record_episodic_return=True"``.
        remedy: A change after which the settings have an effect, such as ``"leave sampler out"``.
        settings: The value and the default value of each setting.

    Examples:
        >>> check_defaults("beside sampler=", "leave sampler out", with_replacement=(True, False))
        Traceback (most recent call last):
        ValueError: with_replacement must be left at its default False beside sampler=, got True, which has no effect. \
Leave it out, or leave sampler out.
    """
    for name, (value, default) in settings.items():
        if value is not default and value != default:
            raise ValueError(
                f"{name} must be left at its default {default!r} {condition}, got {value!r}, which has no effect. "
                f"Leave it out, or {remedy}."
            )


def _format_value(value: Any) -> str:
    return f"{value!r}, which is a string, not a number" if isinstance(value, str) else repr(value)


def _number(value: Any) -> float:
    if isinstance(value, str):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan
