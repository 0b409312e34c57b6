"""Checkpoints that are replaced as a whole, whatever ends the process that writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fsspec.core import strip_protocol
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.serialization import get_safe_globals

from torchrl_lightning.checkpoint_reader import load_checkpoint
from torchrl_lightning.files import replaced_files


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write checkpoints beside their place, flush them to the disk, and rename them: the old or the new one is there.

    Lightning's own way writes to the system's temporary folder. Where that is another filesystem, the file is copied to
    its place, so that a process that is killed, or a disk that is full, leaves half of it and no other. What killed
    processes left behind is removed by the next save into the same folder. Checkpoints that are not local files are
    written in Lightning's way; removing is Lightning's. Local checkpoints are read within the limits of
    :mod:`torchrl_lightning.limits`, unless ``weights_only=False`` or classes that you registered by
    ``torch.serialization.add_safe_globals`` ask for more than plain values.

    Our commands have it among ``trainer.plugins``; with :class:`~torchrl_lightning.LastCheckpoint` or
    :class:`~torchrl_lightning.BestCheckpoint` a trainer that has Lightning's own gets it.

    Examples:
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
        target = Path(strip_protocol(str(path)))
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

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It holds other than plain values and tensors, or exceeds the limits.
        """
        return read_within_limits(path, map_location, weights_only)


def read_within_limits(source: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read a checkpoint as Lightning does; plain values and tensors in local and open files within the limits."""
    is_path = isinstance(source, str | Path)
    is_local = not is_path or isinstance(get_filesystem(source), LocalFileSystem)
    if weights_only is False or not is_local or _has_own_classes():
        found: dict[str, Any] = (
            TorchCheckpointIO().load_checkpoint(source, map_location, weights_only)
            if is_path
            else torch.load(source, map_location=map_location, weights_only=weights_only)
        )
        return found
    path = Path(strip_protocol(str(source))) if is_path else source
    if is_path and not path.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    try:
        found = load_checkpoint(path)
    except ValueError as error:
        raise ValueError(f"{source} is no whole checkpoint of plain data: {error}") from error
    if map_location is None or str(map_location) == "cpu":
        return found
    if is_path:
        return torch.load(path, map_location=map_location, weights_only=True)
    source.seek(0)
    return torch.load(source, map_location=map_location, weights_only=True)


def _has_own_classes() -> bool:
    """Return whether a user has allowed torch to load further classes."""
    return any(not str(getattr(each, "__module__", "")).startswith("torch.") for each in get_safe_globals())


def write_atomically(trainer: Trainer) -> None:
    """Give a trainer that writes checkpoints in Lightning's own way ours."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
