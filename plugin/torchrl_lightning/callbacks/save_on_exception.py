"""Keeps the work of a run that ends before its time."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

logger = logging.getLogger(__name__)


class SaveOnException(Callback):
    """Writes a checkpoint when Ctrl-C or an exception ends the training, and says where.

    Unlike Lightning's ``OnExceptionCheckpoint`` it never makes a later run resume by itself: pass the file as
    ``ckpt_path``. The resumed run makes the updates that were left of the last rollout before it collects anew.

    With several ranks nothing is written: an exception ends one of them while the others wait for its gradients, and
    a checkpoint needs the state of all.

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
        self._training = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to watch: what fails before has learned nothing."""
        self._training = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the watch."""
        self._training = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes the checkpoint, while collector and buffer are still alive."""
        training, self._training = self._training, False
        if not training:
            return
        reason = type(exception).__name__
        if trainer.world_size > 1:
            logger.warning("stopped by %s; with several ranks only the regular checkpoints are kept.", reason)
            return
        trainer.save_checkpoint(self.path, weights_only=False)
        logger.warning("stopped by %s; to resume, run the same command with ckpt_path=%s", reason, self.path)
