"""Ring buffers of several environments in one flat array of cells."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning._core.state import (
    MAX_COUNT,
    Attribute,
    Child,
    InPlace,
    Stateful,
    bounded_integer,
    check_state,
    flag,
    mapping,
    tensor,
)
from torchrl_lightning._core.validators import optional
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.kernels.row_copies import write_steps
from torchrl_lightning.replay import process_owned
from torchrl_lightning.replay.episode_index import EpisodeIndex
from torchrl_lightning.replay.positions import Flags, Ints, MissingStepsError, steps_between
from torchrl_lightning.replay.successors import SuccessorCheck

ALL_STEPS = np.iinfo(np.int64).max
_FIRST_VERSIONS = itertools.count(1)  # first versions; each ring object of a process gets another one
_WRITE_COUNT, _RESTART_OFFSET, VERSION = range(3)  # indices of Rings._counters
NO_INDEX = (*(np.empty(0, kind) for kind in (np.int64, np.bool_, np.int64, np.bool_, np.int64)),)


class Rings(process_owned.ProcessOwned, Stateful):
    """One ring per environment: ``cell = (position % length) * num_envs + env``.

    Args:
        num_envs: number of rings.
        length: number of cells per ring.

    Examples:
        >>> rings = Rings(2, 4)
        >>> rings.cell(torch.tensor([0, 1]), torch.tensor([5, 5])).tolist()
        [2, 3]
    """

    OWNER, VERSION = "writer", 5
    STATE = {
        "num_envs": Attribute(),
        "length": Attribute(),
        "positions": InPlace(attribute="_positions", low=0, high=MAX_COUNT),
        "oldest": Attribute(check_for=lambda rings: tensor(torch.int64, rings.num_envs, low=0, high=MAX_COUNT)),
        "restart_offset": Attribute(bounded_integer()),
        "write_count": Attribute(bounded_integer()),
        "index": Attribute(optional(mapping), "_episodes"),
        "successors": Child(),
    }

    def __init__(self, num_envs: int, length: int = 0) -> None:
        self.claim_ownership()
        self.num_envs, self.length = num_envs, length
        self.index: EpisodeIndex | None = None
        """The index of episode boundaries, or None if episodes are not tracked."""
        self.count = 0
        """Number of stored steps."""
        self._positions: Ints = np.zeros(num_envs, np.int64)
        self._valid_from: Ints = np.zeros(num_envs, np.int64)  # lowest position that may be stored
        self._counters: Ints = np.zeros(3, np.int64)
        self._counters[VERSION] = next(_FIRST_VERSIONS) << 40
        self.successors = SuccessorCheck()
        """The comparison of entries that finds trajectories that were cut without a flag."""
        self.reloaded: Flags | None = None
        """Mask of environments that were not written since the last load, ``[num_envs]``, or None."""
        # All positions are equal (in lockstep); the filled cells are the first cells (uniformly filled).
        self._in_lockstep = self._uniformly_filled = True
        self._ids: Ints = np.arange(num_envs)

    @classmethod
    def at(cls, length: int, positions: Tensor, oldest: Tensor | None = None) -> Rings:
        """Build rings with these next positions, ``[num_envs]``."""
        rings = cls(len(positions), length)
        rings._positions[:] = positions.cpu().numpy()
        if oldest is not None:
            rings._valid_from[:] = oldest.cpu().numpy()
        rings._refresh()
        return rings

    # ------------------------------------------------------------------ reading

    @property
    def ids(self) -> Ints:
        """The ids of all environments."""
        return self._ids

    @property
    def positions(self) -> Tensor:
        """Next position of every environment, ``[num_envs]`` int64; a live, read-only view."""
        return torch.from_numpy(self._positions)

    @property
    def oldest(self) -> Tensor:
        """Position of the oldest stored step of every environment, ``[num_envs]``."""
        return torch.from_numpy(self._oldest())

    @oldest.setter
    def oldest(self, positions: Tensor) -> None:
        self._valid_from[:] = positions.numpy()

    @property
    def arrays(self) -> tuple[Ints, Ints]:
        """Next position and lowest valid position of every environment, each ``[num_envs]``; live views."""
        return self._positions, self._valid_from

    @property
    def filled(self) -> Tensor:
        """Number of stored steps of every environment, ``[num_envs]``."""
        return torch.from_numpy(self._positions - self._oldest())

    @property
    def is_uniformly_filled(self) -> bool:
        """Whether the filled cells are exactly the first ``count`` cells."""
        return self._uniformly_filled

    @property
    def is_in_lockstep(self) -> bool:
        """Whether all environments are at the same position."""
        return self._in_lockstep

    @property
    def restart_offset(self) -> int:
        """Offset of write versions, which grows at each :meth:`clear`, so that write versions never repeat."""
        return self._counters.item(_RESTART_OFFSET)

    @restart_offset.setter
    def restart_offset(self, value: int) -> None:
        self._counters[_RESTART_OFFSET] = value

    @property
    def write_count(self) -> int:
        """Number of rows written since the rings were last emptied."""
        return self._counters.item(_WRITE_COUNT)

    @write_count.setter
    def write_count(self, value: int) -> None:
        self._counters[_WRITE_COUNT] = value

    @property
    def version(self) -> int:
        """A counter that increases with each change that may move an episode border or remove a cell.

        These are writes, removals, cuts, loads and changed flags of stored steps. Cached cells or steps are valid while
        the version stays the same.
        """
        return self._counters.item(VERSION)

    def _oldest(self) -> Ints:
        return np.maximum(self._positions - self.length, self._valid_from)

    def cell(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the cells of steps: ``(position % length) * num_envs + env``."""
        return positions % self.length * self.num_envs + env_ids

    def env_of(self, index: Tensor) -> Tensor:
        """Return the environments of cells."""
        return index % self.num_envs

    def position_of(self, index: Tensor) -> Tensor:
        """Return the positions of the steps in cells; for an empty cell, a number below ``oldest`` or negative."""
        slot = torch.div(index, self.num_envs, rounding_mode="floor")
        newest = int(self._positions[0]) - 1 if self._in_lockstep else self.positions[index % self.num_envs] - 1
        return newest - (newest - slot) % self.length

    def is_filled(self, index: Tensor) -> Tensor:
        """Return a mask of the filled cells."""
        index = index.cpu()
        inside = (index >= 0) & (index < self.length * self.num_envs)
        index = index.clamp(0, self.length * self.num_envs - 1)
        return inside & (self.position_of(index) >= self.oldest[index % self.num_envs])

    def filled_cells(self) -> Tensor:
        """Return all filled cells in ascending order."""
        if self.is_uniformly_filled:
            return torch.arange(self.count)
        cells = torch.arange(self.length * self.num_envs)
        return cells[self.is_filled(cells)]

    def has_room(self, env: Ints, steps: int) -> Flags:
        """Return a mask of environments that can store ``steps`` further steps without overwriting any."""
        return self._positions[env] + steps - self._oldest()[env] <= self.length

    def cells_of_next(self, env: Ints, steps: int) -> Tensor:
        """Return the cells of the next steps of environments, time-major ``[steps * M]``."""
        position = self._positions[env] + np.arange(steps)[:, None]
        return torch.from_numpy(position % self.length * self.num_envs + env).reshape(-1)

    # ------------------------------------------------------------------ write versions

    def write_version(self, index: Tensor) -> Tensor:
        """Return, for each cell, the next position of its ring plus ``restart_offset``, in the shape of ``index``."""
        if not self._in_lockstep:
            return self.snapshot()[index.cpu() % self.num_envs]
        versions = np.empty(tuple(index.shape), np.int64)
        versions.fill(self._positions.item(0) + self._counters.item(_RESTART_OFFSET))
        return torch.from_numpy(versions)

    def snapshot(self) -> Tensor:
        """Return the next position of every ring plus ``restart_offset``, as a copy, ``[num_envs]``."""
        return self.positions + self.restart_offset

    def is_unchanged(self, index: Tensor, versions: Tensor) -> Tensor:
        """Return a mask of the cells that are unchanged since ``write_version``."""
        return self.is_filled(index) & (self.position_of(index) + self.restart_offset < versions)

    # ------------------------------------------------------------------ writing

    def before_change(self, env: Any, below: Any = ALL_STEPS) -> None:
        """Raise an error if another process created the rings; shared rings record each coming change here.

        Args:
            env: the environments.
            below: only steps before these positions change.

        Raises:
            RuntimeError: another process created the rings.
        """
        if self._process != process_owned.current:
            self.check_owner()

    def after_change(self) -> None:
        """Do nothing; shared rings record each change here."""

    def write(self, leaves: tuple[Ints, Ints], ids: Ints | None, steps: int, done: Flags, init: Flags) -> Ints:
        """Write steps, advance the positions and record the episodes, in one atomic call.

        Args:
            leaves: addresses of rows and cells (:meth:`Cells.match`); empty for rows that are already in their cells.
            ids: the environments, or None for all.
            steps: number of steps per environment.
            done: mask of steps that end an episode, ``[steps, M]``; empty without an episode index.
            init: mask of steps that begin an episode, ``[steps, M]``; may be empty.

        Returns:
            The cells, ``[steps * M]``.
        """
        env, in_lockstep = (self._ids, self._in_lockstep) if ids is None else (ids, False)
        self.before_change(env)
        cells = np.empty(steps * len(env), np.int64)
        jitted(write_steps)(
            *leaves, cells, env, in_lockstep, steps, self.length, self._positions, self._valid_from, self._counters,
            NO_INDEX if self.index is None else self.index.arrays, done, init,
        )  # fmt: skip
        if in_lockstep and self._uniformly_filled:
            self.count = min(self._positions.item(0), self.length) * self.num_envs
        else:
            self._refresh()
        self.after_change()
        return cells

    def claim(self, env: Ints, steps: int) -> None:
        """Remove the cells of the next steps from the rings, so that no process reads a half-written row."""
        self.before_change(env)
        positions = self._positions[env]
        oldest = np.clip(positions + steps - self.length, self._valid_from[env], positions)
        if self.index is not None:
            self.index.keep_headless_end(env, oldest)
        self._valid_from[env] = oldest
        self._counters[VERSION] += 1
        self._refresh()

    def drop(self, env: Ints, count: int | None) -> Tensor:
        """Remove the ``count`` oldest steps of environments, or all steps; return the cells, sorted by environment."""
        oldest = self._oldest()[env]
        stored = self._positions[env] - oldest
        if count is not None and int(stored.min()) < count:
            shortest = int(env[stored.argmin()])
            raise MissingStepsError(
                f"count must be at most {int(stored.min())}, the stored steps of environment {shortest}, got {count}."
            )
        end = oldest + (stored if count is None else count)
        run, position, _ = steps_between(oldest, end - 1)
        self.before_change(env, end)
        if self.index is not None:
            self.index.keep_headless_end(env, end)
        self._valid_from[env] = end
        self._counters[VERSION] += 1
        self._refresh()
        self.after_change()
        return torch.from_numpy(position % self.length * self.num_envs + env[run])

    def cut(self, env: Ints) -> None:
        """End the running episodes of environments; the next steps begin new episodes."""
        if self.index is not None:
            self.before_change(env)
            self.index.cut(env)
            self._counters[VERSION] += 1

    def set_flags(
        self, cells: Ints, done: Flags, had_begin_flag: Flags, begin_masks: Callable[[Ints], tuple[Flags, Flags]]
    ) -> None:
        """Update the episodes after flags of stored steps changed; see :meth:`EpisodeIndex.set_flags`."""
        if self.index is not None:
            env = cells % self.num_envs
            self.before_change(env)
            self.index.set_flags(cells, done, had_begin_flag, begin_masks)
            self._counters[VERSION] += 1
            self.after_change()

    def clear(self) -> None:
        """Remove all steps and reset the positions to 0."""
        self.before_change(self._ids)
        self.reloaded = None
        self._counters[_RESTART_OFFSET] += self._positions.max()
        self._counters[VERSION] += 1
        self._positions[:] = self._valid_from[:] = 0
        self._refresh()
        if self.index is not None:
            self.index.clear()
        self.after_change()

    def mark_written(self, env: Ints) -> None:
        """Remove environments from ``reloaded`` at their first write after a load."""
        assert self.reloaded is not None
        self.reloaded[env] = False
        if not self.reloaded.any():
            self.reloaded = None

    def make_index(self) -> None:
        """Build the episode index."""
        self.check_process()
        self.index = EpisodeIndex(self.length, self._positions, self._valid_from)

    def drop_index(self) -> None:
        """Remove the episode index, because the ends of episodes are unknown."""
        self.check_owner()
        if self.is_shared:
            raise RuntimeError("The episode index of a buffer that other processes share cannot be removed.")
        self.index = None
        self._counters[VERSION] += 1

    def continue_from(self, other: Rings) -> None:
        """Start at the oldest stored positions of other rings, so that copied steps keep their write versions."""
        oldest = other._oldest()
        first = oldest.min()
        self._positions[:] = self._valid_from[:] = oldest - first
        self._counters[_RESTART_OFFSET] = other.restart_offset + first
        self._counters[VERSION] += 1
        self.successors = other.successors
        self._refresh()

    def _refresh(self) -> None:
        first, oldest = self._positions[0], self._oldest()
        filled = self._positions - oldest
        self.count = int(filled.sum())
        self._in_lockstep = bool((self._positions == first).all())
        self._uniformly_filled = self.count == self.length * self.num_envs or (self._in_lockstep and not oldest.any())

    # ------------------------------------------------------------------ state

    def validate_state(self, state_dict: Any) -> dict[str, Any]:
        """Validate a state; raise RuntimeError if other processes use the rings."""
        self.check_loadable()
        return super().validate_state(state_dict)

    @property
    def _episodes(self) -> dict[str, Any] | None:
        cells = slice(self.count) if self.is_uniformly_filled else self.filled_cells().numpy()
        return None if self.index is None else self.index.state_of(cells)

    @_episodes.setter
    def _episodes(self, state: Mapping[str, Any] | None) -> None:
        self._refresh()
        self.index = None
        if state is not None:
            self.make_index()
            assert self.index is not None
            self.index.load_state(state, self.filled_cells().numpy())

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        """Validate that an index is consistent with the stored steps; raise ValueError if it is not."""
        positions, oldest, index = (values[entry] for entry in ("positions", "oldest", "index"))
        rings = Rings.at(self.length, positions, oldest)
        if not rings.oldest.equal(oldest) or bool((rings.filled < 0).any()):
            raise ValueError("The writer state is foreign: its oldest steps cannot be stored.")
        if index is None:
            return
        cells, envs, newest = rings.filled_cells(), rings.num_envs, rings.positions - 1
        env = rings.env_of(cells)
        schema = {
            "column": tensor(torch.int64, len(cells), low=0, high=newest[env]),
            "done": tensor(torch.bool, len(cells)),
            "begin": tensor(torch.int64, envs, low=0, high=newest.clamp(min=0)),
            "open": tensor(torch.bool, envs),
            "headless_end": tensor(torch.int64, envs, low=-1, high=newest.clamp(min=-1)),
            "has_cuts": flag,
        }
        episodes = check_state(index, schema, "episode index")
        column, position = episodes["column"], rings.position_of(cells)
        begin = torch.where(column >= position, position, column)
        at_begin = torch.searchsorted(cells, rings.cell(env, begin)).clamp(max=max(len(cells) - 1, 0))
        end = torch.where(begin >= rings.oldest[env], column[at_begin], episodes["headless_end"][env])
        is_running = episodes["open"][env] & (begin == episodes["begin"][env])
        end = torch.where(is_running, newest[env], end)
        if not (end >= position).all():
            raise ValueError("The episode index state is foreign: it has steps after the end of their episode.")

    def _post_load(self) -> None:
        self._counters[VERSION] += 1
        self.reloaded = np.ones(self.num_envs, np.bool_)

    def __getstate__(self) -> dict[str, Any]:
        self.check_picklable()
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.claim_ownership()
        if self.index is not None:
            self.index.attach(self._positions, self._valid_from)


class RingOwner(Protocol):
    """Protocol of the writer that fills the rings in a storage: a :class:`RingWriter`."""

    rings: Rings

    def plan_rewrite(self, changes: Mapping[tuple[str, ...], Tensor], cells: Tensor) -> Callable[[], None]:
        """Validate new values of stored entries; return the function that then updates the episodes."""
        ...


class Dependent(Protocol):
    """Protocol of a component that derives a stored entry from other entries."""

    def refresh(self, cells: Ints) -> None:
        """Recompute the entry for ``cells``: all steps of the episodes with a replaced entry."""
        ...


class _WeakWriterRef:
    """A weak reference to a writer; a copy or pickle refers to no writer."""

    def __init__(self, writer: RingOwner | None = None) -> None:
        self.writer = (lambda: None) if writer is None else weakref.ref(writer)

    def __reduce__(self) -> Any:
        return _WeakWriterRef, ()


def attach_rings(storage: Storage, writer: RingOwner) -> None:
    """Store a weak reference to the writer in a storage of any kind."""
    storage.writer_ref = _WeakWriterRef(writer)


def ring_owner(storage: Storage) -> RingOwner | None:
    """Return the writer of the rings in a storage, or None."""
    reference = getattr(storage, "writer_ref", None)
    return None if reference is None else reference.writer()


def rings_of(storage: Storage) -> Rings | None:
    """Return the rings in a storage, or None."""
    writer = ring_owner(storage)
    return None if writer is None else writer.rings


def uneven_rings(storage: Storage) -> Rings | None:
    """Return the rings in a storage, or None if its filled cells are the first ``len(storage)`` cells."""
    writer = ring_owner(storage)
    return None if writer is None or writer.rings.is_uniformly_filled else writer.rings


def stored_cells(storage: Storage) -> Tensor:
    """Return all filled cells in ascending order, in ``O(capacity)``."""
    rings = uneven_rings(storage)
    return torch.arange(len(storage)) if rings is None else rings.filled_cells()


def check_single_ring(rings: Rings | None) -> None:
    """Validate that neighbouring cells are successive steps; raise RuntimeError if there are several rings."""
    if rings is not None and rings.num_envs > 1:
        raise RuntimeError(
            f"The cells of {rings.num_envs} environments are interleaved, so TorchRL's slice samplers and "
            "sequences would mix them. Use SequenceSampler of torchrl_lightning."
        )


def reject_uneven_rings(rings: Rings | None, reader: str) -> None:
    """Raise RuntimeError if ``rings`` is not None, because ``reader`` cannot read unevenly filled rings."""
    if rings is not None:
        raise RuntimeError(
            f"{reader} cannot read unevenly filled rings ({rings.filled.tolist()} steps of {rings.num_envs} "
            "environments). Use UniformSampler, PrioritizedSampler or SequenceSampler of torchrl_lightning."
        )
