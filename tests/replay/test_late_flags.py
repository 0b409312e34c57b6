"""Late writes of flags, rewards and successors into stored steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from torchrl_lightning import (
    EpisodicReplayBuffer,
    ExperienceBuffer,
    FrameStackTransform,
    HindsightRelabel,
    RingStorage,
    RingWriter,
    SequenceSampler,
)
from torchrl_lightning.episodic.time_steps import FIRST, LAST, MID
from torchrl_lightning.replay.episode_index import FlagsDifferError

Write = Callable[[Any, int, bool], None]


def rows(count: int, start: int = 0, done: tuple[int, ...] = ()) -> TensorDict:
    now = torch.arange(count, dtype=torch.float32).view(-1, 1) + start
    ended = torch.zeros(count, 1, dtype=torch.bool)
    ended[list(done)] = True
    after = {"observation": now + 1, "reward": torch.ones(count, 1), "done": ended, "terminated": ended.clone()}
    init = torch.zeros(count, 1, dtype=torch.bool)
    return TensorDict({"observation": now, "is_init": init, "next": after}, [count])


def replay(num_envs: int = 1, length: int = 20, **settings: Any) -> ExperienceBuffer:
    return ExperienceBuffer(storage=RingStorage(num_envs * length), num_envs=num_envs, **settings)


def begins(buffer: Any, env: int = 0) -> list[int]:
    position = torch.arange(int(buffer.writer.oldest[env]), int(buffer.writer.positions[env]))
    found: list[int] = buffer.writer.index.begin(torch.full_like(position, env), position, clip=False).tolist()
    return found


def by_entry(buffer: Any, cell: int, value: bool) -> None:
    buffer.storage.write_entry(("next", "done"), torch.tensor([cell]), torch.tensor([[value]]))


def by_key(buffer: Any, cell: int, value: bool) -> None:
    flags = buffer[:]["next", "done"].clone()
    flags[cell] = value
    buffer["next", "done"] = flags


def row_with(buffer: Any, cell: int, value: bool) -> TensorDict:
    row: TensorDict = buffer.storage.get(torch.tensor([cell]))
    return row.set(("next", "done"), torch.tensor([[value]]))


def by_rows(buffer: Any, cell: int, value: bool) -> None:
    buffer[torch.tensor([cell])] = row_with(buffer, cell, value)


def by_slice(buffer: Any, cell: int, value: bool) -> None:
    buffer[cell : cell + 1] = row_with(buffer, cell, value)


def by_number(buffer: Any, cell: int, value: bool) -> None:
    buffer[cell] = row_with(buffer, cell, value)[0]


def by_mask(buffer: Any, cell: int, value: bool) -> None:
    mask = torch.zeros(len(buffer), dtype=torch.bool)
    mask[cell] = True
    buffer[mask] = row_with(buffer, cell, value)


def by_set(buffer: Any, cell: int, value: bool) -> None:
    buffer.storage.set(torch.tensor([cell]), row_with(buffer, cell, value))


def by_storage(buffer: Any, cell: int, value: bool) -> None:
    buffer.storage[cell] = row_with(buffer, cell, value)[0]


def by_write_back(buffer: Any, cell: int, value: bool) -> None:
    index = torch.tensor([cell])
    batch = row_with(buffer, cell, value).set("index", index)
    buffer.write_back(batch.set("write_position", buffer.writer.rings.write_version(index)), [("next", "done")])


WAYS = [by_entry, by_key, by_rows, by_slice, by_number, by_mask, by_set, by_storage, by_write_back]


@pytest.mark.parametrize("write", WAYS)
def test_later_done_flag_ends_an_episode_and_can_be_cleared(write: Write) -> None:
    buffer = replay()
    buffer.extend(rows(5))
    write(buffer, 2, True)
    assert begins(buffer) == [0, 0, 0, 3, 3]
    write(buffer, 4, True)
    buffer.extend(rows(2, 5))
    assert begins(buffer) == [0, 0, 0, 3, 3, 5, 5]
    write(buffer, 2, False)
    assert begins(buffer) == [0] * 5 + [5] * 2
    write(buffer, 4, False)
    buffer.extend(rows(1, 7))
    assert begins(buffer) == [0] * 8


@pytest.mark.parametrize("write", [by_entry, by_rows])
def test_n_step_returns_windows_and_goals_stop_at_a_later_end(write: Write) -> None:
    buffer = replay(n_steps=3)
    buffer.extend(rows(8))
    write(buffer, 3, True)
    folded = buffer.storage.get(torch.arange(8), buffer._n_step)
    assert folded["steps_to_next_obs"].tolist() == [3, 3, 2, 1, 3, 3, 2, 1]
    assert folded["next", "observation"].flatten().tolist() == [3, 4, 4, 4, 7, 8, 8, 8]

    windows = replay(sampler=SequenceSampler(2), batch_size=64)
    windows.extend(rows(6))
    windows.sample()
    write(windows, 2, True)
    assert set(windows.sample()["observation"][:, 0].flatten().tolist()) == {0, 1, 3, 4}

    stacks = replay(transform=FrameStackTransform(3, keys=["picture"]))
    data = rows(5)
    data["picture"] = data["observation"].view(-1, 1, 1).expand(5, 2, 2).clone()
    stacks.extend(data)
    write(stacks, 2, True)
    index = torch.tensor([3, 4])
    shown = stacks.transform(stacks.storage.get(index).set("index", index))["picture"][:, :, 0, 0]
    assert shown.tolist() == [[3, 3, 3], [3, 3, 4]]

    goals = replay(transform=HindsightRelabel(1.0, strategy="final"), batch_size=64)
    data = rows(6)
    for level in (data, data["next"]):
        level["achieved_goal"], level["desired_goal"] = level["observation"].clone(), torch.full((6, 1), -9.0)
    data["next", "reward"] -= 2
    goals.extend(data)
    write(goals, 2, True)
    batch = goals.sample()
    expected = torch.where(batch["observation"] <= 2, 3.0, 6.0)
    assert batch["desired_goal"].equal(expected)


def test_only_the_environment_of_the_step_changes() -> None:
    buffer = replay(3)
    buffer.extend(torch.stack([rows(4), rows(4), rows(4)], 1), time_dim=0)
    buffer.storage.write_entry(("next", "done"), torch.tensor([4, 8]), torch.ones(2, 1, dtype=torch.bool))
    assert [begins(buffer, env) for env in range(3)] == [[0] * 4, [0, 0, 2, 2], [0, 0, 0, 3]]


def test_later_init_flag_splits_an_episode_and_can_be_cleared() -> None:
    buffer = replay()
    buffer.extend(rows(5))
    cells = torch.tensor([2, 4])
    buffer.storage.write_entry("is_init", cells, torch.ones(2, 1, dtype=torch.bool))
    assert begins(buffer) == [0, 0, 2, 2, 4]
    buffer.storage.write_entry("is_init", cells[:1], torch.zeros(1, 1, dtype=torch.bool))
    assert begins(buffer) == [0, 0, 0, 0, 4]


def test_cleared_flag_does_not_join_another_trajectory() -> None:
    buffer = replay()
    data = rows(6, done=(2,)).exclude("is_init")
    buffer.extend(data.set(("collector", "traj_ids"), torch.tensor([0, 0, 0, 1, 1, 1])))
    by_entry(buffer, 2, False)
    assert begins(buffer) == [0, 0, 0, 3, 3, 3]


def test_cut_stays_after_flag_changes() -> None:
    buffer = replay()
    buffer.extend(rows(3))
    buffer.writer.cut()
    buffer.extend(rows(3, 3))
    by_entry(buffer, 4, True)
    assert begins(buffer) == [0, 0, 0, 3, 3, 5]
    by_entry(buffer, 4, False)
    assert begins(buffer) == [0, 0, 0, 3, 3, 3]


def test_episode_whose_first_steps_are_overwritten() -> None:
    buffer = replay(length=4)
    buffer.extend(rows(7))
    by_entry(buffer, 4 % 4, True)  # position 4
    assert begins(buffer) == [0, 0, 5, 5]
    assert buffer.writer.index.end(torch.zeros(4).long(), torch.arange(3, 7)).tolist() == [4, 4, 6, 6]
    by_entry(buffer, 4 % 4, False)
    buffer.extend(rows(1, 7))
    assert begins(buffer) == [0] * 4
    buffer.storage.write_entry("is_init", torch.tensor([0]), torch.ones(1, 1, dtype=torch.bool))
    assert begins(buffer) == [4] * 4


def test_flags_of_a_loaded_buffer_update_episodes_before_its_first_write() -> None:
    buffer = replay()
    buffer.extend(rows(5))
    other = replay()
    other.load_state_dict(buffer.state_dict())
    by_entry(other, 2, True)
    assert begins(other) == [0, 0, 0, 3, 3]
    again = replay()
    again.load_state_dict(other.state_dict())
    assert begins(again) == [0, 0, 0, 3, 3]


def test_flag_with_another_key_ends_an_episode() -> None:
    buffer = ExperienceBuffer(storage=RingStorage(9), writer=RingWriter(done_key=("next", "agent", "over")))
    buffer.extend(TensorDict({"next": {"agent": {"over": torch.zeros(4, 1, dtype=torch.bool)}}}, [4]))
    buffer.storage.write_entry(("next", "agent", "over"), torch.tensor([1]), torch.ones(1, 1, dtype=torch.bool))
    assert begins(buffer) == [0, 0, 2, 2]


def returns_of(buffer: EpisodicReplayBuffer, env: int = 0) -> list[float]:
    stored = torch.arange(int(buffer.writer.oldest[env]), int(buffer.writer.positions[env]))
    found: list[float] = buffer.get_field("discounted_return", torch.full_like(stored, env), stored).flatten().tolist()
    return found


def test_episodic_returns_follow_flags_and_rewards() -> None:
    buffer = EpisodicReplayBuffer(None, 1, 20, record_episodic_return=True, gamma=0.5)
    buffer.extend(rows(4))
    both, cell = torch.ones(1, 1, dtype=torch.bool), torch.tensor([3])
    buffer.storage.write_entry(("next", "terminated"), cell, both)
    assert returns_of(buffer) == [-1000.0] * 4
    buffer.storage.write_entry(("next", "done"), cell, both)
    assert returns_of(buffer) == [1.875, 1.75, 1.5, 1.0]
    buffer.storage.write_entry(("next", "reward"), torch.tensor([2]), torch.tensor([[5.0]]))
    assert returns_of(buffer) == [2.875, 3.75, 5.5, 1.0]
    buffer[torch.tensor([3])] = buffer[:][3:4].clone().set(("next", "reward"), torch.zeros(1, 1))
    assert returns_of(buffer) == [2.75, 3.5, 5.0, 0.0]
    buffer.storage.write_entry(("next", "done"), cell, ~both)
    assert returns_of(buffer) == [-1000.0] * 4


def test_episodic_returns_of_one_environment_of_several() -> None:
    buffer = EpisodicReplayBuffer(None, 2, 20, record_episodic_return=True, gamma=1.0)
    data = torch.stack([rows(3, done=(2,)), rows(3)], 1)
    buffer.extend(data, time_dim=0)
    index = torch.tensor([3])  # step 1 of environment 1
    for name in ("terminated", "done"):
        buffer.storage.write_entry(("next", name), index, torch.ones(1, 1, dtype=torch.bool))
    assert (returns_of(buffer, 0), returns_of(buffer, 1)) == ([3.0, 2.0, 1.0], [2.0, 1.0, -1000.0])


def test_time_steps_update_after_changed_step_types() -> None:
    row = TensorDict({"step_type": torch.tensor(0), "reward": torch.tensor(0.0), "discount": torch.tensor(1.0)})
    buffer = EpisodicReplayBuffer(row, 1, 20, record_episodic_return=True, gamma=1.0)
    kind = torch.tensor([FIRST, MID, MID, MID, MID])
    buffer.extend(TensorDict({"step_type": kind, "reward": torch.ones(5), "discount": torch.ones(5)}, [5]))
    buffer.storage.write_entry("discount", torch.tensor([2]), torch.zeros(1))
    buffer.storage.write_entry("step_type", torch.tensor([2, 3]), torch.tensor([LAST, FIRST]))
    assert begins(buffer) == [0, 0, 0, 3, 3]
    assert returns_of(buffer) == [2.0, 1.0, -1000.0, -1000.0, -1000.0]


def test_version_increases_with_flags_and_not_with_other_entries() -> None:
    buffer = replay()
    buffer.extend(rows(5).set("state", torch.zeros(5, 1)))
    rings = buffer.writer.rings
    version = rings.version
    buffer.storage.write_entry("state", torch.tensor([1]), torch.ones(1, 1))
    assert rings.version == version
    by_entry(buffer, 1, True)
    assert rings.version > version


def test_flags_that_differ_are_refused_before_anything_changes() -> None:
    buffer = replay(n_steps=3)
    data = rows(4)
    for name in ("done", "terminated"):
        data["next", name] = data["next", name].expand(4, 2).clone()
    buffer.extend(data)
    with pytest.raises(FlagsDifferError, match="done_reduce"):
        buffer.storage.write_entry(("next", "done"), torch.tensor([1]), torch.tensor([[True, False]]))
    assert not buffer[:]["next", "done"].any()
    assert begins(buffer) == [0] * 4


@pytest.mark.parametrize("index", [(2, "next"), (slice(None), 0), (..., 1)])
def test_write_into_a_view_is_refused(index: Any) -> None:
    buffer = replay()
    buffer.extend(rows(4))
    with pytest.raises(TypeError, match="write_entry"):
        buffer[index] = 0


def test_writes_into_views_do_not_update_episodes() -> None:
    buffer = replay()
    buffer.extend(rows(4))
    buffer.storage.get(slice(None))["next", "done"][1] = True
    assert begins(buffer) == [0] * 4
    assert "view" in (RingStorage.get.__doc__ or "")
    assert "write_entry" in (RingStorage.get.__doc__ or "")
