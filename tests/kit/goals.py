"""A goal environment in the style of gymnasium-robotics, without a simulator."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Reach(gym.Env[dict[str, Any], Any]):
    """Move a point to a goal. The reward is 0 within 0.05 of the goal and -1 elsewhere. An episode has 8 steps."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        place = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.observation_space = spaces.Dict({"observation": place, "achieved_goal": place, "desired_goal": place})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.place, self.steps = np.zeros(2), 0
        self.goal = self.np_random.uniform(-0.5, 0.5, 2)
        return self.seen(), {}

    def step(self, action: Any):
        self.place = self.place + 0.25 * np.asarray(action, np.float64)
        self.steps += 1
        is_near = bool(np.linalg.norm(self.place - self.goal) < 0.05)
        return self.seen(), is_near - 1.0, False, self.steps == 8, {"is_success": np.float32(is_near)}

    def seen(self) -> dict[str, Any]:
        return {"observation": self.place.copy(), "achieved_goal": self.place.copy(), "desired_goal": self.goal.copy()}
