"""Environments described by plain values, so that a YAML file or a worker process can build them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np


class SelectObservation(gym.ObservationWrapper[Any, Any, Any]):
    """Show only some entries of a flat observation, e.g. to hide velocities from a policy with memory.

    Args:
        env: an environment with a one-dimensional Box observation.
        indices: the entries to show, in this order.

    Raises:
        ValueError: if the observation is no flat Box or an index is out of range.

    Example:
        >>> SelectObservation(gym.make("CartPole-v1"), [0, 2]).reset(seed=0)[0].shape
        (2,)
    """

    def __init__(self, env: gym.Env[Any, Any], indices: Sequence[int]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise ValueError(f"observe= selects entries of a one-dimensional Box; the environment observes {space}.")
        if not indices or not all(0 <= index < space.shape[0] for index in indices):
            raise ValueError(f"observe={list(indices)} must name entries 0 to {space.shape[0] - 1} of {space}.")
        self._indices = np.asarray(indices)
        self.observation_space = gym.spaces.Box(space.low[self._indices], space.high[self._indices], dtype=space.dtype)

    def observation(self, observation: Any) -> Any:
        """Return the selected entries."""
        return observation[self._indices]


class EnvironmentFactory:
    """Build an environment from its id and settings; picklable, and comparable by its ``repr``.

    Args:
        id: an environment id.
        observe: entries of a flat observation to show; all if None.
        env_kwargs: passed on to :func:`gymnasium.make`, e.g. ``max_episode_steps``.

    Example:
        >>> factory = EnvironmentFactory("CartPole-v1", observe=[0, 2], env_kwargs={"max_episode_steps": 200})
        >>> factory().observation_space.shape
        (2,)
        >>> factory
        EnvironmentFactory('CartPole-v1', observe=[0, 2], env_kwargs={'max_episode_steps': 200})
    """

    def __init__(
        self, id: str, observe: Sequence[int] | None = None, env_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.id = id
        self.observe = None if observe is None else list(observe)
        self.env_kwargs = dict(env_kwargs or {})

    def __call__(self, **kwargs: Any) -> gym.Env[Any, Any]:
        """Build an environment; ``kwargs``, e.g. ``render_mode``, override those of the factory."""
        env = gym.make(self.id, **{**self.env_kwargs, **kwargs})
        return env if self.observe is None else SelectObservation(env, self.observe)

    def __repr__(self) -> str:
        settings = {"observe": self.observe, "env_kwargs": self.env_kwargs}
        text = "".join(f", {name}={value!r}" for name, value in settings.items() if value)
        return f"{type(self).__name__}({self.id!r}{text})"
