"""Detection of trajectories that were cut without a flag, from trajectory ids or stored successors."""

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
from torchrl_lightning._core.tree import Path, Tree, entry_of, leaves_of, name_of
from torchrl_lightning.replay.positions import Flags, Ints
from torchrl_lightning.replay.ring_storage import RingStorage
from torchrl_lightning.replay.rings import Rings
from torchrl_lightning.replay.successors import comparable

logger = logging.getLogger(__name__)
Rows = tuple[Any, TensorDictBase, list[Tensor] | None]
"""The storage, the rows to write into it, and their leaves if these are matched with the cells."""


class TrajectoryCuts:
    """Find rows of a write that begin a new trajectory without a flag."""

    def __init__(self) -> None:
        self.compared: list[Path] = []
        """Entries that can be compared with stored successors."""
        self._has_ids = self._has_warned = False

    def prepare(self, written: Tree, stored: Tree, flags: Iterable[Path]) -> None:
        """Find the usable entries of rows; the arguments are the arguments of :func:`comparable`."""
        self.compared = comparable(written, stored, tuple(flags))
        self._has_ids = TRAJ_IDS in dict(leaves_of(written))

    def add(self, rings: Rings, rows: Rows, env: Ints, done: Flags, init: Flags, compares: bool) -> Flags:
        """Return a mask of rows that begin an episode, with or without a flag.

        Args:
            rings: the rings to write to.
            rows: the rows, time-major, ``[steps * M]``.
            env: their environments, ``[M]``.
            done: mask of rows that end an episode, ``[steps, M]``.
            init: mask of rows with a flag that begins an episode, ``[steps, M]``; may be empty.
            compares: compare rows with stored successors.
        """
        positions, floor = rings.arrays
        last = positions[env] - 1
        cells, is_stored = last % rings.length * rings.num_envs + env, last >= floor[env]
        flagged = init
        if self._has_ids:
            ids = numbers_of(entry(rows, TRAJ_IDS)).reshape(done.shape)
            change = np.empty(done.shape, np.bool_)
            change[1:] = ids[1:] != ids[:-1]
            change[0] = False
            change[0, is_stored] = stored_ids(rows[0], cells[is_stored]) != ids[0, is_stored]
            init = init | change if init.size else change
        if compares and self.compared:
            init = self._compare(rings, rows, env, cells, done, init, flagged, is_stored)
        if init is not flagged and rings.index is not None and not rings.index.has_cuts:
            rings.index.has_cuts = bool((init & ~flagged).any() if flagged.size else init.any())
        if rings.reloaded is not None:
            rings.reloaded[env] = False
            if not rings.reloaded.any():
                rings.reloaded = None
        return init

    def _compare(
        self,
        rings: Rings,
        rows: Rows,
        env: Ints,
        cells: Ints,
        done: Flags,
        init: Flags,
        flagged: Flags,
        is_stored: Flags,
    ) -> Flags:
        """Add cuts found by stored successors; in the first write after a load, they replace the cuts found by ids."""
        assert rings.index is not None
        storage, check, tells = rows[0], rings.successors, init
        asked = rings.index.is_running(env) & is_stored
        if self._has_ids:  # ids mark cuts, except after a load, because a new collector numbers from zero again
            asked = np.zeros_like(asked) if rings.reloaded is None else asked & rings.reloaded[env]
            tells = init.copy()
            tells[0, asked] = flagged[0, asked] if flagged.size else False
        cut, reason, took_part = check.find_cuts(
            self.compared,
            lambda path: entry(rows, path),
            lambda path, chosen: stored_entry(storage, (NEXT, *path), cells[chosen]),
            done,
            tells,
            asked,
        )
        if isinstance(storage, RingStorage):
            storage.watched |= {(NEXT, *path) for path in check.matched}
        if self._has_ids and took_part:
            init = tells
        if reason is None:
            return init
        init = init.copy() if init.size else np.zeros(done.shape, np.bool_)
        init[0] |= cut
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the new rows of the environments %s do not continue their stored trajectories, because %s differs "
                "from the stored successor: the writer ends those trajectories there. Call writer.cut() whenever "
                "environments are started again. If the rows do continue them, turn the comparison off by "
                "check_successors=False of the RingWriter or the buffer.",
                env[cut].tolist(), name_of(reason),
            )  # fmt: skip
        return init


def entry(rows: Rows, path: Path) -> Tensor:
    """Return an entry of the rows to write, ``[n, ...]``."""
    storage, data, leaves = rows
    found = entry_of(data, path) if leaves is None else leaves[storage.cells.places[path]]
    assert found is not None
    return found


def stored_entry(storage: Any, path: Path, cells: Ints) -> Tensor:
    """Read an entry of stored steps, ``[n, ...]``, from a storage of any kind."""
    index = torch.from_numpy(cells)
    if not isinstance(storage, RingStorage):
        found = entry_of(storage.get(index), path)
        assert found is not None
        return found
    known = storage.cells
    assert known is not None
    return known.leaves[known.places[path]].index_select(0, index.to(known.device))


def stored_ids(storage: Any, cells: Ints) -> NDArray[Any]:
    """Read the trajectory ids of stored steps, ``[n]``."""
    known = storage.cells if isinstance(storage, RingStorage) else None
    if not cells.size:
        return cells
    if known is None or not known.on_cpu:
        return numbers_of(stored_entry(storage, TRAJ_IDS, cells))
    return numbers_of(known.leaves[known.places[TRAJ_IDS]])[cells]


def numbers_of(ids: Tensor) -> NDArray[Any]:
    """Return the trajectory ids, one per row, as an array ``[n]``."""
    array: NDArray[Any] = (ids if ids.is_cpu else ids.cpu()).numpy()
    return array if array.ndim == 1 else array.reshape(len(array), -1)[:, 0]
