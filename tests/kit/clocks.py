"""Environments whose observations vary a little around a large value."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

STEPS = np.random.default_rng(0).integers(-8, 9, size=(1 << 14, 2)) / 4


class Clock(gymnasium.Env[Any, Any]):
    """Observe an origin plus quarters, whatever is done; an episode has 20 steps.

    Args:
        origin: What is added to the first number.
        dtype: The dtype of the observation; quarters become whole numbers if it is an integer.
        nested: Observe a Dict of the clock and a number that single precision holds.
        constant: Observe nothing but the origin.
        continuous: Take actions from a Box.
    """

    def __init__(
        self,
        origin: float = 0.0,
        dtype: str = "float64",
        nested: bool = False,
        constant: bool = False,
        continuous: bool = False,
    ) -> None:
        self.origin, self.dtype, self.nested, self.constant = origin, np.dtype(dtype), nested, constant
        whole = self.dtype.kind in "iu"
        self.scale = 4 if whole else 1
        bounds = (np.iinfo(self.dtype).min, np.iinfo(self.dtype).max) if whole else (-np.inf, np.inf)
        self.observation_space: Any = spaces.Box(*bounds, (1,), self.dtype)
        if nested:
            small = spaces.Box(-np.inf, np.inf, (1,), np.float32)
            self.observation_space = spaces.Dict(
                {"small": small, "inner": spaces.Dict({"clock": self.observation_space})}
            )
        self.action_space: Any = spaces.Box(-1.0, 1.0, (1,), np.float32) if continuous else spaces.Discrete(2)

    def _shown(self) -> Any:
        clock, small = STEPS[self.first + self.t] * (not self.constant)
        shown = np.array([int(clock * 4) + int(self.origin) if self.scale > 1 else clock + self.origin], self.dtype)
        return {"small": np.array([small], np.float32), "inner": {"clock": shown}} if self.nested else shown

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.first = 0, int(self.np_random.integers(len(STEPS) - 32))
        return self._shown(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._shown(), 1.0, False, self.t >= 20, {}
