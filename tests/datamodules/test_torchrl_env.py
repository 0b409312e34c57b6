"""Training and evaluation accept TorchRL environments as ``env=``; contract tests cover resumed runs."""

from __future__ import annotations

import multiprocessing
from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.envs import Compose, GymEnv, ParallelEnv, RewardScaling, SerialEnv, StepCounter, TransformedEnv

from kit import actor_critic
from kit.replay import replay_data
from kit.torchrl_envs import Walk, cart_pole
from torchrl_lightning import DQNModule, PPOModule, RecurrentNetwork, play_episodes
from torchrl_lightning.collectors import TorchRLCollector
from torchrl_lightning.environments import make_environment, spawn_seed

limited = partial(lambda: TransformedEnv(cart_pole(), Compose(StepCounter(20), RewardScaling(0, 0.1))))
one_hot = partial(GymEnv, "CartPole-v1")


@pytest.fixture
def fit(tmp_path):
    """Return a function that fits PPO to a few frames, and returns module, data and trainer."""

    def run(env, epochs=1, network=None, resume=None, limit_val_batches=0, **settings):
        sizes = {"num_envs": 2, "frames_per_batch": 32, "num_epochs": 1, "mini_batch_size": 16}
        data = actor_critic.rollouts(env=env, **{**sizes, **settings})
        limits = {"max_epochs": epochs, "limit_val_batches": limit_val_batches}
        module, runner = actor_critic.fit(tmp_path, data, PPOModule(network=network), resume, **limits)
        return module, data, runner

    return run


READY = {"ready, serial": (partial(SerialEnv, 2, Walk), 2), "ready, batch": (partial(Walk, [2]), 2), "ready": (Walk, 1)}
MADE = {"Walk": Walk, "Walk, batch": partial(Walk, [2]), "CartPole": cart_pole, "one-hot": one_hot, "limited": limited}
TRAINED = {
    **{name: {"env": make} for name, make in MADE.items()},
    **{name: {"env": make, "num_envs": number, "eval_env": Walk} for name, (make, number) in READY.items()},
    "memory": {"env": Walk, "network": RecurrentNetwork(hidden_size=8), "mini_batch_size": None, "num_mini_batch": 2},
    "normalised observations": {"env": Walk, "normalize_observation": True},
    "normalised rewards": {"env": Walk, "normalize_reward": True},
}


@pytest.mark.parametrize("name", TRAINED)
def test_ppo_trains_and_evaluates(name, fit) -> None:
    settings = {"num_envs": 2, **TRAINED[name]}
    env = settings.pop("env")
    module, data, _ = fit(env() if name in READY else env, epochs=2, limit_val_batches=1, **settings)
    assert data.frames == 64
    assert data.specs.num_envs == settings["num_envs"]
    assert data.metrics()["train/episodes"] > 0
    assert data.evaluate(module.policy, 1)["episode_length"] > 0


@pytest.mark.parametrize("env", [cart_pole, one_hot, limited])
def test_dqn_trains(env, tmp_path) -> None:
    data = replay_data(env=env, warmup_frames=8, batch_size=4, updates_per_epoch=8)
    actor_critic.fit(tmp_path, data, DQNModule())
    assert data.frames == 8 + 16
    assert "step_count" not in data.specs.keys


def test_evaluation_plays_the_dynamics_of_training() -> None:
    """The same actions and seed lead to the same observations, rewards and ends, over a whole episode."""

    left = TensorDictModule(lambda x: (x[..., 0] > 0).long(), in_keys=["observation"], out_keys=["action"])
    seen = []
    left.register_forward_pre_hook(lambda module, step: seen.append(step[0]["observation"].clone()))
    played = play_episodes(limited, left, 2, num_envs=2, seed=3)
    length = int(played["episode_length"].min())
    steps = make_environment(limited, 2)
    steps.set_seed(spawn_seed(3, "episodes"))
    rollout = steps.rollout(length, left, break_when_any_done=False)
    assert torch.equal(torch.stack(seen[:length], 1), rollout["observation"])
    first = int(played["episode_length"].argmin())
    assert rollout["next", "reward"][first].sum().isclose(played["episode_return"][first])
    assert rollout["next", "done"][first, -1]
    steps.close()


def test_checkpoint_of_another_environment_is_refused(fit, tmp_path) -> None:
    fit(Walk)[2].save_checkpoint(tmp_path / "walk.ckpt")
    with pytest.raises(ValueError, match="SerialEnv"):
        fit(SerialEnv(2, Walk), eval_env=Walk, resume=tmp_path / "walk.ckpt")


def test_evaluation_environment_is_compared(fit, caplog) -> None:
    fit(SerialEnv(2, limited), eval_env=limited)
    assert "eval_env" not in caplog.text
    fit(SerialEnv(2, limited), eval_env=cart_pole)
    assert caplog.text.count("wrappers are CartPoleEnv in evaluation, expected CartPoleEnv > RewardScaling") == 1
    with pytest.raises(ValueError, match=r"'observation'.*shape=\(4,\).*\(2,\)"):
        fit(Walk, eval_env="CartPole-v1")


def test_batch_of_another_size_is_refused(fit) -> None:
    with pytest.raises(ValueError, match=r"num_envs must be 2.*8"):
        fit(partial(Walk, [2]), num_envs=8)


def test_copy_in_each_process(fit, three_threads) -> None:
    env = ParallelEnv(2, Walk, mp_start_method="fork")
    fit(env, eval_env=Walk)
    assert env.is_closed
    assert torch.get_num_threads() == 3
    assert not multiprocessing.active_children()


def test_thread_count_is_restored_after_a_collector(fit, three_threads) -> None:
    def collector(policy):
        torch.set_num_threads(1)  # TorchRL's collectors with processes do the same
        return TorchRLCollector(make_environment(Walk, 2), policy, frames_per_batch=32)

    fit(Walk, collector=collector)
    assert torch.get_num_threads() == 3


class Broken(Walk):
    """Returns NaN in its third step."""

    def _step(self, tensordict):
        step = super()._step(tensordict)
        step[self.entry][self.steps[..., 0] == 3] = torch.nan
        return step


@pytest.mark.parametrize("entry", ["observation", "reward"])
@pytest.mark.parametrize("length", [1, 16])
def test_numbers_that_are_not_finite_are_refused(entry, length, fit, monkeypatch) -> None:
    monkeypatch.setattr(Broken, "entry", entry, raising=False)
    with pytest.raises(ValueError, match=f"{entry}"):
        fit(Broken, epochs=5, frames_per_batch=2 * length, mini_batch_size=2 * length)
