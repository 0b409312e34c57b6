"""Entries that are replaced in stored steps: all of them, or none if one is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from torchrl_lightning.entries import Path
from torchrl_lightning.kernels.indices import integers
from torchrl_lightning.replay.cells import Cells


class RewritableStorage(Protocol):
    """A storage whose writer checks the entries that it watches."""

    cells: Cells | None
    watched: set[Path]

    def check_owner(self) -> None:
        """Raise an error if another process owns the storage."""
        ...

    def check_filled(self, index: Tensor) -> None:
        """Raise an error if a cell holds nothing."""
        ...

    def plan(self, changes: Mapping[Path, Tensor], cells: Tensor) -> Callable[[], None] | None:
        """Check the watched entries; return what has to follow."""
        ...

    def touch(self) -> None:
        """Record that something has changed."""
        ...


def plan_entries(storage: RewritableStorage, changes: Mapping[Path, Tensor], cells: Tensor) -> Callable[[], None]:
    """Check leaves that are to be replaced in stored steps, all of them together; return what replaces them.

    Args:
        storage: where the steps are stored.
        changes: values that have the shapes and dtypes of the leaves, ``[n, ...]`` each.
        cells: which steps, ``[n]``, each once.

    Raises:
        IndexError: a cell holds nothing.
        ValueError: the writer refuses the new flags.
    """
    storage.check_owner()
    known = storage.cells
    assert known is not None
    cells = integers(cells, "Cells").to(known.device)
    storage.check_filled(cells)
    values = known.apart([value.detach().to(known.device) for value in changes.values()])
    watched = {path: value for path, value in zip(changes, values, strict=True) if path in storage.watched}
    follow = storage.plan(watched, cells)

    def write() -> None:
        for path, value in zip(changes, values, strict=True):
            known.leaves[known.places[path]].index_copy_(0, cells, value)
        storage.touch()
        if follow is not None:
            follow()

    return write
