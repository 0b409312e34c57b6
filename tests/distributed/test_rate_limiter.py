"""Writers and learners wait for each other within a bound, and never for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_lightning.distributed.rate_limiter import RateLimiter
from torchrl_lightning.fitting import Fault


@given(
    ratio=st.floats(0.1, 8.0),
    insert=st.integers(1, 16),
    draw=st.integers(1, 64),
    min_size=st.integers(1, 40),
    slack=st.floats(0.0, 50.0),
    seed=st.integers(0, 99),
)
def test_the_ratio_is_kept_within_its_bound(
    ratio: float, insert: int, draw: int, min_size: int, slack: float, seed: int
) -> None:
    bound = (ratio * insert + draw) / 2 + slack
    limiter, coin = RateLimiter(ratio, bound, min_size), random.Random(seed)
    for _ in range(1000):
        may_insert, may_draw = limiter.admits_insert(insert), limiter.admits_draw(draw)
        assert may_insert or may_draw  # nobody waits for ever
        if may_insert and (not may_draw or coin.random() < 0.5):
            limiter.inserted += insert
        else:
            limiter.drawn += draw
        surplus = ratio * (limiter.inserted - min_size) - limiter.drawn
        assert limiter.inserted < min_size or surplus >= -bound - 1e-6
        assert surplus <= max(bound, ratio * (insert - 1)) + 1e-6  # what reaches min_size did not wait
    assert limiter.drawn


def test_without_a_ratio_only_the_first_draw_waits() -> None:
    limiter = RateLimiter(min_size=3)
    assert (limiter.admits_insert(10**9), limiter.admits_draw(1)) == (True, False)
    limiter.inserted = 3
    assert limiter.admits_draw(10**9)


def test_a_bound_that_would_never_be_left_is_refused() -> None:
    limiter = RateLimiter(2.0, error_buffer=10.0)
    limiter.inserted = 1
    assert limiter.admits_insert(4)
    with pytest.raises(
        Fault, match=r"error_buffer=10 is too small for inserts of 4 rows and draws of 16 .* at least 12"
    ):
        limiter.admits_draw(16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples_per_insert": 0.0, "error_buffer": 1.0}, "samples_per_insert must be above 0, got 0"),
        ({"samples_per_insert": 1.0}, "samples_per_insert=1.0 and error_buffer=None go together"),
        ({"error_buffer": 1.0}, "samples_per_insert=None and error_buffer=1.0 go together"),
        ({"min_size": 0}, "min_size must be a positive integer"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RateLimiter(**settings)
