"""Checkpoints that are replaced as a whole, whatever ends the process that writes them."""

from __future__ import annotations

__all__ = ["AtomicCheckpointIO"]

from pathlib import Path
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO

from torchrl_lightning.files import replaced_files


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write checkpoints beside their place, flush them to the disk, and rename them: the old or the new one is there.

    Lightning's own way writes to the system's temporary folder. Where that is another filesystem, the file is copied to
    its place, so that a process that is killed, or a disk that is full, leaves half of it and no other. What killed
    processes left behind is removed by the next save into the same folder. Checkpoints that are not local files are
    written in Lightning's way; reading and removing are Lightning's.

    Our commands have it among ``trainer.plugins``; with :class:`~torchrl_lightning.LastCheckpoint` or
    :class:`~torchrl_lightning.BestCheckpoint` a trainer that has Lightning's own gets it.

    Example:
        >>> trainer = Trainer(plugins=[AtomicCheckpointIO()], logger=False)
        >>> type(trainer.strategy.checkpoint_io).__name__
        'AtomicCheckpointIO'
    """

    def __init__(self) -> None:
        super().__init__()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint.

        Raises:
            OSError: The disk is full or cannot be written to; an earlier checkpoint stays whole.
        """
        filesystem = get_filesystem(path)
        if storage_options is not None or not isinstance(filesystem, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(filesystem._strip_protocol(str(path)))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with replaced_files(target) as (file,):
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            failed = error.__context__ if isinstance(error, RuntimeError) else error  # torch tells it in its own way
            if not isinstance(failed, OSError):
                raise
            said = f"{failed.strerror or failed}; no checkpoint was written, and what was there stays"
            raise OSError(failed.errno, said, str(target)) from error


def write_atomically(trainer: Trainer) -> None:
    """Give a trainer that writes checkpoints in Lightning's own way ours."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
