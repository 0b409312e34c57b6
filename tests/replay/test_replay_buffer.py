"""The inputs of ExperienceBuffer, and every method of TorchRL's buffer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    RandomSampler,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers.samplers import ConsumingSampler, Sampler
from torchrl.envs.transforms import RewardScaling, Transform, UnsqueezeTransform

from kit.rings import ring
from kit.rows import numbered
from torchrl_lightning import RecentSampler
from torchrl_lightning.replay import (
    ExperienceBuffer,
    PrioritizedSampler,
    RingStorage,
    SequenceSampler,
    UniformSampler,
)

buffer = partial(ring, 20, batch_size=6)


class Noting(RandomSampler):
    """Sampler that records the priorities that it receives."""

    def __init__(self) -> None:
        self.noted: dict[int, float] = {}
        self.marked = 0

    def update_priority(self, index: torch.Tensor, priority: torch.Tensor, *, storage: object = None) -> None:
        self.noted.update(zip(index.tolist(), priority.tolist(), strict=True))

    def mark_update(self, index: torch.Tensor, *, storage: object = None) -> None:
        self.marked += len(index)


class Biased(RandomSampler):
    """Sampler that returns the first cells, with a weight and a nested info entry."""

    def sample(self, storage: object, batch_size: int) -> tuple[torch.Tensor, dict]:
        index = torch.arange(batch_size)
        return index, {"priority_weight": index / 2, ("note", "x"): index * 2}


def rollout(envs: int, steps: int) -> TensorDict:
    """Return a rollout ``[N, T]`` with the values ``100 * env + step``."""
    value = torch.arange(envs).unsqueeze(1) * 100 + torch.arange(steps)
    return TensorDict({"a": value.float()}, [envs, steps], names=[None, "time"])


@pytest.mark.parametrize("form", ["named", "time_dim", "time_major", "step by step"])
def test_rollouts_of_all_shapes_are_written(form: str) -> None:
    ours, data = buffer(num_envs=2), rollout(2, 3)
    if form == "named":
        index = ours.extend(data)
    elif form == "time_dim":
        index = ours.extend(TensorDict({"a": data["a"]}, [2, 3]), time_dim=1)
    elif form == "time_major":
        index = ours.extend(TensorDict({"a": data["a"].T}, [3, 2]), time_dim=0)
    else:
        index = torch.cat([ours.extend(step) for step in data.unbind(1)])
    assert index.tolist() == list(range(6))
    assert ours[:]["a"].tolist() == [0, 100, 1, 101, 2, 102]
    assert ours.writer.positions.tolist() == [3, 3]


def test_rollout_of_some_environments_is_written() -> None:
    ours = buffer(num_envs=4)
    ours.extend(rollout(2, 3), env_ids=torch.tensor([3, 1]))
    cells = ours.writer.cell(torch.tensor([1, 1, 3]), torch.tensor([0, 2, 1]))
    assert ours.storage.get(cells)["a"].tolist() == [100, 102, 1]
    assert ours.extend(rollout(1, 1)[0], env_ids=1).tolist() == [13]


def test_add_writes_one_step() -> None:
    ours = buffer()
    assert [ours.add(row) for row in numbered(3).unbind(0)] == [0, 1, 2]
    several = buffer(num_envs=3)
    assert several.add(numbered(3)).tolist() == [0, 1, 2]


def test_written_data_are_not_modified() -> None:
    ours, data = buffer(), numbered(4)
    before = data.clone()
    ours.extend(data.lock_())
    assert set(data.keys(True)) == set(before.keys(True))
    assert (data == before).all()


@pytest.mark.parametrize("sampler", [UniformSampler, lambda: SequenceSampler(4, episode_ends="across")])
def test_short_and_long_sampling_path_are_equal(sampler: Callable[[], Any]) -> None:
    short, long = (buffer(sampler=sampler(), seed=3, data=numbered(12)) for _ in range(2))
    for _ in range(3):
        one, (other, info) = short.sample(), long.sample(return_info=True)
        assert set(one.keys(True)) == set(other.keys(True))
        assert (one == other).all()
        assert one.device == other.device
        assert one.names == other.names
        assert torch.equal(info["index"], one["index"])


def test_entries_from_the_sampler() -> None:
    for kwargs in ({}, {"prefetch": 2}):
        ours = buffer(sampler=Biased(), **kwargs, data=numbered(10))
        batch = ours.sample()
        assert batch["priority_weight"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
        assert batch["note", "x"].tolist() == [0, 2, 4, 6, 8, 10]


def test_transforms_apply_to_writes_and_samples() -> None:
    ours = buffer(transform=UnsqueezeTransform(-1, in_keys=["a"], in_keys_inv=[]))
    ours.append_transform(RewardScaling(loc=0.0, scale=2.0, in_keys=[("next", "reward")]))
    ours.extend(numbered(10))
    batch = ours.sample()
    assert batch["a"].shape == (6, 1)
    assert torch.equal(batch["next", "reward"], batch["a"] * 2)


def test_transform_can_reject_a_write() -> None:
    class Keep(Transform):
        def _inv_call(self, data: TensorDict) -> None:
            return None

    ours = buffer(transform=Keep())
    assert ours.extend(numbered(3)).shape == (0,)
    assert len(ours) == 0


def test_empty_discards_prefetched_batches() -> None:
    ours = buffer(prefetch=3, data=numbered(10))
    ours.sample()
    ours.empty()
    ours.extend(numbered(10, 50))
    assert all(ours.sample()["a"].min() >= 50 for _ in range(5))


def test_batch_size_is_validated() -> None:
    ours = ExperienceBuffer(storage=RingStorage(10))
    ours.extend(numbered(10))
    with pytest.raises(RuntimeError, match="batch_size"):
        ours.sample()
    assert ours.sample(3).shape == (3,)
    ours = buffer(data=numbered(10))
    with pytest.warns(UserWarning, match="batch_sizes"):
        assert ours.sample(3).shape == (3,)
    assert ours.sample(4).shape == (4,)


def test_iteration_without_replacement_returns_each_row_once() -> None:
    ours = buffer(sampler=SamplerWithoutReplacement(), batch_size=5, data=numbered(20))
    assert sorted(torch.cat([batch["a"] for batch in ours]).tolist()) == list(range(20))


def test_sequence_unit_of_torchrl() -> None:
    ours = buffer(sample_unit=Sequence(length=3, episode_boundary="stop"), batch_size=4, data=numbered(12))
    batch = ours.sample()
    assert batch["a"].numel() == 12
    several = buffer(num_envs=2, sample_unit=Sequence(length=3, episode_boundary="stop"), batch_size=4)
    for step in range(5):
        several.extend(numbered(2, step))
    with pytest.raises(RuntimeError, match="interleaved"):
        several.sample()


def test_slices_of_torchrl() -> None:
    ours = buffer(sampler=SliceSampler(slice_len=3, traj_key="episode"))
    data = numbered(33).set("episode", torch.arange(33) // 5)
    ours.extend(data)
    batch = ours.sample()["a"].reshape(2, 3)
    assert torch.equal(batch - batch[:, :1], torch.arange(3.0).expand(2, 3))
    assert torch.equal(batch[:, 0] // 5, batch[:, 2] // 5)
    several = buffer(num_envs=2, sampler=SliceSampler(slice_len=2, traj_key="episode"), batch_size=4, data=data[:2])
    with pytest.raises(RuntimeError, match="interleaved"):
        several.sample()


class OfAUser(RandomSampler):
    """Sampler class that belongs neither to TorchRL nor to this package."""


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement, OfAUser])
def test_samplers_of_torchrl_refuse_uneven_rings(sampler: type[Sampler]) -> None:
    ours = buffer(num_envs=2, sampler=sampler(), batch_size=2, data=numbered(2))
    ours.sample()
    ours.extend(numbered(1), env_ids=torch.tensor([1]))
    with pytest.raises(RuntimeError, match=r"unevenly filled rings \(\[1, 2\]"):
        ours.sample()
    for _ in range(20):
        ours.extend(numbered(2))
    assert ours.sample()["index"].shape == (2,)  # all rings are full again, so every cell holds a step


def test_priorities_reach_the_sampler() -> None:
    ours = buffer(sampler=Noting(), data=numbered(6).set("td_error", torch.arange(6.0)))
    assert ours.sampler.noted == {i: float(i) for i in range(6)}
    batch = ours.sample()
    batch["td_error"] = torch.full((6, 1), 9.0)
    ours.update_tensordict_priority(batch)
    assert {ours.sampler.noted[i] for i in batch["index"].tolist()} == {9.0}
    with pytest.raises(KeyError, match="td_error"):
        ours.update_tensordict_priority(batch.exclude("td_error"))
    assert ours.sampler.marked == 6
    plain = buffer(data=numbered(6))
    plain.update_tensordict_priority(plain.sample())  # without priorities, the call neither changes anything nor warns


def test_sampler_uses_the_generator_of_the_buffer() -> None:
    torch.manual_seed(0)
    one = buffer(generator=None)
    torch.manual_seed(0)
    other = buffer(generator=None)
    for ours in (one, other):
        ours.extend(numbered(20))
    torch.manual_seed(1)
    assert torch.equal(one.sample()["index"], other.sample()["index"])
    sampler = RandomSampler()
    one.set_sampler(sampler)
    assert torch.equal(one.sample()["index"], other.sample()["index"])


def test_consuming_samplers_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"ConsumingSampler.*TensorDictReplayBuffer"):
        buffer(sampler=ConsumingSampler(1))


def test_parts_can_be_replaced_only_by_our_parts() -> None:
    ours = buffer()
    for exchange in (
        lambda: ours.set_storage(LazyTensorStorage(20)),
        lambda: ours.set_writer(TensorDictRoundRobinWriter()),
        lambda: ours.set_sampler(ConsumingSampler(1)),
    ):
        with pytest.raises(TypeError, match="TensorDictReplayBuffer"):
            exchange()
    ours.extend(numbered(3))
    assert ours.sample()["index"].max() < 3


def test_two_buffers_cannot_fill_one_storage() -> None:
    make = partial(ExperienceBuffer, storage=RingStorage(6), batch_size=2)
    one = make(num_envs=2)
    with pytest.raises(ValueError, match="RingStorage"):
        make(num_envs=2)
    one.extend(numbered(2))
    shared = ExperienceBuffer(storage=one.storage, writer=one.writer, batch_size=2)
    assert len(shared) == 2


@pytest.mark.parametrize("made", ["at once", "later", "within another"])
def test_priority_table_has_the_size_of_the_storage(made: str) -> None:
    prioritized = PrioritizedSampler(batch_length=2)
    sampler = RecentSampler(2, prioritized=prioritized) if made == "within another" else prioritized
    buffer = ExperienceBuffer(storage=RingStorage(12), sampler=None if made == "later" else sampler, batch_size=3)
    if made == "later":
        buffer.set_sampler(sampler)
    buffer.extend(numbered(20))
    assert prioritized.max_size == 12
    assert buffer.sample()["priority_weight"].shape == (3, 2)
    with pytest.raises(ValueError, match=r"max_capacity=N.*max_size"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(12), sampler=PrioritizedSampler()).extend(numbered(3))


def test_buffer_without_storage_logs_its_size(caplog: pytest.LogCaptureFixture) -> None:
    ExperienceBuffer(storage=RingStorage(1000))
    assert not caplog.messages
    assert ExperienceBuffer().storage.max_size == 1000
    assert "1000 cells" in caplog.text
