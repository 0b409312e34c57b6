"""What goes wrong in ALF's own replay buffer goes right here: a test for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from kit.seeds import generator
from torchrl_lightning.episodic import EpisodicReplayBuffer

ENVS = torch.arange(2)


def build(num_environments: int = 2, max_length: int = 8, **options: Any) -> EpisodicReplayBuffer:
    row = TensorDict({"x": torch.tensor(0)})
    options = {"prioritized_sampling": True, "generator": generator(), **options}
    return EpisodicReplayBuffer(row, num_environments, max_length, **options)


def fill(buffer: EpisodicReplayBuffer, steps: int, start: int = 0, env_ids: torch.Tensor | None = None) -> None:
    for t in range(start, start + steps):
        ids = ENVS if env_ids is None else env_ids
        buffer.add_batch(TensorDict({"x": 100 * ids + t}, [len(ids)]), env_ids)


def drawn(buffer: EpisodicReplayBuffer, length: int, count: int = 400) -> set[tuple[int, int]]:
    batch, info = buffer.get_batch(count, length)
    first = 100 * info.env_ids + info.positions
    assert batch["x"].equal(first.unsqueeze(1) + torch.arange(length))
    return set(zip(info.env_ids.tolist(), info.positions.tolist(), strict=True))


def test_ignored_steps_stay_ignored_after_a_late_update() -> None:
    buffer = build(num_earliest_frames_ignored=2)
    fill(buffer, 6)
    buffer.update_priority(ENVS.repeat(2), torch.tensor([0, 0, 1, 1]), torch.full((4,), 50.0))
    for length in (1, 3):
        assert drawn(buffer, length) == {(e, p) for e in range(2) for p in range(2, 7 - length)}


def test_recency_and_priorities_work_together() -> None:
    buffer = build(recent_data_steps=1, recent_data_ratio=0.5)
    fill(buffer, 6)
    buffer.update_priority(ENVS.repeat(6), torch.arange(6).repeat_interleave(2), torch.tensor([1.0] + [0.0] * 11))
    _, info = buffer.get_batch(8, 2)
    assert info.positions.tolist() == [4] * 4 + [0] * 4
    assert info.env_ids.tolist() == [0, 1, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("length", [1, 2])
def test_importance_weights_survive_a_restore(length: int) -> None:
    buffer = build(enable_checkpoint=True)
    fill(buffer, 6)
    buffer.update_priority(ENVS, torch.tensor([1, 2]), torch.tensor([4.0, 0.0]))
    buffer.get_batch(2, length)
    other = build(enable_checkpoint=True)
    other.load_state_dict(buffer.state_dict())
    first, second = buffer.get_batch(16, length)[1], other.get_batch(16, length)[1]
    assert first.positions.equal(second.positions)
    assert first.importance_weights.equal(second.importance_weights)
    # The priority over the mean of those that are not zero.
    count = 2 * (7 - length) - 1
    high = (first.env_ids == 0) & (first.positions == 1)
    expected = torch.where(high, 4.0, 1.0) / ((count + 3) / count)
    torch.testing.assert_close(first.importance_weights, expected)


def test_no_window_where_an_environment_is_too_short() -> None:
    buffer = build()
    fill(buffer, 1)
    fill(buffer, 3, 1, torch.tensor([1]))
    assert drawn(buffer, 2) == {(1, 0), (1, 1), (1, 2)}
    with pytest.raises(ValueError, match="no room for a window: the fullest ring holds 4 steps"):
        buffer.get_batch(4, 5)


@pytest.mark.parametrize("prioritized", [True, False])
def test_an_empty_buffer_gives_nothing(prioritized: bool) -> None:
    buffer = build(prioritized_sampling=prioritized)
    with pytest.raises(RuntimeError, match="holds 0 steps"):
        buffer.gather_all()
    for length in (1, 2):
        with pytest.raises(RuntimeError, match=r"0 .*are stored"):
            buffer.get_batch(4, length)
    with pytest.raises(RuntimeError, match=r"0 .*are stored"):
        buffer.sample(4)


def test_positions_below_the_first_step_are_refused() -> None:
    buffer = build()
    fill(buffer, 2)
    with pytest.raises(IndexError, match="Step -1 of environment 1 is not stored"):
        buffer.get_field("x", torch.tensor([1]), torch.tensor([-1]))


def test_initial_priority_is_known_without_priorities_too() -> None:
    assert build(prioritized_sampling=False, initial_priority=3.0).initial_priority == 3
    buffer = build(initial_priority=0.5)
    assert buffer.initial_priority == 0.5
    fill(buffer, 2)
    buffer.update_priority(ENVS, torch.tensor([0, 1]), torch.tensor([7.0, 0.0]))
    assert buffer.initial_priority == 7


def test_late_updates_are_ignored_even_if_all_are_late() -> None:
    buffer = build(max_length=2)
    fill(buffer, 5)
    buffer.update_priority(ENVS, torch.tensor([0, 1]), torch.tensor([9.0, 9.0]))
    assert buffer.initial_priority == 1
    buffer.update_priority(ENVS, torch.tensor([2, 4]), torch.tensor([9.0, 5.0]))
    assert buffer.initial_priority == 5
    for positions, error in (([4, 5], IndexError), ([4], ValueError)):
        with pytest.raises(error):
            buffer.update_priority(ENVS, torch.tensor(positions), torch.tensor([1.0, 1.0]))
    with pytest.raises(ValueError, match="without priorities"):
        build(prioritized_sampling=False).update_priority(ENVS, ENVS, torch.ones(2))


def test_clear_forgets_priorities() -> None:
    buffer = build()
    fill(buffer, 6)
    buffer.update_priority(ENVS, torch.tensor([5, 5]), torch.tensor([50.0, 2.0]))
    buffer.clear(torch.tensor([0]))
    assert buffer.initial_priority == 2
    assert drawn(buffer, 2) == {(1, p) for p in range(5)}
    fill(buffer, 2, 6, torch.tensor([0]))
    assert drawn(buffer, 2) == {(0, 6)} | {(1, p) for p in range(5)}
    buffer.dequeue(n=2)
    assert drawn(buffer, 2) == {(1, p) for p in range(2, 5)}
    other = build()
    other.load_state_dict(buffer.state_dict())
    assert drawn(other, 1) == {(1, p) for p in range(2, 6)}
    buffer.clear()
    assert (buffer.total_size, buffer.initial_priority) == (0, 1)
    fill(buffer, 1)
    assert drawn(buffer, 1) == {(0, 0), (1, 0)}


def test_shorter_windows_keep_the_priorities_of_the_last_steps() -> None:
    buffer = build()
    fill(buffer, 4)
    buffer.update_priority(ENVS.repeat(4), torch.arange(4).repeat_interleave(2), torch.tensor([1.0] + [0.0] * 7))
    for length in (1, 3, 1, 2):
        assert drawn(buffer, length) == {(0, 0)}


def test_equal_priorities_give_exactly_equal_counts() -> None:
    buffer = build()
    fill(buffer, 1)
    assert buffer.get_batch(1000, 1)[1].env_ids.bincount().tolist() == [500, 500]
