"""A run ends at `total_frames`, also if other settings shorten its epochs."""

from __future__ import annotations

import lightning as L
import pytest
from lightning.pytorch.callbacks import Timer

from kit.actor_critic import TinyActorCritic, fit, rollouts
from kit.replay import dqn, replay_data
from kit.replay import fit as fit_replay
from torchrl_lightning import GymnasiumCollector, make_vector_env


class Limit(L.Callback):
    """Fail if a run does not end by itself."""

    def on_train_batch_end(self, trainer, *args):
        assert trainer.global_step < 60, "training goes on"


ENDLESS = {"max_epochs": -1, "callbacks": [Limit()]}


@pytest.mark.parametrize(
    ("shortened", "updates"),
    [
        ({}, 8),
        ({"limit_train_batches": 3}, 6),
        ({"limit_train_batches": 0.5}, 4),
        ({"limit_train_batches": 1}, 2),
    ],
)
def test_total_frames_end_on_policy_training_of_shortened_epochs(shortened, updates, tmp_path):
    data = rollouts(total_frames=100)
    _, run = fit(tmp_path, data, **ENDLESS, **shortened)
    assert (data.frames, run.global_step, run.current_epoch) == (128, updates, 2)
    # The rollout counts as used: the next write starts a new one.
    assert data.buffer.state_dict()["consumed"]


def test_total_frames_end_on_policy_training_of_a_module_that_ends_epochs_early(tmp_path):
    class Cutting(TinyActorCritic):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    data = rollouts(total_frames=128)
    _, run = fit(tmp_path, data, Cutting(), **ENDLESS)
    assert (data.frames, run.global_step) == (128, 4)


@pytest.mark.parametrize("shortened", [{"limit_train_batches": 4}, {"limit_train_batches": 3}])
def test_total_frames_end_replay_training_of_shortened_epochs(shortened, tmp_path):
    data = replay_data(total_frames=50)
    fit_replay(tmp_path, data, **ENDLESS, **shortened)
    assert (data.frames, data.updates) == (50, 11)


@pytest.mark.parametrize(("make", "module", "frames"), [(rollouts, None, 64), (replay_data, dqn(), 50)])
def test_second_fit_after_total_frames_collects_nothing(make, module, frames, tmp_path, caplog):
    data = make(total_frames=frames)
    module, _ = fit(tmp_path, data, module, **ENDLESS)
    learned = data.metrics().get("updates")
    _, run = fit(tmp_path, data, module, **ENDLESS)
    assert (data.frames, run.global_step, run.current_epoch) == (frames, 0, 0)
    assert data.metrics().get("updates") == learned
    assert data.collector is None
    assert f"all {frames} frames are collected; raise total_frames={frames}" in caplog.text


def test_min_epochs_have_priority_over_total_frames(tmp_path):
    data = rollouts(total_frames=64)
    fit(tmp_path, data, min_epochs=3, **ENDLESS)
    assert data.frames == 3 * 64


class Stop(L.Callback):
    """Ends a run after its first update."""

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = True


NO_END = "this run never ends: the DataModule has total_frames=-1"


def warnings_of_a_run(caplog, folder, data, **settings):
    caplog.clear()
    fit(folder, data, **{"max_epochs": -1, "callbacks": [Stop()], **settings})
    return [record.message for record in caplog.records if "this run never ends" in record.message]


def test_run_without_an_end_logs_one_warning(tmp_path, caplog):
    data = rollouts()
    (said,) = warnings_of_a_run(caplog, tmp_path, data)
    assert said.startswith(NO_END)
    assert warnings_of_a_run(caplog, tmp_path, data) == []


@pytest.mark.filterwarnings("ignore:`max_epochs` was not set")
@pytest.mark.parametrize(
    ("frames", "settings"),
    [
        (64, {}),
        (-1, {"max_epochs": 1}),
        (-1, {"max_steps": 1}),
        (-1, {"max_time": "00:00:01:00"}),
        (-1, {"callbacks": [Stop(), Timer({"minutes": 1})]}),
        (-1, {"fast_dev_run": True}),
        (-1, {"max_epochs": None}),  # Lightning replaces None by 1000
    ],
)
def test_run_with_an_end_logs_no_warning(tmp_path, caplog, frames, settings):
    assert warnings_of_a_run(caplog, tmp_path, rollouts(total_frames=frames), **settings) == []


def test_replay_run_without_an_end_logs_a_warning(tmp_path, caplog):
    fit_replay(tmp_path, replay_data(), dqn(), max_epochs=-1, callbacks=[Stop()])
    assert any(record.message.startswith(NO_END) for record in caplog.records)


@pytest.mark.parametrize(("frames", "warns"), [(-1, True), (64, False)])
def test_total_frames_of_a_user_collector_end_a_run(tmp_path, caplog, frames, warns):
    def collector(policy):
        envs = make_vector_env("CartPole-v1", 4)
        made = GymnasiumCollector(envs, policy, num_envs=4, frames_per_batch=64, seed=0)
        made.total_frames = frames
        return made

    said = warnings_of_a_run(caplog, tmp_path, rollouts(collector=collector))
    assert len(said) == warns
