"""Batches from several buffers."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from kit.files import through_file
from kit.replay import BUFFERS, SIZE, dqn, fit, prioritized, replay_data
from kit.rings import ring
from kit.runs import SaveAt, parameters
from torchrl_lightning import MixedReplay
from torchrl_lightning.agents import DQNModule
from torchrl_lightning.replay import SequenceSampler, UniformSampler


def buffer(number, rows=20, sampler=UniformSampler, **entries):
    made = ring(SIZE, sampler=sampler(), seed=number)
    if rows:
        done = torch.zeros(rows, 1, dtype=torch.bool)
        values = {"a": torch.full((rows,), float(number)), "state": torch.zeros(rows, 2), "next": {"done": done}}
        made.extend(TensorDict({**values, **entries}, [rows]))
    return made


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_buffers_are_less_than_one_row_behind_their_share(weights, sizes):
    ratios = [weight / sum(weights) for weight in weights]
    mixed = MixedReplay(buffer(0), [buffer(1 + number) for number in range(len(weights) - 1)], ratios)
    given_out, total = torch.zeros(len(weights), dtype=torch.float64), 0
    for size in sizes:
        batch = mixed.draw(size)
        assert batch["a"].long().tolist() == batch["source"].tolist() == sorted(batch["source"].tolist())
        shares = torch.bincount(batch["source"], minlength=len(weights))
        assert all(int(share) >= int(ratio * size - 1e-4) for share, ratio in zip(shares, ratios, strict=True))
        given_out, total = given_out + shares, total + size
        assert (given_out - total * torch.tensor(ratios).double()).abs().max() < len(weights)


def test_small_shares_alternate():
    mixed = MixedReplay(buffer(0), [buffer(1)], [0.9, 0.1])
    assert [int(mixed.draw(4)["source"].sum()) for _ in range(5)].count(1) == 2


def test_priorities_and_rewritten_entries_go_back_to_where_the_rows_came_from():
    buffers = [buffer(number, sampler=prioritized) for number in range(2)]
    mixed = MixedReplay(buffers[0], buffers[1:], [0.5, 0.5])
    batch = mixed.draw(8)
    batch["td_error"] = 1.0 + torch.arange(8.0)
    batch["state"] = torch.full((8, 2), 7.0) * (1 + batch["source"]).unsqueeze(-1)
    mixed.update_tensordict_priority(batch)
    mixed.write_back(batch, ["state"])
    for number, each in enumerate(buffers):
        mine = batch[batch["source"] == number]
        last = dict(zip(mine["index"].tolist(), mine["td_error"].tolist(), strict=True))
        found = each.sampler.table.tree[torch.tensor(list(last))]
        assert found.tolist() == pytest.approx([(error + 1e-8) ** 0.7 for error in last.values()])
        states = each[:]["state"][:, 0]
        assert {cell for cell, state in enumerate(states.tolist()) if state} == set(last)
        assert states[list(last)].tolist() == [7.0 * (1 + number)] * len(last)


def test_windows_are_mixed_too():
    sampler = partial(SequenceSampler, 4)
    mixed = MixedReplay(buffer(0, sampler=sampler), [buffer(1, sampler=sampler)], [0.5, 0.5])
    batch = mixed.draw(6)
    assert batch["source"].shape == batch["a"].shape == batch["next"].shape == (6, 4)
    assert batch.names == batch["next"].names == [None, "time"]
    batch["state"] = torch.ones(6, 4, 2)
    mixed.write_back(batch, ["state"])
    assert all(each[:]["state"].any() for each in mixed.buffers)


def test_buffers_with_different_entries_are_refused():
    with pytest.raises(RuntimeError, match="buffer 1 of 2 is empty"):
        MixedReplay(buffer(0), [buffer(1, rows=0)], [0.5, 0.5]).draw(4)
    different = MixedReplay(buffer(0), [buffer(1, b=torch.zeros(20))], [0.5, 0.5])
    with pytest.raises(ValueError, match=r"batches differ in b\. Store the same entries"):
        different.draw(4)


class Counting(DQNModule):
    """Counts the demonstrations in each batch."""

    def training_step(self, batch, batch_idx):
        self.__dict__.setdefault("shown", []).append(int(batch["source"].sum()))
        super().training_step(batch, batch_idx)


def test_stream_draws_from_demonstrations_and_resumes(tmp_path):
    recorded = replay_data("prioritized", warmup_frames=60, updates_per_epoch=1)
    fit(tmp_path, recorded, max_epochs=1)

    def mixed(own):
        shown = BUFFERS["prioritized"](num_envs=2)
        shown.load_state_dict(recorded.buffer.state_dict())
        return MixedReplay(own, [shown], [0.75, 0.25])

    def run(seed=0, resume=None, **settings):
        data = replay_data("prioritized", source=mixed, reset_at_each_batch=True, frames_per_batch=8)
        return fit(tmp_path, data, dqn(Counting, seed), resume, **settings)[0]

    uninterrupted = run()
    assert uninterrupted.shown == [2] * 20
    saving = SaveAt(tmp_path / "at.ckpt", "on_train_batch_end", 13)
    run(callbacks=[saving])
    assert torch.equal(parameters(run(9, saving.path)), parameters(uninterrupted))


def test_object_that_is_not_a_source_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"source=.*update_tensordict_priority"):
        fit(tmp_path, replay_data(source=lambda own: [own]))


def second_share(mixed, batch_size):
    """Return the number of rows of the next batch that come from the second buffer."""
    (_, second), mixed._owed = mixed._partition(batch_size)
    return second


@given(ratio=st.floats(1e-12, 0.999), batch_size=st.integers(1, 10**9), batches=st.integers(1, 60))
def test_fractions_of_a_share_carry_over(ratio, batch_size, batches):
    mixed = MixedReplay(buffer(0), [buffer(1)], [1 - ratio, ratio])
    share = 1 - mixed.ratios[0]
    assert abs(share - Fraction(ratio)) < Fraction(ratio) / 10**12
    given_out = sum(second_share(mixed, batch_size) for _ in range(batches))
    assert abs(given_out - share * batch_size * batches) < 1
    other = MixedReplay(buffer(0), [buffer(1)], [1 - ratio, ratio])
    other.load_state_dict(through_file(mixed.state_dict()))
    assert second_share(other, batch_size) == second_share(mixed, batch_size)


def test_ratios_that_leave_nothing_for_the_first_buffer_are_refused():
    with pytest.raises(ValueError, match=r"ratios must sum to 1, got .* first buffer"):
        MixedReplay(buffer(0), [buffer(1)], [1e-6, 1.0])
    for wrong in (math.nan, math.inf, 0.0):
        with pytest.raises(ValueError, match="ratios must be 2 positive numbers"):
            MixedReplay(buffer(0), [buffer(1)], [0.5, wrong])
