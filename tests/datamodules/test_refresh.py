"""Refreshed recurrent states are written back into the buffer."""

from __future__ import annotations

import pytest
import torch

from kit.replay import SIZE, cells, experience, fit, replay_data
from torchrl_lightning.agents import DQNModule, RecurrentNetwork
from torchrl_lightning.replay import SequenceSampler

# All frames are collected before the first update.
STILL = {"warmup_frames": 41, "frames_per_update": 0.01}
STATES = [("recurrent_state",), ("next", "recurrent_state")]


class Noting(DQNModule):
    """Record each batch after its update, and the content of the buffer before the first update."""

    def training_step(self, batch, batch_idx):
        if not hasattr(self, "before"):
            self.before, self.batches = cells(self.trainer.datamodule), []
        super().training_step(batch, batch_idx)
        self.batches.append(batch)


def recurrent(cls=Noting, cell="gru", **kwargs):
    torch.manual_seed(0)
    return cls(RecurrentNetwork(cell, 8), **{"refresh_states": True, "learning_rate": 0.01, **kwargs})


def windows(n_steps=1, **kwargs):
    sampler = lambda: SequenceSampler(6, **{"episode_ends": "pad", "burn_in": 1, **kwargs})  # noqa: E731
    return experience(sampler, n_steps=n_steps)


@pytest.mark.parametrize(("cell", "keys"), [("gru", None), ("lstm", None), ("gru", STATES)])
def test_refreshed_states_replace_the_stored_ones(cell, keys, tmp_path):
    data, module = replay_data(windows(), write_back=keys, **STILL), recurrent(cell=cell)
    fit(tmp_path, data, module)
    expected, found = module.before, cells(data)
    written = set()
    for batch in module.batches:
        assert not batch["mask"].all()
        for row, step in batch["mask"].nonzero().tolist():
            cell_number = int(batch["index"][row, step])
            written.add(cell_number)
            for key in STATES:
                expected[cell_number].get(key).copy_(batch[row, step].get(key))
    assert 0 < len(written) < len(found)
    changed = torch.zeros(len(found), dtype=torch.bool)
    for key in STATES:
        new, old = found.get(key), expected.get(key)
        leaves = zip(new.values(), old.values(), strict=True) if cell == "lstm" else [(new, old)]
        for a, b in leaves:
            assert torch.equal(a, b)
            changed |= a.flatten(1).any(1)
    # Random steps were stored with states of zeros.
    assert changed[list(written)].all()


class Idle(Noting):
    """Skip the updates of the second epoch: its batches repeat the first state of each window."""

    def training_step(self, batch, batch_idx):
        if self.current_epoch == 0:
            super().training_step(batch, batch_idx)
        elif batch_idx == 0:
            self.before = cells(self.trainer.datamodule)


@pytest.mark.parametrize(
    ("options", "settings"),
    [({"refresh_states": False}, {}), ({}, {"write_back": []}), ({"cls": Idle}, {})],
    ids=["off", "not wanted", "not learned from"],
)
def test_stored_states_are_unchanged_without_a_refresh(options, settings, tmp_path):
    data, module = replay_data(windows(), **STILL, **settings), recurrent(**options)
    fit(tmp_path, data, module)
    assert (cells(data) == module.before).all()


def test_refresh_changes_later_updates_but_not_the_first(tmp_path):
    errors = []
    for refresh in (False, True):
        data, module = replay_data(windows(), **STILL), recurrent(refresh_states=refresh)
        fit(tmp_path, data, module)
        errors.append([batch["td_error"] for batch in module.batches])
    assert torch.equal(errors[0][0], errors[1][0])
    assert not torch.equal(errors[0][-1], errors[1][-1])


def test_overwritten_cells_keep_their_new_states(tmp_path):
    class Overwriting(Noting):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            buffer = self.trainer.datamodule.buffer
            step = buffer.storage.get(torch.arange(2))
            for key in STATES:
                step.set(key, torch.full_like(step.get(key), 5.0))
            buffer.extend(step.expand(SIZE // 4, 2).clone(), time_dim=0)

    data, module = replay_data(windows(), warmup_frames=SIZE, updates_per_epoch=1), recurrent(Overwriting)
    fit(tmp_path, data, module, max_epochs=1)
    # Half of each ring is new; the other half received the refreshed states.
    found, (batch,) = cells(data), module.batches
    new = (found["recurrent_state"] == 5.0).flatten(1).all(1)
    assert int(new.sum()) == SIZE // 2
    served = batch["index"][batch["mask"]].unique()
    assert new[served].any()
    old = served[~new[served]]
    assert old.numel()
    assert not torch.equal(found["recurrent_state"][old], module.before["recurrent_state"][old])


def test_n_step_successors_are_seen_through_the_steps_between(tmp_path):
    """Successors after the window do not count, and their states are not rewritten."""
    data, module = replay_data(windows(3, burn_in=0), warmup_frames=120), recurrent()
    fit(tmp_path, data, module)
    for batch in module.batches:
        ahead = torch.arange(6) + batch["steps_to_next_obs"]
        # The last step of an episode and the newest step have a stored successor.
        ended = (batch["steps_to_next_obs"] == 1) & batch["mask"]
        inside = (ahead < 6) & batch["mask"].gather(1, ahead.clamp(max=5))
        closing = torch.stack([ended[row].gather(0, ahead[row].clamp(max=6) - 1) for row in range(8)])
        counts = batch["mask"] & (inside | (closing & (ahead <= 6)))
        assert counts.any()
        assert not counts.all()
        assert torch.equal(batch["td_error"] != 0, counts)
    assert module.rewritten_keys(module.batches[-1]) == STATES[:1]
