"""Evaluation episodes: exactly as many as asked, without favour, without a trace."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import PendulumEnv
from torchrl.modules import GRUModule

from kit.counting import CountingEnv, RandomEnv, still_policy, vector_env
from kit.rollouts import categorical_actor
from torchrl_lightning import EnvironmentRecipe
from torchrl_lightning.collectors import play_episodes

STILL = still_policy()


def test_episodes_have_known_returns_and_ends() -> None:
    result = play_episodes(vector_env(), STILL, 6)
    # Environments 0 and 1 play two episodes, the others one.
    assert result["episode_length"].tolist() == [3, 3, 4, 4, 5, 11]
    assert result["episode_return"].tolist() == [6, 6, 10, 10, 15, 66]
    assert result["terminated"].tolist() == [True, True, False, False, True, True]
    assert result["truncated"].tolist() == [False, False, True, True, True, False]
    assert result.batch_size == (6,)


def test_long_episodes_count_as_often_as_short_ones() -> None:
    env = SyncVectorEnv([lambda: CountingEnv(0, 2), lambda: CountingEnv(1, 70)], autoreset_mode="SameStep")
    result = play_episodes(env, STILL, 4)
    assert result["episode_length"].tolist() == [2, 2, 70, 70]
    assert not env.closed


def test_fewer_episodes_than_environments() -> None:
    assert play_episodes(vector_env(), STILL, 2)["episode_length"].tolist() == [3, 4]


class Lucky(CountingEnv):
    """Says in each step whether the number of steps is even, or says nothing."""

    def __init__(self, key: str, number: int, length: int) -> None:
        super().__init__(number, length)
        self.key = key

    def step(self, action):
        *step, info = super().step(action)
        return *step, {**info, **({self.key: self.success_value(np.bool_(self.t % 2 == 0))} if self.key else {})}

    def success_value(self, is_even_step):
        return is_even_step


class SeveralGoals(Lucky):
    """Says of two goals whether each is reached."""

    def success_value(self, is_even_step):
        return np.array([True, is_even_step])


@pytest.mark.parametrize("kind", [Lucky, SeveralGoals])
@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
@pytest.mark.parametrize("key", ["is_success", "success"])
def test_success_is_what_the_last_step_says(mode: str, key: str, kind: type[Lucky]) -> None:
    env = SyncVectorEnv([partial(kind, key, 0, 2), partial(kind, key, 1, 3)], autoreset_mode=mode)
    assert play_episodes(env, STILL, 4)["success"].tolist() == [True, True, False, False]
    mute = SyncVectorEnv([partial(Lucky, "", 0, 2), partial(Lucky, "", 1, 3)], autoreset_mode=mode)
    assert "success" not in play_episodes(mute, STILL, 2)


def test_evaluation_restores_modes_and_generators() -> None:
    network = nn.Sequential(nn.Dropout(), nn.Linear(3, 3).eval())
    policy = categorical_actor(network)
    modes = [module.training for module in policy.modules()]

    def returns(seed: int) -> list[float]:
        played = play_episodes(RandomEnv, policy, 5, num_envs=2, seed=seed, deterministic=False)
        return played["episode_return"].tolist()

    before = torch.get_rng_state()
    first = returns(4)
    assert torch.equal(before, torch.get_rng_state())
    assert [module.training for module in policy.modules()] == modes
    torch.rand(3)
    assert returns(4) == first != returns(5)


class Remembering(nn.Module):
    """Acts 2 at every step but the first of an episode, which it knows from its state alone."""

    in_keys = ("recurrent_state",)

    def make_tensordict_primer(self):
        names = ["x", "recurrent_state", "is_init"]
        return GRUModule(1, 1, in_keys=names, out_keys=["y", ("next", "recurrent_state")]).make_tensordict_primer()

    def forward(self, td):
        state = td["recurrent_state"]
        td["action"] = (state.reshape(len(state)) > 0).long() * 2
        td["next", "recurrent_state"] = state + 1
        return td


def test_recurrent_states_are_carried_and_reset() -> None:
    result = play_episodes(vector_env(), Remembering(), 8)
    lengths = torch.tensor([3, 3, 4, 4, 5, 5, 11, 11])
    assert torch.equal(result["episode_length"], lengths)
    steps = lengths * (lengths + 1) // 2
    assert torch.equal(result["episode_return"], (steps + 2 * (lengths - 1)).float())


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="num_episodes"):
        play_episodes(CountingEnv, STILL, 0)
    with pytest.raises(ValueError, match="seed"):
        play_episodes(CountingEnv, STILL, 1, seed=-2)


def test_evaluation_without_an_end_is_warned_about(monkeypatch, caplog) -> None:
    monkeypatch.setattr("torchrl_lightning.collectors.episodes.MANY_TORCHRL_STEPS", 3)
    policy = TensorDictModule(lambda angle: torch.zeros(len(angle), 1), in_keys=["th"], out_keys=["action"])
    for time_limit, num_warnings in ((2, 0), (5, 1)):
        play_episodes(EnvironmentRecipe(PendulumEnv, time_limit=time_limit), policy, 1, num_envs=1, seed=0)
        assert (
            caplog.text.count("no episode has ended after 3 steps: an environment without an end needs") == num_warnings
        )
