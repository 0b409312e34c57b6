"""Calls that fail change nothing, and say what came; calls that ask for nothing get nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, TensorDictReplayBuffer
from torchrl.data.replay_buffers.utils import TED2Flat

from kit.rings import ring
from kit.rows import numbered
from torchrl_lightning import (
    ExperienceBuffer,
    PPOBuffer,
    PrioritizedSampler,
    RecurrentReplayBuffer,
    RingStorage,
    RingWriter,
    SequenceSampler,
    SimpleReplayBuffer,
    UniformSampler,
)

SIZES = pytest.mark.parametrize("size", [-1, 2.5, True, "3"])


def buffer(filled: int = 5, num_envs: int = 1, **kwargs: Any) -> ExperienceBuffer:
    return ring(8 // num_envs, num_envs, filled=filled, **kwargs)


def prioritized(filled: int = 5, capacity: int = 8) -> ExperienceBuffer:
    return buffer(filled, sampler=PrioritizedSampler(capacity, 1.0, 1.0))


def state(ours: ExperienceBuffer) -> str:
    return repr((ours.state_dict(), sorted(ours.storage.tree), len(ours), ours.writer.index is None))


def lazy(**last: Any) -> LazyStackedTensorDict:
    *steps, end = numbered(3).unbind(0)
    return LazyStackedTensorDict(*steps, end.copy().update(last))


# ---------------------------------------------------------------------- a failed write


@pytest.mark.parametrize("filled", [0, 5])
@pytest.mark.parametrize("wrong", [math.nan, -1.0, math.inf])
def test_a_wrong_priority_is_refused_before_anything_is_written(wrong: float, filled: int) -> None:
    ours = prioritized(0)
    if filled:
        ours.extend(numbered(filled, td_error=torch.ones(filled)))
    before = state(ours)
    with pytest.raises(ValueError, match=r"got (nan|-1\.0|inf) in row 1; nothing was written"):
        ours.extend(numbered(2, td_error=torch.tensor([1.0, wrong])))
    assert state(ours) == before


def test_priorities_with_further_dimensions_are_reduced() -> None:
    ours = prioritized(0)
    ours.extend(numbered(2, td_error=torch.tensor([[1.0, 2.0], [3.0, 1.0]])))
    assert ours.sampler.table.priorities[:2].tolist() == [2, 3]


@pytest.mark.parametrize("filled", [0, 3])
def test_a_sampler_smaller_than_the_storage_is_refused_before_anything_is_written(filled: int) -> None:
    ours = buffer(filled)
    ours.set_sampler(PrioritizedSampler(4, 1.0, 1.0))
    before = state(ours)
    with pytest.raises(ValueError, match=r"8 cells, this sampler keeps 4 .* max_capacity=8"):
        ours.extend(numbered(2))
    assert state(ours) == before


def test_a_failed_first_write_leaves_the_schema_open() -> None:
    ours = ExperienceBuffer(storage=RingStorage(8), writer=RingWriter(track_episodes=True))
    with pytest.raises(KeyError, match="track_episodes=True needs"):
        ours.extend(TensorDict({"b": torch.zeros(2)}, [2]))
    ours.extend(numbered(2))
    assert sorted(ours[:].keys()) == ["a", "next", "number"]
    ours = buffer(0)
    with pytest.raises(ValueError, match="meta"):
        ours.extend(numbered(2).to("meta"))
    ours.extend(TensorDict({"b": torch.zeros(2)}, [2]))  # nor has it made an episode index that needs a done flag
    assert ours.writer.index is None


@pytest.mark.parametrize("filled", [0, 5])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: numbered(3, x=NonTensorData("a", [3])), "'x' is a NonTensorData"),
        (lambda: numbered(3, x=NonTensorStack("a", "b", "c")), "'x' is a NonTensorStack"),
        (lambda: numbered(3, x="text"), "'x' is a NonTensorData"),
        (lambda: numbered(3, x=np.array(["a", "b", "c"])), "'x' is a NonTensorData"),
        (lambda: numbered(3).set("x", {"y": np.zeros(3), "z": "text"}), r"\('x', 'z'\) is a NonTensorData"),
        (lambda: numbered(3, x=torch.eye(3).to_sparse()), "'x' is a sparse"),
        (lambda: lazy(extra=torch.zeros(())), r"Only some rows have the entries \['extra'\]"),
    ],
)
def test_entries_that_are_no_tensors_are_refused_by_name(make: Callable[[], Any], says: str, filled: int) -> None:
    ours = buffer(filled)
    before = state(ours)
    with pytest.raises(TypeError, match=says):
        ours.extend(make())
    assert state(ours) == before


def test_lazy_stacks_of_equal_rows_are_written() -> None:
    ours = buffer(0)
    ours.extend(lazy())
    ours.extend(lazy())
    assert ours[:]["a"].tolist() == [0, 1, 2, 0, 1, 2]


# ---------------------------------------------------------------------- what is no TensorDict


@pytest.mark.parametrize("data", [torch.zeros(3), [1, 2], {"a": torch.zeros(3)}])
def test_what_is_no_tensordict_is_refused_by_name(data: Any) -> None:
    kind = "plain tensor" if isinstance(data, torch.Tensor) else type(data).__name__
    storage = RingStorage(8)
    calls = [
        buffer().extend,
        buffer().add,
        buffer().update_tensordict_priority,
        lambda data: buffer().write_back(data, ["a"]),
        RingWriter().extend,
        RingWriter().add,
        lambda data: storage.set(slice(0, 3), data),
        ReplayBuffer(storage=RingStorage(8), writer=RingWriter()).extend,
        SimpleReplayBuffer(1, 1, 8, 2).extend,
        RecurrentReplayBuffer(8, 1, 1, 1).extend,
        PPOBuffer(1, 1, 8, 2).writer.add,
    ]
    for call in calls:
        with pytest.raises(TypeError, match=f"Expected a TensorDict, got a {kind}"):
            call(data)
    assert not storage.tree


def test_a_mixture_of_ours_and_torchrls_buffers() -> None:
    parts = [
        TensorDictReplayBuffer(storage=RingStorage(8), writer=RingWriter(), batch_size=2),
        TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=2),
    ]
    for part in parts:
        part.extend(TensorDict({"a": torch.ones(3)}, [3]))
    mixture = ReplayBufferEnsemble(*parts, p=[0.5, 0.5], batch_size=4)
    assert mixture.sample()["a"].tolist() == [[1.0, 1.0], [1.0, 1.0]]


# ---------------------------------------------------------------------- nothing


@pytest.mark.parametrize("filled", [0, 5])
def test_writing_no_rows_writes_nothing(filled: int) -> None:
    for ours in (buffer(filled), prioritized(filled), buffer(filled, writer=RingWriter(1))):
        before = state(ours)
        for write in (ours.extend, ours.writer.extend):
            index = write(numbered(0))
            assert index.tolist() == []
            assert index.dtype == torch.int64
        assert state(ours) == before
    several = buffer(0, num_envs=2)
    assert several.extend(TensorDict({"a": torch.zeros(2, 0)}, [2, 0]), time_dim=1).tolist() == []
    assert several.extend(numbered(0), env_ids=[]).tolist() == []


SAMPLERS = [
    UniformSampler,
    lambda: UniformSampler(with_replacement=False),
    lambda: UniformSampler(stratified=True),
    lambda: PrioritizedSampler(8, 1.0, 1.0),
    lambda: PrioritizedSampler(8, 1.0, 1.0, weight_norm="buffer"),
    lambda: SequenceSampler(2),
    lambda: SequenceSampler(2, episode_ends="pad"),
    lambda: SequenceSampler(2, episode_ends="across"),
]


@pytest.mark.parametrize("make", SAMPLERS)
def test_sampling_nothing_gives_an_empty_batch(make: Callable[[], Any]) -> None:
    ours = buffer(sampler=make())
    batch = ours.sample(0)
    assert len(batch) == 0
    assert set(ours.sample(2).keys(True, True)) == set(batch.keys(True, True))
    assert batch.shape[1:] == ours.sample(2).shape[1:]


@SIZES
@pytest.mark.parametrize("make", SAMPLERS)
def test_other_batch_sizes_are_refused(make: Callable[[], Any], size: Any) -> None:
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 0, got"):
        buffer(sampler=make()).sample(size)


def test_priorities_of_nothing() -> None:
    ours = prioritized()
    before = ours.sampler.table.priorities.clone()
    ours.update_priority([], torch.zeros(0))
    ours.update_priority([], 1.0)
    ours.sampler.mark_update([])
    ours.update_tensordict_priority(ours.sample(0).set("td_error", torch.zeros(0)))
    assert ours.write_back(ours.sample(2), []).tolist() == []
    assert torch.equal(ours.sampler.table.priorities, before)


# ---------------------------------------------------------------------- cells and environments


def test_negative_numbers_count_from_the_last_cell() -> None:
    ours, theirs = buffer(), TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    theirs.extend(numbered(5))
    for index in (-1, -5, [0, -1], [], slice(-2, None), torch.tensor([-1, 0]), np.array([-1]), np.int64(-2)):
        assert ours[index]["a"].tolist() == theirs[index]["a"].tolist()
    for index in (-6, [0, -6], 5):
        with pytest.raises(IndexError, match=r"Cell (-6|5) holds nothing; 5 of 8"):
            ours[index]
    uneven = buffer(0, num_envs=2)
    uneven.extend(numbered(1), env_ids=[1])
    with pytest.raises(IndexError, match="Cell -1 holds nothing"):
        uneven[-1]


@pytest.mark.parametrize("index", [[0.5], torch.tensor([0.5]), np.array([1.0]), [[True]]])
def test_cells_are_integers(index: Any) -> None:
    ours = prioritized()
    if index != [[True]]:  # a mask
        with pytest.raises(TypeError, match="Cells must be integers, got torch"):
            ours.storage.get(index)
    with pytest.raises(TypeError, match="Cells must be integers, got torch"):
        ours.storage.set(index, numbered(1))
    with pytest.raises(TypeError, match="Cells must be integers, got torch"):
        ours.update_priority(index, 1.0)


@pytest.mark.parametrize("env_ids", [[0.5], [1.0], [True], torch.tensor([True, False]), "1"])
def test_env_ids_are_integers(env_ids: Any) -> None:
    ours = buffer(0, num_envs=2)
    ours.extend(numbered(2))
    for call in (lambda: ours.extend(numbered(1), env_ids), lambda: ours.writer.cut(env_ids)):
        with pytest.raises(TypeError, match="env_ids must be integers, got"):
            call()
    assert ours.writer.positions.tolist() == [1, 1]
    assert ours.extend(numbered(1), env_ids=1).tolist() == [3]


# ---------------------------------------------------------------------- extras of TorchRL


def test_hooks_and_checkpointers_are_refused() -> None:
    for part in (buffer(), RingStorage(4), PPOBuffer(1, 1, 8, 2)):
        for register in (part.register_save_hook, part.register_load_hook):
            with pytest.raises(TypeError, match="writes its own files"):
                register(TED2Flat())
