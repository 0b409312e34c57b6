"""A vector environment of a user yields the same steps in every autoreset mode."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict.nn import TensorDictModule
from torchrl.data import RandomSampler

from kit.acting import collect
from kit.actor_critic import rollouts
from kit.ranks import of_rank
from kit.replay import dqn, experience, fit, replay_data
from kit.states import differences, plain
from torchrl_lightning import GymnasiumCollector, play_episodes

DISABLED, SAME_STEP, NEXT_STEP = AutoresetMode.DISABLED, AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


class Lanes(VectorEnv[Any, Any, Any]):
    """Copies that observe ``[identity, episode, step, a random number]`` in reused memory.

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


N = 4
policy = TensorDictModule(
    lambda x: (x[..., 1:].sum(-1) * 1000).long() % 3, in_keys=["observation"], out_keys=["action"]
)


def test_partial_resets_give_the_rows_of_resets_in_the_same_step() -> None:
    for actor in (policy, None):
        mine, twin = (
            GymnasiumCollector(Lanes(mode), actor, frames_per_batch=28, seed=3) for mode in (DISABLED, SAME_STEP)
        )
        for _ in range(3):
            assert not differences(plain(mine.rollout()), plain(twin.rollout()))
    played = [play_episodes(Lanes(mode), policy, 9, seed=1) for mode in (DISABLED, SAME_STEP)]
    assert not differences(*map(plain, played))


def lanes(mode: Any, **settings: Any) -> Any:
    given = {"env": Lanes(mode), "eval_env": Lanes(), "num_envs": N, "frames_per_update": 5.0}
    return replay_data(**{**given, **settings})


def rings(data: Any) -> list[Any]:
    """Return the stored rows of each environment in order."""
    found = data.buffer.writer.rings
    return [
        data.buffer.storage.get(found.cell(torch.full((int(end),), env), torch.arange(int(end))))
        for env, end in enumerate(data.buffer.writer.positions)
    ]


def ended(ring: Any) -> list[list[float]]:
    """Return the rewards of each finished episode in a ring."""
    episodes: list[list[float]] = [[]]
    for reward, done in zip(ring["next", "reward"].flatten().tolist(), ring["next", "done"].flatten(), strict=True):
        episodes[-1].append(reward)
        episodes += [[]] if done else []
    return episodes[:-1]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("mode", [DISABLED, NEXT_STEP])
def test_rings_equal_the_rings_of_a_same_step_environment(mode, steps) -> None:
    """Compare each environment with a twin that resets in the last step of an episode."""
    found = []
    for each in (mode, SAME_STEP):
        data = lanes(each, frames_per_batch=N * steps, normalize_reward=True)
        collect(data, policy, 40)
        found.append(rings(data))
        over = [episode for ring in found[-1] for episode in ended(ring)]
        metrics = data.metrics()
        assert data.frames == sum(map(len, found[-1])) == data.state_dict()["ranks"][0]["collector"]["frames"]
        assert metrics["train/episodes"] == len(over) > 30
        assert metrics["train/length"] == pytest.approx(sum(map(len, over)) / len(over))
        assert metrics["train/return"] == pytest.approx(sum(map(sum, over)) / len(over))
        data.close()
    for mine, twin in zip(*found, strict=True):
        both = min(len(mine), len(twin))
        assert both > 30
        assert not differences(plain(mine[:both]), plain(twin[:both]))


def test_rollouts_that_begin_with_a_reset_are_cut_where_they_end() -> None:
    data = lanes(NEXT_STEP, frames_per_batch=N * 7, reset_at_each_batch=True)
    collect(data, policy, 20)
    for ring in rings(data):
        begins, done = ring["is_init"][1:, 0], ring["next", "done"][:-1, 0]
        assert begins.equal(done)
        assert ring["observation"][1:][~begins].equal(ring["next", "observation"][:-1][~done])
        assert (ring["observation"][1:][begins][:, 2] == 0).all()
    data.close()


def test_dqn_learns_from_a_gymnasium_vector_entry_point_and_is_evaluated(tmp_path) -> None:
    env = gymnasium.make_vec("CartPole-v1", N, vectorization_mode="vector_entry_point")
    data = replay_data(experience(n_steps=3), env=env, eval_env="CartPole-v1", num_envs=N, frames_per_update=9.0)
    module, _ = fit(tmp_path, data, limit_val_batches=1)
    assert data.frames == int(data.buffer.writer.positions.sum()) in range(211, 215)  # rounded up to whole steps
    assert data.evaluate(module.policy, 1)["episode_length"] > 0
    # Final observations are outside the limits, and first observations are near zero.
    rows = torch.cat(rings(data))
    last = rows["next", "observation"][rows["next", "done"][:, 0]].abs()
    assert (last[:, [0, 2]] > torch.tensor([2.4, 0.2])).any(1).all()
    assert (rows["observation"][rows["is_init"][:, 0]].abs() <= 0.05).all()


def test_reset_rows_that_cannot_be_dropped_are_refused(tmp_path) -> None:
    def refused(data: Any, says: str, **settings: Any) -> None:
        with pytest.raises(ValueError, match=f"^<?[^\n]*{says}[^\n]*$"):
            fit(tmp_path, data, dqn(), **settings)

    refused(rollouts(env=Lanes(NEXT_STEP), eval_env=Lanes()), "NEXT_STEP.*ReplayDataModule.* accepts it")
    refused(lanes(NEXT_STEP), "on 2 ranks, got AutoresetMode.NEXT_STEP", strategy=of_rank(0, 2))
    for data in (lanes(SAME_STEP), replay_data(num_envs=N)):  # the suggested settings
        fit(tmp_path, data, dqn(), strategy=of_rank(0, 2))
        assert data.frames > 0
    refused(lanes(NEXT_STEP, buffer=experience(RandomSampler)), "with RandomSampler, got AutoresetMode.NEXT_STEP")
    refused(lanes(SAME_STEP, eval_env=Lanes(NEXT_STEP)), "NEXT_STEP")
