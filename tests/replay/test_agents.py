"""Rows with one flag per agent."""

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
from torchrl_lightning.replay.episode_index import FlagsDifferError, reduce_flags

NO, ONE, BOTH = [False, False], [True, False], [True, True]


def rows(flags: list[list[bool]], shape: tuple[int, ...] = (2,)) -> TensorDict:
    """Return steps of two agents."""
    count = len(flags)
    now = torch.arange(count, dtype=torch.float32).view(-1, 1)
    done = torch.tensor(flags).view(count, *shape)
    reward = torch.ones(done.shape)
    after = {"observation": now + 1, "reward": reward, "done": done, "terminated": done.clone()}
    return TensorDict({"observation": now, "next": after}, [count])


def begins(buffer: Any) -> list[int]:
    position = torch.arange(int(buffer.writer.positions[0]))
    found: list[int] = buffer.writer.index.begin(torch.zeros_like(position), position).tolist()
    return found


USERS: dict[str, Callable[[], Any]] = {
    "n steps": lambda: ExperienceBuffer(storage=RingStorage(20), n_steps=3),
    "windows": lambda: ExperienceBuffer(storage=RingStorage(20), sampler=SequenceSampler(2)),
    "padded windows": lambda: ExperienceBuffer(storage=RingStorage(20), sampler=SequenceSampler(2, episode_ends="pad")),
    "stacks": lambda: ExperienceBuffer(storage=RingStorage(20), transform=FrameStackTransform(2)),
    "goals": lambda: ExperienceBuffer(storage=RingStorage(20), transform=HindsightRelabel()),
    "tracked": lambda: ExperienceBuffer(storage=RingStorage(20), writer=RingWriter(track_episodes=True)),
    "returns": lambda: EpisodicReplayBuffer(None, 1, 20, record_episodic_return=True),
    "episodic": lambda: EpisodicReplayBuffer(None, 1, 20, keep_episodic_info=True),
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2)])
def test_flags_that_differ_are_refused_if_episodes_are_used(user: str, shape: tuple[int, ...]) -> None:
    buffer = USERS[user]()
    buffer.extend(rows([NO, BOTH, NO], shape))
    with pytest.raises(FlagsDifferError, match="done_reduce='any'"):
        buffer.extend(rows([NO, ONE, NO], shape))
    assert len(buffer) == 3
    assert begins(buffer) == [0, 0, 2]


@pytest.mark.parametrize(("reduce", "expected"), [("any", [0, 0, 2, 2, 4]), ("all", [0, 0, 0, 0, 4])])
def test_flags_are_reduced_by_done_reduce(reduce: str, expected: list[int]) -> None:
    for buffer in (
        ExperienceBuffer(storage=RingStorage(20), n_steps=3, done_reduce=reduce),
        ExperienceBuffer(storage=RingStorage(20), writer=RingWriter(done_reduce=reduce)),
        EpisodicReplayBuffer(None, 1, 20, record_episodic_return=True, done_reduce=reduce),
    ):
        buffer.extend(rows([NO, ONE, NO, BOTH, NO]))
        assert begins(buffer) == expected
        buffer.storage.write_entry(("next", "done"), torch.tensor([0]), torch.tensor([ONE]))
        assert begins(buffer)[1] == (1 if reduce == "any" else 0)


@pytest.mark.parametrize(("reduce", "expected"), [("any", [2.0, 1.0, 2.0, 1.0]), ("all", [4.0, 3.0, 2.0, 1.0])])
def test_return_continues_while_one_agent_lives(reduce: str, expected: list[float]) -> None:
    buffer = EpisodicReplayBuffer(None, 1, 20, record_episodic_return=True, gamma=1.0, done_reduce=reduce)
    buffer.extend(rows([NO, ONE, NO, BOTH]))
    returns = buffer.get_field("discounted_return", torch.zeros(4).long(), torch.arange(4))
    assert returns[:, 1].tolist() == expected


def test_rows_with_different_flags_are_stored_until_episodes_are_used() -> None:
    buffer = ExperienceBuffer(storage=RingStorage(20))
    for _ in range(2):
        buffer.extend(rows([NO, ONE, NO]))
    assert len(buffer.sample(4)) == 4
    assert buffer.writer.index is None
    buffer.set_sampler(SequenceSampler(2))
    with pytest.raises(ValueError, match="done_reduce"):
        buffer.sample(4)
    buffer = ExperienceBuffer(storage=RingStorage(20))
    buffer.extend(rows([NO, ONE, NO]))
    buffer.append_transform(FrameStackTransform(2))
    with pytest.raises(ValueError, match="done_reduce"):
        buffer.sample(4)
    episodic = EpisodicReplayBuffer(None, 1, 20)
    episodic.extend(rows([NO, ONE, NO]))
    with pytest.raises(RuntimeError, match="done_reduce"):
        episodic.steps_to_episode_end(torch.tensor([0]), torch.tensor([0]))


def test_terminated_flags_that_differ_are_refused_before_returns_are_written() -> None:
    buffer = EpisodicReplayBuffer(None, 1, 20, record_episodic_return=True)
    data = rows([NO, BOTH])
    data["next", "terminated"] = torch.tensor([NO, ONE])
    with pytest.raises(FlagsDifferError, match="done_reduce"):
        buffer.extend(data)
    assert len(buffer) == 0


@pytest.mark.parametrize("value", ["or", True, 1])
def test_unknown_reduction_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="done_reduce"):
        RingWriter(done_reduce=value)
    with pytest.raises(ValueError, match="done_reduce"):
        ExperienceBuffer(storage=RingStorage(4), done_reduce=value)
    with pytest.raises(ValueError, match="done_reduce"):
        ExperienceBuffer(storage=RingStorage(4), writer=RingWriter(), done_reduce="any")


def test_single_flag_per_row_needs_no_reduction() -> None:
    flags = torch.tensor([[[True]], [[False]]])
    assert reduce_flags(flags, 1).tolist() == [[True, False]]
    assert reduce_flags(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), 2).tolist() == [[True], [False]]
