"""A policy and a replay source for workers. All their actions are known in advance."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_lightning.environments import ReplayedRows


class Constant(nn.Module):
    """Always takes the action in its only weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.weight.long().expand(len(observation))


def constant_policy() -> TensorDictModule:
    return TensorDictModule(Constant(), in_keys=["observation"], out_keys=["action"])


class FollowedReplay:
    """Replays episodes of one step. They observe the seed and take ``content`` as the action; 0 replays nothing."""

    def __init__(self, num_envs: int, content: int = 0, seed: int = 0) -> None:
        self.num_envs, self.content, self.seed = num_envs, content, seed
        self.told: list[int] = []

    @property
    def playing(self) -> Any:
        return np.zeros(self.num_envs, bool)

    def __call__(self, starts: Any) -> ReplayedRows | None:
        ones = np.ones(starts.sum())
        if not self.content or not len(ones):
            return None
        seen = {"observation": np.full((len(ones), 3), self.seed % 1000)}
        return ReplayedRows(starts, seen, ones * self.content, seen, ones, ones > 0, ones < 0)

    def for_worker(self, seed: int) -> FollowedReplay:
        return FollowedReplay(self.num_envs, self.content, seed)

    def snapshot(self) -> int:
        return self.content

    def delta(self, since: int) -> int:
        self.told.append(since)
        return self.content - since

    def apply_delta(self, delta: int) -> None:
        self.content += delta
