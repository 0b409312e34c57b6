"""Suggest known names for an unknown name. Imports nothing until a name is unknown."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, names: Iterable[str], least: float = 0.65) -> str | None:
    """Return the name that is most similar to a word, or None if no similarity reaches ``least``.

    Examples:
        >>> nearest("gama", ["size", "gamma", "gae_lambda"])
        'gamma'
        >>> nearest("colour", ["size", "gamma", "gae_lambda"])
    """
    from difflib import get_close_matches

    known = {name.casefold(): name for name in names}
    return next((known[found] for found in get_close_matches(word.casefold(), known, 1, least)), None)


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return the end of an error message: the most similar name, or all names if they are few.

    Examples:
        >>> did_you_mean("gama", ["size", "gamma"])
        '; did you mean gamma?'
        >>> did_you_mean("colour", ["size", "gamma"])
        '; known are gamma, size.'
    """
    names = sorted(names)
    found = nearest(word, names)
    if found is not None:
        return f"; did you mean {found}?"
    return f"; known are {', '.join(names)}." if 0 < len(names) <= 40 else "."
