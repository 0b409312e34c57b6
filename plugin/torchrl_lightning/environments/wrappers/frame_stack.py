"""Stack the last images of a Gymnasium environment."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from torchrl_lightning._core.images import stack_axis


class FrameStack(gym.Wrapper[Any, Any, Any, Any]):
    """Stack the last images along their channels; other entries of a Dict observation are not changed.

    The shape ``[H, W]`` becomes ``[K, H, W]``, ``[C, H, W]`` becomes ``[K * C, H, W]``, and ``[H, W, C]`` becomes
    ``[H, W, K * C]``. An episode begins with ``K`` copies of its first image.

    Args:
        env: an environment that observes an image or a Dict with images.
        count: the number of images, ``K``.

    Raises:
        ValueError: the observation does not contain an image.
    """

    def __init__(self, env: gym.Env[Any, Any], count: int) -> None:
        super().__init__(env)
        space = env.observation_space
        entries = space.spaces if isinstance(space, spaces.Dict) else {"": space}
        images = {
            name: entry for name, entry in entries.items() if isinstance(entry, spaces.Box) and is_image(entry.shape)
        }
        if not images:
            raise ValueError(
                f"frame_stack={count} needs an image in the observation, got {space}. Remove frame_stack; "
                "for vectors use gymnasium.wrappers.FrameStackObservation in wrappers."
            )
        self._count = count
        self._frames: dict[str, deque[Any]] = {name: deque(maxlen=count) for name in images}
        self._axes = {name: stack_axis(entry.shape) for name, entry in images.items()}
        stacked = {
            name: spaces.Box(
                self._join(name, [entry.low] * count), self._join(name, [entry.high] * count), dtype=entry.dtype
            )
            for name, entry in images.items()
        }
        self._is_dict = isinstance(space, spaces.Dict)
        self.observation_space = spaces.Dict({**entries, **stacked}) if self._is_dict else stacked[""]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._stack(observation, self._count), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, and append its image to the stack."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._stack(observation, 1), reward, terminated, truncated, info

    def _stack(self, observation: Any, times: int) -> Any:
        for name, frames in self._frames.items():
            # A copy, because the environment may write its next image into the same memory.
            frames.extend([np.array(observation[name] if self._is_dict else observation)] * times)
        images = {name: self._join(name, frames) for name, frames in self._frames.items()}
        return {**observation, **images} if self._is_dict else images[""]

    def _join(self, name: str, frames: Sequence[Any]) -> Any:
        join = np.stack if frames[0].ndim == 2 else np.concatenate
        return join(frames, self._axes[name])


def is_image(shape: Sequence[int]) -> bool:
    """Return whether an entry with this shape is an image: two or three dimensions."""
    return len(shape) in (2, 3)
