"""Compare the returns of episodes with thresholds."""

from __future__ import annotations

import math

TOLERANCE = 1e-6


def reaches(total: float, threshold: float) -> bool:
    r"""Return True if an episode's return is at least \(c - 10^{-6} \max(1, |c|)\), for a threshold \(c\).

    Rewards are stored in float32 and summed in float64, so a return differs from the user's number by rounding.

    Args:
        total: The return, summed in float64. NaN reaches no threshold.
        threshold: The lowest return that counts. Every return reaches ``-inf``.

    Examples:
        >>> import torch
        >>> total = torch.tensor([0.7]).double().sum().item()
        >>> total >= 0.7, reaches(total, 0.7), reaches(0.69999, 0.7)
        (False, True, False)
    """
    if math.isinf(threshold):
        return total >= threshold
    return total >= threshold - TOLERANCE * max(1.0, abs(threshold))
