"""Small environments with observations that are known in advance."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule

from torchrl_lightning.collectors import GymnasiumCollector


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
    """Accepts a bounded action and stores all received actions."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.received: list[Any] = []

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.received.append(np.array(action))
        return super().step(action)


class ShiftedEnv(CountingEnv):
    """Accepts actions of a space that starts at another number, and rejects all others."""

    def __init__(self, action_space: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.action_space = action_space

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is none of {self.action_space}")
        return super().step(action)


class RandomEnv(CountingEnv):
    """Draws random observations, so that a test can see the effect of a seed."""

    def _observe(self) -> Any:
        return self.np_random.normal(size=3).astype(np.float32)


class SeedKeepingEnv(RandomEnv):
    """Stores the seeds of the resets of all its copies."""

    kept: ClassVar[list[int]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.kept.append(seed)
        return super().reset(seed=seed)


class FailingEnv(CountingEnv):
    """Raises an error at its third step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.t == 2:
            raise ArithmeticError("the third step is too much")
        return super().step(action)


# terminations, truncations, both in the same step, and episodes that are longer than a rollout
SHAPES = [(3, 1000), (1000, 4), (5, 5), (11, 1000)]


def still_policy() -> TensorDictModule:
    """Build a policy that always takes action 0."""
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


class WholeResets(SyncVectorEnv):
    """Resets all of its environments and ignores the mask of a reset."""

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed)


class InterleavedWorkers:
    """Replaces a collector with two workers. Their rollouts arrive in an irregular order.

    Environment ``i`` of worker ``w`` has the identity ``2 * w + i``, and episodes of 10 steps.
    """

    num_workers = 2
    TURNS = (0, 0, 1, 0, 1, 1, 1, 0)

    def __init__(self, policy: Any, steps: int, label: str | None) -> None:
        self.label, self.workers = label, []
        for worker in range(self.num_workers):
            env = SyncVectorEnv(
                [lambda i=2 * worker + i: CountingEnv(i, 10) for i in range(2)], autoreset_mode="SameStep"
            )
            self.workers.append(GymnasiumCollector(env, policy, frames_per_batch=2 * steps, seed=worker))

    def __iter__(self) -> Iterator[Any]:
        for worker in itertools.cycle(self.TURNS):
            rollout = self.workers[worker].rollout()
            trajectories = rollout.pop(("collector", "traj_ids"))
            if self.label == "traj_ids":
                rollout["collector", "traj_ids"] = 2 * trajectories + worker
            elif self.label == "env_ids":
                rollout["collector", "env_ids"] = (2 * worker + torch.arange(2))[:, None].expand_as(trajectories)
            yield rollout

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()
