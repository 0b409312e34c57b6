"""Memory-mapped cells of several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrl_lightning.replay import RingStorage


def keep_files_apart(storage: Any, rank: int, world_size: int) -> None:
    """Lays the memory-mapped cells of each of several ranks into ``rank_R`` below the storage's ``scratch_dir``.

    Args:
        storage: nothing has been written to it.
        rank: which process this is.
        world_size: how many there are; a single one keeps its folder.

    Raises:
        ValueError: if all ranks would write into the same files.

    Example:
        >>> storage = RingStorage(10, scratch_dir="cells")
        >>> keep_files_apart(storage, 1, 2)
        >>> storage.scratch_dir.as_posix()
        'cells/rank_1'
    """
    folder = getattr(storage, "scratch_dir", None)
    if world_size == 1 or folder is None:
        return
    if not isinstance(storage, RingStorage) or storage.tree:
        kind = "an opened RingStorage" if isinstance(storage, RingStorage) else f"a {type(storage).__name__}"
        raise ValueError(
            f"the buffers of all {world_size} ranks would write into the files of {kind} in {folder}; give the buffer "
            "a new RingStorage(..., scratch_dir=...), which is laid into a folder for each rank, or keep it in memory."
        )
    storage.scratch_dir = Path(folder) / f"rank_{rank}"
