"""Inputs, outputs and errors of RingStorage."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import LazyTensorStorage, RandomSampler, ReplayBuffer, TensorDictReplayBuffer

from kit.rings import ring
from kit.rows import numbered
from torchrl_lightning._core import memory
from torchrl_lightning.replay import RingStorage, RingWriter

buffer = partial(ring, 8, batch_size=4)


def test_cells_are_read_by_all_index_types() -> None:
    ours = buffer(data=numbered(5))
    storage = ours.storage
    assert storage.get(2)["a"].item() == 2
    assert storage.get([1, 3])["a"].tolist() == [1, 3]
    assert storage.get(slice(1, 3))["a"].tolist() == [1, 2]
    assert storage.get(torch.tensor([True, False, True, False, False]))["a"].tolist() == [0, 2]
    sequences = storage.get(torch.tensor([[0, 1, 2], [2, 3, 4]]))
    assert sequences.names == [None, "time"]
    assert sequences["next", "deep", "x"].shape == (2, 3)
    with pytest.raises(IndexError, match=r"Cell 5 .*5 of 8"):
        storage.get(torch.tensor([4, 5]))
    with pytest.raises(IndexError):
        storage.get(torch.tensor([-1]))


def test_negative_numbers_count_from_the_last_cell() -> None:
    ours, theirs = buffer(data=numbered(5)), TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    theirs.extend(numbered(5))
    for index in (-1, -5, [0, -1], [], slice(-2, None), torch.tensor([-1, 0]), np.array([-1]), np.int64(-2)):
        assert ours[index]["a"].tolist() == theirs[index]["a"].tolist()
    for index in (-6, [0, -6], 5):
        with pytest.raises(IndexError, match=r"Cell (-6|5) .*5 of 8"):
            ours[index]
    uneven = ring(4, 2)
    uneven.extend(numbered(1), env_ids=[1])
    with pytest.raises(IndexError, match="Cell -1 "):
        uneven[-1]


def test_batches_are_copies() -> None:
    ours = buffer(data=numbered(8))
    ours.sample()["a"].fill_(99)
    assert ours[:]["a"].max() == 7


def test_stored_rows_have_no_gradients_or_inference_mode() -> None:
    ours = buffer()
    weight = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        ours.extend(TensorDict({"a": torch.zeros(3)}, [3]))
    ours.extend(TensorDict({"a": weight * 2}, [3]))
    batch = ours.sample()
    assert not batch["a"].requires_grad
    assert not ours.storage.data["a"].requires_grad


def test_failed_first_write_leaves_the_schema_open() -> None:
    ours = buffer(writer=RingWriter(track_episodes=True))
    with pytest.raises(KeyError, match="track_episodes=True"):
        ours.extend(TensorDict({"b": torch.zeros(2)}, [2]))
    ours.extend(numbered(2))
    assert sorted(ours[:].keys()) == ["a", "next", "number"]
    ours = buffer()
    with pytest.raises(ValueError, match="meta"):
        ours.extend(numbered(2).to("meta"))
    ours.extend(TensorDict({"b": torch.zeros(2)}, [2]))  # the failed write left no index that needs done flags
    assert ours.writer.index is None
    with pytest.raises(ValueError, match="meta"):
        ours.extend(TensorDict({"b": torch.zeros(3, device="meta")}, [3]))


def test_lazy_stacks_of_equal_rows_are_written() -> None:
    ours = buffer()
    for _ in range(2):
        ours.extend(LazyStackedTensorDict(*numbered(3).unbind(0)))
    assert ours[:]["a"].tolist() == [0, 1, 2, 0, 1, 2]


def test_size_is_checked_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = ring(10**12)
    with pytest.raises(ValueError, match=r"RingStorage\(1000000000000\).*scratch_dir"):
        ours.extend(numbered(3))
    assert not ours.storage.initialized
    monkeypatch.setattr(memory, "free_bytes", lambda device, folder=None: 10)
    with pytest.raises(ValueError, match="10 bytes are free on the disk"):
        buffer(scratch_dir=tmp_path / "full").extend(numbered(3))
    assert not (tmp_path / "full").exists()


def test_empty_storage_raises_an_error() -> None:
    ours = buffer()
    with pytest.raises(RuntimeError, match="empty"):
        ours.storage.get(torch.tensor([0]))
    with pytest.raises(ValueError, match="without entries"):
        ours.extend(TensorDict({}, [3]))


def test_torchrl_writer_sets_cells() -> None:
    ours = ReplayBuffer(storage=RingStorage(8), batch_size=4)
    ours.extend(numbered(3))
    ours[1] = numbered(1, 50)[0]
    ours.storage.set(torch.tensor([0, 2]), numbered(2, 60), set_cursor=False)
    assert ours[:]["a"].tolist() == [60, 50, 61]


def test_full_disk_raises_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory.os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"[0-9]+ KiB.*scratch_dir=") as raised:
        buffer(scratch_dir=tmp_path).extend(numbered(3))
    assert raised.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_disk_is_reserved_before_the_first_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = []
    reserve = os.posix_fallocate

    def counting(descriptor: int, start: int, size: int) -> None:
        reserve(descriptor, start, size)
        blocks.append(os.fstat(descriptor).st_blocks * 512)

    monkeypatch.setattr(memory.os, "posix_fallocate", counting)
    ours = ring(1 << 16, scratch_dir=tmp_path, data=numbered(3))
    assert blocks[0] >= sum(leaf.nbytes for leaf in ours.storage.cells.leaves) > 1 << 18


def test_disk_without_reservation_logs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(memory.os, "posix_fallocate")
    ours = buffer(scratch_dir=tmp_path, data=numbered(3))
    assert "cannot reserve the " in caplog.text
    assert ours[:]["a"].tolist() == [0, 1, 2]


def test_moved_memory_is_detected() -> None:
    ours = buffer(data=numbered(4))
    for leaf in ours.storage.cells.leaves:
        leaf.share_memory_()  # the same move as when a process is started
    ours.extend(numbered(3, 4))
    assert ours[:]["a"].tolist() == ours.storage.get(torch.arange(7))["a"].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_all_dtypes_and_widths_are_read() -> None:
    data = TensorDict({"b": torch.rand(6, 0), "c": torch.rand(6, 2).bfloat16(), "d": torch.rand(6, 2, 3)}, [6])
    data["e"] = torch.rand(6, dtype=torch.complex64)
    ours, order = buffer(), torch.tensor([5, 0, 5])
    ours.extend(data)
    assert all(torch.equal(ours.storage.get(order)[key], data[key][order]) for key in data.keys())  # noqa: SIM118
    with pytest.raises(IndexError):
        ours.storage.gather(torch.tensor([8]))


def test_invalid_cells_of_a_foreign_sampler_are_rejected() -> None:
    class Wrong(RandomSampler):
        def sample(self, storage: object, batch_size: int) -> tuple[torch.Tensor, dict]:
            return torch.full((batch_size,), -1), {}

    ours = buffer(sampler=Wrong(), data=numbered(3))
    with pytest.raises(IndexError, match="Cell -1 "):
        ours.sample()
