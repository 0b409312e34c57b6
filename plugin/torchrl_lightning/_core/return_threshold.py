"""Comparison of returns with thresholds."""

from __future__ import annotations

import math

TOLERANCE = 1e-6


def reaches(total: float, threshold: float) -> bool:
    r"""Return whether a return reaches a threshold \(c\): whether it is at least \(c - 10^{-6} \max(1, |c|)\).

    Rewards are stored in float32, and a return is their sum in float64: it differs from the user's number by rounding.

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
