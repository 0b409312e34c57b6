"""EnvPool's environments, if a pool wrote into the same arrays at each call: what is collected is as of fresh ones."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from kit.states import differences, plain
from torchrl_lightning import EnvironmentRecipe, GymnasiumCollector

BOX = spaces.Box(-1000, 1000, (2,), np.float32)


class Pool:
    """Counts episodes and steps of its copies, and the actions that they got."""

    def __init__(self, num_envs: int, careless: bool) -> None:
        self.careless = careless
        self.state = np.zeros((num_envs, 2), np.float32)
        self.memory: dict[str, Any] = {
            "counts": np.zeros((num_envs, 2), np.float32),
            "inner": {"total": np.zeros(num_envs, np.int64)},
            "reward": np.zeros(num_envs, np.float32),
            "flags": np.zeros((2, num_envs), bool),
        }
        self.owned: list[Any] = []

    def _returned(self, value: Any, array: Any) -> Any:
        if not self.careless:
            return value.copy()
        target = array[: len(value)]
        target[...] = value
        return target

    def _spoil(self) -> None:
        self.memory["counts"][...], self.memory["inner"]["total"][...] = -77, -77
        self.memory["reward"][...], self.memory["flags"][...] = np.nan, True

    def _shown(self, rows: Any) -> Any:
        counts = self._returned(self.state[rows], self.memory["counts"])
        total = self._returned(self.state[rows].sum(1).astype(np.int64), self.memory["inner"]["total"])
        return {"counts": counts, "inner": {"total": total}}

    def reset(self, ids: Any = None) -> Any:
        rows = np.arange(len(self.state)) if ids is None else np.asarray(ids)
        self._spoil()
        self.state[rows] = np.stack([self.state[rows, 0] + 10, np.zeros(len(rows))], 1)
        return self._shown(rows), {}

    def step(self, actions: Any) -> Any:
        for array, value in self.owned:
            assert np.array_equal(array, value)
            assert not np.shares_memory(array, actions)
        self._spoil()
        self.state[:, 1] += 1
        reward = actions.astype(np.float32).sum(1)
        if self.careless:
            actions[...] = 1
            self.owned.append((actions, actions.copy()))
        over = self.state[:, 1] >= 3 + np.arange(len(self.state)) % 2
        flags = np.stack([over & (self.state[:, 0] % 20 == 0), over & (self.state[:, 0] % 20 != 0)])
        observations = self._shown(np.arange(len(self.state)))
        ends = [self._returned(flag, memory) for flag, memory in zip(flags, self.memory["flags"], strict=True)]
        return observations, self._returned(reward, self.memory["reward"]), *ends, {}

    def close(self) -> None:
        self.state = self.state[:0]


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package that makes such pools; of copies that are careless where it says so."""
    module: Any = ModuleType("envpool")
    module.careless = True
    space = spaces.Dict(counts=BOX, inner=spaces.Dict(total=spaces.Box(-1000, 1000, (), np.int64)))
    module.list_all_envs = lambda: ["Counts-v0"]
    module.make_spec = lambda task, **kwargs: SimpleNamespace(
        observation_space=space,
        action_space=spaces.Box(-1, 1, (2,), np.float32),
        config=SimpleNamespace(max_num_players=1),
    )
    module.make = lambda task, *, num_envs, **kwargs: Pool(num_envs, module.careless)
    monkeypatch.setitem(sys.modules, "envpool", module)
    return module


def test_rows_are_as_of_fresh_arrays(pools: Any) -> None:
    rollouts = []
    for pools.careless in (True, False):
        recipe = EnvironmentRecipe("Counts-v0", vectorization="envpool")
        collector = GymnasiumCollector(recipe, num_envs=3, frames_per_batch=60, seed=0)
        rollouts.append(collector.rollout())
        collector.shutdown()
    careless, tidy = rollouts
    assert tidy["next", "done"].sum() > 9
    assert tidy["next", "terminated"].any()
    assert not differences(plain(careless), plain(tidy))


def test_reset_of_some_leaves_what_the_others_show(pools: Any) -> None:
    from torchrl_lightning.environments.backends.envpool_env import EnvPoolVectorEnv

    observations = []
    for pools.careless in (True, False):
        env = EnvPoolVectorEnv("Counts-v0", 3, {})
        env.reset(seed=0)
        env.step(np.zeros((3, 2), np.float32))
        observation, _ = env.reset(options={"reset_mask": np.array([False, True, False])})
        observations.append((observation["counts"].tolist(), observation["inner"]["total"].tolist()))
        env.close()
    assert observations[0] == observations[1] == ([[10, 1], [20, 0], [10, 1]], [11, 20, 11])
