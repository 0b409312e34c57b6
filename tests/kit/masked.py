"""An environment that returns an action mask, and raises an error if a masked action is taken."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Doors(gymnasium.Env[Any, Any]):
    """Opens some of four doors at random in each step.

    The first open door pays 1. Observes the open doors and a mask.
    """

    def __init__(self, parts: tuple[int, ...] = (4,), steps: int = 5, last: int = 0) -> None:
        self.parts, self.steps, self.last = parts, steps, last
        total = sum(parts)
        self.action_space = spaces.Discrete(total) if len(parts) == 1 else spaces.MultiDiscrete(parts)
        self.observation_space = spaces.Dict(
            {"action_mask": spaces.MultiBinary(total), "observation": spaces.Box(-1.0, 1.0, (total,))}
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self.show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        first, reward = 0, 0.0
        for size, choice in zip(self.parts, np.atleast_1d(action), strict=True):
            part = self.mask[first : first + size]
            assert part[choice], "a closed door"
            reward += float(choice == part.argmax())
            first += size
        self.count += 1
        done = self.count == self.steps
        observation = self.show()
        if done:
            observation["action_mask"][:] = self.last
        return observation, reward, done, False, {}

    def show(self) -> dict[str, Any]:
        masks = []
        for size in self.parts:
            mask = self.np_random.random(size) < 0.4
            mask[self.np_random.integers(size)] = True
            masks.append(mask)
        self.mask = np.concatenate(masks)
        return {"action_mask": self.mask.astype(np.int8), "observation": self.mask.astype(np.float32) * 2 - 1}
