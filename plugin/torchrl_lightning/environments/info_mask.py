"""Masks of actions that an environment tells beside its observation."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from torchrl_lightning.environments.faults import EnvironmentFault
from torchrl_lightning.keys import ACTION_MASK, OBSERVATION


class ActionMaskFromInfo(gym.Wrapper[Any, Any, Any, Any]):
    """Show the mask of actions that an environment tells by ``info["action_mask"]`` as an entry of the observation.

    An observation that is no Dict becomes the entry ``observation``.

    Args:
        env: an environment with one choice among actions.

    Raises:
        ValueError: its actions are others.

    Examples:
        >>> env = ActionMaskFromInfo(gym.make("Taxi-v4"))
        >>> observation, _ = env.reset(seed=0)
        >>> observation["action_mask"].tolist()
        [1, 1, 0, 0, 0, 0]
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        if not isinstance(env.action_space, spaces.Discrete):
            raise ValueError(f"{ACTION_MASK!r} in info is of one choice, but this env has {env.action_space}.")
        seen = env.observation_space
        entries = dict(seen.spaces) if isinstance(seen, spaces.Dict) else {OBSERVATION: seen}
        self._is_dict = isinstance(seen, spaces.Dict)
        mask = spaces.MultiBinary(int(env.action_space.n))
        self.observation_space = spaces.Dict({**entries, ACTION_MASK: mask})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._with_mask(observation, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._with_mask(observation, info), reward, terminated, truncated, info

    def _with_mask(self, observation: Any, info: dict[str, Any]) -> dict[str, Any]:
        mask = info.get(ACTION_MASK)
        if mask is None:
            raise EnvironmentFault(
                f"ActionMaskFromInfo found no {ACTION_MASK!r} in info, which has {sorted(info)}; leave it out."
            )
        seen = observation if self._is_dict else {OBSERVATION: observation}
        return {**seen, ACTION_MASK: np.asarray(mask, np.int8)}
