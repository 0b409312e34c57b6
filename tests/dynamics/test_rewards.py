"""Rewards with a known equation, for plans in a learned model."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import Composite, Unbounded

from torchrl_lightning import DynamicsTargets, QuadraticReward
from torchrl_lightning._core.trust import check_config

NUMBERS = st.floats(-3.0, 3.0)


@given(
    weights=st.lists(st.floats(0.0, 9.0), min_size=2, max_size=2).filter(any),
    target=st.lists(NUMBERS, min_size=2, max_size=2),
    rows=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=4),
    constant=NUMBERS,
    action_weight=st.floats(0.0, 2.0),
)
def test_reward_is_the_sum_over_the_elements(
    weights: list[float], target: list[float], rows: list[Any], constant: float, action_weight: float
) -> None:
    columns = torch.tensor(rows, dtype=torch.float64)
    reward = QuadraticReward(weights, target, constant, action_weight)
    expected = [
        constant
        - sum(w * (s - t) ** 2 for w, s, t in zip(weights, row[:2], target, strict=True))
        - action_weight * row[2] ** 2
        for row in rows
    ]
    nothing = torch.full((len(rows), 2), math.nan, dtype=torch.float64)  # the reward does not depend on it
    actual = reward(nothing, columns[:, 2:], columns[:, :2])
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))
    assert reward(nothing.float(), columns[:, 2:].float(), columns[:, :2].float()).dtype == torch.float32


def test_reward_is_greatest_at_the_target() -> None:
    reward = QuadraticReward([1.0, 0.0], target=[0.5, 9.0], constant=2.0)
    nearby = torch.tensor([[0.5, 7.0], [0.4, 9.0], [0.6, 9.0]])
    torch.testing.assert_close(reward(nearby, torch.ones(3, 1), nearby), torch.tensor([2.0, 1.99, 1.99]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": []}, "weights must contain a number above 0, got []"),
        ({"weights": [0.0, 0.0]}, "weights must contain a number above 0, got [0.0, 0.0]"),
        ({"weights": [1.0, -1.0]}, "weights must be "),
        ({"weights": [math.nan]}, "weights must be "),
        ({"weights": [math.inf]}, "weights must be "),
        ({"weights": [1.0], "target": [0.0, 1.0]}, "weights and target must have equal lengths, got 1 and 2"),
        ({"weights": [1.0], "target": [math.inf]}, "target must be "),
        ({"weights": [1.0], "constant": math.nan}, "constant must be "),
        ({"weights": [1.0], "action_weight": -0.1}, "action_weight must be "),
    ],
)
def test_reward_names_the_wrong_number(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        QuadraticReward(**settings)


def test_reward_for_other_observations_is_an_error_before_the_first_fit() -> None:
    reward = QuadraticReward([1.0, 1.0])
    targets = DynamicsTargets(Composite(observation=Unbounded(3)), Unbounded(1), reward=reward)
    with pytest.raises(ValueError, match=r"reward must .*3 numbers, got 2 numbers"):
        targets.check_function(reward, "reward")


def test_config_with_the_reward_is_trusted() -> None:
    check_config({"_target_": "torchrl_lightning.QuadraticReward", "weights": [1.0]}, where="a config")


def test_state_of_a_reward_gives_the_same_reward() -> None:
    reward = QuadraticReward([1.0, 3.0], [0.5, -1.0], constant=2.0, action_weight=0.1)
    other = QuadraticReward.from_state(reward.state)
    rows, action = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    assert other.state == reward.state
    assert torch.equal(other(rows, action, rows), reward(rows, action, rows))
