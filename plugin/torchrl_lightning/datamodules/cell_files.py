"""Memory-mapped cells of several ranks."""

from __future__ import annotations

from typing import Any

from torchrl_lightning.replay import RingStorage


def check_files_apart(storage: Any, world_size: int) -> None:
    """Refuse a storage whose files several ranks would write into.

    The files of a :class:`RingStorage` have no name, so that ranks never share them.

    Args:
        storage: The storage of a rank's buffer.
        world_size: Number of ranks.

    Raises:
        ValueError: The storage keeps its cells in named files.

    Example:
        >>> check_files_apart(RingStorage(10, scratch_dir="cells"), 2)
    """
    folder = getattr(storage, "scratch_dir", None)
    if world_size > 1 and folder is not None and not isinstance(storage, RingStorage):
        raise ValueError(
            f"The buffers of all {world_size} ranks would write into the files of a {type(storage).__name__} in "
            f"{folder}; give the buffer a RingStorage(..., scratch_dir=...), or keep it in memory."
        )
