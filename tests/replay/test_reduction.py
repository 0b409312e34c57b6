"""Every path reduces priorities with extra dimensions, for example errors of several critics, to one per row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data.replay_buffers.samplers import Sampler

from kit.rings import ring
from kit.rows import numbered
from torchrl_lightning import MixedReplay, PrioritizedSampler, RecentSampler, RingStorage, RingWriter
from torchrl_lightning.episodic import EpisodicReplayBuffer

REDUCE = {
    "max": lambda errors: errors.amax(-1),
    "min": lambda errors: errors.amin(-1),
    "mean": lambda errors: errors.mean(-1),
    "median": lambda errors: errors.median(-1).values,
}
reductions = pytest.mark.parametrize("reduction", REDUCE)
FLAT = ((), (1,), (2,), (5,), (1, 2), (2, 1), (3, 2))
SIZE = 12


def sampler(reduction: str = "max", **settings: Any) -> PrioritizedSampler:
    return PrioritizedSampler(SIZE, 1.0, 1.0, 0.0, reduction=reduction, **settings)


def expected(index: Tensor, errors: Tensor, reduction: str, rows: int = SIZE) -> Tensor:
    """Return the expected priorities of all cells. If several rows name a cell, the last row counts."""
    priorities = torch.ones(rows, dtype=torch.float64)
    for cell, error in zip(index.tolist(), errors.reshape(len(index), -1), strict=True):
        priorities[cell] = REDUCE[reduction](error).double()
    return priorities


def torchrls(house: str, kind: PrioritizedSampler) -> TensorDictReplayBuffer:
    if house == "torchrl":
        return TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE), sampler=kind, batch_size=8)
    return TensorDictReplayBuffer(storage=RingStorage(SIZE), writer=RingWriter(), sampler=kind, batch_size=8)


def buffer(house: str, kind: PrioritizedSampler) -> Any:
    return ring(SIZE, sampler=kind, batch_size=8) if house == "ours" else torchrls(house, kind)


@pytest.mark.parametrize("house", ["ours", "torchrl", "torchrl_over_ring"])
@pytest.mark.parametrize("shape", FLAT)
@reductions
def test_batch_gives_one_priority_for_each_row(house: str, shape: tuple[int, ...], reduction: str) -> None:
    replay = buffer(house, sampler(reduction))
    replay.extend(numbered(SIZE))
    batch = replay.sample()
    batch["td_error"] = torch.rand(8, *shape)
    replay.update_tensordict_priority(batch)
    torch.testing.assert_close(replay.sampler.table.priorities, expected(batch["index"], batch["td_error"], reduction))


@pytest.mark.parametrize("house", ["ours", "torchrl", "torchrl_over_ring"])
@pytest.mark.parametrize("shape", FLAT)
@reductions
def test_cells_and_written_rows_give_one_priority_each(house: str, shape: tuple[int, ...], reduction: str) -> None:
    replay, errors = buffer(house, sampler(reduction)), torch.rand(SIZE, *shape)
    index = replay.extend(numbered(SIZE, td_error=errors))
    torch.testing.assert_close(replay.sampler.table.priorities, expected(index, errors, reduction))
    chosen, errors = torch.tensor([3, 1, 7]), torch.rand(3, *shape)
    replay.update_priority(chosen, errors)
    torch.testing.assert_close(replay.sampler.table.priorities[chosen], expected(chosen, errors, reduction)[chosen])


@pytest.mark.parametrize("envs", [1, 2])
@reductions
def test_rollouts_with_errors_of_several_critics_are_reduced(envs: int, reduction: str) -> None:
    replay = ring(SIZE // envs, envs, sampler(reduction))
    steps, errors = 5, torch.rand(envs, 5, 2)
    rows = numbered(envs * steps, td_error=errors.reshape(-1, 2)).reshape(envs, steps)
    rows.names = [None, "time"]
    index = replay.extend(rows)
    flat = errors.transpose(0, 1).reshape(-1, 2)
    torch.testing.assert_close(replay.sampler.table.priorities[index], expected(index, flat, reduction, SIZE)[index])


@pytest.mark.parametrize("recent", [False, True])
@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2), (3, 1, 2), (), (1,)])
@reductions
def test_window_gets_one_priority(recent: bool, shape: tuple[int, ...], reduction: str) -> None:
    kind: Any = sampler(reduction, batch_length=3)
    table = kind.table
    replay = ring(SIZE, sampler=RecentSampler(3, prioritized=kind) if recent else kind, batch_size=8, filled=SIZE)
    batch = replay.sample()
    errors = torch.rand(8, *shape)
    if shape[:1] == (3,):
        batch["td_error"] = errors
        replay.update_tensordict_priority(batch)
    else:
        replay.update_priority(batch["index"], errors)
    torch.testing.assert_close(table.priorities, expected(batch["index"][:, 0], errors, reduction))


@pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 2)])
@reductions
def test_cells_of_any_shape_get_one_priority_each(shape: tuple[int, ...], reduction: str) -> None:
    replay = ring(SIZE, sampler=sampler(reduction), filled=SIZE)
    index, errors = torch.tensor([[3, 1, 7], [0, 2, 5]]), torch.rand(2, 3, *shape)
    replay.update_priority(index, errors)
    flat = errors.reshape(6, -1)
    torch.testing.assert_close(replay.sampler.table.priorities, expected(index.flatten(), flat, reduction))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.float32, torch.float64])
@reductions
def test_errors_of_every_dtype_are_reduced(dtype: torch.dtype, reduction: str) -> None:
    replay = ring(SIZE, sampler=sampler(reduction), filled=SIZE)
    batch = replay.sample(4)
    batch["td_error"] = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 1], [0, 1, 0]]).to(dtype)
    replay.update_tensordict_priority(batch)
    torch.testing.assert_close(
        replay.sampler.table.priorities,
        expected(batch["index"], batch["td_error"].double(), reduction),
        atol=1e-3,
        rtol=0,
    )


@reductions
def test_mixed_batches_give_one_priority_for_each_row(reduction: str) -> None:
    buffers = [ring(SIZE, sampler=sampler(reduction), filled=SIZE, seed=seed) for seed in (0, 1)]
    mixed = MixedReplay(buffers[0], buffers[1:], [0.5, 0.5])
    batch = mixed.draw(8)
    batch["td_error"] = torch.rand(8, 2)
    mixed.update_tensordict_priority(batch)
    for number, replay in enumerate(buffers):
        rows = batch[batch["source"] == number]
        torch.testing.assert_close(
            replay.sampler.table.priorities, expected(rows["index"], rows["td_error"], reduction)
        )


@reductions
def test_positions_of_environments_get_one_priority_each(reduction: str) -> None:
    row = TensorDict({"x": torch.tensor(0.0)})
    replay = EpisodicReplayBuffer(row, 2, 6, prioritized_sampling=True)
    for _ in range(6):
        replay.add_batch(row.expand(2))
    replay.sampler.reduction = reduction
    errors = torch.rand(2, 3)
    replay.update_priority(torch.tensor([0, 1]), torch.tensor([2, 3]), errors)
    cells = torch.tensor([4, 7])
    torch.testing.assert_close(replay.sampler.table.priorities[cells], expected(cells, errors, reduction)[cells])


class TorchRLSampler(TorchRLPrioritizedSampler):
    """TorchRL's sampler without its compiled trees. It records the priorities that it receives."""

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction
        self.given: list[tuple[Tensor, Tensor]] = []

    def sample(self, storage: Any, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        return torch.arange(batch_size), {}

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        self.given.append((index, priority))

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        pass

    extend = add = Sampler.extend


@pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 2)])
@reductions
def test_torchrl_samplers_get_one_priority_per_row(shape: tuple[int, ...], reduction: str) -> None:
    replay = ring(SIZE, sampler=TorchRLSampler(reduction), filled=SIZE)
    batch = replay.sample(4)
    batch["td_error"] = torch.rand(4, *shape)
    replay.update_tensordict_priority(batch)
    ((index, priority),) = replay.sampler.given
    assert torch.equal(index, batch["index"])
    torch.testing.assert_close(priority, REDUCE[reduction](batch["td_error"].reshape(4, -1)))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (8,), (2, 4)])
def test_torchrl_samplers_get_other_priority_shapes_unchanged(shape: tuple[int, ...]) -> None:
    replay, errors = ring(SIZE, sampler=TorchRLSampler("max"), filled=SIZE), torch.rand(shape)
    batch = TensorDict({"index": torch.arange(4), "td_error": errors})
    replay.update_tensordict_priority(batch)
    assert torch.equal(replay.sampler.given[0][1], errors.reshape(-1))


@reductions
def test_mixed_windows_give_one_priority_each(reduction: str) -> None:
    kinds = [sampler(reduction, batch_length=3) for _ in range(2)]
    buffers = [ring(SIZE, sampler=kind, filled=SIZE, seed=seed) for seed, kind in enumerate(kinds)]
    mixed = MixedReplay(buffers[0], buffers[1:], [0.5, 0.5])
    batch = mixed.draw(8)
    batch["td_error"] = torch.rand(8, 3, 2)
    mixed.update_tensordict_priority(batch)
    for number, kind in enumerate(kinds):
        rows = batch[batch["source"][:, 0] == number]
        wanted = expected(rows["index"][:, 0], rows["td_error"].flatten(1), reduction)
        torch.testing.assert_close(kind.table.priorities, wanted)


@reductions
def test_single_row_with_errors_of_several_critics_is_reduced(reduction: str) -> None:
    replay, errors = ring(SIZE, sampler=sampler(reduction)), torch.rand(3)
    replay.add(numbered(1, td_error=errors.view(1, 3))[0])
    assert replay.sampler.table.priorities[0] == REDUCE[reduction](errors).double()


@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_rewritten_errors_of_windows_keep_their_priorities(reduction: str) -> None:
    replay = ring(SIZE, sampler=sampler(reduction, batch_length=3))
    replay.extend(numbered(SIZE, td_error=torch.rand(SIZE, 2)))
    batch, before = replay.sample(8), replay.sampler.table.priorities.clone()
    batch["td_error"] = torch.rand(8, 3, 2)
    replay.write_back(batch, ["td_error"])
    assert torch.equal(replay.sampler.table.priorities, before)
    cell, error = batch["index"][-1, 0], batch["td_error"][-1, 0]
    assert torch.equal(replay.storage.get(cell.reshape(1))["td_error"][0], error)


@pytest.mark.parametrize("shape", [(3,), (3, 2), (2, 4), (0,), (4, 0)])
def test_wrong_number_of_priorities_raises_an_error(shape: tuple[int, ...]) -> None:
    replay = ring(SIZE, sampler=sampler(), filled=SIZE)
    before = replay.sampler.table.priorities.clone()
    with pytest.raises(ValueError, match=r"priority must be .* got shape"):
        replay.update_priority(torch.arange(4), torch.rand(shape))
    assert torch.equal(replay.sampler.table.priorities, before)
