"""The episode index equals ALF's recorded index and a brute-force twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.golden import arrays
from kit.rings import ring
from kit.twin import Twin

FIRST, LAST = 0, 2


@pytest.mark.parametrize("case", range(4))
def test_index_golden(case: int) -> None:
    data = arrays("alf_episode_index", f"c{case}_")
    num_envs, length = data["num_envs_max_length"].tolist()
    buffer, rows = ring(length, num_envs), Twin(num_envs, length).rows
    writer = buffer.writer
    for i, types in enumerate(data["step_type"]):
        env = np.flatnonzero(types >= 0)
        flags = [(bool(kind == LAST), bool(kind == FIRST)) for kind in types[env]]
        writer.extend(rows(env.tolist(), [flags])[0], env_ids=torch.from_numpy(env))
        assert writer.positions.tolist() == data["current_pos"][i].tolist()
        for e in range(num_envs):
            position = torch.arange(int(writer.oldest[e]), int(writer.positions[e]))
            ids, count = torch.full_like(position, e), len(position)
            assert writer.index.begin(ids, position, clip=False).tolist() == data["begin_pos"][i, e, :count].tolist()
            assert writer.index.steps_to_end(ids, position).tolist() == data["steps_to_end"][i, e, :count].tolist()


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
def test_index_matches_brute_force(plan: tuple) -> None:
    num_envs, length, pieces = plan
    buffer, twin = ring(length, num_envs), Twin(num_envs, length)
    for env_ids, block in pieces:
        rows = twin.rows(env_ids or list(range(num_envs)), block)
        buffer.writer.extend(rows.reshape(-1), None if env_ids is None else torch.tensor(env_ids))
        index, where = buffer.writer.index, twin.stored()
        oldest = dict(reversed(where))
        at = torch.tensor([env for env, _ in where]), torch.tensor([position for _, position in where])
        begin, end = [twin.begin(*step) for step in where], [twin.end(*step) for step in where]
        assert index.begin(*at, clip=False).tolist() == begin
        assert index.begin(*at).tolist() == [max(b, oldest[env]) for b, (env, _) in zip(begin, where, strict=True)]
        assert index.end(*at).tolist() == end
        finished = [twin.done[env][e] for e, (env, _) in zip(end, where, strict=True)]
        assert index.finished(*at).tolist() == finished


def test_missing_steps_raise_an_index_error() -> None:
    buffer = ring(3, 2)
    buffer.extend(Twin(2, 3).rows([0, 1], [[False, False]] * 5), time_dim=0)
    for env, position in ((0, 1), (1, 5), (2, 4)):
        with pytest.raises(IndexError):
            buffer.writer.index.begin(torch.tensor([env]), torch.tensor([position]))


def test_cut_ends_the_running_episodes_unfinished() -> None:
    buffer, twin = ring(9), Twin(1, 9)
    for _ in range(2):
        buffer.extend(twin.rows([0], [[False], [False]]), time_dim=0)
        buffer.writer.cut()
        twin.cut([0])
    where, index = (torch.zeros(4, dtype=torch.long), torch.arange(4)), buffer.writer.index
    assert index.begin(*where).tolist() == [twin.begin(*step) for step in twin.stored()] == [0, 0, 2, 2]
    assert index.end(*where).tolist() == [1, 1, 3, 3]
    assert not index.finished(*where).any()
