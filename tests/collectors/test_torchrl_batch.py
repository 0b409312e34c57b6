"""TorchRL's environments that are batches themselves, stepped as Gymnasium's vector environments are."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv

from kit import actor_critic
from kit.replay import fit as replay_fit
from kit.replay import replay_data
from kit.states import differences, plain
from kit.torchrl_envs import CartPoles, Drift, Walk
from torchrl_lightning import EnvironmentRecipe, GymnasiumCollector, PPOModule
from torchrl_lightning.datamodules._run import collection
from torchrl_lightning.environments.backends.torchrl_batch import as_batch_vector_env
from torchrl_lightning.environments.seeds import spawn_seeds

T = 40


def acts(key, function):
    return TensorDictModule(function, in_keys=[key], out_keys=["action"])


ENVS = {
    "stateful, discrete": (CartPoles, acts("observation", lambda x: (x[:, 2] > 0).long() ^ (x[:, 1] > 0).long())),
    "stateful, bounded": (partial(Walk, [4]), acts("observation", lambda x: x[:, :1] * 0.4 + 0.1)),
    "state handed on, nested": (Drift, acts("place", lambda x: (x - 0.3).clamp(-1, 1))),
}


@pytest.mark.parametrize("name", ENVS)
def test_rows_are_those_of_torchrls_rollout(name) -> None:
    make, policy = ENVS[name]
    env = as_batch_vector_env(make())
    n = env.num_envs
    collector = GymnasiumCollector(env, policy, frames_per_batch=n * T, seed=0)
    first, second = collector.rollout(), collector.rollout()
    twin = make()
    twin.set_seed(spawn_seeds(0, "environment", 0, count=n)[0])
    with torch.no_grad():
        expected = twin.rollout(2 * T, policy, break_when_any_done=False)
    rollout = torch.cat([first, second], 1)
    assert expected["next", "done"].sum() >= n
    rollout = rollout.exclude("collector", "is_init", ("next", "is_init"))
    keys = [
        key for key in rollout.keys(True, True) if key in expected.keys(True, True)
    ]  # TorchRL's may not be truncated
    assert not differences(plain(rollout.select(*keys)), plain(expected.select(*keys)))
    assert set(collector.specs.keys) < set(keys)


def test_unsupported_environments_are_stepped_by_torchrl() -> None:
    for env in (
        Walk(),  # no batch
        Walk([2, 2]),
        SerialEnv(2, Walk),
        TransformedEnv(Walk([2]), StepCounter()),
        GymEnv("CartPole-v1"),
    ):
        assert as_batch_vector_env(env) is None


def test_recipe_without_settings_keeps_a_batched_environment() -> None:
    assert as_batch_vector_env(EnvironmentRecipe(CartPoles)()) is not None
    assert as_batch_vector_env(EnvironmentRecipe(CartPoles, time_limit=9)()) is None


def test_partial_reset_changes_only_its_copies_and_the_batch_is_closed() -> None:
    env = as_batch_vector_env(CartPoles(3))
    env.reset(seed=[5, 6, 7])
    before = env.step(np.array([0, 1, 0]))[0]
    after, _ = env.reset(options={"reset_mask": np.array([False, True, False])})
    assert (before != after).any(1).tolist() == [False, True, False]
    env.close()
    assert env.env.is_closed


@pytest.mark.parametrize("learner", ["dqn", "ppo"])
def test_batch_is_learned_from_and_evaluated(learner, tmp_path, monkeypatch) -> None:
    built = []
    monkeypatch.setattr(
        collection, "GymnasiumCollector", lambda *a, **k: built.append(1) or GymnasiumCollector(*a, **k)
    )
    make = partial(CartPoles, 4, limit=9)
    if learner == "dqn":
        data = replay_data(env=make, num_envs=4)
        module, _ = replay_fit(tmp_path, data, limit_val_batches=1)
        assert data.frames == 60
    else:
        data = actor_critic.rollouts(env=make)
        module, _ = actor_critic.fit(tmp_path, data, PPOModule(), limit_val_batches=1)
        assert data.frames == 128
        assert data.metrics()["train/episodes"] > 0
    assert built == [1]
    played = data.evaluate(module.policy, 6)
    assert (played["episode_return"] == played["episode_length"]).all()
    assert played["episode_length"].max() <= 9


class OnlyTerminating(CartPoles):
    """Says when episodes terminate and end, and not when they are truncated."""

    def __init__(self) -> None:
        super().__init__(2)
        del self.done_spec["truncated"]

    def _step(self, tensordict):
        return super()._step(tensordict).exclude("truncated")


def test_end_is_truncated_only_if_it_is_not_terminated() -> None:
    collector = GymnasiumCollector(as_batch_vector_env(OnlyTerminating()), frames_per_batch=2 * T, seed=0)
    rollout = collector.rollout()
    assert rollout["next", "done"].any()
    assert torch.equal(rollout["next", "terminated"], rollout["next", "done"])
    assert not rollout["next", "truncated"].any()
