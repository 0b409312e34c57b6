from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage

from torchrl_lightning.datamodules.cell_files import keep_files_apart
from torchrl_lightning.replay import RingStorage


def test_ranks_write_into_folders_of_their_own(tmp_path):
    storages = [RingStorage(4, scratch_dir=tmp_path) for _ in range(2)]
    for rank, storage in enumerate(storages):
        keep_files_apart(storage, rank, 2)
        storage.set(slice(0, 4), TensorDict({"a": torch.full((4,), rank)}, [4]))
    assert [storage.get(torch.arange(4))["a"].tolist() for storage in storages] == [[0] * 4, [1] * 4]


def test_one_rank_and_cells_in_memory_stay_as_they_are(tmp_path):
    for storage, ranks in ((RingStorage(4, scratch_dir=tmp_path), 1), (RingStorage(4), 2), (LazyTensorStorage(4), 2)):
        before = getattr(storage, "scratch_dir", None)
        keep_files_apart(storage, 0, ranks)
        assert getattr(storage, "scratch_dir", None) == before


def test_shared_files_are_refused(tmp_path):
    written = RingStorage(4, scratch_dir=tmp_path / "ring")
    written.set(slice(0, 4), TensorDict({"a": torch.arange(4)}, [4]))
    for storage, kind in (
        (RingStorage.open(tmp_path / "ring"), "an opened RingStorage"),
        (LazyMemmapStorage(4, scratch_dir=tmp_path / "theirs"), "a LazyMemmapStorage"),
    ):
        before = storage.scratch_dir
        with pytest.raises(ValueError, match=f"all 2 ranks would write into the files of {kind}"):
            keep_files_apart(storage, 1, 2)
        assert storage.scratch_dir == before
