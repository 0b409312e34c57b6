"""Suggest known names for an unknown name. This module imports nothing until a name is unknown."""

from __future__ import annotations

from collections.abc import Iterable


def closest_name(word: str, names: Iterable[str], cutoff: float = 0.65) -> str | None:
    """Return the name that is most similar to a word, or None if no similarity reaches ``cutoff``.

    Examples:
        >>> closest_name("gama", ["size", "gamma", "gae_lambda"])
        'gamma'
        >>> closest_name("colour", ["size", "gamma", "gae_lambda"])
    """
    from difflib import get_close_matches

    original = {name.casefold(): name for name in names}
    return next((original[match] for match in get_close_matches(word.casefold(), original, 1, cutoff)), None)


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return the end of an error message: the most similar name, or all names if they are few.

    Examples:
        >>> did_you_mean("gama", ["size", "gamma"])
        '; did you mean gamma?'
        >>> did_you_mean("colour", ["size", "gamma"])
        '; known are gamma, size.'
    """
    names = sorted(names)
    closest = closest_name(word, names)
    if closest is not None:
        return f"; did you mean {closest}?"
    return f"; known are {', '.join(names)}." if 0 < len(names) <= 40 else "."
