"""Overwriting of stored steps, also with steps that were read from the same buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import TensorDictMaxValueWriter, TensorDictReplayBuffer

from kit.rings import ring
from kit.rows import numbered
from torchrl_lightning.replay import ExperienceBuffer, RingStorage, RingWriter

CAPACITY = 8


def filled(rows: int) -> Any:
    ours = ring(CAPACITY, batch_size=4)
    ours.extend(numbered(rows))
    return ours


def shown(ours: Any) -> list[int]:
    return ours[:]["a"].tolist()


@pytest.mark.parametrize("rows", [6, 8, 11])
def test_stored_rows_can_overwrite_each_other(rows: int) -> None:
    ours = filled(rows)
    before = shown(ours)
    ours[:] = ours[:]
    ours.write_all(ours.read_all_in_order())
    ours["a"] = ours[:]["a"]
    assert (shown(ours), ours.write_count) == (before, rows)


@given(rows=st.integers(2, 20), start=st.integers(0, 7), count=st.integers(1, 8), to=st.integers(0, 7))
def test_view_is_written_like_its_copy(rows: int, start: int, count: int, to: int) -> None:
    ours, copied = filled(rows), filled(rows)
    count = min(count, len(ours) - start, len(ours) - to)
    if count > 0:
        for each, seen in ((ours, ours[start : start + count]), (copied, copied[start : start + count].clone())):
            each[to : to + count] = seen
        assert shown(ours) == shown(copied)
        ours.extend(ours[start : start + count])
        copied.extend(copied[start : start + count].clone())
        assert shown(ours) == shown(copied)


@pytest.mark.parametrize(
    ("index", "cells"),
    [
        (slice(None), [0, 1, 2, 3, 4]),
        (slice(1, 3), [1, 2]),
        (slice(-2, None), [3, 4]),
        (-1, [4]),
        (torch.tensor(2), [2]),
        ([0, -2], [0, 3]),
        (np.array([3, 1]), [3, 1]),
        (np.array([True, False, False, True, False]), [0, 3]),
        (torch.tensor([True, False, False, True, False]), [0, 3]),
    ],
)
def test_read_cells_can_be_written(index: Any, cells: list[int]) -> None:
    ours, expected = filled(5), [0, 1, 2, 3, 4]
    for cell, value in zip(cells, range(50, 60), strict=False):
        expected[cell] = value
    rows = numbered(len(cells), 50)
    ours[index] = rows if torch.as_tensor(ours[index]["a"]).ndim else rows[0]
    assert shown(ours) == expected


def test_entry_of_all_rows_is_overwritten() -> None:
    ours = filled(5)
    ours["a"] = torch.arange(5.0) * 2
    assert shown(ours) == [0, 2, 4, 6, 8]
    ours["next", "done"] = torch.ones(5, 1, dtype=torch.bool)
    assert ours[:]["next", "done"].all()


@pytest.mark.parametrize(
    ("index", "value", "error", "says"),
    [
        (slice(None), lambda ours: ours[:].clone().set("new", torch.zeros(5)), ValueError, "'new' is new; nothing was"),
        (slice(None), lambda ours: ours[:3], ValueError, r"batch size is \[3\], expected \[5\]"),
        (6, lambda ours: numbered(1)[0], IndexError, "Cell 6 .*5 of 8"),
        (-6, lambda ours: numbered(1)[0], IndexError, "Cell -6 "),
        ("new", lambda ours: torch.zeros(5), KeyError, "no entry 'new'"),
        ("a", lambda ours: torch.zeros(5).long(), ValueError, "Entry 'a' must be"),
        ("a", lambda ours: torch.arange(8.0), ValueError, "Entry 'a' must be"),
    ],
)
def test_invalid_data_is_rejected_before_anything_changes(index: Any, value: Any, error: Any, says: str) -> None:
    ours = filled(5)
    with pytest.raises(error, match=says):
        ours[index] = value(ours)
    assert shown(ours) == [0, 1, 2, 3, 4]


def test_cells_of_uneven_rings_need_a_tensor_index() -> None:
    ours = ring(4, num_envs=2, batch_size=2)
    ours.extend(numbered(2))
    ours.extend(numbered(1, 7), env_ids=torch.tensor([1]))
    with pytest.raises(IndexError, match="unevenly filled"):
        ours[:] = numbered(3)
    ours[torch.tensor([3, 0])] = numbered(2, 50)
    assert ours.storage.get(torch.tensor([0, 1, 3]))["a"].tolist() == [51, 1, 50]


@pytest.mark.parametrize("by_one", [False, True])
def test_torchrls_ranking_writer_keeps_the_best(by_one: bool) -> None:
    writer = TensorDictMaxValueWriter(rank_key="a")
    ours = TensorDictReplayBuffer(storage=RingStorage(3), writer=writer, batch_size=2)
    if by_one:
        ours.add(numbered(1, 7)[0])
    ours.extend(numbered(6))
    for start in (30, 2, 20):
        ours.add(numbered(1, start)[0])
    assert sorted(shown(ours)) == ([7, 20, 30] if by_one else [5, 20, 30])
    assert ours.sample().batch_size == torch.Size([2])


def test_full_ring_rejects_a_row_of_all_environments() -> None:
    ours = ExperienceBuffer(storage=RingStorage(4), writer=RingWriter(num_envs=2, overwrite=False))
    ours.extend(numbered(2))
    ours.extend(numbered(1, 2), env_ids=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"environments \[1\] have no room for 1 more"):
        ours.extend(numbered(2, 3))
    assert len(ours) == 3
    ours.extend(numbered(1, 5), env_ids=torch.tensor([0]))
    assert len(ours) == 4
