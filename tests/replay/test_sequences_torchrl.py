"""Windows over rings in every storage and buffer of TorchRL and of this package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

from kit.files import through_file
from kit.rows import episodes
from kit.seeds import generator
from kit.twin import Twin
from torchrl_lightning import ExperienceBuffer, PrioritizedSampler, RingStorage, RingWriter, SequenceSampler

pytestmark = pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")
ENDS = ("inside", "across", "pad")
STORAGES = {"ring": RingStorage, "lazy": LazyTensorStorage, "memmap": LazyMemmapStorage}
BUFFERS = {"ours": ExperienceBuffer, "torchrl": TensorDictReplayBuffer}
PAIRS = [("ring", "ours"), *((storage, "torchrl") for storage in STORAGES)]


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("episode_ends", ENDS)
@pytest.mark.parametrize(("storage", "buffer"), PAIRS)
def test_windows_work_in_all_combinations(storage: str, buffer: str, episode_ends: str, num_envs: int) -> None:
    options = {"batch_length": 3, "episode_ends": episode_ends, "burn_in": 1}

    def build() -> TensorDictReplayBuffer:
        return BUFFERS[buffer](
            storage=STORAGES[storage](20 * num_envs),
            writer=RingWriter(num_envs),
            sampler=SequenceSampler(**options),
            batch_size=32,
            generator=generator(),
        )

    twin, replay = Twin(num_envs, 20), build()
    write = replay.extend if buffer == "torchrl" else lambda rows: replay.extend(rows.reshape(-1, num_envs), time_dim=0)
    for seed, steps in enumerate((8, 1, 15, 1, 45, 3)):
        dones = torch.rand(steps, num_envs, generator=generator(seed)) < 0.2
        write(twin.rows(list(range(num_envs)), dones.tolist()).reshape(-1))
        twin.check(replay.sample(), **options)
    restored = build()
    restored.load_state_dict(through_file(replay.state_dict(), weights_only=False))
    batch = restored.sample()
    twin.check(batch, **options)
    if buffer == "ours" or storage != "memmap":
        assert (batch == replay.sample()).all()


@pytest.mark.parametrize(
    ("sampler", "other"),
    [
        (SequenceSampler(2), "SliceSampler"),
        (PrioritizedSampler(9, 1.0, 1.0, batch_length=2), "or the sampler without"),
    ],
)
def test_storage_without_ring_writer_raises_an_error(sampler: Any, other: str) -> None:
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=2)
    replay.extend(episodes([6]))
    with pytest.raises(ValueError, match=rf"RingWriter.*LazyTensorStorage.*RingWriter.*{other}"):
        replay.sample()


def test_storage_with_two_dimensions_raises_an_error() -> None:
    storage = LazyTensorStorage(12, ndim=2)
    replay = TensorDictReplayBuffer(storage=storage, sampler=SequenceSampler(2), dim_extend=0, batch_size=2)
    replay.extend(TensorDict({"next": {"done": torch.zeros(4, 3, 1, dtype=torch.bool)}}, [4, 3]))
    with pytest.raises(ValueError, match="RingWriter"):
        replay.sample()
