from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage

from torchrl_lightning.datamodules.cell_files import check_files_apart
from torchrl_lightning.replay import RingStorage


def test_ranks_with_one_folder_have_cells_of_their_own(tmp_path):
    storages = [RingStorage(4, scratch_dir=tmp_path) for _ in range(2)]
    for rank, storage in enumerate(storages):
        check_files_apart(storage, 2)
        storage.set(slice(0, 4), TensorDict({"a": torch.full((4,), rank)}, [4]))
    assert [storage.get(torch.arange(4))["a"].tolist() for storage in storages] == [[0] * 4, [1] * 4]


def test_only_files_with_names_under_several_ranks_are_refused(tmp_path):
    theirs = LazyMemmapStorage(4, scratch_dir=tmp_path / "theirs")
    check_files_apart(theirs, 1)
    check_files_apart(LazyTensorStorage(4), 2)
    with pytest.raises(ValueError, match="all 2 ranks would write into the files of a LazyMemmapStorage"):
        check_files_apart(theirs, 2)
