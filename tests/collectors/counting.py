"""Small environments whose every observation is known beforehand."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule


class CountingEnv(gymnasium.Env[Any, Any]):
    """Observes ``[identity, episode, step]``; the reward is the step plus the action."""

    def __init__(self, identity: int = 0, length: int = 5, limit: int = 1000, kind: str = "box") -> None:
        self.identity, self.length, self.limit, self.kind = identity, length, limit, kind
        vector = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space = {
            "box": vector,
            "discrete": spaces.Discrete(100),
            "scalar": spaces.Box(-np.inf, np.inf, (), np.float64),
            "dict": spaces.Dict(
                {
                    "state": vector,
                    "image": spaces.Box(0, 255, (2, 2), np.uint8),
                    "inner": spaces.Dict({"count": spaces.Discrete(100)}),
                }
            ),
        }[kind]
        self.action_space: Any = spaces.Discrete(3)
        self.episode, self.t = -1, 0
        self.seeds: list[int | None] = []

    def _observe(self) -> Any:
        vector = np.array([self.identity, self.episode, self.t], np.float32)
        return {
            "box": vector,
            "discrete": np.int64(self.t),
            "scalar": np.array(self.t, np.float64),
            "dict": {
                "state": vector,
                "image": np.full((2, 2), self.t, np.uint8),
                "inner": {"count": np.int64(self.t)},
            },
        }[self.kind]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.t = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        reward = self.t + float(np.sum(action))
        return self._observe(), reward, self.t >= self.length, self.t >= self.limit, {"t": self.t}


class ContinuousEnv(CountingEnv):
    """Takes a bounded action and remembers what it got."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.received: list[Any] = []

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.received.append(np.array(action))
        return super().step(action)


class RandomEnv(CountingEnv):
    """Draws its observations, so that seeds show."""

    def _observe(self) -> Any:
        return self.np_random.normal(size=3).astype(np.float32)


class SeedKeepingEnv(RandomEnv):
    """Keeps the seeds that all its copies were reset with."""

    kept: ClassVar[list[int]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.kept.append(seed)
        return super().reset(seed=seed)


class FailingEnv(CountingEnv):
    """Raises at its third step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.t == 2:
            raise ArithmeticError("the third step is too much")
        return super().step(action)


# Terminations, truncations, both at once, and episodes that outlive a rollout.
SHAPES = [(3, 1000), (1000, 4), (5, 5), (11, 1000)]


def still_policy() -> TensorDictModule:
    """Always act 0."""
    return TensorDictModule(
        lambda x: torch.zeros(len(x), dtype=torch.long), in_keys=["observation"], out_keys=["action"]
    )


def factories(kind: str = "box") -> list[Any]:
    return [
        lambda i=i, length=length, limit=limit: CountingEnv(i, length, limit, kind)
        for i, (length, limit) in enumerate(SHAPES)
    ]


def vector_env(kind: str = "box", mode: AutoresetMode = AutoresetMode.SAME_STEP) -> SyncVectorEnv:
    return SyncVectorEnv(factories(kind), autoreset_mode=mode)
