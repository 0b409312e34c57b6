"""Environments with image observations, without a simulator."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

from torchrl_lightning import FrameStack


class CountedImages(gymnasium.Env[Any, Any]):
    """Observes its step count as an image and a number; the reward is the count.

    Args:
        shape: The shape of the image.
        end: ``terminated``, ``truncated`` or ``never``.
        length: The length of the first episode.
        growth: The number of additional steps in each further episode.
        drawn: Draws random images, so that no two are equal.
        alone: Observes only the image.
    """

    action_space = spaces.Discrete(2)

    def __init__(
        self,
        shape: tuple[int, ...] = (2, 2),
        end: str = "terminated",
        length: int = 5,
        growth: int = 0,
        *,
        drawn: bool = False,
        alone: bool = False,
    ) -> None:
        image, step = spaces.Box(0, 255, shape, np.uint8), spaces.Box(0, 255, (1,), np.float32)
        self.observation_space: Any = image if alone else spaces.Dict({"image": image, "step": step})
        self.count, self.end, self.length, self.growth = 0, end, length - growth, growth
        self.shape, self.drawn, self.alone = shape, drawn, alone

    def shown(self) -> Any:
        image = np.full(self.shape, self.count, np.uint8)
        if self.drawn:
            image = self.np_random.integers(0, 256, self.shape, np.uint8)
        return image if self.alone else {"image": image, "step": np.array([self.count], np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.length = 0, self.length + self.growth
        return self.shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        ends = [self.count == self.length and self.end == name for name in ("terminated", "truncated")]
        return self.shown(), float(self.count), *ends, {}


class RandomImages(gymnasium.Env[Any, Any]):
    """Observes random images. With two colors, each image has a single color. Its episodes have a few steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (5, 7), colors: int = 256) -> None:
        self.observation_space, self.colors = spaces.Box(0, 255, shape, np.uint8), colors

    def shown(self) -> Any:
        shape = self.observation_space.shape
        one = np.full(shape, self.np_random.integers(self.colors), np.uint8)
        self.image = one if self.colors == 2 else self.np_random.integers(0, self.colors, shape, np.uint8)
        return self.image

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        terminated, truncated = (self.np_random.random(2) < (0.2, 0.05)).tolist()
        return self.shown(), float(action), terminated, truncated, {}


class StackedSteps:
    """Steps of random images with a recipe's frame stack. ``frames`` are the images before and after the last step."""

    frames: tuple[torch.Tensor, ...] = ()

    def __init__(self, seed: int, count: int = 3, shape: tuple[int, ...] = (5, 7), colors: int = 256) -> None:
        self.bare = RandomImages(shape, colors)
        self.env = FrameStack(self.bare, count)
        self.reset(seed)

    def reset(self, seed: int | None = None) -> None:
        self.stack, self.begins = self.env.reset(seed=seed)[0], True

    def step(self) -> TensorDict:
        before, stack, begins = self.bare.image, self.stack, self.begins
        self.stack, _, terminated, truncated, _ = self.env.step(0)
        self.begins, self.frames = False, (torch.from_numpy(before), torch.from_numpy(self.bare.image))
        done = terminated or truncated
        after = {"observation": torch.from_numpy(self.stack), "done": torch.tensor([done]), "reward": torch.rand(1)}
        if done:
            self.reset()
        return TensorDict({"observation": torch.from_numpy(stack), "is_init": torch.tensor([begins]), "next": after})


class Mission(CountedImages):
    """Adds a text to the images, and never ends."""

    def __init__(self, shape: tuple[int, ...] = (5, 5, 2)) -> None:
        super().__init__(shape, "never")
        self.observation_space["mission"] = spaces.Text(10)

    def shown(self) -> dict[str, Any]:
        return {**super().shown(), "mission": "go"}


class ImageAlone(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Observes only the image, in the layout ``hwc`` (unchanged), ``chw``, or ``hw`` (one channel)."""

    def __init__(self, env: Any, layout: str) -> None:
        super().__init__(env)
        self.layout = layout
        height, width, channels = env.observation_space["image"].shape
        shape = {"hw": (height, width), "chw": (channels, height, width), "hwc": (height, width, channels)}[layout]
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def observation(self, observation: Any) -> Any:
        image = observation["image"]
        return {"hw": image[..., 0], "chw": image.transpose(2, 0, 1), "hwc": image}[self.layout]


def first_action(step: Any) -> Any:
    """Take action 0, as a policy that is a function."""
    return step.set("action", torch.zeros(step.batch_size, dtype=torch.int64))
