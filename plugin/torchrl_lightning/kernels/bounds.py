"""Compiled action bounds: move values back to a bound if rounding moved them slightly beyond it."""

from __future__ import annotations

from typing import Any


def set_to_bounds(actions: Any, bounds: Any) -> None:
    """Correct values in place that rounding moved beyond a bound; values farther outside stay (numba).

    Args:
        actions: ``[N, F]``; NaN stays.
        bounds: Lower bounds, upper bounds, smallest and largest value to correct, ``[4, F]``.
    """
    for i in range(actions.shape[0]):
        for j in range(actions.shape[1]):
            value, low, high = actions[i, j], bounds[0, j], bounds[1, j]
            if high < value <= bounds[3, j]:
                actions[i, j] = high
            elif bounds[2, j] <= value < low:
                actions[i, j] = low
