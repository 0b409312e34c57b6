"""Updates of episodes and derived entries after flags, rewards or successors of stored steps are replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning._core.keys import NEXT, TRAJ_IDS
from torchrl_lightning._core.tree import Path
from torchrl_lightning.replay.cuts import stored_trajectory_ids
from torchrl_lightning.replay.positions import Flags, Ints
from torchrl_lightning.replay.ring_storage import RingStorage
from torchrl_lightning.replay.rings import Rings
from torchrl_lightning.replay.successors import equal_rows


class FlagReader(Protocol):
    """Protocol of a writer that reduces flags to one per row."""

    rings: Rings

    def done_flags(self, value: Tensor, steps: int) -> Flags:
        """Return a mask of rows that end an episode."""
        ...

    def init_flags(self, value: Tensor, steps: int) -> Flags:
        """Return a mask of rows that begin an episode."""
        ...


class LateFlags:
    """Update episodes and derived entries after entries of stored steps are replaced.

    Args:
        writer: the writer of the rings.
        storage: the storage of the writer.
        done: path of the flag that ends an episode.
        init: path of the flag that begins an episode; the flag need not be stored.
    """

    def __init__(self, writer: FlagReader, storage: RingStorage, done: Path, init: Path) -> None:
        self._writer, self._storage, self._done, self._init = writer, storage, done, init

    def plan(self, changes: Mapping[Path, Tensor], cells: Tensor) -> Callable[[], None]:
        """Validate the new values; return the function to call after they are stored (``RingWriter.plan_rewrite``)."""
        rings, index = self._writer.rings, self._writer.rings.index
        assert index is not None
        changed_cells: Ints = cells.cpu().numpy()
        has_flags = self._done in changes or self._init in changes
        dependents = [
            dependent for dependent, paths in self._storage.dependents if has_flags or not paths.isdisjoint(changes)
        ]
        affected = index.affected_cells(changed_cells) if has_flags or dependents else changed_cells
        done = index.arrays[1][changed_cells]
        if self._done in changes:
            done = self._writer.done_flags(changes[self._done], 1)[0]
        if self._init in changes:
            self._writer.init_flags(changes[self._init], 1)  # called only to validate the flags before anything changes
        had_begin_flag = self._begin_flags(changed_cells) if has_flags else done

        def update() -> None:
            if has_flags:
                rings.set_flags(changed_cells, done, had_begin_flag, self._begin_masks)
            for dependent in dependents:
                dependent.refresh(affected)

        return update

    def _begin_flags(self, cells: Ints) -> Flags:
        """Return a mask of stored steps with a flag that begins an episode."""
        ring_cells = self._storage.cells
        assert ring_cells is not None
        leaf_number = ring_cells.leaf_index.get(self._init)
        if leaf_number is None:
            return np.zeros(len(cells), np.bool_)
        leaf = ring_cells.leaves[leaf_number]
        return self._writer.init_flags(leaf.index_select(0, torch.from_numpy(cells).to(leaf.device)), 1)[0]

    def _begin_masks(self, cells: Ints) -> tuple[Flags, Flags]:
        """Return two masks of successive steps: a flag begins an episode, and a step has a new trajectory id."""
        has_new_id = np.zeros(len(cells), np.bool_)
        if self._storage.cells is not None and TRAJ_IDS in self._storage.cells.leaf_index:
            ids = stored_trajectory_ids(self._storage, cells)
            has_new_id[1:] = ids[1:] != ids[:-1]
        return self._begin_flags(cells), has_new_id


def rewritten_successors(
    rings: Rings, storage: RingStorage, changes: Mapping[Path, Tensor], cells: Tensor
) -> list[Path]:
    """Return the compared entries that have another successor in ``changes`` at an environment's newest step."""
    paths = [path for path in changes if path[0] == NEXT and path[1:] in rings.successors.matched]
    if not paths or storage.cells is None:
        return []
    positions, _ = rings.arrays
    changed_cells = cells.cpu().numpy()
    newest = (positions - 1) % rings.length * rings.num_envs + rings.ids
    rows, rewritten = np.flatnonzero(np.isin(changed_cells, newest)), []
    for path in paths if rows.size else ():
        leaf, row_index = storage.cells.leaves[storage.cells.leaf_index[path]], torch.from_numpy(rows)
        values = changes[path].index_select(0, row_index.to(changes[path].device))
        if not equal_rows(leaf.index_select(0, torch.from_numpy(changed_cells[rows]).to(leaf.device)), values).all():
            rewritten.append(path[1:])
    return rewritten
