"""Write checkpoints atomically, so that a killed process never leaves an incomplete file."""

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

from torchrl_lightning._core.checkpoint_reader import load_checkpoint
from torchrl_lightning._core.files import replaced_files


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write each checkpoint to a temporary file in the same folder, flush it to disk, and rename it.

    Lightning writes to the system's temporary folder. If this folder is on another filesystem, Lightning copies the
    file, and a killed process or a full disk then leaves an incomplete checkpoint. The next save into the same folder
    removes the temporary files of killed processes. Lightning's own code still writes remote checkpoints and removes
    old checkpoints. Local checkpoints must be within the limits of ``_core/file_limits.py``. These limits do not apply
    with ``weights_only=False``, or after you register classes with ``torch.serialization.add_safe_globals``.

    Our commands add this plugin to ``trainer.plugins``. :class:`~torchrl_lightning.LastCheckpoint` and
    :class:`~torchrl_lightning.BestCheckpoint` replace Lightning's default plugin by it.

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
            OSError: The disk is full or not writable; an earlier checkpoint stays intact.
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
            cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch wraps the OSError
            if not isinstance(cause, OSError):
                raise
            message = f"{cause.strerror or cause}; no checkpoint was written, and an existing one is unchanged"
            raise OSError(cause.errno, message, str(target)) from error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: The checkpoint contains more than plain values and tensors, or exceeds the limits.
        """
        return read_within_limits(path, map_location, weights_only)


def read_within_limits(source: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read a checkpoint like Lightning, within the limits that :class:`AtomicCheckpointIO` describes."""
    is_path = isinstance(source, str | Path)
    is_local = not is_path or isinstance(get_filesystem(source), LocalFileSystem)
    if weights_only is False or not is_local or _has_registered_classes():
        checkpoint: dict[str, Any] = (
            TorchCheckpointIO().load_checkpoint(source, map_location, weights_only)
            if is_path
            else torch.load(source, map_location=map_location, weights_only=weights_only)
        )
        return checkpoint
    path = Path(strip_protocol(str(source))) if is_path else source
    if is_path and not path.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    try:
        checkpoint = load_checkpoint(path)
    except ValueError as error:
        raise ValueError(f"{source} is not a complete checkpoint of plain data: {error}") from error
    if map_location is None or str(map_location) == "cpu":
        return checkpoint
    if is_path:
        return torch.load(path, map_location=map_location, weights_only=True)
    source.seek(0)
    return torch.load(source, map_location=map_location, weights_only=True)


def _has_registered_classes() -> bool:
    """Return True if the user has registered additional classes for torch to load."""
    return any(not str(getattr(cls, "__module__", "")).startswith("torch.") for cls in get_safe_globals())


def use_atomic_checkpoints(trainer: Trainer) -> None:
    """Replace Lightning's default checkpoint plugin of a trainer by :class:`AtomicCheckpointIO`."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
