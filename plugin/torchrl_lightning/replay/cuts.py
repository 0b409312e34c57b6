"""Detection of trajectories that were cut without a flag, by trajectory ids or stored successors."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.keys import NEXT, TRAJ_IDS
from torchrl_lightning._core.tree import Path, Tree, entry_of, key_text, leaves_of
from torchrl_lightning.replay.positions import Flags, Ints
from torchrl_lightning.replay.ring_storage import RingStorage
from torchrl_lightning.replay.rings import Rings
from torchrl_lightning.replay.successors import comparable_paths

logger = logging.getLogger(__name__)
PendingRows = tuple[Any, TensorDictBase, list[Tensor] | None]
"""The storage, the rows to write, and the leaves of these rows if they have been matched with the cells."""


class TrajectoryCuts:
    """Find rows of a write that begin a new trajectory without a flag."""

    def __init__(self) -> None:
        self.compared: list[Path] = []
        """Entries that can be compared with stored successors."""
        self._has_ids = self._has_warned = False

    def set_entries(self, written: Tree, stored: Tree, flags: Iterable[Path]) -> None:
        """Find the entries that can be compared; see :func:`comparable_paths` for the arguments."""
        self.compared = comparable_paths(written, stored, tuple(flags))
        self._has_ids = TRAJ_IDS in dict(leaves_of(written))

    def find_begins(
        self, rings: Rings, rows: PendingRows, env: Ints, done: Flags, init: Flags, compare_successors: bool
    ) -> Flags:
        """Return a mask of rows that begin an episode, with or without a flag.

        Args:
            rings: the rings to write to.
            rows: the rows, time-major, ``[steps * M]``.
            env: environments of the rows, ``[M]``.
            done: mask of rows that end an episode, ``[steps, M]``.
            init: mask of rows at which a flag begins an episode, ``[steps, M]``; may be empty.
            compare_successors: compare rows with stored successors.
        """
        positions, valid_from = rings.arrays
        last_positions = positions[env] - 1
        cells, is_stored = last_positions % rings.length * rings.num_envs + env, last_positions >= valid_from[env]
        init_flags = init
        if self._has_ids:
            ids = trajectory_id_array(pending_entry(rows, TRAJ_IDS)).reshape(done.shape)
            id_changes = np.empty(done.shape, np.bool_)
            id_changes[1:] = ids[1:] != ids[:-1]
            id_changes[0] = False
            id_changes[0, is_stored] = stored_trajectory_ids(rows[0], cells[is_stored]) != ids[0, is_stored]
            init = init | id_changes if init.size else id_changes
        if compare_successors and self.compared:
            init = self._compare(rings, rows, env, cells, done, init, init_flags, is_stored)
        if init is not init_flags and rings.index is not None and not rings.index.has_cuts:
            rings.index.has_cuts = bool((init & ~init_flags).any() if init_flags.size else init.any())
        if rings.reloaded is not None:
            rings.mark_written(env)
        return init

    def _compare(
        self,
        rings: Rings,
        rows: PendingRows,
        env: Ints,
        cells: Ints,
        done: Flags,
        init: Flags,
        init_flags: Flags,
        is_stored: Flags,
    ) -> Flags:
        """Add cuts found by stored successors. In the first write after a load, they replace the cuts found by ids."""
        assert rings.index is not None
        storage, successors, known_begins = rows[0], rings.successors, init
        is_compared = rings.index.is_running(env) & is_stored
        if self._has_ids:  # ids mark cuts, but not after a load, because a new collector counts ids from zero
            is_compared = np.zeros_like(is_compared) if rings.reloaded is None else is_compared & rings.reloaded[env]
            known_begins = init.copy()
            known_begins[0, is_compared] = init_flags[0, is_compared] if init_flags.size else False
        cut, differing_path, was_used = successors.find_cuts(
            self.compared,
            lambda path: pending_entry(rows, path),
            lambda path, selected: stored_entry(storage, (NEXT, *path), cells[selected]),
            done,
            known_begins,
            is_compared,
        )
        if isinstance(storage, RingStorage):
            storage.watched |= {(NEXT, *path) for path in successors.matched}
        if self._has_ids and was_used:
            init = known_begins
        if differing_path is None:
            return init
        init = init.copy() if init.size else np.zeros(done.shape, np.bool_)
        init[0] |= cut
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the new rows of the environments %s do not continue their stored trajectories, because %s differs "
                "from the stored successor: the writer ends those trajectories there. Call writer.cut() whenever "
                "environments are restarted. If the rows do continue them, pass check_successors=False to the "
                "RingWriter or the buffer.",
                env[cut].tolist(), key_text(differing_path),
            )  # fmt: skip
        return init


def pending_entry(rows: PendingRows, path: Path) -> Tensor:
    """Return an entry of the rows to write, ``[n, ...]``."""
    storage, data, leaves = rows
    value = entry_of(data, path) if leaves is None else leaves[storage.cells.leaf_index[path]]
    assert value is not None
    return value


def stored_entry(storage: Any, path: Path, cells: Ints) -> Tensor:
    """Read an entry of stored steps, ``[n, ...]``, from a storage of any kind."""
    index = torch.from_numpy(cells)
    if not isinstance(storage, RingStorage):
        value = entry_of(storage.get(index), path)
        assert value is not None
        return value
    ring_cells = storage.cells
    assert ring_cells is not None
    return ring_cells.leaves[ring_cells.leaf_index[path]].index_select(0, index.to(ring_cells.device))


def stored_trajectory_ids(storage: Any, cells: Ints) -> NDArray[Any]:
    """Read the trajectory ids of stored steps, ``[n]``."""
    ring_cells = storage.cells if isinstance(storage, RingStorage) else None
    if not cells.size:
        return cells
    if ring_cells is None or not ring_cells.on_cpu:
        return trajectory_id_array(stored_entry(storage, TRAJ_IDS, cells))
    return trajectory_id_array(ring_cells.leaves[ring_cells.leaf_index[TRAJ_IDS]])[cells]


def trajectory_id_array(ids: Tensor) -> NDArray[Any]:
    """Return the trajectory ids, one per row, as an array ``[n]``."""
    array: NDArray[Any] = (ids if ids.is_cpu else ids.cpu()).numpy()
    return array if array.ndim == 1 else array.reshape(len(array), -1)[:, 0]
