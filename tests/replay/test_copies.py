"""Copies and pickles need memory for the content, not for the capacity, and equal the original."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from kit.operations import Twin
from kit.replay_settings import Settings
from kit.rows import numbered
from kit.states import differences
from torchrl_lightning import (
    EpisodicReplayBuffer,
    ExperienceBuffer,
    FrameStorage,
    GAEBuffer,
    HoldoutSplit,
    MBReplayBuffer,
    MinSegmentTree,
    PPODBuffer,
    PrioritizedSampler,
    RecentSampler,
    RingStorage,
    RolloutStorage,
    SequenceSampler,
    SumSegmentTree,
    UniformSampler,
)
from torchrl_lightning.l2r import SimpleReplayBuffer
from torchrl_lightning.velora import RecurrentReplayBuffer

CAPACITY = 200_000
LIMIT = 100_000
"""Maximum size of a pickle of ten rows, in bytes. Each single entry of 200,000 rows takes more."""
THROUGH = {"deepcopy": copy.deepcopy, "pickle": lambda part: pickle.loads(pickle.dumps(part))}
through = pytest.mark.parametrize("through", THROUGH.values(), ids=THROUGH)


def ring(sampler: Any = None, num_envs: int = 1, size: int = CAPACITY, **settings: Any) -> ExperienceBuffer:
    generator = torch.Generator().manual_seed(0)
    return ExperienceBuffer(
        storage=RingStorage(size), sampler=sampler, num_envs=num_envs, generator=generator, batch_size=8, **settings
    )


def frames(size: int = CAPACITY) -> ExperienceBuffer:
    generator = torch.Generator().manual_seed(0)
    return ExperienceBuffer(storage=FrameStorage(size, 2), generator=generator, batch_size=8, num_envs=2)


def rows(count: int, start: int = 0, num_envs: int = 1) -> TensorDict:
    data = numbered(count * num_envs, start * num_envs, ends=False)
    data["next", "done"] = ((torch.arange(len(data)) // num_envs + start) % 5 == 4).unsqueeze(-1)
    data["next", "terminated"] = data["next", "done"]
    return data


def write(buffer: Any, count: int, start: int = 0) -> None:
    envs = buffer.writer.num_envs
    if isinstance(buffer.storage, FrameStorage):
        stacks = (torch.arange(start, start + count + 1) % 200).view(-1, 1, 1, 1, 1).expand(-1, envs, 2, 4, 4)
        stacks = (stacks - torch.tensor([1, 0]).view(2, 1, 1)).clamp(min=0).to(torch.uint8)
        done = (torch.arange(start, start + count) % 4 == 3).view(-1, 1, 1).expand(-1, envs, 1)
        following = {"observation": stacks[1:], "done": done}
        data = TensorDict({"observation": stacks[:-1], "next": following}, [count, envs], names=["time", None])
        buffer.extend(data)
        return
    data = rows(count, start, envs)
    if envs > 1:
        data = data.reshape(count, envs)
        data.names = ["time", None]
    buffer.extend(data)


def fill_unevenly(buffer: Any) -> None:
    for env, steps in enumerate((5, 0, 2, 3)):
        for step in range(steps):
            buffer.extend(rows(1, 10 * env + step), env_ids=torch.tensor([env]))


def fill_and_remove(buffer: Any) -> None:
    write(buffer, 12)
    buffer.writer.drop(5)


PARTS: dict[str, tuple[Callable[..., Any], Callable[[Any], None]]] = {
    "uniform": (ring, lambda buffer: write(buffer, 10)),
    "n steps": (lambda **size: ring(n_steps=3, **size), lambda buffer: write(buffer, 10)),
    "several environments": (lambda **size: ring(num_envs=4, **size), lambda buffer: write(buffer, 3)),
    "uneven": (lambda **size: ring(num_envs=4, **size), fill_unevenly),
    "removed": (lambda **size: ring(UniformSampler(stratified=True), num_envs=2, **size), fill_and_remove),
    "prioritized": (lambda **size: ring(PrioritizedSampler(), **size), lambda buffer: write(buffer, 10)),
    "prioritized, buffer norm": (
        lambda **size: ring(PrioritizedSampler(weight_norm="buffer", max_priority_within_buffer=True), **size),
        lambda buffer: write(buffer, 10),
    ),
    "prioritized windows": (lambda **size: ring(PrioritizedSampler(batch_length=3), **size), lambda b: write(b, 10)),
    "prioritized, uneven": (lambda **size: ring(PrioritizedSampler(), num_envs=4, **size), fill_unevenly),
    "sequences": (lambda **size: ring(SequenceSampler(3), **size), lambda buffer: write(buffer, 10)),
    "recent": (
        lambda **size: ring(RecentSampler(2, recent_data_steps=3, recent_data_ratio=0.5), **size),
        lambda buffer: write(buffer, 10),
    ),
    "frames": (frames, lambda buffer: write(buffer, 5)),
    "removed frames": (frames, fill_and_remove),
    "emptied": (lambda **size: ring(PrioritizedSampler(), **size), lambda b: (write(b, 10), b.empty(), write(b, 4))),
}
parts = pytest.mark.parametrize("part", PARTS)


def made(part: str, **size: Any) -> Any:
    make, fill = PARTS[part]
    buffer = make(**size)
    fill(buffer)
    if isinstance(buffer.sampler, PrioritizedSampler):
        batch = buffer.sample()
        batch["td_error"] = torch.rand(batch.shape, generator=torch.Generator().manual_seed(1))
        buffer.update_tensordict_priority(batch)
    return buffer


@parts
def test_pickle_size_is_that_of_the_stored_rows(part: str) -> None:
    assert len(pickle.dumps(made(part))) < LIMIT


@through
@parts
@pytest.mark.parametrize("size", [40, 80])
def test_copy_equals_its_original_and_continues_equally(part: str, size: int, through: Any) -> None:
    buffer = made(part, size=size)
    other = through(buffer)
    assert not differences(buffer.state_dict(), other.state_dict())
    assert not differences(buffer.sample().to_dict(), other.sample().to_dict())
    assert other.storage.max_size == size
    for start in range(20, 100, 20):  # beyond the capacity
        for each in (buffer, other):
            write(each, 20, start)
        assert not differences(buffer.sample().to_dict(), other.sample().to_dict())
    assert not differences(buffer.state_dict(), other.state_dict())


@through
def test_copy_shares_no_memory(through: Any) -> None:
    buffer = made("prioritized", size=40)
    other = through(buffer)
    before = buffer.state_dict()
    write(other, 40, 100)
    other.update_priority(torch.arange(40), torch.full((40,), 3.0))
    assert not differences(before, buffer.state_dict())


@through
@pytest.mark.parametrize("tree", [SumSegmentTree, MinSegmentTree])
@pytest.mark.parametrize("leaves", [0, 1, 7, 64, 1000])
def test_copied_trees_equal_their_originals(tree: Any, leaves: int, through: Any) -> None:
    one = tree(1000)
    generator = torch.Generator().manual_seed(leaves)
    for _ in range(3):
        if leaves:
            one[torch.randperm(leaves, generator=generator)] = torch.rand(leaves, generator=generator)
    other = through(one)
    assert torch.equal(one.leaves, other.leaves)
    assert one.summary() == other.summary()
    index = torch.arange(0, 1000, 3)
    one[index], other[index] = 0.25, 0.25
    assert torch.equal(one.leaves, other.leaves)
    assert one.summary() == other.summary()
    if tree is SumSegmentTree:
        assert one.nnz == other.nnz


def rollout(steps: int, start: int = 0) -> TensorDict:
    data = rows(steps, start, 2).reshape(steps, 2)
    data.names = ["time", None]
    data["observation"] = data["next", "observation"] = data["number"].float().unsqueeze(-1)
    data["state_value"] = data["next", "state_value"] = data["next", "reward"]
    return data


@through
@pytest.mark.parametrize("estimated", [False, True])
def test_pickled_rollout_size_is_that_of_the_stored_steps(estimated: bool, through: Any) -> None:
    buffer = GAEBuffer(20_000)
    buffer.extend(rollout(4))
    if estimated:
        buffer[:]["advantage"]
    assert len(pickle.dumps(buffer)) < LIMIT
    other = through(buffer)
    assert not differences(buffer.state_dict(), other.state_dict())
    assert other.storage.size == 20_000
    assert set(other[:].keys(True, True)) == set(buffer[:].keys(True, True))
    for each in (buffer, other):
        each.empty()
        each.extend(rollout(20_000, 4))
    assert torch.equal(buffer[:]["advantage"], other[:]["advantage"])


def model_based() -> MBReplayBuffer:
    buffer = MBReplayBuffer(CAPACITY, num_envs=1)
    data = rows(10)
    data["observation"] = data["next", "observation"] = torch.zeros(10, 3)
    data["action"] = torch.zeros(10, 1)
    buffer.extend(data)
    return buffer


def episodic(**settings: Any) -> EpisodicReplayBuffer:
    buffer = EpisodicReplayBuffer(TensorDict({"x": torch.zeros(3)}), 2, CAPACITY // 2, **settings)
    for _ in range(5):
        buffer.add_batch(TensorDict({"x": torch.zeros(2, 3)}, [2]))
    return buffer


def velora() -> RecurrentReplayBuffer:
    buffer = RecurrentReplayBuffer(CAPACITY, 3, 2, 4)
    for _ in range(10):
        buffer.add(torch.ones(1, 3), torch.ones(1, 2), 1.0, torch.ones(1, 3), False, torch.ones(1, 4))
    return buffer


def simple() -> SimpleReplayBuffer:
    buffer = SimpleReplayBuffer(3, 2, CAPACITY, 8)
    for _ in range(10):
        buffer.store({"obs": np.ones(3), "act": np.ones(2), "rew": 0.0, "next_obs": np.ones(3), "done": False})
    return buffer


def demonstrating() -> PPODBuffer:
    buffer = PPODBuffer(CAPACITY // 10, rho=0.2, phi=0.3)
    buffer.extend(rollout(4))
    return buffer


OTHERS = {
    "dynamics": model_based,
    "episodic": episodic,
    "episodic prioritized": lambda: episodic(prioritized_sampling=True),
    "velora": velora,
    "l2r": simple,
    "demonstrations": demonstrating,
}


@through
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_pickle_size_of_other_buffers_is_that_of_their_rows(make: Callable[[], Any], through: Any) -> None:
    buffer = make()
    assert len(pickle.dumps(buffer)) < LIMIT
    other = through(buffer)
    assert not differences(buffer.state_dict(), other.state_dict())
    assert other.storage.max_size == buffer.storage.max_size


def resident_growth(call: Callable[[], Any]) -> int:
    """Return the growth of the peak resident memory during a call, in bytes."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    clear.write_text("5")
    before = int(status.read_text().split("VmHWM:")[1].split()[0])
    call()
    return 1024 * (int(status.read_text().split("VmHWM:")[1].split()[0]) - before)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@through
@pytest.mark.parametrize("part", ["uniform", "prioritized", "frames", "sequences"])
def test_copy_allocates_little_memory(part: str, through: Any) -> None:
    make, _ = PARTS[part]
    buffer = make(size=1_000_000)
    if isinstance(buffer.storage, FrameStorage):
        write(buffer, 5)
    else:
        buffer.extend(rows(10).set("x", torch.zeros(10, 100)))
    assert resident_growth(lambda: through(buffer)) < 100_000_000  # the full capacity of "x" takes 400 MB


class CopiedTwin(Twin):
    """Twin that continues with a copy of the buffer after some operations."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.copies = random.Random(f"copies {settings.seed}")

    def check(self) -> None:
        if self.copies.random() < 0.4:
            self.buffer = self.copies.choice(list(THROUGH.values()))(self.buffer)
        super().check()


@pytest.mark.parametrize("seed", range(50))
def test_copies_of_random_buffers_match_plain_lists(seed: int) -> None:
    CopiedTwin(Settings.of(seed)).run(15)


@through
def test_pickled_split_size_is_that_of_its_held_out_rows(through: Any) -> None:
    buffer, split = ring(), HoldoutSplit(0.5)
    write(buffer, 10)
    split.extend(buffer.writer)
    other = through(split)
    assert len(pickle.dumps(split)) < LIMIT
    assert not differences(split.state_dict(), other.state_dict())
    cells = torch.arange(10)
    assert all(map(torch.equal, split.parts(cells), other.parts(cells)))


def test_pickles_share_the_files_of_mapped_tensors(tmp_path: Any) -> None:
    data = rollout(4).memmap_(tmp_path)
    storage = RolloutStorage(4, num_envs=2)
    assert storage.take_ownership(data)
    other = pickle.loads(pickle.dumps(storage))
    storage.data["observation"].fill_(7.0)
    assert (other.data["observation"] == 7.0).all()


def _write_in_child(buffer: Any, filled: Any) -> None:
    filled.put(buffer.storage.get(torch.arange(10))["number"].tolist())
    buffer.storage.write_entry("number", torch.arange(10), torch.arange(10) + 100)
    buffer.extend(rows(10, 10))


def test_started_process_shares_the_rows_of_a_shared_buffer() -> None:
    buffer = ring(size=100)
    write(buffer, 10)
    buffer.share()
    context = multiprocessing.get_context("spawn")
    filled = context.Queue()
    child = context.Process(target=_write_in_child, args=(buffer, filled))
    child.start()
    assert filled.get(timeout=120) == list(range(10))
    child.join(120)
    assert buffer.storage.get(torch.arange(10))["number"].tolist() == list(range(100, 110))
    assert len(buffer) == 20


def test_copy_size_of_a_memory_mapped_storage_is_that_of_its_rows(tmp_path: Any) -> None:
    buffer = ExperienceBuffer(storage=RingStorage(CAPACITY, scratch_dir=tmp_path))
    buffer.extend(rows(10))
    assert len(pickle.dumps(buffer)) < LIMIT
    assert not differences(buffer.state_dict(), copy.deepcopy(buffer).state_dict())


def test_unshared_copy_size_of_a_shared_buffer_is_that_of_its_rows() -> None:
    buffer = ring()
    write(buffer, 10)
    buffer.share()
    assert len(pickle.dumps(buffer)) < LIMIT
    other = copy.deepcopy(buffer)
    assert not other.shared
    assert not differences(buffer.state_dict(), other.state_dict())
    write(other, 10, 10)
    assert len(other) == 20
    assert len(buffer) == 10
