"""Compiled bounds of actions: what lies beyond a bound only by rounding is set to it."""

from __future__ import annotations

from typing import Any


def set_to_bounds(actions: Any, low: Any, high: Any, least: Any, most: Any) -> None:
    """Set numbers beyond a bound to the bound, in place, except those farther outside (numba).

    Args:
        actions: ``[N, F]``; NaN stays.
        low: lower bounds, ``[F]``.
        high: upper bounds, ``[F]``.
        least: a number below it stays, ``[F]``.
        most: a number above it stays, ``[F]``.
    """
    for i in range(actions.shape[0]):
        for j in range(actions.shape[1]):
            value = actions[i, j]
            if high[j] < value <= most[j]:
                actions[i, j] = high[j]
            elif least[j] <= value < low[j]:
                actions[i, j] = low[j]
