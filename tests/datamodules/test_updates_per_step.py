"""Several updates in one step of Lightning's are the same updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import lightning as L
import pytest
import torch
from tensordict import TensorDictBase

from kit.replay import dqn, fit, replay_data, stored
from kit.runs import SaveAt, parameters
from torchrl_lightning import UpdateBatches, updates_of
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


@pytest.mark.parametrize(
    ("buffer", "settings", "more", "precision"),
    [
        ("uniform", ROLLING, {}, "32-true"),
        ("prioritized", ROLLING, {}, "32-true"),
        ("sequence", ROLLING, {"recurrent": True, "refresh_states": True}, "32-true"),
        ("prioritized", EXACT, {}, "32-true"),
        ("sequence", EXACT, {"recurrent": True, "refresh_states": True}, "32-true"),
        ("prioritized", ROLLING, {"learning_rate": 0.1}, "bf16-mixed"),
    ],
)
def test_frames_batches_and_weights_are_those_of_one_update_a_step(buffer, settings, more, precision, tmp_path):
    runs = []
    for count in (1, 4):
        data, module = replay_data(buffer, updates_per_step=count, **settings), dqn(Noting, **more)
        fit(tmp_path, data, module, precision=precision)
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


class Counting(L.Callback):
    """Counts what Lightning calls around an update."""

    def __init__(self):
        self.seen = Counter()

    def on_before_backward(self, trainer, pl_module, loss):
        self.seen["backward"] += 1

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen["optimizer"] += 1


def test_lightnings_hooks_and_counter_run_once_for_a_step(tmp_path):
    counting, data = Counting(), replay_data("uniform", updates_per_step=4, **ROLLING)
    _, run = fit(tmp_path, data, callbacks=[counting])
    assert data.updates == 20  # in two epochs of three steps
    assert run.global_step == 6
    assert counting.seen == {"backward": 6, "optimizer": 6}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run of one update a step: its data, and its module."""
    data = replay_data("prioritized", **EXACT)
    return data, fit(tmp_path_factory.mktemp("whole"), data, dqn(Noting), max_epochs=3)[0]


@pytest.mark.parametrize("fails_at", [14, 16, 17])
def test_a_run_that_ended_inside_a_step_goes_on_with_the_update_that_failed(fails_at, uninterrupted, tmp_path):
    first, resumed = (replay_data("prioritized", updates_per_step=4, **EXACT) for _ in range(2))
    failing, save = dqn(Noting), SaveAt(tmp_path / "at.ckpt", "on_exception")
    failing.fails_at = fails_at
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, first, failing, max_epochs=3, callbacks=[save])
    module, _ = fit(tmp_path, resumed, dqn(Noting, seed=99), tmp_path / "at.ckpt", max_epochs=3)
    # Frames, updates and exploration of each update; its batch is drawn anew.
    whole, module_too = uninterrupted
    assert failing.seen + module.seen == module_too.seen
    assert (resumed.updates, resumed.frames, len(stored(resumed))) == (whole.updates, whole.frames, len(stored(whole)))


def test_each_batch_passes_the_hooks(tmp_path):
    passed = []

    def pass_on(batch, dataloader_idx):
        passed.append(batch)
        return batch

    def copied(batch, device, dataloader_idx):
        return batch.clone() if isinstance(batch, TensorDictBase) else batch

    class Learner(DQNModule):
        def training_step(self, batch, batch_idx):
            for part in updates_of(batch):
                super().training_step(part, batch_idx)
                assert "td_error" in part

    data = replay_data(updates_per_epoch=4, updates_per_step=4)
    data.on_before_batch_transfer, data.transfer_batch_to_device = pass_on, copied
    fit(tmp_path, data, dqn(Learner), max_epochs=1)
    assert sum(isinstance(batch, TensorDictBase) for batch in passed) == 4


def test_lightning_does_not_draw_when_it_looks_for_a_size():
    assert not isinstance(UpdateBatches(iter([])), Iterable)


def test_a_module_that_makes_one_update_is_refused(tmp_path):
    module = dqn()
    module.automatic_optimization = True
    with pytest.raises(ValueError, match=r"DQNModule has automatic_optimization=True.*or take updates_per_step=1"):
        fit(tmp_path, replay_data(updates_per_step=2), module)
