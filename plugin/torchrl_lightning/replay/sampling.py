"""Which cells a storage holds."""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning.replay.storage import RingStorage
from torchrl_lightning.replay.writer import RingWriter


def check_size(number: Any, least: int = 0, name: str = "batch_size") -> int:
    """Check how many of something are asked for.

    Args:
        number: how many.
        least: smallest number that makes sense.
        name: what the error calls it.

    Raises:
        ValueError: it is not an integer, or too small.

    Example:
        >>> check_size(3)
        3
    """
    try:
        size = -1 if isinstance(number, bool) else index(number)
    except TypeError:
        size = -1
    if size < least:
        wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{name} must be {wanted}, got {number!r}.")
    return size


def ring_of(storage: Storage) -> RingWriter | None:
    """Return the writer of a storage's rings, unless its filled cells are simply the first ``len(storage)`` ones.

    Example:
        >>> ring_of(RingStorage(4)) is None
        True
    """
    return storage.writer if isinstance(storage, RingStorage) and not storage.is_prefix else None


def stored_cells(storage: Storage) -> Tensor:
    """Return all cells that hold something, in ascending order: ``O(capacity)``.

    Example:
        >>> from tensordict import TensorDict
        >>> storage = RingStorage(4)
        >>> storage.set(slice(0, 2), TensorDict({"a": torch.arange(2)}, [2]))
        >>> stored_cells(storage).tolist()
        [0, 1]
    """
    writer = ring_of(storage)
    return torch.arange(len(storage)) if writer is None else writer.filled_cells()
