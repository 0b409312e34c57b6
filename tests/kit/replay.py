"""DQN runs that learn CartPole from each kind of replay buffer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from kit.runs import trainer
from torchrl_lightning import RecentSampler, RecurrentReplayBuffer, ReplayDataModule, SimpleReplayBuffer
from torchrl_lightning.agents import DQNModule, MLPNetwork, RecurrentNetwork
from torchrl_lightning.replay import (
    ExperienceBuffer,
    PrioritizedSampler,
    RingStorage,
    SequenceSampler,
    UniformSampler,
)

SIZE = 400


def experience(sampler: Any = UniformSampler, folder: Path | None = None, **settings: Any) -> Callable[[int], Any]:
    """Return a factory of a buffer. If a folder is given, the buffer stores its data in files there."""

    def make(num_envs: int) -> ExperienceBuffer:
        storage = RingStorage(SIZE, scratch_dir=folder)
        return ExperienceBuffer(storage=storage, sampler=sampler(), num_envs=num_envs, **settings)

    return make


def prioritized(**settings: Any) -> PrioritizedSampler:
    return PrioritizedSampler(SIZE, alpha=0.7, beta=0.5, **settings)


def recent() -> RecentSampler:
    return RecentSampler(recent_data_steps=4, recent_data_ratio=0.25, prioritized=prioritized(batch_length=1))


BUFFERS: dict[str, Any] = {
    "uniform": experience(),
    "prioritized": experience(prioritized),
    "three steps": experience(n_steps=3),
    "prioritized, three steps": experience(prioritized, n_steps=3),
    "sequence": experience(lambda: SequenceSampler(4)),
    "recent, prioritized": experience(recent),
    "simple": lambda num_envs: SimpleReplayBuffer(4, None, SIZE, 8, num_envs=num_envs),
}


def recurrent(num_envs: int) -> RecurrentReplayBuffer:
    return RecurrentReplayBuffer(SIZE, 4, None, None, num_envs=num_envs)


def dqn(cls: Any = DQNModule, seed: int = 0, recurrent: bool = False, **settings: Any) -> Any:
    torch.manual_seed(seed)
    network = RecurrentNetwork("gru", 8) if recurrent else MLPNetwork([8], "relu")
    return cls(network, **{"epsilon_frames": 100, **settings})


def replay_data(buffer: Any = "uniform", **settings: Any) -> ReplayDataModule:
    """Make data with ten updates an epoch and two new frames for each, after 40 random ones.

    ``buffer`` may be a name in ``BUFFERS``.
    """
    sizes = {"num_envs": 2, "batch_size": 8, "updates_per_epoch": 10, "warmup_frames": 40, "eval_episodes": 2}
    buffer = BUFFERS[buffer] if isinstance(buffer, str) else buffer
    return ReplayDataModule(**{"env": "CartPole-v1", "buffer": buffer, "seed": 0, **sizes, **settings})


def fit(folder: Path, data: Any, module: Any = None, ckpt_path: Any = None, **settings: Any) -> tuple[Any, L.Trainer]:
    """Fit a module, DQN by default, without evaluations; return it and its trainer."""
    module = dqn() if module is None else module
    run = trainer(folder, **{"limit_val_batches": 0, **settings})
    run.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, run


def cells(data: Any) -> Any:
    """Copy the contents of a run's buffer."""
    return data.buffer.storage.get(torch.arange(len(data.buffer))).clone()


def stored(data: Any) -> Tensor:
    """Return the contents of a run's buffer as one vector."""
    leaves = sorted(cells(data).flatten_keys().items())
    return torch.cat([leaf.reshape(-1).double() for _, leaf in leaves])
