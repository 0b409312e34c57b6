"""The config of a run in its checkpoints, so that they are of use wherever they lie."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf

from torchrl_lightning.learn.loading import CONFIG


class KeptConfig(Callback):
    """Put what environment and module are built from into each checkpoint, as plain data.

    Args:
        cfg: The config of the run.
    """

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__()
        self.config = {group: OmegaConf.to_container(cfg[group], resolve=True) for group in ("data", "model")}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the config."""
        checkpoint[CONFIG] = self.config
