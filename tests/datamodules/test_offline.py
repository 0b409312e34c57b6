"""A data set fills the buffer, with or without later collection; contract tests cover resumed runs."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from lightning.pytorch.loggers import CSVLogger
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.modules.distributions import NormalParamExtractor
from torchrl.objectives import IQLLoss, LossModule, SoftUpdate

from kit.demonstrations import recorded
from kit.files import logged
from kit.normalized import statistics_of
from kit.replay import BUFFERS, dqn, fit, recurrent, replay_data, stored
from torchrl_lightning import (
    DQNModule,
    LossModuleAgent,
    RolloutMetricsLogger,
    environment_specs,
    make_vector_env,
    updates_of,
)
from torchrl_lightning.demonstrations.io.demo_dataset import read_dataset, transitions
from torchrl_lightning.replay import ExperienceBuffer, RingStorage


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    """Return a folder with recorded episodes of CartPole."""
    return recorded(tmp_path_factory.mktemp("cartpole"))


@pytest.fixture(scope="module")
def rows(cartpole):
    """Return the steps of each recorded episode."""
    specs = environment_specs(make_vector_env("CartPole-v1", 1))
    return [transitions(each, specs) for each in read_dataset(cartpole, "CartPole-v1")]


def offline(dataset, buffer="uniform", **kwargs):
    return replay_data(buffer, **{"dataset": dataset, "warmup_frames": None, **kwargs})


@pytest.mark.parametrize("name", [*BUFFERS, "recurrent"])
def test_offline_run_collects_nothing_and_serves_the_data_set_from_all_buffers(name, cartpole, rows, tmp_path):
    data = offline(cartpole, recurrent if name == "recurrent" else name)
    if name == "recurrent":
        data.on_after_batch_transfer = lambda batch, index: batch.unsqueeze(1)
    module, run = fit(tmp_path, data, dqn(recurrent=name in ("sequence", "recurrent")), limit_val_batches=1)
    assert (module.updates, data.updates, data.frames, data.collector) == (20, 20, 0, None)
    assert run.callback_metrics["eval/length"] > 5
    held = data.buffer.storage.get(torch.arange(len(data.buffer)))
    for key, leaf in torch.cat(rows).items(True, True):
        assert torch.equal(held.get(key).reshape(leaf.shape), leaf), key
    assert data.metrics()["replay/size"] == len(held) == sum(map(len, rows))


@pytest.mark.parametrize("name", ["prioritized, three steps", "sequence"])
def test_collected_steps_follow_the_data(name, cartpole, rows, tmp_path):
    data = offline(cartpole, name, frames_per_update=2.0, num_envs=2, total_frames=30)
    fit(tmp_path, data, dqn(recurrent=name == "sequence"))
    assert data.frames == 30
    writer, cells = data.buffer.writer, data.buffer.storage.get
    assert sum(writer.positions) == sum(map(len, rows)) + 30
    lengths = [0, 0]
    for each in rows:  # an episode is written into the ring with the fewest steps
        ring = lengths.index(min(lengths))
        position = torch.arange(lengths[ring], lengths[ring] + len(each))
        found = cells(writer.cell(torch.tensor(ring), position))
        assert torch.equal(found["next", "observation"], each["next", "observation"])
        lengths[ring] += len(each)
    behind = cells(writer.cell(torch.arange(2), torch.tensor(lengths)))
    assert behind["is_init"].all()


@pytest.mark.parametrize("name", ["prioritized, three steps", "sequence"])
def test_share_of_each_batch_is_drawn_from_data_that_stay(name, cartpole, rows, tmp_path):
    data = replay_data(name, dataset=cartpole, dataset_share=0.25, warmup_frames=100, total_frames=900)
    module = dqn(Counting, recurrent=name == "sequence")
    fit(tmp_path, data, module, max_epochs=-1)
    assert set(module.shown) == {2}  # of 8
    own, shown = data._source.buffers
    assert own is data.buffer
    assert len(own) == 400  # all of its cells
    assert shown.writer.positions.tolist() == [sum(map(len, rows))]
    assert (shown.n_steps, shown.gamma) == (own.n_steps, module.gamma)
    held = shown.storage.get(torch.arange(len(shown)))
    for key, leaf in torch.cat(rows).items(True, True):
        assert torch.equal(held.get(key), leaf), key


class Counting(DQNModule):
    """Counts the demonstrations in each batch."""

    def training_step(self, batch, batch_idx):
        for part in updates_of(batch):
            source = part["source"]
            self.__dict__.setdefault("shown", []).append(int((source if source.ndim == 1 else source[:, 0]).sum()))
        super().training_step(batch, batch_idx)


def test_data_are_normalised_by_their_own_moments(cartpole, rows, tmp_path):
    data = offline(cartpole, normalize_observation=True, normalize_reward=True)
    fit(tmp_path, data)
    moments = statistics_of(data)
    seen = torch.cat(rows)["observation"].double()
    assert torch.allclose(moments["observation"].mean, seen.mean(0))
    assert torch.allclose(moments["observation"].variance, seen.var(0, correction=0))
    assert moments["reward"].count == len(seen)


def test_checkpoint_without_the_buffer_reads_the_data_again(cartpole, tmp_path, caplog):
    settings = {"normalize_observation": True, "checkpoint_buffer": "none"}
    first, resumed = (offline(cartpole, "prioritized, three steps", **settings) for _ in range(2))
    _, run = fit(tmp_path, first)
    run.save_checkpoint(tmp_path / "at.ckpt")
    fit(tmp_path, resumed, dqn(), tmp_path / "at.ckpt", max_epochs=3)
    assert "the data set is read and 0 frames are collected" in caplog.text
    assert torch.equal(stored(resumed), stored(first))
    assert (resumed.updates, resumed.frames) == (30, 0)
    states = [data.state_dict()["normalization"]["observation"] for data in (first, resumed)]
    assert str(states[0]) == str(states[1])


def test_loggers_count_updates(cartpole, tmp_path):
    fit(tmp_path, offline(cartpole), logger=CSVLogger(tmp_path, "", ""), callbacks=[RolloutMetricsLogger()])
    rows = logged(tmp_path)
    assert {float(row["step"]) for row in rows} == {10.0, 20.0}
    assert "updates_per_second" in rows[0]


def test_data_that_do_not_fit_are_refused_before_training(cartpole, rows, tmp_path):
    steps = sum(map(len, rows))
    for data, message in [
        (offline(tmp_path / "nowhere"), "nowhere does not exist. Name a directory of demonstrations"),
        (offline(cartpole, env="MountainCar-v0"), "contains no usable demonstration"),
        (
            offline(cartpole, lambda num_envs: ExperienceBuffer(storage=RingStorage(8), num_envs=num_envs)),
            rf"has {steps} steps in 6 episodes, but the buffer has max_size=8\. Increase max_size",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            fit(tmp_path, data)
        data.close()


# ------------------------------------------------------------------ learning


class Match(gym.Env):
    """Reward actions near the last observed number; an episode has three steps."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 3
        return self.shown(), {}

    def shown(self):
        self.number = self.np_random.uniform(-0.9, 0.9, 1).astype(np.float32)
        return self.number

    def step(self, action):
        self.left -= 1
        reward = -float(np.abs(action - self.number)[0])
        return self.shown(), reward, not self.left, False, {}


def gaussian(specs):
    net = nn.Sequential(MLP(in_features=1, out_features=2, num_cells=[32]), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=specs.action,
        distribution_class=TanhNormal,
    )


def iql(specs):
    keys, network = ["observation", "action"], partial(MLP, out_features=1, num_cells=[32])
    critics = ValueOperator(network(in_features=2), in_keys=keys), ValueOperator(network(in_features=1))
    loss = IQLLoss(gaussian(specs), critics[0], value_network=critics[1], temperature=10.0, expectile=0.8)
    loss.make_value_estimator(gamma=0.9)
    return loss


def learned(folder, policy, agent, epochs):
    """Learn from the recorded episodes of a policy; return the data, and the mean return of the learned policy."""
    recorded(folder, Match, policy, 60)
    torch.manual_seed(0)
    data = offline(folder, env=Match, batch_size=64, updates_per_epoch=50, eval_episodes=20)
    module, _ = fit(folder, data, agent, max_epochs=epochs)
    return data, data.evaluate(module.policy)["episode_return"].mean()


def test_iql_is_better_than_its_data(tmp_path):
    agent = LossModuleAgent(iql, target_updater=partial(SoftUpdate, tau=0.05), learning_rate=1e-2)
    data, found = learned(tmp_path, lambda step: step.set("action", torch.rand(*step.shape, 1) * 2 - 1), agent, 2)
    earlier = data.buffer[:]["next", "reward"].mean() * 3
    assert earlier < -1.5
    assert found > earlier / 2


class Cloning(LossModule):
    """A cloning loss, because TorchRL's own loss warns about a missing annotation."""

    functional = False

    def __init__(self, actor_network):
        super().__init__()
        self.actor_network = actor_network

    @classmethod
    def of(cls, specs):
        return cls(gaussian(specs))

    def forward(self, batch):
        return TensorDict({"loss_bc": -self.actor_network.get_dist(batch).log_prob(batch["action"]).mean()})


def test_behaviour_is_cloned(tmp_path):
    agent = LossModuleAgent(Cloning.of, learning_rate=1e-2)
    assert learned(tmp_path, lambda step: step.set("action", step["observation"].clone()), agent, 3)[1] > -0.3
