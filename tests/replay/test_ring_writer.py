"""RingWriter stores the same steps as one plain list per environment."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from kit.rings import ring
from kit.rows import numbered
from torchrl_lightning.replay import RingStorage, RingWriter


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, list[tuple[list[int] | None, int]]]:
    num_envs = draw(st.integers(1, 4))
    ids = st.none() | st.lists(st.integers(0, num_envs - 1), min_size=1, max_size=num_envs, unique=True)
    pieces = draw(st.lists(st.tuples(ids, st.integers(1, 9)), min_size=1, max_size=10))
    return num_envs, draw(st.integers(1, 5)), pieces


@settings(max_examples=150, deadline=None)
@given(plan=plans(), on_disk=st.booleans())
def test_rings_match_lists(plan: tuple, on_disk: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    num_envs, length, pieces = plan
    scratch = tmp_path_factory.mktemp("ring") if on_disk else None
    buffer = ring(length, num_envs, scratch_dir=scratch)
    writer, stored = buffer.writer, [[] for _ in range(num_envs)]
    number = 0
    for env_ids, many in pieces:
        who = list(range(num_envs)) if env_ids is None else env_ids
        values = list(range(number, number + many * len(who)))
        number += len(values)
        index = writer.extend(numbered(len(values), values[0]), None if env_ids is None else torch.tensor(env_ids))
        for i, value in enumerate(values):
            stored[who[i % len(who)]].append(value)
        kept = values[-length * len(who) :]
        assert buffer.storage.get(index[-len(kept) :])["a"].tolist() == kept
        assert writer.rings.env_of(index).tolist() == who * many

        assert writer.positions.tolist() == [len(steps) for steps in stored]
        assert writer.filled.tolist() == [min(len(steps), length) for steps in stored]
        assert len(buffer) == sum(writer.filled.tolist())
        cells = writer.rings.filled_cells()
        assert len(cells) == len(buffer)
        assert not writer.is_uniformly_filled or cells.tolist() == list(range(len(cells)))
        assert writer.is_uniformly_filled or len(set(writer.filled.tolist())) > 1
        env, position = writer.rings.env_of(cells), writer.rings.position_of(cells)
        assert torch.equal(writer.cell(env, position), cells)
        found = buffer.storage.get(cells)
        expected = [stored[e][p] for e, p in zip(env.tolist(), position.tolist(), strict=True)]
        assert found["a"].tolist() == expected
        assert found["next", "deep", "x"].tolist() == expected
        empty = torch.tensor([cell for cell in range(num_envs * length) if cell not in cells.tolist()])
        if len(empty):
            assert (writer.rings.position_of(empty) < writer.oldest[writer.rings.env_of(empty)]).all()
            with pytest.raises(IndexError, match="Cell "):
                buffer.storage.get(empty)


def test_empty_resets_the_rings() -> None:
    buffer = ring(3, 2, data=numbered(2, 1))
    buffer.extend(numbered(1, 3), env_ids=torch.tensor([1]))
    buffer.empty()
    assert len(buffer) == 0
    assert buffer.write_count == 0
    assert buffer.writer.is_uniformly_filled
    assert buffer.extend(numbered(2, 5)).tolist() == [0, 1]


def test_invalid_sizes_are_rejected() -> None:
    with pytest.raises(ValueError, match="one-dimensional"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(8, ndim=2), writer=RingWriter(2))
    for storage in (LazyTensorStorage(7), RingStorage(7)):
        with pytest.raises(ValueError, match=r"max_size=7.*num_envs=2.*max_size=6.*8"):
            TensorDictReplayBuffer(storage=storage, writer=RingWriter(2))


def test_uneven_rings_need_a_ring_storage() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), writer=RingWriter(2))
    buffer.extend(numbered(2, 1))
    with pytest.raises(ValueError, match="RingStorage"):
        buffer.writer.extend(numbered(1, 3), env_ids=torch.tensor([0]))
    assert len(buffer) == 2
    assert buffer.writer.positions.tolist() == [1, 1]


@pytest.mark.parametrize("rows", [3, 8, 11])
def test_storage_of_torchrl_keeps_the_newest_of_many_rows(rows: int) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=RingWriter())
    buffer.extend(numbered(4))
    buffer.extend(numbered(rows, 100))
    kept = [*range(4), *range(100, 100 + rows)][-4:]
    assert sorted(buffer[:]["number"].tolist()) == kept
