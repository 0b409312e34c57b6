"""Counts of environment frames and of replayed steps."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kit.actor_critic import rollouts
from kit.demonstrated_runs import CART_POLES, demonstrated, ppo, shown
from kit.forks import forked_workers
from kit.ranks import Report, fit_ranks, reports, run_ranks
from kit.replay import cells, dqn, fit, replay_data
from kit.states import check_refused
from torchrl_lightning import (
    AsynchronousCollector,
    DemonstrationReplay,
    DemonstrationSampler,
    DemonstrationStorage,
    GymnasiumCollector,
    PPODBuffer,
    PPOModule,
    RolloutMetricsLogger,
    write_demonstration,
)
from torchrl_lightning.agents import MLPNetwork
from torchrl_lightning.datamodules._run.frames import FrameClock


class Counting(RolloutMetricsLogger):
    """Record the collected steps and the counted steps after each epoch."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        data = trainer.datamodule
        mask = data.buffer.rollout["demo", "mask"]
        self.rows.append((int((~mask).sum()), int(mask.sum()), data.metrics(), pl_module.progress))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"env": CART_POLES},
        {"collector": partial(AsynchronousCollector, "CartPole-v1", num_workers=1, num_envs=4, frames_per_batch=64)},
    ],
    ids=["gymnasium", "torchrl", "processes"],
)
def test_replayed_steps_are_not_counted_as_frames(settings, human, tmp_path):
    data, counting = rollouts(buffer=demonstrated(human), total_frames=300, **settings), Counting()
    with forked_workers():
        fit(tmp_path, data, ppo(), max_epochs=-1, callbacks=[counting])
    frames = replayed = 0
    for own, other, metrics, progress in counting.rows:
        assert frames < 300
        frames, replayed = frames + own, replayed + other
        assert (metrics["frames"], metrics.get("frames/replayed", 0.0)) == (frames, replayed)
        assert progress == pytest.approx(frames / 300)
    assert frames >= 300
    assert replayed > 0
    assert data.clock == (frames, "frames")


def test_run_that_only_replays_ends(human, tmp_path, caplog):
    message = "the last 256 steps were all replayed: training stops after 0 of total_frames=200."
    for resume in (None, tmp_path / "at.ckpt"):
        data = rollouts(buffer=demonstrated(human, rho=1.0, phi=0.0), total_frames=200)
        with caplog.at_level(logging.WARNING):
            _, run = fit(tmp_path, data, ppo(), resume, max_epochs=-1)
        assert message in caplog.text
        assert (data.frames, data.metrics()["frames/replayed"], run.current_epoch) == (0, 256.0, 4)
        run.save_checkpoint(tmp_path / "at.ckpt")
        caplog.clear()


@pytest.mark.parametrize("own", [False, True])
def test_replayed_steps_are_learned_off_policy(own, tmp_path):
    storage = DemonstrationStorage()
    storage.replace([shown(7)], [])

    class Subclass(GymnasiumCollector):  # a subclass yields rollouts, not rows
        pass

    def collector(policy, seed):
        replay = DemonstrationReplay(storage, DemonstrationSampler(rho=0.5, phi=0.0), 2)
        cls = Subclass if own else GymnasiumCollector
        return cls("CartPole-v1", policy, num_envs=2, frames_per_batch=2, seed=seed, replay=replay)

    data = replay_data(collector=collector, total_frames=200)
    fit(tmp_path, data, dqn(), max_epochs=-1)
    replayed = int(data.metrics()["frames/replayed"])
    assert data.frames >= 200
    assert replayed > 50
    assert int(cells(data)["demo", "mask"].sum()) == replayed
    assert data.updates >= (data.frames + replayed - 40) // 2 - 1


class Sharing(PPOModule):
    """Count the agent's steps and the replayed steps of this rank."""

    own = other = 0

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        mask = self.trainer.datamodule.buffer.rollout["demo", "mask"]
        self.own, self.other = self.own + int((~mask).sum()), self.other + int(mask.sum())


def tell(module, data):
    counted = {"own": module.own, "other": module.other, "epochs": module.current_epoch, "progress": module.progress}
    return {**counted, "frames": data.frames, "replayed": data.metrics()["frames/replayed"]}


def learn(folder):
    (folder / "human").mkdir()
    write_demonstration(folder / "human" / "shown.safetensors", shown(7))
    torch.manual_seed(0)
    buffer = partial(PPODBuffer, rho=0.6, phi=0.0, initial_human_demos_dir=str(folder / "human"))
    sizes = {"num_envs": 2, "frames_per_batch": 128, "mini_batch_size": 64, "num_epochs": 1, "total_frames": 600}
    data = rollouts(buffer=buffer, **sizes)
    fit_ranks(Sharing(MLPNetwork([8])), data, Report(folder, "frames", tell), max_epochs=-1)


def test_frame_counts_are_equal_on_all_ranks(tmp_path):
    first, second = reports(run_ranks(learn, tmp_path), "frames")
    assert first["own"] != second["own"]
    assert first["frames"] == second["frames"] == first["own"] + second["own"]
    assert first["replayed"] == second["replayed"] == first["other"] + second["other"]
    assert first["epochs"] == second["epochs"]
    assert np.isclose(first["progress"], first["frames"] / 600)


def test_state_without_a_count_is_refused():
    clock = FrameClock(SimpleNamespace(total_frames=9))
    clock.add(1, 1, torch.tensor([[[True], [True]]]))
    for name in ("count", "alone"):
        state = FrameClock(SimpleNamespace(total_frames=9)).state_dict()
        del state[name]
        check_refused(clock, state, f"lacks.*{name}")


def test_resumed_run_that_only_replays_ends_as_an_uninterrupted_one(human, tmp_path):
    def run(epochs, resume=None):
        data = rollouts(buffer=demonstrated(human, rho=1.0, phi=0.0), total_frames=200)
        return fit(tmp_path, data, ppo(), resume, max_epochs=epochs)[1]

    run(2).save_checkpoint(tmp_path / "at.ckpt")
    assert run(99, tmp_path / "at.ckpt").current_epoch == run(99).current_epoch == 4
