"""Vector environments whose info is a list of dicts, one for each environment, are stepped as others are."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers import vector as around

from kit.images import first_action
from kit.replay import dqn, experience
from kit.runs import trainer
from torchrl_lightning import GymnasiumCollector, MLPNetwork, OnPolicyDataModule, PPOModule, ReplayDataModule
from torchrl_lightning.collectors import play_episodes
from torchrl_lightning.environments.env_errors import EnvironmentFault

SEEN: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-100, 100, (2,), np.float32),
    "discrete": spaces.Discrete(100),
    "dict": spaces.Dict({"a": spaces.Box(-100, 100, (1,), np.float32), "b": spaces.Dict({"c": spaces.Discrete(100)})}),
}


class Counting(gym.Env[Any, Any]):
    """Shows the step of the episode, which ends after a number of steps; says of success what it is told."""

    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 3, seen: str = "box", success: Any = None) -> None:
        self.observation_space, self.length, self.seen, self.success = SEEN[seen], length, seen, success

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {"steps": 0}

    def step(self, action: Any) -> Any:
        self.steps += 1
        success = {} if self.success is None else {"is_success": self.success}
        return self._show(), 1.0, self.steps == self.length, False, {"steps": self.steps, **success}

    def _show(self) -> Any:
        number = np.float32(self.steps)
        nested = {"a": np.full(1, number), "b": {"c": self.steps}}
        return {"box": np.full(2, number), "discrete": self.steps, "dict": nested}[self.seen]


def plain(mode: AutoresetMode, seen: str = "box", success: Any = (None, None)) -> VectorEnv[Any, Any, Any]:
    makes = [partial(Counting, length, seen, told) for length, told in zip((3, 5), success, strict=True)]
    return SyncVectorEnv(makes, autoreset_mode=mode)


class Tuples(VectorWrapper[Any, Any, Any, Any, Any]):
    """Returns another kind of info."""

    def __init__(self, env: VectorEnv[Any, Any, Any], convert: Any = tuple) -> None:
        super().__init__(env)
        self.convert = convert

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        return observation, self.convert(info)

    def step(self, actions: Any) -> Any:
        *step, info = self.env.step(actions)
        return *step, self.convert(info)


WRAPPERS: dict[str, Any] = {
    "list": around.DictInfoToList,
    "tuple": lambda env: Tuples(around.DictInfoToList(env)),
    "list within": lambda env: around.TransformReward(around.DictInfoToList(env), lambda reward: reward),
    "statistics within": lambda env: around.DictInfoToList(around.RecordEpisodeStatistics(env)),
}
MODES = [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seen", SEEN)
def test_rollouts_are_those_of_info_as_a_dict(seen: str, mode: AutoresetMode, wrapper: str) -> None:
    expected, rollout = (
        GymnasiumCollector(env, frames_per_batch=24, seed=0).rollout()
        for env in (plain(mode, seen), WRAPPERS[wrapper](plain(mode, seen)))
    )
    assert rollout["next", "done"].sum() == 6
    for key in expected.keys(True, True):
        assert torch.equal(expected[key], rollout[key]), key


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("told", "expected"), [((True, False), [True, False]), ((None, None), None), (([True, True], [True, False]), None)]
)
def test_evaluations_report_success(told: Any, expected: Any, mode: AutoresetMode, wrapper: str) -> None:
    if isinstance(told[0], list):
        told, expected = tuple(map(np.array, told)), [True, False]
    env = WRAPPERS[wrapper](plain(mode, success=told))
    episodes = play_episodes(env, first_action, 2)
    assert episodes["episode_return"].tolist() == [3.0, 5.0]
    assert ("success" in episodes) == (expected is not None)
    if expected is not None:
        assert episodes["success"].tolist() == expected


@pytest.mark.parametrize("mode", MODES)
def test_run_collects_and_evaluates_in_it(mode: AutoresetMode) -> None:
    env, played = (around.DictInfoToList(plain(mode)) for _ in range(2))
    data = OnPolicyDataModule(env, num_envs=2, frames_per_batch=32, eval_env=played, eval_episodes=2, seed=0)
    run = trainer(max_epochs=2, limit_val_batches=1)
    run.fit(PPOModule(MLPNetwork([8])), datamodule=data)
    assert run.callback_metrics["eval/return"] == 4.0
    assert 3.0 < run.callback_metrics["train/return"] < 5.0


@pytest.mark.parametrize("mode", AutoresetMode)
def test_replay_stores_true_successors(mode: AutoresetMode) -> None:
    env = around.DictInfoToList(plain(mode))
    sizes: dict[str, Any] = {"warmup_frames": 40, "updates_per_epoch": 4, "batch_size": 8, "seed": 0}
    data = ReplayDataModule(env, buffer=experience(), num_envs=2, eval_env=Counting, **sizes)
    run = trainer(max_epochs=1, limit_val_batches=0)
    run.fit(dqn(), datamodule=data)
    rows = data.buffer.storage.get(data.buffer.writer.rings.filled_cells())
    ends = rows["next", "terminated"].squeeze(-1)
    assert ends.sum() > 8
    assert set(rows["next", "observation"][ends][:, 0].tolist()) == {3.0, 5.0}


@pytest.mark.parametrize("info", [None, [{}], "no info", [3, 4]])
@pytest.mark.parametrize("call", ["reset", "step"])
def test_info_of_another_kind_is_refused_at_the_first_call(call: str, info: Any) -> None:
    env = Tuples(plain(AutoresetMode.SAME_STEP))
    env.convert = lambda own: info if call == "reset" or own["steps"].any() else own
    collector = GymnasiumCollector(env, frames_per_batch=24, seed=0)
    with pytest.raises(EnvironmentFault, match=rf"{call}.*2"):
        collector.rollout()
