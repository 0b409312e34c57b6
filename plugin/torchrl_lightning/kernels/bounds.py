"""Compiled functions for bounded actions: clamp numbers, correct rounding, and the probability beyond a bound."""

from __future__ import annotations

import math
from typing import Any

_SERIES_BELOW = -30.0  # log_normal_cdf uses a series below this value, before erfc underflows in float64


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


def clamp(value: Any, low: Any, high: Any) -> Any:
    """Return a number clamped to bounds; NaN stays NaN (numba)."""
    if value > high:
        return high
    return low if value < low else value


def log_normal_cdf(z: float) -> float:
    """Return the log CDF of the standard Normal (numba)."""
    if z > _SERIES_BELOW:
        return math.log(0.5 * math.erfc(-z / math.sqrt(2.0)))
    inverse = 1.0 / (z * z)
    return -0.5 * z * z - math.log(-z) - 0.5 * math.log(2.0 * math.pi) + math.log(1.0 - inverse * (1.0 - 3.0 * inverse))
