"""An environment of any spaces, whose observations are samples."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

FOUR = spaces.Box(-1.0, 1.0, (4,), np.float32)


class Drawn(gymnasium.Env[Any, Any]):
    """Observations are normally distributed, the reward is 1, and each seventh step is the last one."""

    def __init__(self, action: Any = None, observation: Any = FOUR) -> None:
        self.action_space = spaces.Discrete(3) if action is None else action
        self.observation_space = observation

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert np.shape(action) == self.action_space.shape
        self.count += 1
        return self.observe(), 1.0, False, self.count == 7, {}

    def observe(self) -> Any:
        space = self.observation_space
        return self.np_random.normal(size=space.shape).astype(space.dtype)
