from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.golden import arrays
from kit.rings import ring, starts_of, write
from kit.statistics import chi_square
from torchrl_lightning import PrioritizedSampler, RecentSampler


class GivenDraws(RecentSampler):
    """RecentSampler with injected random numbers."""

    def inject(self, *numbers: Any) -> None:
        self.numbers = [np.asarray(values, np.float64) for values in numbers]

    def draw(self, count: int) -> Any:
        assert len(self.numbers[0]) == count
        return self.numbers.pop(0)


@pytest.mark.parametrize("case", range(8))
def test_windows_equal_golden_draws_of_alf(case: int) -> None:
    golden = arrays("alf_uniform_and_recent_sampling", f"c{case}_")
    envs, length, adds, count, steps, ignored, ratio, newest, again = golden["config"].tolist()
    options = {"with_replacement": bool(again), "num_earliest_frames_ignored": int(ignored)}
    sampler = GivenDraws(int(steps), recent_data_steps=int(newest), recent_data_ratio=ratio, **options)
    buffer = ring(int(length), int(envs), sampler)
    for _ in range(int(adds)):
        write(buffer)
    recent = int(golden["n_recent"])
    # ALF permutes the environments, but this package ranks one random number per environment.
    orders = iter([row[row >= 0].argsort() / envs for row in golden["randperms"] if row[0] >= 0])
    numbers = []
    for part in (golden["uniforms"][: int(count) - recent], golden["uniforms"][int(count) - recent :]):
        numbers += [next(orders)] if len(part) % int(envs) else []
        numbers += [part] if len(part) else []
    sampler.inject(*numbers)
    batch = buffer.sample(int(count))
    assert not sampler.numbers
    assert batch.shape == (int(count), int(steps))
    assert batch["env"][:, 0].tolist() == golden["env_ids"].tolist()
    assert batch["position"].tolist() == golden["x"].tolist()


@pytest.mark.parametrize("with_replacement", [False, True])
def test_start_positions_of_an_environment_are_equally_likely(with_replacement: bool) -> None:
    buffer = ring(7, 3, RecentSampler(3, with_replacement=with_replacement, num_earliest_frames_ignored=1))
    for step in range(10):
        write(buffer, *range(1 + step % 2))
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(400):
        counts.update(starts_of(buffer.sample(10)))
    # Environment 0 holds positions 3 to 9, environment 1 holds 0 to 4, environment 2 nothing.
    expected = dict.fromkeys([(0, position) for position in (4, 5, 6, 7)], 500.0)
    expected |= dict.fromkeys([(1, position) for position in (1, 2)], 1000.0)
    assert set(counts) == set(expected)
    assert chi_square([*counts.elements()], expected) < 20.5  # 5 degrees of freedom, p = 0.001


def test_draws_are_spread_evenly() -> None:
    buffer = ring(50, 2, RecentSampler())
    for _ in range(60):
        write(buffer)
    drawn = starts_of(buffer.sample(100))
    assert sorted(drawn) == [(env, position) for env in range(2) for position in range(10, 60)]
    few = Counter(env for env, _ in starts_of(buffer.sample(7)))
    assert sorted(few.values()) == [3, 4]


def test_recent_windows_come_first_if_enough_others_exist() -> None:
    buffer = ring(40, 2, RecentSampler(2, recent_data_steps=4, recent_data_ratio=0.3, num_earliest_frames_ignored=1))
    for stored in range(1, 60):
        write(buffer)
        if stored < 3:
            continue
        batch = buffer.sample(10)
        newest = [stored - 1 - position <= 4 for _, position in starts_of(batch)]
        if (min(stored, 40) - 2) * 0.3 > 4:
            assert all(newest[:3])
            oldest = max(stored - 40, 0)
            assert min(position for _, position in starts_of(batch)) > oldest
        else:
            assert Counter(env for env, _ in starts_of(batch)) == {0: 5, 1: 5}
    drawn = Counter(start for _ in range(200) for start in starts_of(buffer.sample(10))[:3])
    assert {position for _, position in drawn} == {54, 55, 56, 57}
    assert chi_square([*drawn.elements()], dict.fromkeys(drawn, 1.0)) < 24.3  # 7 degrees of freedom, p = 0.001


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, int, int, list[list[int]]]:
    num_envs, length = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    steps, ignored = draw(st.integers(1, length)), draw(st.integers(0, 3))
    some = st.lists(st.integers(0, num_envs - 1), min_size=1, max_size=num_envs, unique=True)
    return num_envs, length, steps, ignored, draw(st.lists(some, min_size=1, max_size=16))


@settings(max_examples=25, deadline=None)
@given(history=histories(), ratio=st.sampled_from([0.0, 0.5, 1.0]))
def test_start_positions_equal_plain_lists(history: tuple[int, int, int, int, list[list[int]]], ratio: float) -> None:
    num_envs, length, steps, ignored, writes = history
    sampler = RecentSampler(steps, num_earliest_frames_ignored=ignored, recent_data_steps=2, recent_data_ratio=ratio)
    buffer = ring(length, num_envs, sampler)
    stored: list[list[int]] = [[] for _ in range(num_envs)]
    for envs in writes:
        for env in envs:
            stored[env] = [*stored[env], stored[env][-1] + 1 if stored[env] else 0][-length:]
        write(buffer, *sorted(envs))
        allowed = {
            (env, ring_positions[i])
            for env, ring_positions in enumerate(stored)
            for i in range(ignored, len(ring_positions) - steps + 1)
        }
        if not allowed:
            with pytest.raises(ValueError, match="batch_length"):
                buffer.sample(4)
            continue
        batch = buffer.sample(64)
        newest = {
            (env, position) for env, position in allowed if position + steps + 1 >= len(stored[env]) + stored[env][0]
        }
        has_enough = (sum(map(len, stored)) / num_envs - (steps - 1 + ignored)) * ratio > 2
        drawn = starts_of(batch)
        assert set(drawn[: int(64 * ratio)] if has_enough else drawn) == (newest if has_enough else allowed)
        assert set(drawn) <= allowed
        for key in ("env", "position"):
            gap = int(key == "position")
            assert (batch[key] == batch[key][:, :1] + gap * torch.arange(steps)).all()


@pytest.mark.parametrize("inner", [False, True])
def test_single_steps_equal_the_first_steps_of_windows(inner: bool) -> None:
    batches = []
    for length in (1, None):
        sampler = RecentSampler(recent_data_ratio=0.5, prioritized=prioritized(40) if inner else None)
        buffer = ring(20, 2, sampler)
        buffer.sample_options = {"batch_length": length}
        for _ in range(9):
            write(buffer)
        batches.append(buffer.sample(8))
    windows, steps = batches
    assert steps.shape == (8,)
    assert all(windows[key][:, 0].equal(steps[key]) for key in steps.sorted_keys)


def prioritized(cells: int, ignored: int = 0) -> PrioritizedSampler:
    return PrioritizedSampler(cells, 1.0, 1.0, eps=0.0, batch_length=1, num_earliest_frames_ignored=ignored)


def test_recent_windows_combine_with_prioritized_windows() -> None:
    inner = prioritized(80, 1)
    sampler = RecentSampler(
        2, recent_data_steps=4, recent_data_ratio=0.25, num_earliest_frames_ignored=1, prioritized=inner
    )
    buffer = ring(40, 2, sampler)
    for _ in range(10):
        write(buffer)
    batch = buffer.sample(16)  # too few steps are stored to prefer the newest
    assert Counter(starts_of(batch)) == {(env, position): 1 for env in range(2) for position in range(1, 9)}
    for _ in range(40):
        write(buffer)
    buffer.update_priority(torch.arange(80), torch.zeros(80))
    buffer.update_priority(buffer.writer.cell(torch.tensor([0, 1]), torch.tensor([20, 30])), torch.tensor([1.0, 3.0]))
    batch = buffer.sample(16)
    drawn = starts_of(batch)
    assert {position for _, position in drawn[:4]} <= {45, 46, 47, 48}
    assert Counter(env for env, _ in drawn[:4]) == {0: 2, 1: 2}
    assert Counter(drawn[4:]) == {(0, 20): 3, (1, 30): 9}
    assert (batch["position"] == batch["position"][:, :1] + torch.arange(2)).all()
    for key, heavy in (("importance_weights", 1.5), ("priority_weight", 1 / 3)):
        light = 0.5 if key == "importance_weights" else 1.0
        expected = torch.tensor([1.0] * 4 + [light if start == (0, 20) else heavy for start in drawn[4:]])
        torch.testing.assert_close(batch[key], expected.unsqueeze(1).expand(-1, 2))
    # The update sets the priorities of all windows.
    batch["td_error"] = torch.full((16, 2), 7.0)
    write(buffer)
    buffer.update_tensordict_priority(batch)
    first = buffer.writer.cell(batch["env"][:, 0], batch["position"][:, 0])
    assert (inner.table.priorities[first] == 7.0).all()
    buffer.empty()
    assert inner.table.count == 0


def recent_windows(sampler: RecentSampler, buffer: Any, count: int) -> int:
    """Return the number of windows in a batch that are drawn from the newest ones."""
    return sampler._count_recent(buffer.writer, count, 1)


def test_recent_ratio_is_not_rounded_up_by_a_window() -> None:
    """0.07 * 100 is 7.000000000000001 as a floating-point number."""
    sampler = RecentSampler(recent_data_steps=1)
    writer = ring(400, 1, sampler)
    for _ in range(300):
        write(writer)
    for percent in range(1, 101):
        sampler.recent_data_ratio = percent / 100
        for count in (1, 3, 50, 100, 128, 200):
            expected = -(-count * percent // 100)
            assert recent_windows(sampler, writer, count) == expected, (percent, count)


def test_start_positions_are_counted_without_rounding() -> None:
    """With 100 starts, uniform draws already reach the ratio of the newest 7, so no recent draws are added."""
    sampler = RecentSampler(recent_data_steps=7, recent_data_ratio=0.07)
    buffer = ring(400, 1, sampler)
    for _ in range(100):
        write(buffer)
    assert recent_windows(sampler, buffer, 100) == 0
    write(buffer)
    assert recent_windows(sampler, buffer, 100) == 7
    with pytest.raises(ValueError, match=r"recent_data_ratio.*0.*1.*2"):
        sampler.recent_data_ratio = 2
    assert sampler.recent_data_ratio == 0.07
