"""Interquartile means over seeds equal their definition."""

from __future__ import annotations

import numpy as np
import pytest

from torchrl_lightning.cli.plot import bootstrap_interval, interquartile_mean


@pytest.mark.parametrize("count", [1, 2, 4, 5, 6, 8, 11])
def test_interquartile_mean_is_that_of_values_repeated_four_times(count: int) -> None:
    scores = np.random.default_rng(count).normal(size=(3, count))
    repeated = np.sort(np.repeat(scores, 4, -1))[:, count : -count or None]  # drop a quarter at each end
    np.testing.assert_allclose(interquartile_mean(scores), repeated.mean(-1))


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    scores = np.random.default_rng(0).normal(3.0, size=(20, 200))
    middle, low, high = bootstrap_interval(scores)
    np.testing.assert_allclose(middle, interquartile_mean(scores.T))
    assert 0.85 < ((low < 3.0) & (high > 3.0)).mean() < 0.99  # few seeds: bootstrap covers less than 95 %


def test_runs_that_have_ended_are_left_out() -> None:
    scores = np.array([[1.0, np.nan, np.nan], [2.0, 5.0, np.nan]])
    middle, low, high = bootstrap_interval(scores)
    assert [part[1] for part in (middle, low, high)] == [5.0, 5.0, 5.0]
    assert low[0] == 1.0 < middle[0] == 1.5 < high[0] == 2.0
    assert np.isnan([middle[2], low[2], high[2]]).all()
