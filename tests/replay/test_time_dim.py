"""Buffers with a configured time dimension for rollouts without dimension names."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors.utils import split_trajectories

from torchrl_lightning import EpisodicReplayBuffer, MBReplayBuffer, RecurrentReplayBuffer, SimpleReplayBuffer
from torchrl_lightning.replay import ExperienceBuffer, RingStorage

STEPS, ENVS, LENGTH = 4, 3, 8


def rollout(steps: int = STEPS, envs: int = ENVS, start: int = 0) -> TensorDict:
    """Return a rollout ``[N, T]`` of several episodes with the numbers ``100 * env + step``."""
    value = (100.0 * torch.arange(envs)[:, None] + torch.arange(start, start + steps)).unsqueeze(-1)
    done = torch.zeros(envs, steps, 1, dtype=torch.bool)
    done[:, 1 : steps - 1] = True
    ids = done.cumsum(1).roll(1, 1).squeeze(-1)
    ids[:, 0] = 0
    ids = ids + 50 * torch.arange(envs)[:, None]
    after = {"observation": value + 1, "reward": value, "done": done, "terminated": done}
    entries = {"observation": value, "action": value, "recurrent_state": value, "collector": {"traj_ids": ids}}
    return TensorDict({**entries, "next": after}, [envs, steps])


def make(num_envs: int = ENVS, **settings: Any) -> ExperienceBuffer:
    return ExperienceBuffer(storage=RingStorage(LENGTH * num_envs), num_envs=num_envs, **settings)


def stored(buffer: Any) -> list[list[float]]:
    """Return the numbers stored in each ring, oldest first."""
    writer = buffer.writer
    steps = [torch.arange(*bounds) for bounds in zip(writer.oldest.tolist(), writer.positions.tolist(), strict=True)]
    cells = [writer.cell(torch.tensor(env), positions) for env, positions in enumerate(steps)]
    return [buffer.storage.get(each)["observation"].flatten().tolist() for each in cells]


def expected(*envs: int, steps: int = STEPS) -> list[list[float]]:
    return [[100.0 * env + step for step in range(steps)] for env in envs or range(ENVS)]


def named(data: TensorDictBase, *names: str | None) -> TensorDictBase:
    data.names = list(names)
    return data


LAYOUTS: dict[str, tuple[int | None, Callable[[TensorDict], TensorDictBase]]] = {
    "last": (-1, lambda data: data),
    "second": (1, lambda data: data),
    "first": (0, lambda data: data.transpose(0, 1)),
    "first from the end": (-2, lambda data: data.transpose(0, 1).contiguous()),
    "lazy": (-1, lambda data: TensorDict.lazy_stack(list(data.unbind(1)), 1)),
    "nested": (-1, lambda data: data.reshape(1, ENVS, STEPS)),
    "nested twice": (-1, lambda data: data.reshape(ENVS, 1, 1, STEPS)),
    "nested, time first": (0, lambda data: data.transpose(0, 1).reshape(STEPS, ENVS, 1)),
    "a name": (0, lambda data: named(data, None, "time")),
    "no setting": (None, lambda data: named(data, None, "time")),
    "another name": (-1, lambda data: named(data, "agents", None)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rollouts_of_every_layout_are_stored_in_order(layout: str) -> None:
    time_dim, arrange = LAYOUTS[layout]
    buffer = make(time_dim=time_dim)
    index = buffer.extend(arrange(rollout()))
    assert stored(buffer) == expected()
    assert index.tolist() == list(range(STEPS * ENVS))


def test_argument_of_extend_wins_over_the_setting() -> None:
    buffer = make(time_dim=-1)
    buffer.extend(rollout().transpose(0, 1), time_dim=0)
    assert stored(buffer) == expected()


@pytest.mark.parametrize("time_dim", [None, -1, 0, 1])
def test_flat_rows_are_one_step_of_each_environment(time_dim: int | None) -> None:
    buffer = make(time_dim=time_dim)
    for step in range(STEPS):
        data = rollout()[:, step]
        (buffer.extend if step % 2 else buffer.add)(data)
    assert stored(buffer) == expected()
    single = make(1, time_dim=time_dim)
    single.extend(rollout()[0])
    single.add(rollout()[0, 0])
    assert stored(single) == [[0.0, 1.0, 2.0, 3.0, 0.0]]


def test_single_steps_of_nested_batches_are_added() -> None:
    buffer = make(4, time_dim=-1)
    for step in range(2):
        buffer.add(rollout(envs=4)[:, step].reshape(2, 2))
    assert stored(buffer) == expected(*range(4), steps=2)


def test_setting_holds_for_some_environments() -> None:
    buffer = make(time_dim=-1)
    buffer.extend(rollout()[[2, 0]], env_ids=torch.tensor([2, 0]))
    assert stored(buffer) == [expected()[0], [], expected()[2]]


BUFFERS: dict[str, Callable[[], Any]] = {
    "experience": lambda: make(time_dim=-1),
    "episodic": lambda: EpisodicReplayBuffer(None, ENVS, LENGTH, record_episodic_return=True, gamma=0.9, time_dim=-1),
    "model-based": lambda: MBReplayBuffer(LENGTH, time_dim=-1),
    "recurrent": lambda: RecurrentReplayBuffer(LENGTH * ENVS, num_envs=ENVS, time_dim=-1),
    "simple": lambda: SimpleReplayBuffer(size=LENGTH * ENVS, num_envs=ENVS, time_dim=-1),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_every_replay_buffer_is_told_the_time_dimension(kind: str) -> None:
    for copied in (lambda buffer: buffer, copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))):
        buffer = copied(BUFFERS[kind]())
        buffer.extend(rollout())
        assert stored(buffer) == expected()
        assert copied(buffer).time_dim == -1


@pytest.mark.parametrize("value", ["time", 1.5, True])
def test_time_dimension_must_be_an_integer(value: Any) -> None:
    with pytest.raises(ValueError, match="time_dim"):
        make(time_dim=value)
    buffer = make()
    with pytest.raises(ValueError, match="time_dim"):
        buffer.time_dim = value
    assert buffer.time_dim is None


def test_rollouts_that_do_not_fit_change_nothing() -> None:
    cases: list[tuple[int | None, TensorDictBase, str]] = [
        (None, rollout(), "time_dim=-1"),
        (2, rollout(), "time_dim=2"),
        (-1, rollout(envs=2), "3 environments, got 2"),
        (-1, rollout(1, 2), "3 environments, got 2"),
        (-1, rollout(envs=4), "3 environments, got 4"),
        (-1, rollout().reshape(-1), "3 rows, one step per environment, got 12"),
        (1, rollout(5)[0], "3 rows, one step per environment, got 5"),
    ]
    for time_dim, data, message in cases:
        buffer = make(time_dim=time_dim)
        buffer.extend(rollout()[:, 0])
        with pytest.raises(ValueError, match=message):
            buffer.extend(data)
        assert stored(buffer) == expected(steps=1)


def test_one_step_of_fewer_environments_may_reserve_the_memory() -> None:
    buffer = make(time_dim=-1)
    buffer.extend(rollout(1, 2))
    buffer.empty()
    buffer.extend(rollout())
    assert stored(buffer) == expected()


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4))
def test_split_trajectories_are_joined(lengths: list[list[int]]) -> None:
    steps = min(map(sum, lengths))
    envs = len(lengths)
    data = rollout(steps, envs)
    for env, parts in enumerate(lengths):
        ends = torch.tensor(parts).cumsum(0)
        data["collector", "traj_ids"][env] = 50 * env + torch.searchsorted(ends, torch.arange(steps), right=True)
    buffer = ExperienceBuffer(storage=RingStorage(12 * envs), num_envs=envs, time_dim=-1)
    buffer.extend(split_trajectories(data, prefix="collector"))
    assert stored(buffer) == expected(*range(envs), steps=steps)
    assert set(buffer.storage.tree["collector"]) == {"traj_ids"}


def test_masked_rows_that_cannot_be_joined_are_refused() -> None:
    buffer = make(2, time_dim=-1)
    data = rollout(envs=2)
    for mask in (
        [[1, 1, 1, 0], [1, 1, 1, 1]],
        [[1, 1, 0, 0], [1, 1, 1, 1]],
        [[1, 0, 1, 0], [1, 1, 0, 0]],
        [[0] * 4] * 2,
    ):
        with pytest.raises(ValueError, match="split_trajs=False"):
            buffer.extend(data.clone().set(("collector", "mask"), torch.tensor(mask).bool()))
    assert not len(buffer)
    buffer.extend(data.set(("collector", "mask"), torch.tensor([[1, 1, 1, 0]] * 2).bool()))  # equally long
    assert stored(buffer) == expected(0, 1, steps=3)


def test_state_is_resumed_with_another_setting() -> None:
    buffer = make(time_dim=-1)
    buffer.extend(rollout())
    for time_dim in (None, 0, 1):
        resumed = make(time_dim=time_dim)
        resumed.load_state_dict(buffer.state_dict())
        assert resumed.time_dim == time_dim
        following = rollout(2, start=STEPS)
        resumed.extend(named(following, None, "time") if time_dim is None else following.transpose(0, 1 - time_dim))
        assert stored(resumed) == expected(steps=STEPS + 2)


def test_process_of_a_shared_buffer_keeps_its_rings() -> None:
    buffer = make(5, time_dim=-1).share(example=rollout()[0, 0])
    for start in (0, 2):
        buffer.extend(rollout(2, 2, start))
    buffer.add(rollout(1, 2, 4)[:, 0])
    assert stored(buffer) == [*expected(0, 1, steps=5), [], [], []]
    buffer.extend(rollout(1, 5, 5))
    assert buffer.writer.positions.tolist() == [6, 6, 1, 1, 1]


def test_rows_of_one_environment_are_known_by_their_trajectories() -> None:
    buffer = make(time_dim=-1).share(example=rollout()[0, 0])
    buffer.extend(rollout(3)[1])  # the number of steps equals the number of environments
    assert sorted(stored(buffer)) == [[], [], [100.0, 101.0, 102.0]]
    flat = make(time_dim=-1).share(example=rollout()[0, 0])
    flat.extend(rollout()[:, 0])
    assert stored(flat) == expected(steps=1)
    unknown = make(time_dim=-1).share(example=rollout()[0, 0].exclude("collector"))
    with pytest.raises(ValueError, match="3 rows"):
        unknown.extend(rollout()[0].exclude("collector"))
