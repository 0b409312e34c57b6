"""The episode index against ALF's recorded one, and against a brute-force twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from kit.golden import arrays
from torchrl_lightning.replay import RingStorage, RingWriter

FIRST, LAST = 0, 2


def rings(num_envs: int, length: int) -> RingWriter:
    writer = RingWriter(num_envs, track_episodes=True)
    storage = RingStorage(num_envs * length)
    writer.register_storage(storage)
    writer.kept = storage  # the storage knows its writer weakly, and the writer here has no buffer
    return writer


def steps(done: list[bool], init: list[bool]) -> TensorDict:
    column = {"is_init": torch.tensor(init).unsqueeze(-1), "next": {"done": torch.tensor(done).unsqueeze(-1)}}
    return TensorDict(column, [len(done)])


@pytest.mark.parametrize("case", range(4))
def test_golden(case: int) -> None:
    data = arrays("alf_episode_index", f"c{case}_")
    num_envs, length = data["num_envs_max_length"].tolist()
    writer = rings(num_envs, length)
    for i, types in enumerate(data["step_type"]):
        env = np.flatnonzero(types >= 0)
        kinds = types[env]
        writer.extend(steps((kinds == LAST).tolist(), (kinds == FIRST).tolist()), env_ids=torch.from_numpy(env))
        assert writer.positions.tolist() == data["current_pos"][i].tolist()
        for e in range(num_envs):
            position = torch.arange(int(writer.oldest[e]), int(writer.positions[e]))
            ids, count = torch.full_like(position, e), len(position)
            assert writer.index.begin(ids, position, clip=False).tolist() == data["begin_pos"][i, e, :count].tolist()
            assert writer.index.steps_to_end(ids, position).tolist() == data["steps_to_end"][i, e, :count].tolist()


class Twin:
    """All steps ever written, as lists; everything else follows by looking."""

    def __init__(self, num_envs: int, length: int) -> None:
        self.length = length
        self.steps: list[list[tuple[bool, bool]]] = [[] for _ in range(num_envs)]

    def begin(self, env: int, position: int) -> int:
        steps = self.steps[env]
        while position and not steps[position][1] and not steps[position - 1][0]:
            position -= 1
        return position

    def end(self, env: int, position: int) -> int:
        steps = self.steps[env]
        while not steps[position][0] and position + 1 < len(steps) and not steps[position + 1][1]:
            position += 1
        return position


flags = st.tuples(st.sampled_from([False, False, True]), st.sampled_from([False, False, False, True]))


@st.composite
def writes(draw: st.DrawFn) -> tuple[int, int, list[tuple[list[int] | None, list[list[tuple[bool, bool]]]]]]:
    num_envs, length = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    ids = st.none() | st.lists(st.integers(0, num_envs - 1), min_size=1, max_size=num_envs, unique=True)
    plan = []
    for env_ids in draw(st.lists(ids, min_size=1, max_size=12)):
        width = num_envs if env_ids is None else len(env_ids)
        many = draw(st.sampled_from([1, 1, 1, 2, 5, 9]))
        plan.append((env_ids, [[draw(flags) for _ in range(width)] for _ in range(many)]))
    return num_envs, length, plan


@settings(max_examples=150, deadline=None)
@given(writes())
def test_like_brute_force(plan: tuple) -> None:
    num_envs, length, pieces = plan
    writer, twin = rings(num_envs, length), Twin(num_envs, length)
    for env_ids, block in pieces:
        done = [flag[0] for row in block for flag in row]
        init = [flag[1] for row in block for flag in row]
        writer.extend(steps(done, init), None if env_ids is None else torch.tensor(env_ids))
        for row in block:
            for env, flag in zip(env_ids or range(num_envs), row, strict=True):
                twin.steps[env].append(flag)
        oldest = [max(0, len(stored) - length) for stored in twin.steps]
        where = [(env, p) for env, stored in enumerate(twin.steps) for p in range(oldest[env], len(stored))]
        at = torch.tensor([env for env, _ in where]), torch.tensor([position for _, position in where])
        begin, end = [twin.begin(*step) for step in where], [twin.end(*step) for step in where]
        assert writer.index.begin(*at, clip=False).tolist() == begin
        assert writer.index.begin(*at).tolist() == [
            max(b, oldest[env]) for b, (env, _) in zip(begin, where, strict=True)
        ]
        assert writer.index.end(*at).tolist() == end
        finished = [twin.steps[env][e][0] for e, (env, _) in zip(end, where, strict=True)]
        assert writer.index.finished(*at).tolist() == finished


def test_steps_that_are_not_stored_are_refused() -> None:
    writer = rings(2, 3)
    for _ in range(5):
        writer.extend(steps([False, False], [False, False]))
    for env, position in ((0, 1), (1, 5), (2, 4)):
        with pytest.raises(IndexError):
            writer.index.begin(torch.tensor([env]), torch.tensor([position]))


def test_a_cut_ends_the_running_episodes_unfinished() -> None:
    writer = rings(1, 9)
    for _ in range(2):
        writer.extend(steps([False, False], [False, False]))
        writer.cut()
    env, position = torch.zeros(4, dtype=torch.long), torch.arange(4)
    assert writer.index.begin(env, position).tolist() == [0, 0, 2, 2]
    assert writer.index.end(env, position).tolist() == [1, 1, 3, 3]
    assert not writer.index.finished(env, position).any()


def test_a_missing_flag_is_an_error() -> None:
    with pytest.raises(KeyError, match="done"):
        rings(1, 4).extend(TensorDict({"a": torch.zeros(2)}, [2]))
