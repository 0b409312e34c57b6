"""Where a run ends: at `total_frames`, whatever else shortens its epochs."""

from __future__ import annotations

import lightning as L
import pytest

from datamodules.replay_parts import fit, replay_data


class Limit(L.Callback):
    """Ends a run that does not end of its own accord."""

    def __init__(self, updates=60):
        self.updates = updates

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step >= self.updates:
            raise AssertionError(f"training goes on after {self.updates} updates")


@pytest.mark.parametrize(
    "shortened", [{}, {"limit_train_batches": 3}, {"limit_train_batches": 0.5}, {"overfit_batches": 1}]
)
def test_total_frames_end_on_policy_training_of_shortened_epochs(shortened, make_data, make_trainer, make_module):
    data = make_data(total_frames=100)
    trainer = make_trainer(max_epochs=-1, callbacks=[Limit()], **shortened)
    trainer.fit(make_module(), datamodule=data)
    assert data.frames == 128
    assert trainer.current_epoch == 2
    # The rollout counts as used: the next write starts a new one.
    assert data.buffer.state_dict()["consumed"]


def test_total_frames_end_on_policy_training_whose_module_cuts_epochs_short(
    make_data, make_trainer, make_module, tiny_actor_critic
):
    class Cutting(tiny_actor_critic):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    data = make_data(total_frames=128)
    trainer = make_trainer(max_epochs=-1, callbacks=[Limit()])
    trainer.fit(make_module(Cutting), datamodule=data)
    assert data.frames == 128
    assert trainer.global_step == 4


@pytest.mark.parametrize("shortened", [{"limit_train_batches": 4}, {"overfit_batches": 3}])
def test_total_frames_end_replay_training_of_shortened_epochs(shortened, tmp_path):
    data = replay_data(total_frames=50)
    fit(tmp_path, data, max_epochs=-1, callbacks=[Limit()], **shortened)
    assert (data.frames, data.updates) == (50, 11)


def test_a_second_fit_with_the_budget_spent_collects_nothing(make_data, make_trainer, make_module, caplog):
    data, module = make_data(total_frames=64), make_module()
    make_trainer(max_epochs=-1).fit(module, datamodule=data)
    trainer = make_trainer(max_epochs=-1, callbacks=[Limit()])
    trainer.fit(module, datamodule=data)
    assert (data.frames, trainer.global_step, trainer.current_epoch) == (64, 0, 0)
    assert data.collector is None
    assert "all 64 frames are collected; raise total_frames=64 to go on" in caplog.text


def test_a_second_fit_with_the_budget_of_replay_spent_collects_nothing(tmp_path):
    data = replay_data(total_frames=50)
    module, _ = fit(tmp_path, data, max_epochs=-1)
    _, run = fit(tmp_path, data, module, max_epochs=-1, callbacks=[Limit()])
    assert (data.frames, data.updates, run.global_step) == (50, 11, 0)


def test_a_minimum_of_epochs_outweighs_the_budget(make_data, make_trainer, make_module):
    data = make_data(total_frames=64)
    trainer = make_trainer(max_epochs=-1, min_epochs=3, callbacks=[Limit()])
    trainer.fit(make_module(), datamodule=data)
    assert data.frames == 3 * 64
