"""TorchRL environments that reuse, change and keep memory: stored data are as of tidy ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.envs import Compose, GymWrapper, ParallelEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv

from kit.careless import Careless, CarelessTorchRL, assert_alike, pair
from kit.states import differences, plain
from torchrl_lightning import EnvironmentRecipe, GymnasiumCollector, record_demonstrations
from torchrl_lightning.collectors import TorchRLCollector, play_episodes
from torchrl_lightning.environments.backends.torchrl_batch import as_batch_vector_env
from torchrl_lightning.environments.backends.torchrl_env import make_environment


def torchrl(env: Any, policy: Any = None, **settings: Any) -> Any:
    collector = TorchRLCollector(env, policy, frames_per_batch=60, seed=0, **settings)
    try:
        return torch.cat([collector.rollout().clone() for _ in range(2)], 1)
    finally:
        collector.shutdown()


TORCHRL: dict[str, Callable[[Any], Any]] = {
    "alone": lambda make: make(),
    "in series": lambda make: SerialEnv(3, make),
    "in series, without buffers": lambda make: SerialEnv(3, make, use_buffers=False),
    "a batch": lambda make: make([3]),
    "transformed": lambda make: TransformedEnv(make([3]), StepCounter()),
    "several transforms": lambda make: TransformedEnv(make([3]), Compose(RewardSum(), StepCounter())),
    "by the recipe": lambda make: make_environment(EnvironmentRecipe(make, time_limit=4), 3),
    "by a factory": lambda make: make_environment(make, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TORCHRL)
def test_torchrl_environments(name: str, dtype: torch.dtype) -> None:
    rollouts = [torchrl(TORCHRL[name](maker)) for maker in pair(CarelessTorchRL, dtype=dtype)]
    assert_alike(*rollouts)
    observation, following = rollouts[0]["observation"], rollouts[0]["next", "observation"]
    goes_on = ~rollouts[0]["next", "done"][:, :-1, 0]
    assert (observation[:, 1:][goes_on] == following[:, :-1][goes_on]).all()
    assert rollouts[0]["action"].abs().max() <= 1


def test_torchrl_environments_in_processes() -> None:
    makers = pair(CarelessTorchRL)
    rollouts = [torchrl(ParallelEnv(2, maker, mp_start_method="fork", num_threads=1)) for maker in makers]
    assert_alike(*rollouts)
    serial = torchrl(SerialEnv(2, makers[1]))
    assert not differences(plain(rollouts[0]), plain(serial))


@pytest.mark.parametrize("observation", ["box", "float64", "dict", "image"])
def test_gymnasiums_environments_within_torchrls(observation: str) -> None:
    def make(maker: Any) -> Any:
        return lambda: GymWrapper(maker())

    for lay in (lambda each: each(), partial(SerialEnv, 2)):
        rollouts = [
            torchrl(lay(make(maker))) for maker in pair(Careless, observation=observation, action="box", buffers=2)
        ]
        assert_alike(*rollouts)


@pytest.mark.parametrize("action", ["box", "multi-binary", "discrete"])
def test_frame_skip_of_torchrls_wrapper_gives_fresh_actions(action: str) -> None:
    def make(maker: Any) -> Any:
        return lambda: GymWrapper(maker(), frame_skip=2, categorical_action_encoding=True)

    for lay in (lambda each: each(), partial(SerialEnv, 2)):
        assert_alike(*(torchrl(lay(make(maker))) for maker in pair(Careless, action=action)))


def test_series_that_runs_already_is_copied_from() -> None:
    envs = [SerialEnv(2, maker) for maker in pair(CarelessTorchRL)]
    for env in envs:
        env.reset()
    assert_alike(*(torchrl(env) for env in envs))


def test_torchrl_environment_is_wrapped_once_for_several_collectors() -> None:
    env = CarelessTorchRL([2])
    for _ in range(2):
        collector = TorchRLCollector(env, frames_per_batch=20, seed=0)
        rows = collector.rollout()
        collector.shutdown(close_env=False)
        calls = env._step, env._reset
    assert rows["next", "done"].any()
    TorchRLCollector(env, frames_per_batch=20)
    assert (env._step, env._reset) == calls


def test_policy_of_a_torchrl_environment_that_returns_the_same_tensor_is_stored_as_it_acted() -> None:
    action = torch.full((3, 2), 0.25)
    policy = TensorDictModule(lambda x: action, in_keys=["observation"], out_keys=["action"])
    rollouts = [torchrl(maker([3]), policy) for maker in pair(CarelessTorchRL)]
    assert_alike(*rollouts)
    assert (rollouts[0]["action"] == 0.25).all()
    assert (action == 0.25).all()


@pytest.mark.parametrize("name", TORCHRL)
def test_evaluation_in_torchrl_environments(name: str) -> None:
    policy = TensorDictModule(lambda x: torch.sin(x), in_keys=["observation"], out_keys=["action"])
    played = [play_episodes(TORCHRL[name](maker), policy, 7, seed=0) for maker in pair(CarelessTorchRL)]
    assert not differences(plain(played[0]), plain(played[1]))
    assert played[0]["truncated"].any()
    assert played[0]["terminated"].any()


def test_torchrl_batches_that_are_stepped_as_vector_environments() -> None:
    makers = pair(CarelessTorchRL, [3])
    envs = [as_batch_vector_env(maker()) for maker in makers]
    assert all(envs)
    rollouts = [GymnasiumCollector(env, frames_per_batch=90, seed=0).rollout() for env in envs]
    assert_alike(*rollouts)


def test_demonstrations_recorded_in_torchrl_environments() -> None:
    policy = TensorDictModule(lambda x: torch.sin(x), in_keys=["observation"], out_keys=["action"])
    found = [list(record_demonstrations(maker, policy, 4, seed=0)) for maker in pair(CarelessTorchRL)]
    for careless, tidy in zip(*found, strict=True):
        assert not differences(plain(careless.steps), plain(tidy.steps))
        assert not differences(plain(careless.last_observation), plain(tidy.last_observation))
