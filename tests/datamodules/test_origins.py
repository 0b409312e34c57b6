"""Returns, rings of a replay buffer and filters of rewards distinguish the rows of several workers."""

from __future__ import annotations

from functools import partial

import lightning as L
import pytest
import torch
from tensordict import TensorDict

from kit.actor_critic import fit, rollouts
from kit.counting import CountingEnv, InterleavedWorkers
from kit.replay import fit as fit_replay
from kit.replay import replay_data
from torchrl_lightning.environments.env_ids import EnvIdTracker, env_ids


class Keep(L.Callback):
    """Count the finished episodes, and store their lengths."""

    def __init__(self) -> None:
        self.episodes, self.lengths = 0.0, set()

    def on_train_epoch_end(self, trainer, module):
        metrics = trainer.datamodule.metrics()
        self.episodes += metrics.get("train/episodes", 0)
        self.lengths |= {metrics[name] for name in ("train/length",) if name in metrics}


def workers(steps, label):
    return partial(InterleavedWorkers, steps=steps, label=label)


def fit_seven_steps(folder, label, **settings):
    sizes = {"num_envs": 2, "frames_per_batch": 14, "mini_batch_size": 14, "num_epochs": 1}
    data = rollouts(env=CountingEnv, collector=workers(7, label), **sizes)
    fit(folder, data, **settings)
    return data


@pytest.mark.parametrize("label", ["env_ids", "traj_ids"])
def test_episodes_of_several_workers_have_their_own_lengths(label, tmp_path) -> None:
    keep = Keep()
    fit_seven_steps(tmp_path, label, max_epochs=8, callbacks=[keep])
    assert keep.lengths == {10.0}
    # Each worker delivers 28 steps of its two environments: two episodes of each.
    assert keep.episodes == 8


def test_returns_of_unknown_workers_are_not_reported(tmp_path, caplog) -> None:
    data = fit_seven_steps(tmp_path, None, max_epochs=4)
    assert "time/collect" in data.metrics()
    assert not [name for name in data.metrics() if name.startswith("train/")]
    assert caplog.text.count("'traj_ids'") == 1


@pytest.mark.parametrize("label", ["env_ids", "traj_ids"])
def test_environments_have_their_own_rings(label, tmp_path) -> None:
    sizes = {"num_envs": 4, "frames_per_batch": 8, "warmup_frames": 100}
    data, keep = replay_data(env=CountingEnv, collector=workers(4, label), write_back=[], **sizes), Keep()
    fit_replay(tmp_path, data, callbacks=[keep])
    writer = data.buffer.writer
    assert len(set(writer.positions.tolist())) > 1  # the workers have made different numbers of steps
    for ring in range(4):
        cells = torch.arange(int(writer.positions[ring])) * 4 + ring
        observation = data.buffer.storage.get(cells)["observation"]
        assert observation[:, 0].unique().tolist() == [ring]
        assert observation[:, 2].tolist() == [step % 10 for step in range(len(cells))]
    assert keep.lengths == {10.0}


@pytest.mark.parametrize(
    ("label", "num_envs", "message"),
    [("env_ids", 2, "num_envs must be .* got 2, .* environment [23]"), (None, 4, "'traj_ids'.* got neither")],
)
def test_rows_that_do_not_fit_the_rings_are_refused(label, num_envs, message, tmp_path) -> None:
    data = replay_data(env=CountingEnv, frames_per_batch=8, collector=workers(4, label), num_envs=num_envs)
    with pytest.raises(ValueError, match=message):
        fit_replay(tmp_path, data)


def rollout(trajectories, done) -> TensorDict:
    content = TensorDict({"collector": {"traj_ids": torch.tensor(trajectories)}}, torch.tensor(trajectories).shape)
    content["next", "done"] = torch.tensor(done, dtype=torch.bool)[..., None]
    return content


def test_trajectory_keeps_its_number() -> None:
    origins = EnvIdTracker(InterleavedWorkers.num_workers)
    assert env_ids(origins.with_env_ids(rollout([[4, 4], [5, 7]], [[0, 1], [1, 0]]))).tolist() == [0, 1]
    assert env_ids(origins.with_env_ids(rollout([[6, 6], [8, 8]], [[0, 0], [0, 1]]))).tolist() == [0, 2]
    assert env_ids(origins.with_env_ids(rollout([[7, 7], [9, 9]], [[0, 0], [0, 0]]))).tolist() == [1, 2]
    assert env_ids(origins.with_env_ids(rollout([[9, 9], [6, 6]], [[0, 0], [0, 0]]))).tolist() == [2, 0]


def test_rows_that_join_several_workers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'traj_ids'.* cat_results=\"stack\""):
        EnvIdTracker(InterleavedWorkers.num_workers).with_env_ids(rollout([[1, 1, 2, 2]], [[0, 0, 0, 0]]))


def test_collector_without_workers_needs_no_numbers() -> None:
    given = rollout([[1, 1], [2, 2]], [[0, 0], [0, 0]])
    assert EnvIdTracker(1).with_env_ids(given) is given
    assert env_ids(given) is None
