from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from replay.sequence_twin import Twin, episodes
from torchrl_lightning import ExperienceBuffer, RingStorage, RingWriter, SequenceSampler

pytestmark = pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict")
ENDS = ("inside", "across", "pad")
OVER = ("steps", "trajectories")
STORAGES = {
    "ring": RingStorage,
    "lazy": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
}
WRITERS = {"ring": RingWriter, "round_robin": TensorDictRoundRobinWriter}
BUFFERS = {"ours": ExperienceBuffer, "torchrl": TensorDictReplayBuffer}


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("episode_ends", ENDS)
@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_in_every_combination(storage: str, writer: str, buffer: str, episode_ends: str, over: str) -> None:
    options = {"batch_length": 3, "episode_ends": episode_ends, "burn_in": 1}

    def build() -> TensorDictReplayBuffer:
        return BUFFERS[buffer](
            storage=STORAGES[storage](20),
            writer=WRITERS[writer](),
            sampler=SequenceSampler(**options, over=over),
            batch_size=32,
            generator=torch.Generator().manual_seed(0),
        )

    twin, replay = Twin(1, 20), build()
    for seed, steps in enumerate((8, 1, 15, 1, 45, 3)):
        dones = torch.rand(steps, 1, generator=torch.Generator().manual_seed(seed)) < 0.2
        replay.extend(twin.rows([0], dones.tolist())[:, 0])
        twin.check(replay.sample(), **options)
    restored = build()
    restored.load_state_dict(reloaded(replay.state_dict()))
    batch = restored.sample()
    twin.check(batch, **options)
    if buffer == "ours" or storage != "memmap":
        assert (batch == replay.sample()).all()


def reloaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_its_state_needs_no_pickle(tmp_path: Path) -> None:
    for flat in (False, True):
        sampler = SequenceSampler(3, over="trajectories")
        buffer = ExperienceBuffer(storage=RingStorage(20), sampler=sampler)
        if flat:
            sampler = SequenceSampler(3)
            buffer = ExperienceBuffer(
                storage=LazyTensorStorage(20), writer=TensorDictRoundRobinWriter(), sampler=sampler
            )
        buffer.extend(episodes([4, 5, 6, 9]))
        buffer.sample(2)
        file = io.BytesIO()
        torch.save(buffer.sampler.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        other = SequenceSampler(3)
        other.load_state_dict(state)
        buffer.sampler.dumps(tmp_path / str(flat))
        third = SequenceSampler(3)
        third.loads(tmp_path / str(flat))
        assert torch.equal(third.state_dict()["generator"], state["generator"])
        assert torch.equal(third.state_dict()["trajectories"]["begin"], state["trajectories"]["begin"])


def test_several_environments_in_a_flat_storage_need_their_numbers() -> None:
    # As TorchRL's collectors deliver them: chunks of two environments, one after the other.
    ids = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 2]])
    done = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 0]], dtype=torch.bool).unsqueeze(-1)
    data = TensorDict(
        {"collector": {"traj_ids": ids}, "next": {"done": done}, "step": torch.arange(8).view(2, 4)}, [2, 4]
    )

    def build(**options: Any) -> TensorDictReplayBuffer:
        replay = TensorDictReplayBuffer(
            storage=LazyTensorStorage(16), sampler=SequenceSampler(3, **options), batch_size=50
        )
        replay.extend(data.reshape(-1))
        return replay

    with pytest.raises(ValueError, match="several environments"):
        build().sample()
    batch = build(traj_key=("collector", "traj_ids")).sample()
    assert set(batch["step"][:, 0].tolist()) == {0, 1, 4}
    assert (batch["collector", "traj_ids"] == batch["collector", "traj_ids"][:, :1]).all()
    with pytest.raises(KeyError, match="traj_key"):
        build(traj_key="number").sample()


def test_rings_of_several_environments_are_recognised_over_torchrl_storage() -> None:
    replay = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20), writer=RingWriter(2), sampler=SequenceSampler(3), batch_size=20
    )
    twin = Twin(2, 10)
    replay.extend(twin.rows([0, 1], [[False, True]] * 6 + [[False, False]] * 6).reshape(-1))
    twin.check(replay.sample(), 3, 0, "inside")


def test_a_full_storage_of_unknown_seam_is_refused() -> None:
    source = LazyTensorStorage(6)
    TensorDictReplayBuffer(storage=source, batch_size=1).extend(episodes([4, 4]))
    storage = LazyTensorStorage(6)
    storage.load_state_dict(source.state_dict())
    replay = TensorDictReplayBuffer(storage=storage, sampler=SequenceSampler(2), batch_size=2)
    with pytest.raises(ValueError, match="which cell was written last"):
        replay.sample()


def test_a_sampler_put_on_a_filled_storage_finds_the_seam() -> None:
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(6), batch_size=100)
    replay.extend(episodes([4, 4])[:4])
    replay.extend(episodes([4, 4])[4:])
    replay.set_sampler(SequenceSampler(3))
    assert set(replay.sample()["step"][:, 0].tolist()) == {4, 5}


def test_cells_written_out_of_order_are_refused() -> None:
    replay = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4),
        writer=TensorDictMaxValueWriter(rank_key="rank"),
        sampler=SequenceSampler(2),
        batch_size=2,
    )
    for rank in (5.0, 1.0, 4.0, 3.0, 9.0, 2.0, 8.0):
        row = episodes([1], rank=torch.tensor([[rank]]))
        replay.extend(row)
    with pytest.raises(ValueError, match="one after the other"):
        replay.sample()


def test_storages_that_hold_no_windows() -> None:
    replay = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2), sampler=SequenceSampler(2), dim_extend=0, batch_size=2
    )
    replay.extend(TensorDict({"next": {"done": torch.zeros(4, 3, 1, dtype=torch.bool)}}, [4, 3]))
    with pytest.raises(ValueError, match="one-dimensional"):
        replay.sample()
    replay = TensorDictReplayBuffer(storage=ListStorage(12), sampler=SequenceSampler(2), batch_size=2)
    replay.extend(episodes([4]))
    with pytest.raises(TypeError, match="TensorDicts"):
        replay.sample()
