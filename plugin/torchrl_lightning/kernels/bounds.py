"""Compiled bounds of actions: what lies beyond a bound only by rounding is set to it."""

from __future__ import annotations

from typing import Any


def set_to_bounds(actions: Any, bounds: Any) -> None:
    """Set numbers beyond a bound to the bound, in place, except those farther outside (numba).

    Args:
        actions: ``[N, F]``; NaN stays.
        bounds: Lower bounds, upper bounds, and the numbers below and above which an action stays, ``[4, F]``.
    """
    for i in range(actions.shape[0]):
        for j in range(actions.shape[1]):
            value, low, high = actions[i, j], bounds[0, j], bounds[1, j]
            if high < value <= bounds[3, j]:
                actions[i, j] = high
            elif bounds[2, j] <= value < low:
                actions[i, j] = low
