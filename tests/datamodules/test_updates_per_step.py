"""Several updates in one step of Lightning's are the same updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import lightning as L
import pytest
import torch
from tensordict import TensorDictBase

from datamodules.replay_parts import BUFFERS, dqn, fit, replay_data, stored, trainer
from kit.runs import parameters
from torchrl_lightning import ReplayDataModule, UpdateBatches, updates_of
from torchrl_lightning.learn import DQNModule

EXACT = {"reset_at_each_batch": True, "frames_per_batch": 8, "frames_per_update": 0.7}
ROLLING = {"frames_per_update": 3.7, "num_envs": 4}


class Noting(DQNModule):
    """Notes what there is when each update begins; one of them may fail."""

    fails_at = -1

    def terms(self, batch):
        data = self.trainer.datamodule
        if self.updates == self.fails_at:
            raise RuntimeError("out of luck")
        self.__dict__.setdefault("seen", []).append((data.updates, data.frames, float(self.policy.amount)))
        return super().terms(batch)


def check_same(folder, buffer, settings, precision="32-true", **kwargs):
    """Compare a run of one update a step with a run of four."""
    runs = []
    for count in (1, 4):
        data, module = replay_data(buffer, updates_per_step=count, **settings), dqn(Noting, **kwargs)
        fit(folder, data, module, precision=precision)
        runs.append((data, module))
    # Ten updates are steps of four, four and two.
    assert len(data.train_dataloader()) == 3
    (data, module), (data_too, module_too) = runs
    assert module.seen == module_too.seen
    assert (data.updates, data.frames) == (data_too.updates, data_too.frames)
    assert torch.equal(stored(data), stored(data_too))
    assert torch.equal(parameters(module), parameters(module_too))
    if hasattr(data.buffer.sampler, "table"):
        cells = torch.arange(len(data.buffer))
        assert torch.equal(*(each.buffer.sampler.table.tree[cells] for each in (data, data_too)))
    timeless = [{k: v for k, v in each.metrics().items() if not k.startswith("time/")} for each in (data, data_too)]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("settings", [ROLLING, EXACT], ids=["rolling", "exact"])
@pytest.mark.parametrize("buffer", ["uniform", "prioritized", "sequence"])
def test_frames_batches_and_weights_are_those_of_one_update_a_step(buffer, settings, tmp_path):
    recurrent = buffer == "sequence"
    check_same(tmp_path, buffer, settings, recurrent=recurrent, refresh_states=recurrent)


class Counting(L.Callback):
    """Counts what Lightning calls around an update."""

    def __init__(self):
        self.seen = Counter()

    def on_before_backward(self, trainer, pl_module, loss):
        self.seen["backward"] += 1

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen["optimizer"] += 1


def test_lightnings_hooks_and_counter_run_once_for_a_step(tmp_path):
    run, counting = trainer(tmp_path, max_epochs=2), Counting()
    run.callbacks.append(counting)
    data = replay_data("uniform", updates_per_step=4, **ROLLING)
    run.fit(dqn(), datamodule=data)
    assert data.updates == 20  # in two epochs of three steps
    assert run.global_step == 6
    assert counting.seen == {"backward": 6, "optimizer": 6}


def test_mixed_precision_acts_and_learns_with_the_weights_of_the_moment(tmp_path):
    check_same(tmp_path, "prioritized", ROLLING, precision="bf16-mixed", learning_rate=0.1)


@pytest.mark.parametrize("fails_at", [14, 16, 17])
def test_a_run_that_ended_inside_a_step_goes_on_with_the_update_that_failed(fails_at, tmp_path):
    whole, uninterrupted = replay_data("prioritized", **EXACT), dqn(Noting)
    fit(tmp_path, whole, uninterrupted, max_epochs=3)

    first, failing = replay_data("prioritized", updates_per_step=4, **EXACT), dqn(Noting)
    failing.fails_at = fails_at
    run = trainer(tmp_path, max_epochs=3)
    with pytest.raises(RuntimeError, match="out of luck"):
        run.fit(failing, datamodule=first)
    run.save_checkpoint(tmp_path / "at.ckpt")
    resumed, module = replay_data("prioritized", updates_per_step=4, **EXACT), dqn(Noting, seed=99)
    fit(tmp_path, resumed, module, tmp_path / "at.ckpt", max_epochs=3)
    # Frames, updates and exploration of each update; its batch is drawn anew.
    assert failing.seen + module.seen == uninterrupted.seen
    assert (resumed.updates, resumed.frames, len(stored(resumed))) == (whole.updates, whole.frames, len(stored(whole)))


def test_a_spent_budget_ends_a_step_early(tmp_path):
    data, module = replay_data(total_frames=70, frames_per_update=0.5, updates_per_step=4), dqn()
    _, run = fit(tmp_path, data, module, max_epochs=-1)
    # As with one update a step: 70 frames serve updates 0 to 60.
    assert (data.frames, data.updates, module.updates) == (70, 61, 61)
    assert run.current_epoch == 7


def test_each_batch_passes_the_hooks(tmp_path):
    class Hooked(ReplayDataModule):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            self.__dict__.setdefault("passed", []).append(batch)
            return batch

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
            return moved.clone() if isinstance(moved, TensorDictBase) else moved

    class Learner(DQNModule):
        def training_step(self, batch, batch_idx):
            for part in updates_of(batch):
                super().training_step(part, batch_idx)
                assert "td_error" in part

    sizes = {"batch_size": 8, "updates_per_epoch": 4, "updates_per_step": 4}
    data = Hooked("CartPole-v1", buffer=BUFFERS["uniform"], seed=0, **sizes)
    fit(tmp_path, data, dqn(Learner), max_epochs=1)
    assert sum(isinstance(batch, TensorDictBase) for batch in data.passed) == 4


def test_lightning_does_not_draw_when_it_looks_for_a_size():
    assert not isinstance(UpdateBatches(iter([])), Iterable)


def test_a_module_that_makes_one_update_is_refused(tmp_path):
    module = dqn()
    module.automatic_optimization = True
    with pytest.raises(ValueError, match=r"DQNModule has automatic_optimization=True.*or take updates_per_step=1"):
        fit(tmp_path, replay_data(updates_per_step=2), module)
    with pytest.raises(ValueError, match="updates_per_step must be a positive integer"):
        replay_data(updates_per_step=0)
