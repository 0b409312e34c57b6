"""Every combination of storages, writers, samplers and buffers of TorchRL and of this package."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer

from torchrl_lightning.replay import ExperienceBuffer, RingStorage, RingWriter

STORAGES: dict[str, Callable[..., Storage]] = {
    "ring": RingStorage,
    "mapped ring": lambda size, folder: RingStorage(size, scratch_dir=folder / "ring"),
    "tensor": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
    "list": ListStorage,
}
WRITERS: dict[str, Callable[[], Writer]] = {"ring": RingWriter, "round robin": TensorDictRoundRobinWriter}
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "without": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=2, traj_key="episode"),
}
BUFFERS = {"ours": ExperienceBuffer, "tensordict": TensorDictReplayBuffer, "plain": ReplayBuffer}


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_combinations_of_parts_sample_stored_rows(
    storage: str, writer: str, sampler: str, buffer: str, tmp_path: object
) -> None:
    if sampler == "slices" and storage == "list":
        pytest.skip("TorchRL's slices need a tensor storage")
    make = STORAGES[storage]
    cells = make(10, tmp_path) if storage == "mapped ring" else make(10)
    if buffer == "ours" and not ("ring" in storage and writer == "ring"):
        with pytest.raises(TypeError, match="TorchRL's TensorDictReplayBuffer"):
            ExperienceBuffer(storage=cells, writer=WRITERS[writer]())
        return
    ours = BUFFERS[buffer](storage=cells, writer=WRITERS[writer](), sampler=SAMPLERS[sampler](), batch_size=4)
    for start in range(0, 15, 3):
        step = torch.arange(start, start + 3)
        ours.extend(TensorDict({"a": step.float(), "episode": step // 5, "next": {"b": step}}, [3]))
    assert len(ours) == 10
    if buffer == "plain":
        batch, info = ours.sample(return_info=True)
        index = info["index"][0] if sampler == "slices" else info["index"]
    else:
        batch = ours.sample()
        index = batch["index"]
    assert batch.shape == (4,)
    assert torch.equal(batch["next", "b"].float(), batch["a"])
    assert batch["a"].min() >= 5
    assert index.dtype == torch.int64
    assert torch.equal(batch["a"].long() % 10, index.reshape(-1))
    if sampler == "slices":
        assert torch.equal(batch["a"][1::2], batch["a"][::2] + 1)


def test_mixture_of_our_and_torchrl_buffers() -> None:
    parts = [
        TensorDictReplayBuffer(storage=RingStorage(8), writer=RingWriter(), batch_size=2),
        TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=2),
    ]
    for part in parts:
        part.extend(TensorDict({"a": torch.ones(3)}, [3]))
    mixture = ReplayBufferEnsemble(*parts, p=[0.5, 0.5], batch_size=4)
    assert mixture.sample()["a"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
