"""A reward at the goal alone."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium as gym


class GoalReward(gym.Wrapper[Any, Any, Any, Any]):
    """Give a reward of 1 for the step that terminates an episode and 0 for every other, also for one that truncates it.

    For environments that terminate at their goal and nowhere else, such as ``MountainCar-v0``.

    Examples:
        >>> env = GoalReward(gym.make("MountainCar-v0"))
        >>> _ = env.reset(seed=0)
        >>> env.step(0)[1]
        0.0
    """

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the environment, and replace its reward."""
        observation, _, terminated, truncated, info = self.env.step(action)
        return observation, float(terminated), terminated, truncated, info
