"""Comparisons of returns with thresholds tolerate the rounding of summed rewards."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_lightning._core.return_threshold import reaches

HUNDREDTHS = [number / 100 for number in range(1, 101)]
SIGNED = [sign * scale * number for number in HUNDREDTHS for sign in (1, -1) for scale in (1.0, 7.0, 1e4, 1e9)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_reaches_counts_a_return_that_equals_the_threshold(dtype: type[np.floating]) -> None:
    assert [threshold for threshold in SIGNED if not reaches(float(dtype(threshold)), threshold)] == []


@pytest.mark.parametrize("count", [3, 7, 10, 1000])
def test_reaches_counts_a_sum_of_rounded_rewards(count: int) -> None:
    for threshold in HUNDREDTHS:
        total = np.full(count, threshold / count, np.float32).sum(dtype=np.float64)
        assert reaches(float(total), threshold), threshold


@pytest.mark.parametrize(
    ("total", "threshold", "expected"),
    [
        (0.0, 0.0, True),
        (-0.9e-6, 0.0, True),
        (-1.1e-6, 0.0, False),
        (1.0 - 0.9e-6, 1.0, True),
        (1.0 - 1.1e-6, 1.0, False),
        (-200.0 - 1.9e-4, -200.0, True),
        (-200.0 - 2.1e-4, -200.0, False),
        (1e9 - 999.0, 1e9, True),
        (1e9 - 1001.0, 1e9, False),
        (3, 3, True),
        (-math.inf, -math.inf, True),
        (-1e300, -math.inf, True),
        (1e300, math.inf, False),
        (math.inf, math.inf, True),
        (math.inf, 1.0, True),
        (-math.inf, -1e300, False),
        (math.nan, 0.0, False),
        (math.nan, -math.inf, False),
        (0.0, math.nan, False),
    ],
)
def test_reaches_at_the_bound(total: float, threshold: float, expected: bool) -> None:
    assert reaches(total, threshold) is expected


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12))
def test_reaches_agrees_with_exact_arithmetic(total: float, threshold: float) -> None:
    bound = Fraction(threshold) - Fraction(1, 10**6) * max(1, abs(Fraction(threshold)))
    distance = abs(Fraction(total) - bound)
    if distance > Fraction(1, 10**12) * max(1, abs(bound)):
        assert reaches(total, threshold) == (Fraction(total) >= bound)
