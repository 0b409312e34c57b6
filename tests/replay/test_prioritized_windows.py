"""Priority sampling of window starts."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from kit.golden import arrays
from kit.rings import ring, starts_of, write
from kit.states import equal
from kit.statistics import chi_square
from torchrl_lightning.replay.priorities import Priorities
from torchrl_lightning.replay.prioritized import PrioritizedSampler
from torchrl_lightning.replay.replay_buffer import ExperienceBuffer
from torchrl_lightning.replay.ring_writer import RingWriter


def make(num_envs: int, length: int, sampler: Any = None, **options: Any) -> ExperienceBuffer:
    options = {"alpha": 1.0, "beta": 0.5, "eps": 0.0, "batch_length": 1, **options}
    return ring(length, num_envs, sampler or PrioritizedSampler(num_envs * length, **options))


def give(buffer: ExperienceBuffer, env: int, position: int, priority: float) -> None:
    cell = buffer.writer.cell(torch.tensor([env]), torch.tensor([position]))
    buffer.update_priority(cell, torch.tensor([priority]))


class Injected(PrioritizedSampler):
    """Sampler that reads its random numbers from an array."""

    def draw(self, count: int) -> Any:
        assert len(self.numbers) == count
        return self.numbers.astype(np.float64)


def test_golden_draws_of_alf() -> None:
    sampler = Injected(32, 1.0, 0.5, eps=0.0, batch_length=1, weight_norm=None)
    buffer = make(8, 4, sampler)
    for stage in "abcd":
        if stage == "a":
            write(buffer, 1, steps=2)
        elif stage == "b":
            give(buffer, 1, 0, 0.5)
            give(buffer, 1, 1, 1.5)
        elif stage == "c":
            write(buffer, 0, 2)
        else:
            give(buffer, 1, 1, 1.0)
            give(buffer, 2, 0, 1.0)
        golden = arrays("alf_prioritized_sampling", f"{stage}_")
        # ALF orders the leaves by environment, this package by step. Map each draw to the same leaf.
        leaves = golden["leaf_priorities"].astype(np.float64)
        drawn = np.minimum((golden["uniforms"] + np.arange(1000.0)) / 1000, 1 - 1e-7) * leaves.sum()
        leaf = np.searchsorted(leaves.cumsum(), drawn, side="right")
        within = drawn - (leaves.cumsum() - leaves.reshape(-1))[leaf]
        ours = leaves.T.reshape(-1)
        place = leaf % 4 * 8 + leaf // 4
        sampler.numbers = ((ours.cumsum() - ours)[place] + within) / leaves.sum()
        sampler.stratified = False
        batch = buffer.sample(1000)
        assert starts_of(batch) == list(zip(golden["env_ids"].tolist(), golden["positions"].tolist(), strict=True))
        weights = torch.from_numpy(golden["weights"])
        torch.testing.assert_close(batch["importance_weights"][:, 0], weights)
        torch.testing.assert_close(batch["priority_weight"][:, 0], weights**-0.5)
        # Stratified draws return each window in its exact proportion for all random numbers.
        sampler.stratified, sampler.numbers = True, golden["uniforms"]
        counts = {start: starts_of(buffer.sample(1000)).count(start) for start in set(starts_of(batch))}
        assert counts == dict(zip(zip(*golden["unique_env_pos"].tolist(), strict=True), golden["counts"], strict=True))


def test_golden_leaves_of_alf_for_windows_of_two() -> None:
    golden, buffer = arrays("alf_prioritized_sampling", "len2_"), make(2, 6, batch_length=2)
    for _ in range(9):
        write(buffer)
    buffer.sample(4)
    assert buffer.writer.positions.tolist() == golden["current_pos"].tolist()
    leaves = buffer.sampler.table.tree.leaves.view(6, 2).T
    assert leaves.tolist() == golden["leaf_priorities"].tolist()


@pytest.mark.parametrize("steps", [1, 3])
def test_windows_follow_the_priorities_of_their_first_steps(steps: int) -> None:
    buffer = make(2, 5, batch_length=steps, stratified=False)
    for position in range(8):
        write(buffer, *([0, 1] if position < 4 else [0]))
    expected = {}
    for env, first, newest in ((0, 3, 7), (1, 0, 3)):
        for position in range(first, newest + 1):
            give(buffer, env, position, 1.0 + env + position % 4)
            if position + steps - 1 <= newest:
                expected[env, position] = 1.0 + env + position % 4
    drawn = starts_of(buffer.sample(8000))
    assert set(drawn) == set(expected)
    assert chi_square(drawn, expected) < 26.1  # 8 degrees of freedom at most, p = 0.001


def test_entries_of_a_batch() -> None:
    buffer = make(2, 5, batch_length=3, weight_norm="buffer")
    write(buffer, steps=4)
    give(buffer, 0, 1, 4.0)
    give(buffer, 1, 3, 0.01)  # no window can start here, so this priority must not affect the weights
    batch = buffer.sample(14)
    assert batch.shape == (14, 3)
    assert batch.names == [None, "time"]
    assert (batch["position"] == batch["position"][:, :1] + torch.arange(3)).all()
    assert (batch["env"] == batch["env"][:, :1]).all()
    heavy = (batch["env"] == 0) & (batch["position"][:, :1] == 1)
    assert heavy[:, 0].sum() == 8
    torch.testing.assert_close(batch["importance_weights"], torch.where(heavy, 16 / 7, 4 / 7))
    torch.testing.assert_close(batch["priority_weight"], torch.where(heavy, 0.5, 1.0))


def test_window_gets_the_highest_priority_of_its_steps() -> None:
    buffer = make(1, 6, batch_length=2)
    write(buffer, steps=5)
    batch = buffer.sample(16)
    batch["td_error"] = batch["position"].unsqueeze(-1).float()
    write(buffer, steps=3)  # overwrites positions 0 and 1
    buffer.update_tensordict_priority(batch)
    assert buffer.sampler.table.priorities.tolist() == [1.0, 1.0, 3.0, 4.0, 1.0, 1.0]
    buffer.update_tensordict_priority(batch[batch["position"][:, 0] < 2])
    buffer.update_priority(torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert buffer.sampler.table.priorities.tolist() == [1.0, 1.0, 3.0, 4.0, 1.0, 1.0]


def test_priorities_survive_a_change_of_batch_length() -> None:
    buffer = make(1, 8, batch_length=1)
    write(buffer, steps=6)
    for position in range(6):
        give(buffer, 0, position, position + 1.0)
    for steps in (3, 1, 4, 2):
        buffer.sampler.sample(buffer.storage, 2, steps)
        kept = [position + 1.0 for position in range(7 - steps)]
        assert buffer.sampler.table.tree.leaves.tolist() == kept + [0.0] * (8 - len(kept))
        assert buffer.sampler.table.tree.nnz == len(kept)
    with pytest.raises(ValueError, match=r"6.*7 \(batch_length=7"):
        buffer.sampler.sample(buffer.storage, 2, 7)
    with pytest.raises(ValueError, match="batch_length=2"):
        PrioritizedSampler(8, 1.0, 1.0).sample(buffer.storage, 2, 2)


@pytest.mark.parametrize("steps", [None, 2])
def test_late_priorities_do_not_restore_ignored_steps(steps: int | None) -> None:
    buffer = make(2, 6, batch_length=steps, num_earliest_frames_ignored=3)
    write(buffer, steps=6)
    for position in range(6):
        give(buffer, 0, position, 5.0)
    batch = buffer.sample(100)
    assert batch["position"].min() == 3
    give(buffer, 0, 0, 50.0)
    give(buffer, 0, 2, 50.0)
    write(buffer, 1)
    batch = buffer.sample(100)
    first = batch["position"].reshape(100, -1)[:, 0]
    last = 5 if steps is None else 4
    assert set(first[batch["env"].reshape(100, -1)[:, 0] == 0].tolist()) == set(range(3, last + 1))
    assert set(first[batch["env"].reshape(100, -1)[:, 0] == 1].tolist()) == set(range(4, last + 2))


def test_rejected_window_length_keeps_shorter_windows() -> None:
    buffer = make(2, 6, batch_length=1)
    write(buffer, steps=3)
    for _ in range(2):
        assert sorted(set(starts_of(buffer.sample(12)))) == [(env, p) for env in range(2) for p in range(3)]
        before = buffer.state_dict()["sampler"]
        with pytest.raises(ValueError, match="batch_length"):
            buffer.sampler.sample(buffer.storage, 12, 5)
        assert equal(buffer.state_dict()["sampler"], before)


def test_single_steps_are_first_steps_of_windows() -> None:
    buffers = [make(2, 9, batch_length=1) for _ in "ab"]
    buffers[1].sample_options = {"batch_length": None}
    for buffer in buffers:
        write(buffer, steps=12)
        give(buffer, 1, 5, 7.0)
    windows, steps = (buffer.sample(40) for buffer in buffers)
    assert (windows.shape, steps.shape) == (torch.Size([40, 1]), torch.Size([40]))
    assert all(windows[key][:, 0].equal(steps[key]) for key in steps.sorted_keys)
    for batch, buffer in zip((windows, steps), buffers, strict=True):
        batch["td_error"] = torch.arange(40.0).view(batch.shape)
        buffer.update_tensordict_priority(batch)
    assert buffers[0].sampler.table.priorities.equal(buffers[1].sampler.table.priorities)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, int, int, list[tuple[str, Any]]]:
    num_envs, length = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    steps, ignored = draw(st.integers(1, length)), draw(st.integers(0, 3))
    envs = st.lists(st.integers(0, num_envs - 1), min_size=1, max_size=num_envs, unique=True)
    cells = st.lists(st.integers(0, num_envs * length - 1), min_size=1, max_size=4)
    step = st.one_of(
        st.tuples(st.just("write"), st.tuples(envs, st.integers(1, 2 * length))),
        st.tuples(st.just("update"), st.tuples(cells, st.integers(0, 3))),
        st.tuples(st.just("length"), st.integers(1, length)),
        st.tuples(st.sampled_from(["look", "look", "empty", "restore", "alpha"]), st.none()),
    )
    return num_envs, length, steps, ignored, draw(st.lists(step, min_size=1, max_size=14))


@pytest.mark.parametrize("backend", ["numba", "torch"])
@settings(max_examples=20, deadline=None)
@given(history=histories())
def test_drawable_starts_match_plain_lists(
    backend: Any, history: tuple[int, int, int, int, list[tuple[str, Any]]]
) -> None:
    num_envs, length, steps, ignored, changes = history

    def build() -> ExperienceBuffer:
        buffer = make(num_envs, length, batch_length=steps, num_earliest_frames_ignored=ignored, weight_norm="buffer")
        buffer.sampler.table = Priorities(num_envs * length, 1.0, 0.0, keep_lowest=True, limited=True, backend=backend)
        return buffer

    buffer = build()
    stored: list[dict[int, float]] = [{} for _ in range(num_envs)]
    for kind, argument in [*changes, ("look", None)]:
        sampler: Any = buffer.sampler
        if kind == "write":
            envs, count = argument
            highest = max(1.0, sampler.table.largest)
            for env in envs:
                after = max(stored[env], default=-1) + 1
                stored[env] |= {after + step: highest for step in range(count)}
                stored[env] = {p: stored[env][p] for p in sorted(stored[env])[-length:]}
            write(buffer, *envs, steps=count)
        elif kind == "update":
            cells, priority = argument
            buffer.update_priority(torch.tensor(cells), torch.tensor([float(priority)] * len(cells)))
            for env, each in enumerate(stored):
                each.update({p: float(priority) for p in each if p % length * num_envs + env in cells})
        elif kind == "length":
            steps, buffer.sample_options = argument, {"batch_length": argument}
        elif kind == "empty":
            buffer.empty()
            stored = [{} for _ in range(num_envs)]
        elif kind == "alpha":
            sampler.alpha = 0.5
            sampler.alpha = 1.0
        elif kind == "restore":
            state = copy.deepcopy(buffer.state_dict())
            buffer = build()
            buffer.load_state_dict(state)
        else:
            look(buffer, stored, steps, ignored)


def look(buffer: ExperienceBuffer, stored: list[dict[int, float]], steps: int, ignored: int) -> None:
    """Check that windows start at allowed steps, and that counts and weights follow the priorities."""
    allowed = {
        (env, p): priority
        for env, each in enumerate(stored)
        for p, priority in each.items()
        if p - min(each) >= ignored and p + steps - 1 in each
    }
    if not any(allowed.values()):
        with pytest.raises((RuntimeError, ValueError), match=r"0 are stored|No window fits|priorities are zero"):
            buffer.sample(4)
        return
    mean = sum(allowed.values()) / sum(priority > 0 for priority in allowed.values())
    count = 64
    batch = buffer.sample(count)
    drawn = starts_of(batch)
    for start, priority in allowed.items():
        assert abs(drawn.count(start) - count * priority / sum(allowed.values())) < 2
    assert sum(map(drawn.count, allowed)) == count
    assert (batch["position"] == batch["position"][:, :1] + torch.arange(steps)).all()
    expected = torch.tensor([allowed[start] / mean for start in drawn])
    torch.testing.assert_close(batch["importance_weights"], expected.unsqueeze(1).expand(-1, steps))
    table = buffer.sampler.table
    assert table.tree.nnz == sum(priority > 0 for priority in allowed.values())
    assert table.lowest is not None
    assert float(table.lowest.summary()) == min(allowed.values())


def test_windows_of_torchrl_storages() -> None:
    sampler = PrioritizedSampler(8, 1.0, 1.0, batch_length=3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, writer=RingWriter(2))
    buffer.extend(TensorDict({"a": torch.arange(8)}, [8]))
    index, _ = sampler.sample(buffer.storage, 4)
    begin = index[:, :1]
    assert set(begin.reshape(-1).tolist()) == {0, 1, 2, 3}
    assert torch.equal(index, begin + 2 * torch.arange(3))


def test_weights_without_norm_count_windows() -> None:
    buffer = make(2, 6, batch_length=3, weight_norm=None)
    write(buffer, steps=6)
    give(buffer, 0, 2, 9.0)
    batch = buffer.sample(32)
    # 8 of 12 steps can start a window, and seven of them have a priority of 1.
    heavy = (batch["env"] == 0) & (batch["position"][:, :1] == 2)
    assert heavy.any()
    probability = torch.where(heavy, 9 / 16, 1 / 16)
    torch.testing.assert_close(batch["priority_weight"], (8 * probability) ** -0.5)


def test_buffer_weights_ignore_steps_that_begin_no_window() -> None:
    buffer = make(1, 8, batch_length=1, weight_norm="buffer", beta=1.0)
    write(buffer, steps=8)
    for position, priority in enumerate([4.0, 4.0, 2.0, 4.0, 4.0, 4.0, 4.0, 1.0]):
        give(buffer, 0, position, priority)
    weights = {}
    for steps in (1, 3, 1):  # step 7 has the lowest priority; with three steps per window, the lowest start is step 2
        index, info = buffer.sampler.sample(buffer.storage, 64, steps)
        first, weight = index[:, 0].tolist(), info["priority_weight"][:, 0].tolist()
        weights[steps] = dict(zip(first, weight, strict=True))
        assert max(weights[steps].values()) == pytest.approx(1.0)
    assert weights[1][7] == pytest.approx(1.0)
    assert weights[3][0] == pytest.approx(0.5)
