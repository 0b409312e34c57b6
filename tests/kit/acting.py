"""Replay runs without learning. The policy therefore stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch

from kit.runs import trainer
from torchrl_lightning import ReplayDataModule


class Acting(L.LightningModule):
    """A module that learns nothing: it writes made-up errors and calls ``behind[i](data)`` in update ``i``."""

    def __init__(self, policy: Any, behind: dict[int, Callable[[ReplayDataModule], object]]) -> None:
        super().__init__()
        self.policy, self.behind, self.automatic_optimization = policy, behind, False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        batch["td_error"] = torch.arange(float(len(batch)))
        self.behind.get(batch_idx + 1, lambda data: None)(self.trainer.datamodule)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return []


def collect(data: ReplayDataModule, policy: Any, times: int, behind: Any = None) -> None:
    """Collect ``times`` times, with an update after each; call ``behind[i](data)`` in update ``i``."""
    data.updates_per_epoch, data.warmup_frames = times, 1
    trainer(max_epochs=1, limit_val_batches=0).fit(Acting(policy, behind or {}), datamodule=data)
