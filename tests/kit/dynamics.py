"""Transitions, plain and under PyTorchRL's names, and a DataModule for fitting dynamics models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from kit.golden import tensors
from torchrl_lightning import DynamicsDataModule, MBReplayBuffer

golden = partial(tensors, "model_based_batches")


def golden_slice(action: str = "action") -> dict[str, torch.Tensor]:
    """Return the golden transitions, time-major ``[10, 1, ...]``."""
    arrays = golden()
    found = {
        "Observation": arrays["obs"],
        "Action": arrays[action],
        "NextObservation": arrays["next_obs"],
        "Reward": arrays["reward"],
        "Done": torch.zeros(10, 1),
    }
    return {name: value.unsqueeze(1) for name, value in found.items()}


def numbered(first: int, last: int, envs: int = 1, **changes: Any) -> dict[str, torch.Tensor]:
    """Build the steps ``[first, last)`` of ``envs`` environments, with the observations ``100 * env + step``."""
    at = torch.arange(first, last, dtype=torch.float32)[:, None] + 100.0 * torch.arange(envs)
    steps = {
        "Observation": at.unsqueeze(-1),
        "Action": torch.zeros(len(at), envs, 1),
        "NextObservation": at.unsqueeze(-1) + 1,
        "Reward": at.unsqueeze(-1).clone(),
        "Done": torch.zeros(len(at), envs, 1),
    }
    return {**steps, **changes}


def rows(count: int, seed: int = 0, width: int = 3, actions: int = 2) -> TensorDict:
    """Build random transitions ``[count]``."""
    rng = torch.Generator().manual_seed(seed)
    flag = torch.zeros(count, 1, dtype=torch.bool)
    observation = torch.randn(count, width, generator=rng)
    following = {
        "observation": observation + torch.randn(count, width, generator=rng),
        "reward": torch.randn(count, 1, generator=rng),
        **dict.fromkeys(("done", "terminated", "truncated"), flag),
    }
    action = torch.randn(count, actions, generator=rng)
    return TensorDict({"observation": observation, "action": action, "next": following}, [count])


def model_data(**settings: Any) -> DynamicsDataModule:
    """Make data for three fits of four epochs to Pendulum: with 40, 50 and 60 rows."""
    frames = {"warmup_frames": 40, "frames_per_fit": 10, "total_frames": 60, "reset_at_each_batch": True}
    sizes = {"batch_size": 16, "num_members": 3, "max_epochs_per_fit": 4, "eval_episodes": 1}
    buffer = {"buffer": partial(MBReplayBuffer, 1000)}
    return DynamicsDataModule(**{"env": "Pendulum-v1", "seed": 0, **buffer, **frames, **sizes, **settings})
