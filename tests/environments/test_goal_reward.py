from __future__ import annotations

import gymnasium as gym
import pytest

from torchrl_lightning import GoalReward


def last_step(limit: int) -> tuple[float, bool, bool, set[float]]:
    """Drive MountainCar to its goal, or as far as a limit of steps lets it; return the end and the rewards before."""
    env = GoalReward(gym.make("MountainCar-v0", max_episode_steps=limit))
    observation, _ = env.reset(seed=0)
    before = set()
    while True:
        observation, reward, terminated, truncated, _ = env.step(2 if observation[1] >= 0 else 0)
        if terminated or truncated:
            return reward, terminated, truncated, before
        before.add(reward)


@pytest.mark.parametrize(("limit", "end"), [(200, (1.0, True, False)), (100, (0.0, False, True))])
def test_goal_reward_rewards_only_termination(limit, end):
    assert last_step(limit) == (*end, {0.0})


def test_goal_in_the_last_step_that_is_left_is_rewarded():
    assert last_step(122) == (1.0, True, True, {0.0})
