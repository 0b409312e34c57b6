"""The writer of every replay buffer, with one ring per environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning._core.keys import TRAJ_IDS
from torchrl_lightning._core.torchrl_compat import WriterBase, attached_entities
from torchrl_lightning._core.tree import (
    Path,
    check_tensordict,
    entry_of,
    leaves_of,
    nested_key,
    path_of,
    tree_of,
)
from torchrl_lightning._core.validators import Checked, boolean, integer, one_of
from torchrl_lightning.kernels.indices import as_integers
from torchrl_lightning.kernels.row_copies import NO_FLAGS, NO_LEAVES
from torchrl_lightning.replay.cuts import TrajectoryCuts
from torchrl_lightning.replay.episode_index import DONE_REDUCTIONS, EpisodeIndex, FlagsDifferError, reduce_flags
from torchrl_lightning.replay.late_flags import LateFlags, rewritten_successors
from torchrl_lightning.replay.positions import Flags, Ints
from torchrl_lightning.replay.ring_storage import RingStorage
from torchrl_lightning.replay.rings import Rings, attach_rings, ring_owner
from torchrl_lightning.replay.shared_rings import SharedRings
from torchrl_lightning.replay.sharing import ShareableBuffer


def _do_nothing() -> None:
    pass


def writer_of(storage: Storage) -> RingWriter | None:
    """Return the :class:`RingWriter` that fills a storage of any kind, or None."""
    writer = ring_owner(storage)
    return writer if isinstance(writer, RingWriter) else None


class RingWriter(WriterBase):
    """A writer that stores one ring per environment in one flat storage.

    Every environment has its own cursor and a position that only increases;
    ``cell = (position % length) * num_envs + env``. So a write of one step of all environments is one slice copy. A
    write of several steps of all environments is at most two slice copies. A write for some environments is one indexed
    copy. TorchRL's samplers can read the storage while the rings are evenly filled.

    Args:
        num_envs: number of rings; must divide the storage's ``max_size``.
        track_episodes: maintain an :class:`EpisodeIndex`; None maintains the index if the first data contain
            ``done_key``.
        done_key: the flag that ends an episode.
        init_key: the flag that begins an episode, used if the data contain it. This flag separates an episode that was
            cut without a done flag (by a restart) from the next episode.
        overwrite: overwrite the oldest steps of a full ring; False raises an error instead.
        done_reduce: reduces the flags of several agents in one row. ``"any"`` ends the episode when the first agent is
            done; ``"all"`` ends the episode when the last agent is done. None raises an error if the flags differ and
            the index is used.
        check_successors: cut the trajectory of an environment if the first row of a write differs from the successor
            stored with the previous step (see :class:`SuccessorCheck`). Rows with ``("collector", "traj_ids")`` are
            cut at each change of these ids, and compared with successors only in the first write after a load.
            DataModules disable this check while collectors of this package fill the buffer.

    Raises:
        ValueError: ``num_envs`` is not positive, or ``done_reduce`` is unknown.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning.replay import ExperienceBuffer, RingStorage
        >>> buffer = ExperienceBuffer(storage=RingStorage(8), num_envs=2)
        >>> buffer.extend(TensorDict({"a": torch.arange(2)}, [2])).tolist()
        [0, 1]
        >>> buffer.extend(TensorDict({"a": torch.arange(1)}, [1]), env_ids=torch.tensor([1])).tolist()
        [3]
        >>> buffer.writer.positions.tolist()
        [1, 2]
    """

    overwrite = Checked(boolean)
    done_reduce = Checked(lambda value, name: one_of(value, name, DONE_REDUCTIONS))
    check_successors = Checked(boolean)

    def __init__(
        self,
        num_envs: int = 1,
        *,
        track_episodes: bool | None = None,
        done_key: NestedKey = ("next", "done"),
        init_key: NestedKey = "is_init",
        overwrite: bool = True,
        done_reduce: str | None = None,
        check_successors: bool = True,
    ) -> None:
        self.rings = Rings(integer(num_envs, "num_envs"))
        """Positions and cells of the steps of all environments."""
        super().__init__()
        self.track_episodes, self.overwrite = track_episodes, overwrite
        self.done_key = nested_key(done_key)
        self.init_key = nested_key(init_key)
        self.done_reduce = done_reduce
        self.check_successors = check_successors
        self._ring_storage: RingStorage | None = None  # the storage, if it is a RingStorage
        self._done_path, self._init_path = path_of(self.done_key), path_of(self.init_key)
        self._flag_leaves: tuple[int | None, ...] = ()  # leaf numbers of done flag, init flag and trajectory ids
        self._trajectory_cuts = TrajectoryCuts()
        self._matched_cells: Any = None  # the cells that _flag_leaves refers to

    def register_storage(self, storage: Storage) -> None:
        """Set the storage to fill; TorchRL's buffers call this.

        Raises:
            ValueError: the ``max_size`` of the storage is not a multiple of ``num_envs``, or the storage has several
                dimensions.
        """
        if getattr(storage, "ndim", 1) != 1:
            raise ValueError(f"storage must be one-dimensional, got ndim={storage.ndim}. Use a RingStorage.")
        if storage.max_size % self.num_envs:
            smaller = storage.max_size // self.num_envs * self.num_envs
            raise ValueError(
                f"max_size={storage.max_size} must be a multiple of num_envs={self.num_envs}, because all rings have "
                f"the same length. Use max_size={smaller or self.num_envs} or {smaller + self.num_envs}."
            )
        super().register_storage(storage)
        self._ring_storage, self._matched_cells = storage if isinstance(storage, RingStorage) else None, None
        if self._ring_storage is not None:
            self._ring_storage.watched |= {self._done_path, self._init_path}
        length = storage.max_size // self.num_envs
        if length != self.rings.length:
            self.rings = Rings(self.num_envs, length)
        attach_rings(storage, self)

    @property
    def num_envs(self) -> int:
        """Number of rings."""
        return self.rings.num_envs

    @property
    def length(self) -> int:
        """Number of cells of each ring."""
        return self.rings.length

    @property
    def index(self) -> EpisodeIndex | None:
        """The index of episode boundaries, or None if episodes are not tracked."""
        return self.rings.index

    @property
    def positions(self) -> Tensor:
        """Next position of every environment, ``[num_envs]`` int64; a live, read-only view."""
        return self.rings.positions

    @property
    def oldest(self) -> Tensor:
        """Position of the oldest stored step of every environment, ``[num_envs]``."""
        return self.rings.oldest

    @property
    def filled(self) -> Tensor:
        """Number of stored steps of every environment, ``[num_envs]``."""
        return self.rings.filled

    @property
    def is_uniformly_filled(self) -> bool:
        """Whether the filled cells are exactly the first ``len(storage)`` cells."""
        return self.rings.is_uniformly_filled

    def cell(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the cells of steps: ``(position % length) * num_envs + env``."""
        return self.rings.cell(env_ids, positions)

    @property
    def write_count(self) -> int:
        """Number of rows written since the buffer was last emptied."""
        return self.rings.write_count

    @write_count.setter
    def write_count(self, value: int) -> None:
        self.rings.write_count = value

    def share(self) -> None:
        """Move positions, counters and episode index into shared memory; build the index first if possible."""
        cells = getattr(self.storage, "cells", None)
        has_done = cells is not None and self._done_path in cells.leaf_index
        if self.index is None and self.track_episodes is not False and has_done:
            self.rings.make_index()  # other processes would not see an index that is built later
        self.rings = SharedRings(self.rings)

    # ------------------------------------------------------------------ writing

    def add(self, data: TensorDictBase) -> int | Tensor:
        """Write one row, or one step of all environments (``[num_envs]``)."""
        check_tensordict(data)
        if data.ndim:
            return self.extend(data)
        return int(self.extend(data.unsqueeze(0)))

    def extend(self, data: TensorDictBase, env_ids: Tensor | None = None) -> Tensor:
        """Write steps.

        Args:
            data: one step of every environment ``[num_envs]``, or several time-major steps ``[T * num_envs]``; ``[T]``
                for one environment.
            env_ids: the environments of these steps, without duplicates; ``data`` is ``[len(env_ids)]`` or
                ``[T * len(env_ids)]``.

        Returns:
            The cells, ``[n]``; empty for data without rows. If two rows of the data have the same cell, only the later
            row is written.

        Raises:
            TypeError: the data is not a TensorDict, an entry is not a tensor, or ``env_ids`` are not integers.
            ValueError: the data has another schema than the storage, the number of rows does not match the
                environments, or the rings are full and ``overwrite`` is False.
        """
        rings = self.rings
        rings.check_owner()
        check_tensordict(data)
        ids = None if env_ids is None else self.check_ids(env_ids)
        num_envs = rings.num_envs if ids is None else len(ids)
        shape = data.shape
        rows = shape[0] if len(shape) == 1 else -1
        if not rows:
            return torch.zeros(0, dtype=torch.int64)
        if rows < 1 or rows % num_envs:
            raise ValueError(
                f"data must have the batch size [{num_envs}], one step per environment, or [T * {num_envs}], "
                f"time-major, got {list(shape)}."
            )
        storage: Any = self.storage
        # Check this first, because storage.check below fixes the schema.
        is_first_write = rings.index is None and self.track_episodes and not self.write_count
        if is_first_write and entry_of(data, self._done_path) is None:
            raise KeyError(f"track_episodes=True needs the entry {self.done_key!r} in the data.")
        steps = rows // num_envs
        env = rings.ids if ids is None else ids
        if not self.overwrite:
            self._check_room(env, steps)
        leaves, addresses = (None, None) if self._ring_storage is None else self._ring_storage.check(data, rows)
        done, init = self.flags(data, leaves, steps)
        if rings.index is not None:
            _, init_leaf, ids_leaf = self._flag_leaves
            if ids_leaf is not None or self.check_successors:
                # Init flags and trajectory ids together already mark every cut.
                compare_successors = self.check_successors and (init_leaf is None or ids_leaf is None)
                init = self._trajectory_cuts.find_begins(
                    rings, (storage, data, leaves), env, done, init, compare_successors
                )
        if addresses is None:
            addresses = NO_LEAVES
            cells = rings.cells_of_next(env, steps)
            skipped = max(0, steps - self.length) * num_envs
            if leaves is not None:
                self.claim(env, steps)
                storage.cells.scatter([leaf[skipped:] for leaf in leaves], cells[skipped:])
            elif self.num_envs > 1 and (ids is not None or not rings.is_in_lockstep):
                raise ValueError(
                    f"storage must be a RingStorage for unevenly filled rings, got a {type(storage).__name__}."
                )
            else:
                storage.set(cells[skipped:], data[skipped:] if skipped else data)
        return self.write_rows(addresses, ids, steps, done, init)

    @property
    def owned_rings(self) -> int:
        """Number of rings that this process filled last; 0 for an unshared buffer."""
        return self.rings.owned if isinstance(self.rings, SharedRings) else 0

    def extend_own(self, data: TensorDictBase, count: int) -> Tensor:
        """Write steps like :meth:`extend`, to ``count`` rings of this process (:meth:`SharedRings.own_rings`)."""
        rings = self.rings
        return self.extend(
            data, torch.from_numpy(rings.own_rings(count) if isinstance(rings, SharedRings) else rings.ids[:count])
        )

    def claim(self, env: Ints, steps: int) -> None:
        """Remove the cells of the next steps from the rings, so that no process reads a half-written row."""
        self.rings.claim(env, steps)
        self.count_cells()

    def write_rows(self, leaves: tuple[Ints, Ints], ids: Ints | None, steps: int, done: Flags, init: Flags) -> Tensor:
        """Write matched rows (:meth:`Rings.write`), notify storage and buffers, and return cells ``[steps * M]``."""
        rings, storage = self.rings, self._ring_storage
        if not self.overwrite:
            self._check_room(rings.ids if ids is None else ids, steps)
        count_before = rings.count
        cells = rings.write(leaves, ids, steps, done, init)
        if storage is not None:
            if rings.count == count_before:
                storage.bump_revision()
            else:
                storage.set_length(rings.count)
            if rings.num_envs == 1:
                storage.record_cursor(int(cells[-1]))
        index = torch.from_numpy(cells)
        self.notify(index)
        return index

    def _check_room(self, env: Ints, steps: int) -> None:
        if not (room := self.rings.has_room(env, steps)).all():
            raise ValueError(
                f"The rings of the environments {env[~room].tolist()} have no room for {steps} more steps with "
                "overwrite=False; nothing was written. Remove the oldest steps first (dequeue), or build the buffer "
                "with a larger size or overwrite=True."
            )

    def check_ids(self, env_ids: Tensor | None) -> Ints:
        """Return the environment ids, all for None; raise ValueError for duplicate or unknown ids."""
        if env_ids is None:
            return self.rings.ids
        ids = as_integers(env_ids, "env_ids").cpu().numpy().reshape(-1)
        if ids.size == 0 or ids.min() < 0 or ids.max() >= self.num_envs or len(np.unique(ids)) < len(ids):
            raise ValueError(
                f"env_ids must be different numbers in [0, {self.num_envs}), got {ids.tolist()}. "
                "Write several steps of an environment time-major, or one after the other."
            )
        return ids

    def count_cells(self) -> None:
        """Update the storage's number of filled cells."""
        if self._ring_storage is not None:
            self._ring_storage.set_length(self.rings.count)

    def flags(self, data: TensorDictBase, leaves: list[Tensor] | None, steps: int) -> tuple[Flags, Flags]:
        """Return masks ``[steps, M]``: steps that end episodes, and steps that begin episodes; empty without an index.

        The first write may build the index.

        Raises:
            KeyError: the index exists, but the data lacks a done flag.
            FlagsDifferError: the flags of a row differ, ``done_reduce`` is None, and the index is required.
        """
        rings = self.rings
        if rings.index is None and (self.track_episodes is False or self.write_count):
            return NO_FLAGS, NO_FLAGS
        if leaves is None or self._ring_storage.cells is not self._matched_cells:  # type: ignore[union-attr]
            self._find_flag_leaves(data)
        done_leaf, init_leaf, _ = self._flag_leaves
        if rings.index is None and done_leaf is not None:
            self._make_index()
        if rings.index is None:
            return NO_FLAGS, NO_FLAGS
        if done_leaf is None:
            raise KeyError(f"The data has no entry {self.done_key!r}, which the episode index needs.")
        values = self._ordered_leaves(data) if leaves is None else leaves
        try:
            done = self.done_flags(values[done_leaf], steps)
            return done, NO_FLAGS if init_leaf is None else self.init_flags(values[init_leaf], steps)
        except FlagsDifferError:
            if self.track_episodes or any(
                isinstance(buffer, ShareableBuffer) and buffer.uses_episodes
                for buffer in attached_entities(self.storage)
            ):
                raise
            rings.drop_index()
            return NO_FLAGS, NO_FLAGS

    def done_flags(self, value: Tensor, steps: int) -> Flags:
        """Return a mask of rows that end an episode, ``[steps, M]``, from the entry ``done_key``."""
        return reduce_flags(value, steps, self.done_reduce)

    def init_flags(self, value: Tensor, steps: int) -> Flags:
        """Return a mask of rows that begin an episode, ``[steps, M]``, from the entry ``init_key``."""
        return reduce_flags(value, steps, self.done_reduce)

    def _ordered_leaves(self, data: TensorDictBase) -> list[Tensor]:
        return [leaf for _, leaf in leaves_of(tree_of(data))]

    def _find_flag_leaves(self, data: TensorDictBase) -> None:
        """Find the leaf numbers of flags and trajectory ids, and the entries that can be compared."""
        storage = self._ring_storage
        cells = None if storage is None else storage.cells
        written = tree_of(data) if cells is None else cells.schema
        leaf_numbers = {path: number for number, (path, _) in enumerate(leaves_of(written))}
        self._flag_leaves = tuple(leaf_numbers.get(path) for path in (self._done_path, self._init_path, TRAJ_IDS))
        flags = self._done_path, self._init_path
        self._trajectory_cuts.set_entries(written, written if cells is None else cells.tree, flags)
        self._matched_cells = cells

    def plan_rewrite(self, changes: Mapping[Path, Tensor], cells: Tensor) -> Callable[[], None]:
        """Validate new values of stored entries; return the function that then updates the episodes.

        Args:
            changes: the new values, ``[n, ...]`` each.
            cells: cells of the steps, ``[n]``, without duplicates.

        Raises:
            FlagsDifferError: the new flags of a row differ, and ``done_reduce`` is None.
        """
        storage = self._ring_storage
        if storage is None or self.rings.index is None:
            return _do_nothing
        update_episodes = LateFlags(self, storage, self._done_path, self._init_path).plan(changes, cells)
        excluded = rewritten_successors(self.rings, storage, changes, cells)

        def exclude_and_update() -> None:
            for path in excluded:
                self.rings.successors.exclude(path)
            update_episodes()

        return exclude_and_update

    def _make_index(self) -> None:
        if self.length > 1 << 40:  # TorchRL's unbounded storages
            self.track_episodes = False
        else:
            self.rings.make_index()

    def cut(self, env_ids: Tensor | None = None) -> None:
        """End the running episodes, e.g. after a restart of the environments; the next steps begin new episodes."""
        if self.index is not None:
            self.rings.cut(self.check_ids(env_ids))

    def drop(self, count: int | None, env_ids: Tensor | None = None) -> Tensor:
        """Remove the oldest steps from the rings, and the priorities of these steps from the buffer's sampler.

        Args:
            count: number of steps to remove from each environment; None removes all steps.
            env_ids: the environments; None for all.

        Returns:
            The removed cells, ``[M * count]``, one environment after the other.

        Raises:
            ValueError: an environment has fewer than ``count`` steps, ids are duplicate or unknown, or the storage is
                not a RingStorage.
        """
        env = self.check_ids(env_ids)
        if self._ring_storage is None:
            raise ValueError(
                f"storage must be a RingStorage to remove steps, got a {type(self.storage).__name__}. Build the buffer "
                "with storage=RingStorage(...)."
            )
        cells = self.rings.drop(env, count)
        self.count_cells()
        for buffer in attached_entities(self._ring_storage):
            if isinstance(buffer, ShareableBuffer):
                buffer.invalidate_cells(cells)
        return cells

    def clear(self, empty_write_count: bool = True) -> None:
        """Reset all positions to 0; ``ReplayBuffer.empty`` calls this."""
        self.rings.check_owner()
        super().clear(empty_write_count)
        self.rings.clear()

    # ------------------------------------------------------------------ state

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Return positions, episode index and counters: tensors and scalars only."""
        return self.rings.state_dict(copy=copy)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state exactly; see :meth:`Rings.load_state_dict`."""
        self.rings.load_state_dict(state_dict)

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Validate a state for :meth:`load_state_dict` without changing anything; raise an error if it is invalid."""
        self.rings.check_state(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_matched_cells": None}  # the storage pickles its cells

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.storage is not None:
            attach_rings(self.storage, self)

    def __repr__(self) -> str:
        positions = self.positions.numpy()
        return f"{type(self).__name__}(num_envs={self.num_envs}, length={self.length}, positions={positions})"
