"""A pickle of memory-mapped cells shares them with another process; a copy does not."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from tensordict import TensorDict

from kit.processes import environment
from kit.rings import ring
from kit.rows import numbered
from kit.states import differences
from torchrl_lightning import EpisodicReplayBuffer, ExperienceBuffer, RingStorage

READ_AND_WRITE = """
import pickle, sys, torch
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        storage = pickle.load(file)
    storage = getattr(storage, "storage", storage)
    print(*storage.get(torch.arange(len(storage)))["a"].flatten().tolist(), flush=True)
    sys.stdin.readline()
    print(*storage.get(torch.arange(len(storage)))["a"].flatten().tolist(), flush=True)
    storage.write_entry("a", torch.tensor([1]), storage.get(torch.tensor([1]))["a"] + 70)
    print("written", flush=True)
"""
OWN = """
import pickle, sys, torch
from tensordict import TensorDict
from torchrl_lightning import RingStorage
storage = RingStorage(4, scratch_dir=sys.argv[2])
storage.set(slice(0, 3), TensorDict({"a": torch.arange(3)}, [3]))
with open(sys.argv[1], "wb") as file:
    pickle.dump(storage, file)
print("pickled", flush=True)
sys.stdin.readline()
"""


def start(script: str, *arguments: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return answer(process)


def storage_of(folder: Path) -> RingStorage:
    storage = RingStorage(4, scratch_dir=folder)
    storage.set(slice(0, 3), TensorDict({"a": torch.arange(3), "b": torch.rand(3, 2), "c": torch.rand(3, 0)}, [3]))
    return storage


def descriptor(storage: RingStorage) -> int:
    return storage._file.descriptor


def buffer_of(folder: Path) -> ExperienceBuffer:
    return ring(4, scratch_dir=folder, data=numbered(3))


def episodic_of(folder: Path) -> EpisodicReplayBuffer:
    buffer = EpisodicReplayBuffer(TensorDict({"a": torch.zeros(())}), 1, 4, scratch_dir=folder)
    for number in range(3):
        buffer.add_batch(TensorDict({"a": torch.tensor([float(number)])}, [1]), torch.tensor([0]))
    return buffer


def test_another_process_sees_the_same_memory_mapped_cells(tmp_path: Path) -> None:
    makers = {storage_of: pickle.dumps, buffer_of: cloudpickle.dumps, episodic_of: pickle.dumps}
    parts = {tmp_path / make.__name__: make(tmp_path / f"{make.__name__} cells") for make in makers}
    for file, part, dumps in zip(parts, parts.values(), makers.values(), strict=True):
        file.write_bytes(dumps(part))
    with start(READ_AND_WRITE, *parts) as other:  # one process for all parts, because its imports take seconds
        for part in parts.values():
            storage = getattr(part, "storage", part)
            before = storage.get(torch.arange(3))["a"].flatten().tolist()
            assert answer(other) == " ".join(map(str, before))
            storage.write_entry("a", torch.tensor([2]), storage.get(torch.tensor([2]))["a"] + 40)
            now = [*before[:2], before[2] + 40]
            assert ask(other) == " ".join(map(str, now))
            assert answer(other) == "written"
            assert storage.get(torch.arange(3))["a"].flatten().tolist() == [now[0], now[1] + 70, now[2]]
    assert other.returncode == 0
    assert not [file for folder in tmp_path.glob("* cells") for file in folder.iterdir()]


def test_pickle_is_readable_after_its_owner_only_if_opened_before(tmp_path: Path) -> None:
    file, folder = tmp_path / "pickle", tmp_path / "cells"
    with start(OWN, file, folder) as owner:
        assert answer(owner) == "pickled"
        storage = pickle.loads(file.read_bytes())
        again = pickle.loads(pickle.dumps(storage))
        owner.send_signal(signal.SIGKILL)
    for each in (storage, again):
        assert each.get(torch.arange(3))["a"].tolist() == [0, 1, 2]
        assert os.fstat(descriptor(each)).st_nlink == 0  # the system removes the file when its last user closes it
    assert not list(folder.iterdir())
    with pytest.raises(RuntimeError, match=f"{owner.pid}"):
        pickle.loads(file.read_bytes())


def test_replaced_file_descriptor_is_rejected(tmp_path: Path) -> None:
    storage = storage_of(tmp_path / "cells")
    pickled = pickle.dumps(storage)
    number = descriptor(storage)
    with open(tmp_path / "other", "wb+") as other:
        os.dup2(other.fileno(), number)
        with pytest.raises(RuntimeError, match="is another file now"):
            pickle.loads(pickled)


def test_descriptor_is_closed_with_its_storage(tmp_path: Path) -> None:
    storage = storage_of(tmp_path / "cells")
    number = descriptor(storage)
    os.fstat(number)
    del storage
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_pickle_before_the_first_write_maps_separate_cells(tmp_path: Path) -> None:
    ours = RingStorage(4, scratch_dir=tmp_path / "cells")
    other = pickle.loads(pickle.dumps(ours))
    assert other.scratch_dir == tmp_path / "cells"
    for storage, number in ((ours, 1), (other, 2)):
        storage.set(slice(0, 1), TensorDict({"a": torch.tensor([number])}, [1]))
    assert [storage.get(torch.tensor([0]))["a"].item() for storage in (ours, other)] == [1, 2]


@pytest.mark.parametrize("opens", [True, False])
def test_deep_copy_of_mapped_cells_is_in_memory(opens: bool, tmp_path: Path, monkeypatch: Any) -> None:
    ours = buffer_of(tmp_path / "cells")
    if not opens:  # a system without /proc
        monkeypatch.setattr("torchrl_lightning._core.memory.DESCRIPTORS", tmp_path / "missing")
    for other in (copy.deepcopy(ours), *([] if opens else [pickle.loads(pickle.dumps(ours))])):
        assert other.storage.scratch_dir is None
        assert not differences(ours.state_dict(), other.state_dict())
        other.extend(numbered(1, 50))
        assert len(ours) == 3
        assert ours[:]["a"].max() < 50
