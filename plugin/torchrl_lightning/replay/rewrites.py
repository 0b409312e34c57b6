"""Replacement of entries of stored steps, validated as a whole before any entry is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from torchrl_lightning._core.tree import Path
from torchrl_lightning.kernels.indices import as_integers
from torchrl_lightning.replay.cells import Cells


class RewritableStorage(Protocol):
    """Protocol of a storage with watched entries; its writer validates new values of these entries."""

    cells: Cells | None
    watched: set[Path]

    def check_owner(self) -> None:
        """Raise an error if another process owns the storage."""
        ...

    def check_filled(self, index: Tensor) -> None:
        """Raise an error if a cell is empty."""
        ...

    def plan(self, changes: Mapping[Path, Tensor], cells: Tensor) -> Callable[[], None] | None:
        """Validate new values of watched entries; return the function to call after writing them, or None."""
        ...

    def bump_revision(self) -> None:
        """Record a change."""
        ...


def plan_entries(storage: RewritableStorage, changes: Mapping[Path, Tensor], cells: Tensor) -> Callable[[], None]:
    """Validate new values of stored leaves together; return the function that writes them.

    Args:
        storage: the storage of the steps.
        changes: new values with the row shapes and dtypes of the leaves, ``[n, ...]`` each.
        cells: cells of the steps, ``[n]``, without duplicates.

    Raises:
        IndexError: a cell is empty.
        ValueError: the writer rejects the new flags.
    """
    storage.check_owner()
    ring_cells = storage.cells
    assert ring_cells is not None
    cells = as_integers(cells, "Cells").to(ring_cells.device)
    storage.check_filled(cells)
    values = ring_cells.copy_if_aliased([value.detach().to(ring_cells.device) for value in changes.values()])
    watched = {path: value for path, value in zip(changes, values, strict=True) if path in storage.watched}
    after_write = storage.plan(watched, cells)

    def write() -> None:
        for path, value in zip(changes, values, strict=True):
            ring_cells.leaves[ring_cells.leaf_index[path]].index_copy_(0, cells, value)
        storage.bump_revision()
        if after_write is not None:
            after_write()

    return write
