"""A vector environment written as one, in each of the modes in which Gymnasium's reset."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

DISABLED, SAME_STEP, NEXT_STEP = AutoresetMode.DISABLED, AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


class Lanes(VectorEnv[Any, Any, Any]):
    """Copies that observe ``[identity, episode, step, a drawn number]``, in memory that is written again.

    The reward is the step plus the action. Episodes last two to six steps; every third one is truncated.
    """

    def __init__(self, mode: AutoresetMode = SAME_STEP, num_envs: int = 4) -> None:
        self.metadata, self.num_envs = {"autoreset_mode": mode}, num_envs
        self.mode = mode
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.single_action_space = spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.shown = np.zeros((num_envs, 4), np.float32)
        self.shown[:, 0], self.shown[:, 1] = np.arange(num_envs), -1
        self.draws = [np.random.default_rng() for _ in range(num_envs)]
        self.ended = np.zeros(num_envs, dtype=bool)
        self.steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        mask = np.ones(self.num_envs, dtype=bool) if options is None else options["reset_mask"]
        if seed is not None:
            self.draws = [np.random.default_rng(each) for each in seed]
        self._begin(mask)
        self.ended = self.ended & ~mask
        return self.shown, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.steps += 1
        identity, episode = self.shown[:, 0], self.shown[:, 1]
        self.shown[:, 2] += 1
        reward = self.shown[:, 2] + actions
        over = self.shown[:, 2] >= 2 + (3 * identity + 2 * episode) % 5
        cut = (identity + episode) % 3 == 0
        resetting = self.ended if self.mode is NEXT_STEP else np.zeros_like(over)
        if self.mode is DISABLED and self.ended.any():
            raise ValueError("a copy is stepped whose episode has ended")
        over &= ~resetting
        reward[resetting] = 0
        self._begin(resetting)
        self.ended, info = over, {}
        if self.mode is SAME_STEP and over.any():
            info = {"final_obs": self.shown.copy()}
            self._begin(over)
        return self.shown, reward, over & ~cut, over & cut, info

    def _begin(self, which: Any) -> None:
        self.shown[which, 1] += 1
        self.shown[which, 2] = 0
        for i in np.flatnonzero(which):
            self.shown[i, 3] = self.draws[i].random()
