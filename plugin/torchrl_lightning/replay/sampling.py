"""Which cells a storage holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning.replay.storage import RingStorage
from torchrl_lightning.replay.writer import RingWriter


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
