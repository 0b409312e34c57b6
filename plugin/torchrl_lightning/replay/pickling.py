"""Pickling and copying of the cells of a storage."""

from __future__ import annotations

import copy
from functools import partial
from multiprocessing.sharedctypes import Value
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from torchrl_lightning._core.memory import UnnamedFile, check_free_memory, map_tree, pack_tree, unpack_tree
from torchrl_lightning._core.mixins import is_spawning
from torchrl_lightning._core.torchrl_compat import StorageBase
from torchrl_lightning._core.tree import Tree, map_leaves, row_bytes
from torchrl_lightning.replay import process_owned


class _NoLock:
    """A lock that never locks, for a shared number; a real lock stays locked if its holder dies.

    The buffer's lock already protects the number.
    """

    def acquire(self) -> None:
        """Do nothing."""

    release = __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


class PickledCells(process_owned.ProcessOwned, StorageBase):
    """A storage that pickles its cells.

    A pickle contains a copy of the cells in memory. A pickle of memory-mapped cells refers to their file. A pickle of
    shared cells for a new child process refers to the shared memory. Any other pickle of shared cells contains a copy.
    """

    scratch_dir: Path | None
    _file: UnnamedFile | None = None  # the file of memory-mapped cells

    @property
    def tree(self) -> Tree:
        """Nested dict of the leaves, ``[max_size, ...]`` each; empty before the first write."""
        raise NotImplementedError

    def take_ownership(self, tree: Tree) -> None:
        """Use these leaves as the cells."""
        raise NotImplementedError

    def _filled_cells(self) -> Tensor | int:
        """Return the filled cells, or their number if they are the first cells."""
        raise NotImplementedError

    def share_counters(self) -> None:
        """Move length, revision and cursor into memory that forked and spawned processes share."""
        unlocked: Any = _NoLock()
        self.move_counters(partial(Value, lock=unlocked))

    def __getstate__(self) -> dict[str, Any]:
        self.check_picklable()
        if is_spawning() and not self.tree:
            raise ValueError(process_owned.EXAMPLE_FIRST)
        if self.scratch_dir is None:
            return self._copied_state()
        if self._file is None:  # nothing is mapped yet
            return {**super().__getstate__(), "_cells": {}}
        if not self._file.supports_reopening:
            return self._copied_state()
        layout = map_leaves(lambda leaf: leaf[:0].clone(), self.tree)
        return {**super().__getstate__(), "_storage": None, "cells": None, "_cells": layout}

    def _copied_state(self) -> dict[str, Any]:
        """Return the state of a copy in memory, because two storages cannot fill the same file."""
        if self.scratch_dir is not None:
            check_free_memory(row_bytes(self.tree) * self.max_size, "A copy in memory", "use dumps and loads")
        state = {**super().__getstate__(), "_storage": None, "cells": None, "scratch_dir": None, "_file": None}
        if is_spawning():  # the other process uses the same memory
            return {**state, "_cells": self.tree}
        cells = self._filled_cells()
        return {**state, "_cells": pack_tree(self.tree, cells), "_packed": cells}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self._copied_state(), memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        tree, cells = state.pop("_cells"), state.pop("_packed", None)
        super().__setstate__(state)
        if cells is not None:
            tree = unpack_tree(tree, cells, self.max_size)
        elif self._file is not None:
            tree = map_tree(self._file, tree, self.max_size)
        if not self._shared:
            self.claim_ownership()
        if tree:
            self.take_ownership(tree)
