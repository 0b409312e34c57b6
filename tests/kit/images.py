"""Environments that show images, without a simulator."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces


class CountedImages(gymnasium.Env[Any, Any]):
    """Shows its step as an image and a number, and rewards with it; each episode is ``growth`` longer than the last.

    Args:
        shape: of the image.
        end: ``terminated``, ``truncated`` or ``never``.
        length: of the first episode.
        growth: of each that follows.
    """

    action_space = spaces.Discrete(2)

    def __init__(
        self, shape: tuple[int, ...] = (2, 2), end: str = "terminated", length: int = 5, growth: int = 0
    ) -> None:
        image = spaces.Box(0, 255, shape, np.uint8)
        self.observation_space = spaces.Dict({"image": image, "step": spaces.Box(0, 255, (1,), np.float32)})
        self.count, self.end, self.length, self.growth = 0, end, length - growth, growth

    def shown(self) -> dict[str, Any]:
        shape = self.observation_space["image"].shape
        return {"image": np.full(shape, self.count, np.uint8), "step": np.array([self.count], np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.length = 0, self.length + self.growth
        return self.shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        ends = [self.count == self.length and self.end == name for name in ("terminated", "truncated")]
        return self.shown(), float(self.count), *ends, {}


def first_action(step: Any) -> Any:
    """Act 0, as a policy that is a function."""
    return step.set("action", torch.zeros(step.batch_size, dtype=torch.int64))
