"""TorchRL environments as ``env=``: trained on, evaluated in and resumed like Gymnasium's."""

from __future__ import annotations

import multiprocessing
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tensordict.nn import TensorDictModule
from torchrl.envs import Compose, GymEnv, ParallelEnv, RewardScaling, SerialEnv, StepCounter, TransformedEnv

from datamodules.replay_parts import trainer
from kit.runs import parameters
from kit.torchrl_envs import Walk, cart_pole
from torchrl_lightning import (
    DQNModule,
    ExperienceBuffer,
    OnPolicyDataModule,
    PPOModule,
    RecurrentNetwork,
    ReplayDataModule,
    RingStorage,
    play_episodes,
)
from torchrl_lightning.collectors import TorchRLCollector, make_environment, spawn_seed

SIZES = {"num_envs": 2, "frames_per_batch": 32, "num_epochs": 1, "mini_batch_size": 16}
limited = partial(lambda: TransformedEnv(cart_pole(), Compose(StepCounter(20), RewardScaling(0, 0.1))))
one_hot = partial(GymEnv, "CartPole-v1")


@pytest.fixture
def fit(tmp_path):
    """Fit for a few frames, and return the DataModule."""

    def run(data, module, epochs=2, resume=None, **settings):
        torch.manual_seed(0)
        runner = trainer(tmp_path, max_epochs=epochs, **settings)
        runner.fit(module, datamodule=data, ckpt_path=resume)
        return runner

    return run


def on_policy(env, **settings):
    return OnPolicyDataModule(env, **{**SIZES, "eval_episodes": 2, "seed": 0, **settings})


@pytest.mark.parametrize("env", [Walk, partial(Walk, [2]), cart_pole, one_hot, limited])
def test_ppo_trains_and_evaluates(env, fit) -> None:
    data = on_policy(env)
    fit(data, PPOModule(), limit_val_batches=1)
    assert data.frames == 64
    assert data.specs.num_envs == 2
    assert data.metrics()["train/episodes"] > 0


def test_a_policy_with_memory_trains(fit) -> None:
    data = on_policy(Walk, mini_batch_size=None, num_mini_batch=2)
    fit(data, PPOModule(network=RecurrentNetwork(hidden_size=8)))
    assert data.frames == 64


@pytest.mark.parametrize("env", [cart_pole, one_hot, limited])
def test_dqn_trains(env, fit) -> None:
    data = ReplayDataModule(
        env,
        buffer=partial(ExperienceBuffer, storage=RingStorage(64)),
        num_envs=2,
        warmup_frames=8,
        batch_size=4,
        updates_per_epoch=8,
        eval_episodes=1,
        seed=0,
    )
    fit(data, DQNModule())
    assert data.frames == 8 + 16
    assert "step_count" not in data.specs.keys


def test_evaluation_plays_the_dynamics_of_training() -> None:
    """The same actions from the same seed: the same observations, rewards and ends, over a whole episode."""

    left = TensorDictModule(lambda x: (x[..., 0] > 0).long(), in_keys=["observation"], out_keys=["action"])
    seen = []
    left.register_forward_pre_hook(lambda module, step: seen.append(step[0]["observation"].clone()))
    played = play_episodes(limited, left, 2, num_envs=2, seed=3)
    length = int(played["episode_length"].min())
    steps = make_environment(limited, 2)
    steps.set_seed(spawn_seed(3, "episodes"))
    rollout = TorchRLCollector(steps, left, frames_per_batch=2 * length)._built().rollout()
    assert torch.equal(torch.stack(seen[:length], 1), rollout["observation"])
    first = int(played["episode_length"].argmin())
    assert rollout["next", "reward"][first].sum().isclose(played["episode_return"][first])
    assert rollout["next", "done"][first, -1]
    steps.close()


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(fit, tmp_path) -> None:
    whole, half, resumed = PPOModule(), PPOModule(), PPOModule()
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_last=True, filename="at")
    fit(on_policy(Walk, reset_at_each_batch=True), whole, epochs=3)
    kept = {"enable_checkpointing": True, "callbacks": [checkpoint], "limit_val_batches": 1}
    fit(on_policy(Walk, reset_at_each_batch=True), half, **kept)
    assert not torch.equal(parameters(half), parameters(whole))
    data = on_policy(Walk, reset_at_each_batch=True)
    fit(data, resumed, epochs=3, resume=checkpoint.last_model_path, **kept)
    assert data.frames == 3 * 32
    assert torch.equal(parameters(resumed), parameters(whole))


def test_a_checkpoint_of_another_environment_is_refused(fit, tmp_path) -> None:
    fit(on_policy(Walk), PPOModule()).save_checkpoint(tmp_path / "walk.ckpt")
    with pytest.raises(ValueError, match="environment differs: id: Walk in the checkpoint, SerialEnv here"):
        fit(on_policy(SerialEnv(2, Walk), eval_env=Walk), PPOModule(), resume=tmp_path / "walk.ckpt")


def test_ready_environments(fit) -> None:
    with pytest.raises(ValueError, match=r"ready \(vector\) environment, .* Pass eval_env="):
        on_policy(Walk([2]))
    for env, num_envs in ((SerialEnv(2, Walk), 2), (Walk([2]), 2), (Walk(), 1)):
        data = on_policy(env, num_envs=num_envs, eval_env=Walk)
        fit(data, PPOModule(), epochs=1)
        assert data.frames == 32


def test_what_evaluation_plays_is_compared(fit, caplog) -> None:
    fit(on_policy(SerialEnv(2, limited), eval_env=limited), PPOModule(), epochs=1)
    assert "eval_env" not in caplog.text
    fit(on_policy(SerialEnv(2, limited), eval_env=cart_pole), PPOModule(), epochs=1)
    assert caplog.text.count("wrappers are CartPoleEnv in evaluation, expected CartPoleEnv > RewardScaling") == 1
    with pytest.raises(ValueError, match=r"'observation' has shape=\(4,\) in evaluation, expected \(2,\)"):
        fit(on_policy(Walk, eval_env="CartPole-v1"), PPOModule())


def test_a_batch_of_another_size_is_refused(fit) -> None:
    with pytest.raises(ValueError, match="num_envs=8, but the environment has batch size 2; give num_envs=2"):
        fit(on_policy(partial(Walk, [2]), num_envs=8), PPOModule())


def test_a_copy_in_each_process(fit, three_threads) -> None:
    env = ParallelEnv(2, Walk, mp_start_method="spawn")
    fit(on_policy(env, eval_env=Walk), PPOModule(), epochs=1)
    assert env.is_closed
    assert torch.get_num_threads() == 3
    assert not multiprocessing.active_children()


def test_threads_that_a_collector_took_are_given_back(fit, three_threads) -> None:

    def collector(policy):
        torch.set_num_threads(1)  # as TorchRL's own do that start processes
        return TorchRLCollector(make_environment(Walk, 2), policy, frames_per_batch=32)

    fit(on_policy(Walk, collector=collector), PPOModule(), epochs=1)
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
    module = PPOModule()
    sizes = {"frames_per_batch": 2 * length, "mini_batch_size": 2 * length}
    with pytest.raises(ValueError, match=rf"The environment returned {entry}.* with nan, expected finite numbers"):
        fit(on_policy(Broken, **sizes), module, epochs=5)


@pytest.mark.parametrize("settings", [{"normalize_observation": True}, {"normalize_reward": True}])
def test_normalisation(settings, fit) -> None:
    data, module = on_policy(Walk, **settings), PPOModule()
    fit(data, module, limit_val_batches=1)
    assert data.frames == 64
    assert data.evaluate(module.policy, 1)["episode_length"] <= 7
