"""Rings in shared memory, and recovery after a process dies.

Every process takes a shared lock to change the rings or to read from them. Unshared rings do not need this module.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning._core.mixins import is_spawning
from torchrl_lightning.replay.episode_index import EpisodeIndex
from torchrl_lightning.replay.positions import Flags, Ints, steps_between
from torchrl_lightning.replay.rings import ALL_STEPS, VERSION, Rings

# Indices of SharedRings._sync_state: number of changes, 1 during a change, 1 after stop(), and the highest writer id.
_CHANGES, _IS_CHANGING, _IS_STOPPED, _LAST_WRITER_ID = range(4)
_logger = logging.getLogger(__name__)


def _new_instance(cls: Any) -> Any:
    return cls.__new__(cls)


class _SharedArrays:
    """A mixin that keeps an object's NumPy arrays in shared memory.

    A pickle for a new child process refers to the shared memory. Any other copy is an unshared object.
    """

    UNSHARED_TYPE: ClassVar[type]
    ARRAYS: ClassVar[tuple[str, ...]]
    """Attribute names of the arrays."""
    SHARED_ONLY: ClassVar[tuple[str, ...]] = ()
    """Attribute names that an unshared object does not have."""
    _memory: dict[str, Tensor]

    def _share(self) -> None:
        self._memory = {name: torch.from_numpy(getattr(self, name)).share_memory_() for name in self.ARRAYS}
        self._bind()

    def _bind(self) -> None:
        for name, tensor in self._memory.items():
            setattr(self, name, tensor.numpy())

    def __reduce_ex__(self, protocol: Any) -> Any:
        spawns = is_spawning()
        excluded = self.ARRAYS if spawns else ("_memory", *self.SHARED_ONLY)
        state = {name: value for name, value in vars(self).items() if name not in excluded}
        if spawns:
            return _new_instance, (type(self),), state
        return _new_instance, (self.UNSHARED_TYPE,), self._unshared_state(state)

    def _unshared_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of an unshared copy."""
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._bind()


class SharedEpisodeIndex(_SharedArrays, EpisodeIndex):
    """An episode index in shared memory."""

    UNSHARED_TYPE = EpisodeIndex
    ARRAYS = ("_column", "_done", "_begin", "_open", "_headless_end")

    def __init__(self, index: EpisodeIndex, positions: Ints, valid_from: Ints) -> None:
        vars(self).update(vars(index))
        self.has_cuts = True  # assume cuts, because other processes may cut
        self.attach(positions, valid_from)
        self._share()

    def _unshared_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return self.compact_state(state)


class SharedRings(_SharedArrays, Rings):
    """Rings in shared memory; a process must hold the shared lock to change the rings.

    Args:
        rings: the unshared rings; do not use them afterwards.
    """

    UNSHARED_TYPE = Rings
    SHARED_ONLY = ("_sync_state", "_lost_before", "_writer_ids", "_writer_id", "_last_state", "_holds_lock")
    ARRAYS = ("_positions", "_valid_from", "_counters", "_sync_state", "_lost_before", "_writer_ids")
    is_shared = True

    def __init__(self, rings: Rings) -> None:
        vars(self).update(vars(rings))
        self._sync_state: Ints = np.zeros(4, np.int64)
        # The steps of a ring below this position are lost if a process dies while it changes the ring.
        self._lost_before: Ints = np.zeros(self.num_envs, np.int64)
        # Id of the last writer of each ring; not the process id, because the system reuses the id of a dead process.
        self._writer_ids: Ints = np.zeros(self.num_envs, np.int64)
        self._writer_id = 0
        self._holds_lock = False  # whether this process holds the lock
        self._share()
        self._share_index()
        self._record_state()

    def _share_index(self) -> None:
        if self.index is not None:
            self.index = SharedEpisodeIndex(self.index, self._positions, self._valid_from)

    @property
    def is_uniformly_filled(self) -> bool:
        """Whether the filled cells are exactly the first ``count`` cells."""
        self._refresh()
        return self._uniformly_filled

    def position_of(self, index: Tensor) -> Tensor:
        """Return the positions of the steps in cells."""
        self._refresh()
        return super().position_of(index)

    def make_index(self) -> None:
        """Build the episode index in shared memory."""
        super().make_index()
        self._share_index()

    def register(self) -> None:
        """Give this process a new writer id, so that its next steps begin new episodes; the caller holds the lock."""
        self._sync_state[_LAST_WRITER_ID] += 1
        self._writer_id = self._sync_state.item(_LAST_WRITER_ID)

    @property
    def owned(self) -> int:
        """Number of rings that this process filled last, if it has registered."""
        return int((self._writer_ids == self._writer_id).sum()) if self._writer_id else 0

    def own_rings(self, count: int) -> Ints:
        """Return ``count`` rings for the environments of this process; the caller holds the lock.

        These are the rings that this process has written to, then rings without a writer, and then the rings of the
        process that registered first. A process with the rings of an ended process thus takes none of a running one.
        """
        if not self._writer_id:
            self.register()
        age = np.where(self._writer_ids == self._writer_id, -1, self._writer_ids)
        rings: Ints = np.sort(np.argsort(age, kind="stable")[:count])
        return rings

    def write(self, leaves: tuple[Ints, Ints], ids: Ints | None, steps: int, done: Flags, init: Flags) -> Ints:
        """Write steps like :meth:`Rings.write`, but never continue an episode of another process."""
        env = self._ids if ids is None else ids
        taken_over = env[self._writer_ids[env] != self._writer_id]
        if taken_over.size:
            self.cut(taken_over)
            self._writer_ids[taken_over] = self._writer_id
        return super().write(leaves, ids, steps, done, init)

    def before_change(self, env: Any, below: Any = ALL_STEPS) -> None:
        """Record the steps that are lost if this process dies before it releases the lock."""
        if self._holds_lock:
            self._sync_state[_IS_CHANGING] = 1
            self._lost_before[env] = below

    def after_change(self) -> None:
        """Record a change for the other processes."""
        self._sync_state[_CHANGES] += 1
        self._record_state()

    def sync(self) -> tuple[bool, Tensor, Tensor] | None:
        """Return the changes of other processes; if a process died during a change, first remove the affected steps.

        Returns:
            None if nothing changed. Otherwise three values: whether the rings were emptied, the removed cells, and the
            written cells.
        """
        if self._sync_state.item(_IS_CHANGING):
            self._recover()
            self.release()
        self._holds_lock = True
        changes, restart_offset, positions, oldest = self._last_state
        if self._sync_state.item(_CHANGES) == changes:
            return None
        emptied = restart_offset != self.restart_offset
        if emptied:
            positions = oldest = np.zeros_like(positions)
        self._refresh()
        current_oldest = self._oldest()
        removed = self._cells_between(
            np.maximum(oldest, self._positions - self.length), np.minimum(current_oldest, positions)
        )
        written = self._cells_between(np.maximum(positions, current_oldest), self._positions)
        self._record_state()
        return emptied, removed, written

    def release(self) -> None:
        """Mark all changes as complete, before the lock is released."""
        if self._sync_state.item(_IS_CHANGING):
            self._lost_before[:] = 0
            self._sync_state[_IS_CHANGING] = 0  # reset this last, because before_change() sets this first
        self._holds_lock = False

    def _recover(self) -> None:
        env = np.flatnonzero(self._lost_before)
        end, stored = self._lost_before[env], self._positions[env] - self._oldest()[env]
        incomplete = end == ALL_STEPS
        if self.index is not None:
            self.index.keep_headless_end(env[~incomplete], end[~incomplete])
            self.index.invalidate(env[incomplete])
        self._valid_from[env] = np.minimum(end, self._positions[env])
        self._sync_state[_CHANGES] += 1
        self._counters[VERSION] += 1
        if incomplete.any():
            _logger.warning(
                "a process died while it wrote steps of the environments %s: their %d stored steps were removed, "
                "because they may be incomplete; the next steps begin new episodes.",
                env[incomplete].tolist(), int(stored[incomplete].clip(0).sum()),
            )  # fmt: skip

    def _cells_between(self, low: Ints, high: Ints) -> Tensor:
        env, position, _ = steps_between(low, high - 1)
        return self.cell(torch.from_numpy(env), torch.from_numpy(position))

    def _record_state(self) -> None:
        self._last_state = self._sync_state.item(_CHANGES), self.restart_offset, self._positions.copy(), self._oldest()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._holds_lock = False
        if self.index is not None:
            self.index.attach(self._positions, self._valid_from)

    def stop(self) -> None:
        """Stop waiting in all processes."""
        self._sync_state[_IS_STOPPED] = 1

    def resume(self) -> None:
        """Allow waiting again in all processes."""
        self._sync_state[_IS_STOPPED] = 0

    @property
    def is_stopped(self) -> bool:
        """Whether waiting is stopped in all processes."""
        return bool(self._sync_state.item(_IS_STOPPED))
