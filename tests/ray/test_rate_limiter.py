"""Writers and learners wait for each other within a bound, and never for ever."""

from __future__ import annotations

import math
import pickle
import random
import re
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchrl_lightning._core.errors import UserError
from torchrl_lightning.ray.rate_limiter import RateLimiter

RATIOS = st.one_of(
    st.floats(1e-9, 1e6),
    st.decimals(1, 10**6, allow_nan=False, places=0).map(lambda digits: float(digits) / 10**5),
    st.fractions(Fraction(1, 999), 99, max_denominator=999).map(float),
    st.integers(1, 50).map(float),
)
SIZES = st.lists(st.integers(1, 10_000), min_size=1, max_size=3)


def is_stuck(limiter: RateLimiter, inserts: list[int], draws: list[int]) -> bool:
    """Return whether every insert and every draw waits."""
    return not any([*map(limiter.admits_insert, inserts), *map(limiter.admits_draw, draws)])


def test_smallest_bound_admits_an_insert_or_a_draw() -> None:
    limiter = RateLimiter(0.1, error_buffer=0.7, min_size=1)  # 0.1 * 4 inserted and 1 drawn, halved: 0.7
    limiter.admits_insert(4)
    for _ in range(10_000):
        assert limiter.admits_insert(4) or limiter.admits_draw(1)
        if limiter.admits_draw(1):
            limiter.drawn += 1
        else:
            limiter.inserted += 4
    assert abs(limiter.drawn - 0.1 * (limiter.inserted - 1)) <= 0.7 + 1e-9


@given(ratio=RATIOS, inserts=SIZES, draws=SIZES, min_size=st.integers(1, 10_000), seed=st.integers(0, 999))
@example(ratio=0.1, inserts=[4], draws=[1], min_size=1, seed=0)
@example(ratio=1 / 3, inserts=[1], draws=[1], min_size=1, seed=0)
def test_smallest_bound_has_no_deadlock(
    ratio: float, inserts: list[int], draws: list[int], min_size: int, seed: int
) -> None:
    bound = (ratio * max(inserts) + max(draws)) / 2
    limiter, coin = RateLimiter(ratio, bound, min_size), random.Random(seed)
    for step in range(100):
        assert not is_stuck(limiter, inserts, draws)
        insert, draw = coin.choice(inserts), coin.choice(draws)
        if coin.random() < 0.5 and limiter.admits_insert(insert):
            limiter.inserted += insert
        elif limiter.admits_draw(draw):
            limiter.drawn += draw
        elif limiter.admits_insert(insert):
            limiter.inserted += insert
        if step % 10 == 0:  # a restarted service has the counts of its snapshot
            restored = pickle.loads(pickle.dumps(RateLimiter(ratio, bound, min_size)))
            restored.inserted, restored.drawn = limiter.inserted, limiter.drawn
            sizes = [*map(restored.admits_insert, inserts), *map(restored.admits_draw, draws)]
            assert sizes == [*map(limiter.admits_insert, inserts), *map(limiter.admits_draw, draws)]
            limiter = restored


@given(ratio=RATIOS, insert=st.integers(1, 10_000), draw=st.integers(1, 10_000), share=st.floats(0.01, 1 - 1e-6))
def test_smaller_bound_is_refused_and_the_message_names_one_that_is_not(
    ratio: float, insert: int, draw: int, share: float
) -> None:
    limiter = RateLimiter(ratio, share * (ratio * insert + draw) / 2)
    limiter.inserted = 1
    with pytest.raises(UserError, match=r"^error_buffer=.*[^\n]*$") as raised:
        is_stuck(limiter, [insert], [draw])
    enough = float(re.search(r"Set at least (\S+),", str(raised.value))[1])
    limiter = RateLimiter(ratio, enough)
    limiter.inserted = 1
    assert not is_stuck(limiter, [insert], [draw])


def test_counts_beyond_the_precision_of_floats_stay_exact() -> None:
    limiter = RateLimiter(0.1, error_buffer=0.7)
    limiter.inserted, limiter.drawn = 10**17 + 1, 10**16
    assert not limiter.admits_insert(8)
    limiter = RateLimiter(0.1, error_buffer=0.7)
    limiter.inserted, limiter.drawn = 10**17 + 1, 10**16
    assert [limiter.admits_insert(4), limiter.admits_draw(1)] == [True, False]
    limiter.inserted += 4
    assert [limiter.admits_insert(4), limiter.admits_draw(1)] == [False, True]


def test_infinite_bound_has_no_waits_after_the_first_rows() -> None:
    limiter = RateLimiter(2.0, error_buffer=math.inf, min_size=3)
    assert not limiter.admits_draw(1)
    limiter.inserted = 3
    assert limiter.admits_draw(10**9)
    assert limiter.admits_insert(10**9)


@given(
    ratio=st.floats(0.1, 8.0),
    insert=st.integers(1, 16),
    draw=st.integers(1, 64),
    min_size=st.integers(1, 40),
    slack=st.floats(0.0, 50.0),
    seed=st.integers(0, 99),
)
def test_ratio_is_kept_within_its_bound(
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


def test_first_draw_waits_without_a_ratio() -> None:
    limiter = RateLimiter(min_size=3)
    assert (limiter.admits_insert(10**9), limiter.admits_draw(1)) == (True, False)
    limiter.inserted = 3
    assert limiter.admits_draw(10**9)


def test_bound_that_would_deadlock_is_refused() -> None:
    limiter = RateLimiter(2.0, error_buffer=10.0)
    limiter.inserted = 1
    assert limiter.admits_insert(4)
    with pytest.raises(UserError, match=r"error_buffer=10.*4.*16.*12"):
        limiter.admits_draw(16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples_per_insert": 0.0, "error_buffer": 1.0}, "samples_per_insert must be above 0, got 0"),
        (
            {"samples_per_insert": math.inf, "error_buffer": 1.0},
            "samples_per_insert must be finite and above 0, got inf",
        ),
        ({"samples_per_insert": 1.0}, "samples_per_insert=1.0 and error_buffer=None must be set together"),
        ({"error_buffer": 1.0}, "samples_per_insert=None and error_buffer=1.0 must be set together"),
        ({"min_size": 0}, "min_size must be a positive integer"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RateLimiter(**settings)
