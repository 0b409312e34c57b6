"""A DataModule without environments that serves transitions of a linear system, fit by fit."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, Unbounded

from learn.fakes import Loader
from torchrl_lightning.dynamics import DynamicsTargets

SPECS = SimpleNamespace(
    observation=Composite(observation=Unbounded(2)), action=Bounded(-1.0, 1.0, (1,)), num_envs=1, keys=["observation"]
)


def transitions(rows: int, generator: torch.Generator | None = None) -> TensorDict:
    """Return steps of a point that an action pushes; the reward is high in the middle."""
    observation = torch.randn(rows, 2, generator=generator)
    action = torch.rand(rows, 1, generator=generator) * 2.0 - 1.0
    velocity = observation[:, 1:] + 0.1 * action
    following = torch.cat([observation[:, :1] + 0.1 * velocity, velocity], 1)
    after = {"observation": following, "reward": -following[:, :1].square()}
    return TensorDict({"observation": observation, "action": action, "next": after}, [rows])


class FakeDynamics(L.LightningDataModule):
    """Three batches an epoch; begins a new fit every ``refit`` epochs, or when the module says that one is over."""

    def __init__(self, members: int = 3, refit: int = 4, holdout: int = 20, reward: Any = None) -> None:
        super().__init__()
        self.specs, self.num_members, self.refit, self.holdout = SPECS, members, refit, holdout
        self.targets = DynamicsTargets(SPECS.observation, SPECS.action, reward=reward)
        self.frames = self.epochs = self.fits = 0
        self.rows = transitions(60, torch.Generator().manual_seed(0))

    def train_dataloader(self) -> Loader:
        return Loader(3, self.epoch)

    def val_dataloader(self) -> Loader:
        rows = transitions(self.holdout, torch.Generator().manual_seed(1))
        return Loader(2, lambda: iter(self.targets(rows).split(self.holdout - 4)))

    def epoch(self) -> Iterator[TensorDict]:
        module = self.trainer.lightning_module
        if self.epochs % self.refit == 0 or module.fit_is_over:
            self.frames, self.fits = self.frames + 20, self.fits + 1
            self.targets.fit(self.rows[: 20 + self.frames])
            module.begin_fit(self.targets)
        generator = torch.Generator().manual_seed(self.epochs)
        self.epochs += 1
        for _ in range(3):
            yield self.targets(self.rows[torch.randint(60, (self.num_members, 16), generator=generator)])

    def state_dict(self) -> dict[str, Any]:
        return {"frames": self.frames, "epochs": self.epochs, "fits": self.fits, "specs": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.frames, self.epochs, self.fits = state["frames"], state["epochs"], state["fits"]
