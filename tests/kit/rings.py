"""Seeded replay buffers over rings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from kit.rows import numbered
from kit.seeds import generator
from torchrl_lightning.replay import ExperienceBuffer, RingStorage

HOUSES: dict[str, Callable[[Any], Any]] = {
    "torchrl": lambda sampler: TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler),
    "torchrl_plain": lambda sampler: ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler),
    "torchrl_memmap": lambda sampler: TensorDictReplayBuffer(storage=LazyMemmapStorage(20), sampler=sampler),
    "torchrl_over_ring": lambda sampler: TensorDictReplayBuffer(storage=RingStorage(20), sampler=sampler),
    "ours": lambda sampler: ExperienceBuffer(storage=RingStorage(20), sampler=sampler),
}


def ring(
    length: int,
    num_envs: int = 1,
    sampler: Any = None,
    *,
    filled: int = 0,
    data: TensorDict | None = None,
    seed: int = 0,
    scratch_dir: Path | None = None,
    **settings: Any,
) -> ExperienceBuffer:
    """Make a buffer of ``length`` steps for each environment.

    Args:
        length: The number of steps that each environment can store.
        num_envs: The number of environments.
        sampler: TorchRL's own by default.
        filled: The number of steps of each environment that are written as numbers.
        data: Rows that are written after them.
        seed: The seed of the buffer's generator.
        scratch_dir: The folder for a storage on disk.
        settings: Other arguments of the buffer.
    """
    storage = RingStorage(length * num_envs, scratch_dir=scratch_dir)
    settings = {"storage": storage, "generator": generator(seed), **settings}
    buffer = ExperienceBuffer(num_envs=num_envs, sampler=sampler, **settings)
    for step in range(filled):
        buffer.extend(numbered(num_envs, step * num_envs))
    if data is not None:
        buffer.extend(data)
    return buffer


def house(kind: str, sampler: Any, data: TensorDict) -> Any:
    """Make a buffer for 20 steps by its name in ``HOUSES``, and write the data."""
    buffer = HOUSES[kind](sampler)
    buffer.extend(data)
    return buffer


def uneven(sampler: Any, fills: Sequence[int] = (7, 0, 2, 4), length: int = 5) -> ExperienceBuffer:
    """Make a ring for each environment, and write ``fills[e]`` numbers ``100 e + position`` to the ring of ``e``."""
    buffer = ring(length, len(fills), sampler)
    for position in range(max(fills)):
        ids = torch.tensor([env for env, steps in enumerate(fills) if steps > position])
        buffer.extend(TensorDict({"number": 100 * ids + position}, [len(ids)]), env_ids=ids)
    return buffer


UNEVEN = [2, 3, 4, 5, 6, 200, 201, 300, 301, 302, 303]  # the numbers in uneven()


def write(buffer: ExperienceBuffer, *envs: int, steps: int = 1) -> None:
    """Write steps of some or all environments. Each step stores its environment and its position."""
    ids = torch.tensor(envs or range(buffer.writer.num_envs))
    data = {"env": ids.expand(steps, -1), "position": buffer.writer.positions[ids] + torch.arange(steps)[:, None]}
    buffer.extend(TensorDict(data, [steps, len(ids)], names=["time", None]), env_ids=ids)


def starts_of(batch: Any) -> list[tuple[int, int]]:
    """Return environment and position of the first step of each window."""
    return list(zip(batch["env"][:, 0].tolist(), batch["position"][:, 0].tolist(), strict=True))
