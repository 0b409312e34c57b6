"""The writer of every replay buffer: one ring per environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning._compat import WriterBase, attached
from torchrl_lightning.entries import (
    Path,
    check_tensordict,
    entry_of,
    leaves_of,
    nested_key,
    path_of,
    tree_of,
)
from torchrl_lightning.kernels.indices import integers
from torchrl_lightning.kernels.rows import NO_FLAGS, NO_LEAVES
from torchrl_lightning.keys import TRAJ_IDS
from torchrl_lightning.ranges import Checked, boolean, integer, one_of
from torchrl_lightning.replay.cuts import TrajectoryCuts
from torchrl_lightning.replay.episode_index import DONE_REDUCTIONS, EpisodeIndex, FlagsDifferError, flag_of
from torchrl_lightning.replay.late_flags import LateFlags, rewritten_successors
from torchrl_lightning.replay.rings import Rings, filler_of, lay_rings
from torchrl_lightning.replay.sharing import ShareableBuffer, SharedRings
from torchrl_lightning.replay.steps import Flags, Ints
from torchrl_lightning.replay.storage import RingStorage


def _do_nothing() -> None:
    pass


def writer_of(storage: Storage) -> RingWriter | None:
    """Return the :class:`RingWriter` that fills a storage, which may be one of TorchRL's, if there is one."""
    writer = filler_of(storage)
    return writer if isinstance(writer, RingWriter) else None


class RingWriter(WriterBase):
    """Writer of one ring per environment into one flat storage.

    Every environment has its own cursor and an ever-increasing position;
    ``cell = (position % length) * num_envs + env``. So writing one step of all environments takes one slice copy, any
    even write at most two, and a write for some environments one indexed copy. While the rings are evenly filled,
    TorchRL's samplers see an ordinary storage.

    Args:
        num_envs: number of rings; must divide the storage's ``max_size``.
        track_episodes: keep an :class:`EpisodeIndex`; None does so if the first data contain ``done_key``.
        done_key: the flag that ends an episode.
        init_key: the flag that begins one, used if the data contain it: an episode that was cut without being done
            (by a restart) is not joined to the next one.
        overwrite: let steps take the place of the oldest ones where a ring is full; otherwise, they are refused.
        done_reduce: how the flags of several agents in one row become one: ``"any"`` ends the episode with the first
            agent that is done, ``"all"`` with the last one. None raises an error if they differ and the index is used.
        check_successors: cut the trajectory of an environment if the first row of a write is not the successor that was
            stored with the step before (see :class:`SuccessorCheck`). Rows with ``("collector", "traj_ids")`` are cut
            where these change, and compared only in the first write after a load. DataModules turn the comparison off
            while our own collectors fill the buffer.

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
        """Where the steps of the environments lie."""
        super().__init__()
        self.track_episodes, self.overwrite = track_episodes, overwrite
        self.done_key = nested_key(done_key)
        self.init_key = nested_key(init_key)
        self.done_reduce = done_reduce
        self.check_successors = check_successors
        self._own_storage: RingStorage | None = None  # what it fills, if that is one of ours
        self._done_path, self._init_path = path_of(self.done_key), path_of(self.init_key)
        self._places: tuple[int | None, ...] = ()  # of the leaves of both flags and of the ids of trajectories
        self._cuts = TrajectoryCuts()
        self._known: Any = None  # the cells that the places belong to

    def register_storage(self, storage: Storage) -> None:
        """Take the storage to fill; called by TorchRL's buffers.

        Raises:
            ValueError: its ``max_size`` is not a multiple of ``num_envs``, or it has several dimensions.
        """
        if getattr(storage, "ndim", 1) != 1:
            raise ValueError(f"RingWriter fills one-dimensional storages, got ndim={storage.ndim}; use RingStorage.")
        if storage.max_size % self.num_envs:
            below = storage.max_size // self.num_envs * self.num_envs
            raise ValueError(
                f"max_size={storage.max_size} is not a multiple of num_envs={self.num_envs}, so that the rings cannot "
                f"be equally long; use max_size={below or self.num_envs} or {below + self.num_envs}."
            )
        super().register_storage(storage)
        self._own_storage, self._known = storage if isinstance(storage, RingStorage) else None, None
        if self._own_storage is not None:
            self._own_storage.watched |= {self._done_path, self._init_path}
        length = storage.max_size // self.num_envs
        if length != self.rings.length:
            self.rings = Rings(self.num_envs, length)
        lay_rings(storage, self)

    @property
    def num_envs(self) -> int:
        """Number of rings."""
        return self.rings.num_envs

    @property
    def length(self) -> int:
        """Cells of each ring."""
        return self.rings.length

    @property
    def index(self) -> EpisodeIndex | None:
        """Which steps belong to one episode, if that is known."""
        return self.rings.index

    @property
    def positions(self) -> Tensor:
        """Next position of every environment, ``[num_envs]`` int64; a live view that must not be written to."""
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
    def is_even(self) -> bool:
        """Whether all rings are equally filled, so that the first ``len(storage)`` cells are the filled ones."""
        return self.rings.is_even

    def cell(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the cells of steps: ``(position % length) * num_envs + env``."""
        return self.rings.cell(env_ids, positions)

    @property
    def write_count(self) -> int:
        """Rows written since the buffer was emptied."""
        return self.rings.write_count

    @write_count.setter
    def write_count(self, value: int) -> None:
        self.rings.write_count = value

    def share(self) -> None:
        """Move positions, counters and episode index, made now if it may be, into memory that processes share."""
        cells = getattr(self.storage, "cells", None)
        known = cells is not None and self._done_path in cells.places
        if self.index is None and self.track_episodes is not False and known:
            self.rings.make_index()  # of one that another process makes, the others would not know
        self.rings = SharedRings(self.rings)

    # ------------------------------------------------------------------ writing

    def add(self, data: TensorDictBase) -> int | Tensor:
        """Write one row; with several environments, one step of all of them (``[num_envs]``)."""
        check_tensordict(data)
        if data.ndim:
            return self.extend(data)
        return int(self.extend(data.unsqueeze(0)))

    def extend(self, data: TensorDictBase, env_ids: Tensor | None = None) -> Tensor:
        """Write steps.

        Args:
            data: one step of every environment ``[num_envs]``, or several, time-major: ``[T * num_envs]``. With one
                environment: ``[T]``.
            env_ids: the environments of these steps, each at most once; ``data`` is ``[len(env_ids)]`` or
                ``[T * len(env_ids)]``.

        Returns:
            The cells, ``[n]``; none for data without rows. Rows that later rows of the same data would overwrite are
            not written; their cell is that of the row that replaces them.

        Raises:
            TypeError: the data is not a TensorDict or has an entry that is not a tensor, or ``env_ids`` are not
                integers.
            ValueError: the data has another schema than what is stored, or a number of rows that does not fit the
                environments, or there is no room and nothing may be overwritten.
        """
        rings = self.rings
        rings.check_owner()
        check_tensordict(data)
        ids = None if env_ids is None else self.check_ids(env_ids)
        width = rings.num_envs if ids is None else len(ids)
        shape = data.shape
        rows = shape[0] if len(shape) == 1 else -1
        if not rows:
            return torch.zeros(0, dtype=torch.int64)
        if rows < 1 or rows % width:
            raise ValueError(
                f"Got data of batch size {list(shape)} for {width} environments; expected [{width}] (one step of "
                f"each) or a multiple of it, time-major ([T * {width}])."
            )
        storage: Any = self.storage
        # Checked before the storage, which takes its schema from the first rows that it checks.
        first = rings.index is None and self.track_episodes and not self.write_count
        if first and entry_of(data, self._done_path) is None:
            raise KeyError(f"track_episodes=True needs the entry {self.done_key!r} in the data.")
        steps = rows // width
        env = rings.ids if ids is None else ids
        if not self.overwrite:
            self._check_room(env, steps)
        leaves, addresses = (None, None) if self._own_storage is None else self._own_storage.check(data, rows)
        done, init = self.flags(data, leaves, steps)
        if rings.index is not None:
            _, begins, ids_place = self._places
            if ids_place is not None or self.check_successors:
                # Flags of beginnings and ids together leave nothing to compare.
                compares = self.check_successors and (begins is None or ids_place is None)
                init = self._cuts.add(rings, (storage, data, leaves), env, done, init, compares)
        if addresses is None:
            addresses = NO_LEAVES
            cells = rings.cells_of_next(env, steps)
            skipped = max(0, steps - self.length) * width
            if leaves is not None:
                self.claim(env, steps)
                storage.cells.scatter([leaf[skipped:] for leaf in leaves], cells[skipped:])
            elif self.num_envs > 1 and (ids is not None or not rings.is_aligned):
                raise ValueError(
                    f"{type(storage).__name__} cannot hold unevenly filled rings; use RingStorage as the storage."
                )
            else:
                storage.set(cells[skipped:], data[skipped:] if skipped else data)
        return self.advance(addresses, ids, steps, done, init)

    def claim(self, env: Ints, steps: int) -> None:
        """Let the cells that the next steps go to leave the rings, so that nobody reads a row while it is written."""
        self.rings.claim(env, steps)
        self.count_cells()

    def advance(self, leaves: tuple[Ints, Ints], ids: Ints | None, steps: int, done: Flags, init: Flags) -> Tensor:
        """Let the rings write matched rows (:meth:`Rings.write`), and tell it; return the cells, ``[steps * M]``."""
        rings, storage = self.rings, self._own_storage
        if not self.overwrite:
            self._check_room(rings.ids if ids is None else ids, steps)
        before = rings.count
        cells = rings.write(leaves, ids, steps, done, init)
        if storage is not None:
            if rings.count == before:
                storage.touch()
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
                f"The rings of the environments {env[~room].tolist()} have no room for {steps} more steps, and "
                "overwrite=False; take out the oldest ones first (dequeue), or build it longer or with overwrite=True; "
                "nothing was written."
            )

    def check_ids(self, env_ids: Tensor | None) -> Ints:
        """Return the environments, all if there are no ids; refuse ids that are not different environments."""
        if env_ids is None:
            return self.rings.ids
        ids = integers(env_ids, "env_ids").cpu().numpy().reshape(-1)
        if ids.size == 0 or ids.min() < 0 or ids.max() >= self.num_envs or len(np.unique(ids)) < len(ids):
            raise ValueError(
                f"env_ids must be different numbers in [0, {self.num_envs}), got {ids.tolist()}; "
                "write several steps of an environment time-major, or one after the other."
            )
        return ids

    def count_cells(self) -> None:
        """Tell the storage how many cells are filled."""
        if self._own_storage is not None:
            self._own_storage.set_length(self.rings.count)

    def flags(self, data: TensorDictBase, leaves: list[Tensor] | None, steps: int) -> tuple[Flags, Flags]:
        """Return which steps end and begin episodes, ``[steps, M]``; empty without an index, which the first may make.

        Raises:
            KeyError: there is an index, but no flag for it.
            FlagsDifferError: the flags of a row differ, ``done_reduce`` is None, and the index is needed.
        """
        rings = self.rings
        if rings.index is None and (self.track_episodes is False or self.write_count):
            return NO_FLAGS, NO_FLAGS
        if leaves is None or self._own_storage.cells is not self._known:  # type: ignore[union-attr]
            self._find_places(data)
        ends, begins, _ = self._places
        if rings.index is None and ends is not None:
            self._make_index()
        if rings.index is None:
            return NO_FLAGS, NO_FLAGS
        if ends is None:
            raise KeyError(f"The entry {self.done_key!r}, which the episode index needs, is not in the data.")
        values = self._leaves_of(data) if leaves is None else leaves
        try:
            done = self.done_flags(values[ends], steps)
            return done, NO_FLAGS if begins is None else self.init_flags(values[begins], steps)
        except FlagsDifferError:
            if self.track_episodes or any(
                isinstance(user, ShareableBuffer) and user.uses_episodes for user in attached(self.storage)
            ):
                raise
            rings.drop_index()
            return NO_FLAGS, NO_FLAGS

    def done_flags(self, value: Tensor, steps: int) -> Flags:
        """Return which rows end an episode, ``[steps, M]``, from the entry ``done_key``."""
        return flag_of(value, steps, self.done_reduce)

    def init_flags(self, value: Tensor, steps: int) -> Flags:
        """Return which rows begin an episode, ``[steps, M]``, from the entry ``init_key``."""
        return flag_of(value, steps, self.done_reduce)

    def _leaves_of(self, data: TensorDictBase) -> list[Tensor]:
        return [leaf for _, leaf in leaves_of(tree_of(data))]

    def _find_places(self, data: TensorDictBase) -> None:
        """Find flags, ids, and the entries that can be compared among the leaves of rows."""
        storage = self._own_storage
        cells = None if storage is None else storage.cells
        written = tree_of(data) if cells is None else cells.schema
        places = {path: place for place, (path, _) in enumerate(leaves_of(written))}
        self._places = tuple(places.get(path) for path in (self._done_path, self._init_path, TRAJ_IDS))
        flags = self._done_path, self._init_path
        self._cuts.prepare(written, written if cells is None else cells.tree, flags)
        self._known = cells

    def plan_rewrite(self, changes: Mapping[Path, Tensor], cells: Tensor) -> Callable[[], None]:
        """Check entries that are about to be replaced in stored steps, and return what lets the episodes follow them.

        Args:
            changes: the new values, ``[n, ...]`` each.
            cells: the steps, ``[n]``, each once.

        Raises:
            FlagsDifferError: the new flags of a row differ, and ``done_reduce`` is None.
        """
        storage = self._own_storage
        if storage is None or self.rings.index is None:
            return _do_nothing
        follow = LateFlags(self, storage, self._done_path, self._init_path).plan(changes, cells)
        excluded = rewritten_successors(self.rings, storage, changes, cells)

        def follow_all() -> None:
            for path in excluded:
                self.rings.successors.exclude(path)
            follow()

        return follow_all

    def _make_index(self) -> None:
        if self.length > 1 << 40:  # TorchRL's unbounded storages
            self.track_episodes = False
        else:
            self.rings.make_index()

    def cut(self, env_ids: Tensor | None = None) -> None:
        """End the running episodes: the next steps do not continue them, as after a restart of the environments."""
        if self.index is not None:
            self.rings.cut(self.check_ids(env_ids))

    def drop(self, count: int | None, env_ids: Tensor | None = None) -> Tensor:
        """Take the oldest steps out of the rings; the sampler of the buffer forgets their priorities.

        Args:
            count: how many of each environment; None for all that it holds.
            env_ids: the environments; None for all.

        Returns:
            The cells that hold nothing any more, ``[M * count]``, one environment after the other.

        Raises:
            ValueError: an environment holds fewer, the ids are not different numbers of environments, or the storage is
                one of TorchRL's.
        """
        env = self.check_ids(env_ids)
        if self._own_storage is None:
            raise ValueError(
                f"storage must be a RingStorage to remove steps from it, got a {type(self.storage).__name__}, whose "
                "filled cells are always the first ones. Build the buffer with storage=RingStorage(...)."
            )
        cells = self.rings.drop(env, count)
        self.count_cells()
        for user in attached(self._own_storage):
            if isinstance(user, ShareableBuffer):
                user.forget_cells(cells)
        return cells

    def clear(self, empty_write_count: bool = True) -> None:
        """Move back to the start; called by ``ReplayBuffer.empty``."""
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
        """Refuse a state that :meth:`load_state_dict` cannot take; change nothing."""
        self.rings.check_state(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}  # cells are the storage's; their places are found again

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.storage is not None:
            lay_rings(self.storage, self)

    def __repr__(self) -> str:
        positions = self.positions.numpy()
        return f"{type(self).__name__}(num_envs={self.num_envs}, length={self.length}, positions={positions})"
