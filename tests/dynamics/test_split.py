"""Each row trains or validates. Its seed and position decide this once."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from kit.rings import ring, write
from torchrl_lightning import HoldoutSplit, MBReplayBuffer


def grow(buffer, split, steps):
    write(buffer, steps=steps)
    split.extend(buffer.writer)


def held(split, buffer):
    """Return the environments and positions of held-out rows."""
    rows = buffer.storage.get(split.parts(buffer.writer.rings.filled_cells())[1])
    return set(zip(rows["env"].tolist(), rows["position"].tolist(), strict=True))


@pytest.mark.parametrize("envs", [1, 4])
def test_row_keeps_its_part_while_the_buffer_grows_and_wraps(envs):
    buffer, split = ring(200 // envs, envs), HoldoutSplit(0.3, seed=1)
    old_rows: set = set()
    for steps in (30 // envs, 10, 50, 7, 40, 300 // envs):
        grow(buffer, split, steps)
        new_rows = held(split, buffer)
        oldest = int(buffer.writer.oldest[0])
        end = int(buffer.writer.positions[0]) - steps
        assert {row for row in old_rows if row[1] >= oldest} == {row for row in new_rows if row[1] < end}
        old_rows = new_rows


def test_split_does_not_depend_on_the_order_of_writes():
    splits = []
    for steps in ([90], [30, 30, 30], [1] * 90):
        buffer, split = ring(200), HoldoutSplit(seed=5)
        for count in steps:
            grow(buffer, split, count)
        splits.append(held(split, buffer))
    assert splits[0] == splits[1] == splits[2]


def test_validation_fraction_is_met_and_depends_on_the_seed():
    buffer, held_out = ring(5000, 4), []
    write(buffer, steps=5000)
    for seed in (0, 1):
        split = HoldoutSplit(0.2, 20_000, seed=seed)
        split.extend(buffer.writer)
        held_out.append(held(split, buffer))
        assert abs(len(held_out[-1]) / 20_000 - 0.2) < 0.01
    assert abs(len(held_out[0] & held_out[1]) / 20_000 - 0.04) < 0.01


def test_max_validation_frees_overwritten_rows():
    buffer, split = ring(100), HoldoutSplit(0.5, max_validation=10)
    for _ in range(30):
        grow(buffer, split, 17)
        assert len(held(split, buffer)) <= 10
    newest = int(buffer.writer.positions[0])
    assert {position for _, position in held(split, buffer)} <= set(range(newest - 100, newest))
    assert len(held(split, buffer)) == 10


@pytest.mark.parametrize(("envs", "written"), [(1, 0), (3, 0), (1, 9), (3, 9)])
@pytest.mark.parametrize("sizes", [(60, 20), (20, 60), (30, 12, 50)])
def test_row_keeps_its_part_when_the_rings_change_length(envs, written, sizes):
    buffer, split = MBReplayBuffer(sizes[0], num_envs=envs), HoldoutSplit(0.4, max_validation=25, seed=2)

    def rows(count, ids=None):
        shape = [count, envs if ids is None else len(ids)]
        name = torch.arange(rows.at, rows.at + shape[0] * shape[1]).view(shape).double()[..., None]
        rows.at += name.numel()
        after = {"observation": name, "reward": name, "done": torch.zeros_like(name, dtype=torch.bool)}
        data = TensorDict({"observation": name, "action": name, "next": after}, shape)
        buffer.extend(data, ids, time_dim=0)

    def sides():
        cells = buffer.writer.rings.filled_cells()
        names = [buffer.storage.get(part)["observation"].flatten().tolist() for part in split.parts(cells)]
        return {name: side for side, part in enumerate(names) for name in part}

    rows.at = 0
    rows(25)
    if envs > 1:
        rows(4, torch.tensor([1]))  # unevenly filled
    split.extend(buffer.writer)
    before = sides()
    for size in sizes[1:]:
        buffer.max_size = size
        count = buffer.writer.write_count
        if written:
            rows(written)
            assert buffer.writer.write_count == count + written * envs
        split.extend(buffer.writer)
        now = sides()
        assert all(now[name] == side for name, side in before.items() if name in now)
        assert set(before) & set(now)
        assert sum(now.values()) <= 25
        before = now


def test_split_restarts_with_an_emptied_buffer():
    buffer, split = ring(50), HoldoutSplit(0.5, max_validation=20)
    grow(buffer, split, 50)
    buffer.empty()
    grow(buffer, split, 5)
    grow(buffer, split, 45)
    assert 10 <= len(held(split, buffer)) <= 20


@pytest.mark.parametrize(("fraction", "part"), [(0.001, "validation"), (0.999, "training")])
def test_empty_part_is_rejected(fraction, part):
    buffer, split = ring(200), HoldoutSplit(fraction)
    grow(buffer, split, 8)
    with pytest.raises(ValueError, match=rf"validation_fraction={fraction}.*8.*{part}"):
        split.parts(torch.arange(8))
