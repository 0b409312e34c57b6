"""Refuse numbers that no training makes sense with, before anything is built."""

from __future__ import annotations


def check_positive(**settings: float | None) -> None:
    """Refuse settings that are not above 0; None is not set.

    Raises:
        ValueError: Naming the first.

    Example:
        >>> check_positive(clip_epsilon=0.2, target_kl=None)
    """
    for name, value in settings.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0.")


def check_fraction(**settings: float) -> None:
    """Refuse settings outside of `[0, 1]`.

    Raises:
        ValueError: Naming the first.

    Example:
        >>> check_fraction(gamma=0.99)
    """
    for name, value in settings.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; it must be between 0 and 1.")
