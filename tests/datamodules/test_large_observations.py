"""Float64 observations beyond the range of float32 raise an error before an update learns from infinities."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import GymWrapper

from kit.actor_critic import rollouts
from kit.replay import dqn, replay_data
from kit.runs import trainer
from torchrl_lightning import GymnasiumCollector, environment_specs, make_vector_env, play_episodes
from torchrl_lightning.agents import DQNModule, MLPNetwork, PPOModule, SACModule, TD3Module
from torchrl_lightning.deploy.loading import LoadedPolicy
from torchrl_lightning.environments.env_errors import EnvironmentFault

SAYS = r"observation 'observation'.* with -?\S+e\+\d+, expected magnitudes of at most 3.4e\+38"


class Scaled(gym.ObservationWrapper[Any, Any, Any]):
    """Multiply float64 observations by a number, from the first step on or from a later step on."""

    def __init__(self, name: str, scale: float, after: int = 0) -> None:
        super().__init__(gym.make(name))
        shape = self.env.observation_space.shape
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, shape, np.float64)
        self.scale, self.left = scale, after

    def observation(self, observation: Any) -> Any:
        self.left -= 1
        return observation.astype(np.float64) * (1.0 if self.left >= 0 else self.scale)


class Named(gym.ObservationWrapper[Any, Any, Any]):
    """Return a dict of a plain and a large entry."""

    def __init__(self) -> None:
        super().__init__(Scaled("CartPole-v1", 1e39))
        plain = gym.spaces.Box(-1.0, 1.0, (1,))
        self.observation_space = gym.spaces.Dict(plain=plain, large=self.env.observation_space)

    def observation(self, observation: Any) -> Any:
        return {"plain": np.zeros(1, np.float32), "large": observation}


NETWORK = MLPNetwork([8])
RUNS: dict[str, Any] = {
    "dqn": lambda env: (DQNModule(NETWORK), replay_data(env=partial(env, "CartPole-v1"))),
    "sac": lambda env: (SACModule(NETWORK), replay_data(env=partial(env, "Pendulum-v1"))),
    "td3": lambda env: (TD3Module(NETWORK), replay_data(env=partial(env, "Pendulum-v1"))),
    "ppo": lambda env: (PPOModule(NETWORK), rollouts(env=partial(env, "CartPole-v1"))),
    "ppo, continuous": lambda env: (PPOModule(NETWORK), rollouts(env=partial(env, "Pendulum-v1"))),
}


@pytest.mark.parametrize("scale", [1e39, 1e300])
@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
def test_observations_beyond_float32_are_refused_before_an_update(make: Any, scale: float) -> None:
    module, data = make(partial(Scaled, scale=scale))
    with pytest.raises(EnvironmentFault, match=SAYS) as refusal:
        trainer(limit_val_batches=0).fit(module, datamodule=data)
    assert "\n" not in str(refusal.value)
    assert not any(parameter.isnan().any() for parameter in module.parameters())


def test_observations_that_grow_later_are_refused() -> None:
    module, data = dqn(), replay_data(env=partial(Scaled, "CartPole-v1", 1e39, after=60))
    with pytest.raises(EnvironmentFault, match=SAYS):
        trainer(limit_val_batches=0, max_epochs=20).fit(module, datamodule=data)
    assert not any(parameter.isnan().any() for parameter in module.parameters())


def test_entry_of_a_dict_is_named() -> None:
    with pytest.raises(EnvironmentFault, match="'large'"):
        trainer(limit_val_batches=0).fit(PPOModule(NETWORK), datamodule=rollouts(env=Named))


@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
def test_large_observations_within_float32_are_collected(make: Any) -> None:
    module, data = make(partial(Scaled, scale=1e3))
    trainer(limit_val_batches=0, max_epochs=1).fit(module, datamodule=data)
    assert data.frames > 0


def test_normalised_observations_may_exceed_float32_but_not_their_squares_float64() -> None:
    large = partial(Scaled, "CartPole-v1")
    data = rollouts(env=partial(large, 1e60), normalize_observation=True)
    module = PPOModule(NETWORK)
    trainer(limit_val_batches=0, max_epochs=1).fit(module, datamodule=data)
    assert not any(parameter.isnan().any() for parameter in module.parameters())
    data = rollouts(env=partial(large, 1e200), normalize_observation=True)
    with pytest.raises(EnvironmentFault, match=r"at most 1e\+150"):
        trainer(limit_val_batches=0, max_epochs=1).fit(PPOModule(NETWORK), datamodule=data)


def wrapped(name: str, scale: float) -> GymWrapper:
    return GymWrapper(Scaled(name, scale))


def test_torchrl_environments_are_refused_too() -> None:
    env = partial(wrapped, "CartPole-v1", 1e39)
    module = PPOModule(NETWORK)
    with pytest.raises(EnvironmentFault, match=SAYS):
        trainer(limit_val_batches=0).fit(module, datamodule=rollouts(env=env, num_envs=1, eval_num_envs=1))
    assert not any(parameter.isnan().any() for parameter in module.parameters())
    with pytest.raises(EnvironmentFault, match=SAYS):
        play_episodes(env, module.policy, 1, num_envs=1, seed=0)


def policy(dtype: torch.dtype) -> TensorDictModule:
    network = nn.Sequential(nn.Linear(4, 2, dtype=dtype), nn.Softmax(-1))
    choose = TensorDictModule(network, ["observation"], ["action"])
    network.register_forward_hook(lambda module, inputs, output: output.argmax(-1))
    return choose


def test_float64_networks_read_all_numbers() -> None:
    env = partial(Scaled, "CartPole-v1", 1e60)
    collector = GymnasiumCollector(env, policy(torch.float64), num_envs=1, frames_per_batch=8, seed=0)
    (batch, *_) = [batch for batch, _ in zip(collector, range(1), strict=False)]
    assert float(batch["observation"].abs().max()) > 1e40
    collector.shutdown()
    assert play_episodes(env, policy(torch.float64), 1, seed=0)["episode_length"] > 0


def test_evaluations_and_act_refuse_observations_beyond_float32() -> None:
    env = partial(Scaled, "CartPole-v1", 1e39)
    specs = environment_specs(make_vector_env(env, 1))
    built = DQNModule(NETWORK).build(specs).policy
    with pytest.raises(EnvironmentFault, match=SAYS):
        play_episodes(env, built, 1, seed=0)
    loaded = LoadedPolicy(built, specs)
    with pytest.raises(EnvironmentFault, match=SAYS):
        loaded.act(np.array([0.0, 1e39, 0.0, 0.0]))
    assert loaded.act(np.array([0.0, 1e38, 0.0, 0.0])) in (0, 1)
