"""A DataModule without environments: fixed mini-batches, a frame counter, finished evaluation episodes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, Unbounded

SPECS = SimpleNamespace(observation=Composite(observation=Unbounded(4)), action=Categorical(2), num_envs=8)


class Loader:
    """Sized and re-iterable, as the loaders of our DataModules."""

    def __init__(self, length: int, make: Any) -> None:
        self.length, self.make = length, make

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[TensorDict]:
        return self.make()


class FakeData(L.LightningDataModule):
    """Acts on random observations and makes advantages up; 100 more frames an epoch."""

    def __init__(self, total_frames: int = 400, batches: int = 3) -> None:
        super().__init__()
        self.specs: Any = SPECS
        self.batches, self.total_frames, self.frames = batches, total_frames, 0

    def train_dataloader(self) -> Loader:
        return Loader(self.batches, self.epoch)

    def val_dataloader(self) -> Loader:
        episodes = TensorDict(
            {
                "episode_return": torch.tensor([1.0, 3.0]),
                "episode_length": torch.tensor([10, 20]),
                "success": torch.tensor([False, True]),
            },
            batch_size=[2],
        )
        return Loader(1, lambda: iter([episodes]))

    def epoch(self) -> Iterator[TensorDict]:
        module, generator = self.trainer.lightning_module, torch.Generator().manual_seed(self.frames)
        torch.manual_seed(self.frames)
        self.frames += 100
        shape = (self.batches, 16)
        observation = torch.randn(*shape, 2, 4, generator=generator)
        rollout = TensorDict(
            {"observation": observation[..., 0, :], "next": {"observation": observation[..., 1, :]}}, shape
        )
        with torch.no_grad():
            module.policy(rollout)
            module.critic(rollout)
        module.annotate(rollout)
        for name in ("advantage", "value_target", "intrinsic_advantage", "intrinsic_value_target"):
            rollout[name] = torch.randn(*shape, 1, generator=generator)
        rollout["value_target"] += rollout["state_value"]
        yield from rollout.unbind(0)

    def state_dict(self) -> dict[str, Any]:
        return {"frames": self.frames}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.frames = state["frames"]
