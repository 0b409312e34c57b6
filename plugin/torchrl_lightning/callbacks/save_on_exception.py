"""Keeps the work of a run that ends before its time."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

logger = logging.getLogger(__name__)


class SaveOnException(Callback):
    """Writes a checkpoint when Ctrl-C or an exception ends the training, and says where.

    Unlike Lightning's ``OnExceptionCheckpoint`` it never makes a later run resume by itself: pass the file as
    ``ckpt_path``.

    Args:
        dirpath: the folder to write to, made when it is needed.
        filename: the file's name without its ending.

    Example:
        >>> str(SaveOnException("logs/run").path)
        'logs/run/interrupted.ckpt'
    """

    def __init__(self, dirpath: str | Path, filename: str = "interrupted") -> None:
        super().__init__()
        self.path = Path(dirpath) / f"{filename}.ckpt"

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes the checkpoint, while collector and buffer are still alive."""
        if not trainer.training:
            return
        trainer.save_checkpoint(self.path)
        logger.warning("stopped by %s; resume with ckpt_path=%s", type(exception).__name__, self.path)
