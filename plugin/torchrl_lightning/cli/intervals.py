"""Scores over seeds: the mean of their middle half, and how sure it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

DRAWS = 2000


def interquartile_mean(values: NDArray[Any]) -> NDArray[np.float64]:
    r"""Return the mean of the middle half of the last axis ``[*B, n]``: \(n / 4\) of the values is cut at each end.

    Where \(n / 4\) is no whole number, the outermost ones that are left count in part (Agarwal et al., 2021).

    Examples:
        >>> float(interquartile_mean(np.array([0.0, 1.0, 2.0, 9.0])))
        1.5
    """
    count = values.shape[-1]
    place = np.arange(1, count + 1)
    weights = np.clip(np.minimum(place, place[::-1]) - count / 4, 0, 1)
    middle: NDArray[np.float64] = np.sort(values, -1) @ weights / weights.sum()
    return middle


def bootstrapped(values: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return interquartile means over seeds, and the ends of their 95 % intervals, by a bootstrap of fixed draws.

    Args:
        values: Scores ``[n, P]``: a row for each seed, NaN where it has none.

    Returns:
        Three arrays ``[P]``.
    """
    seeds, points = values.shape
    found = np.full((3, points), np.nan)
    drawn = {n: np.random.default_rng(0).integers(n, size=(DRAWS, n)) for n in range(1, seeds + 1)}
    for point, column in enumerate(values.T):
        there = column[~np.isnan(column)]
        if len(there):
            low, high = np.quantile(interquartile_mean(there[drawn[len(there)]]), (0.025, 0.975))
            found[:, point] = interquartile_mean(there), low, high
    return found[0], found[1], found[2]
