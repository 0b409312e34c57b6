"""Buffers that several processes share: rings in shared memory, and recovery after a process dies.

``share()`` moves the rings into shared memory. From then on, every process takes a shared lock to write or to sample.
Unshared rings do not need this module.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import current_process, parent_process
from random import Random
from typing import Any, ClassVar, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning._core.mixins import is_spawning
from torchrl_lightning._core.processes import end_with_parent
from torchrl_lightning.replay import process_owned
from torchrl_lightning.replay.episode_index import EpisodeIndex
from torchrl_lightning.replay.locked import LockedBuffer
from torchrl_lightning.replay.positions import Flags, Ints, steps_between
from torchrl_lightning.replay.rings import ALL_STEPS, VERSION, Rings
from torchrl_lightning.replay.shared_lock import PAUSE, SharedLock

T = TypeVar("T")
LONGEST_PAUSE = 5e-3  # seconds between polls for free cells or new steps
NO_LOCK = nullcontext()
# Indices of SharedRings._sync_state: number of changes, 1 during a change, 1 after stop(), and the highest writer id.
_CHANGES, _IS_CHANGING, _IS_STOPPED, _LAST_WRITER_ID = range(4)
_logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------- rings in shared memory


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


# ---------------------------------------------------------------------- the buffer


class ShareableBuffer(LockedBuffer):
    """A replay buffer that other processes can write to and sample from after :meth:`share`."""

    shared = False

    def share(self, shared: bool = True, *, timeout: float | None = None) -> Self:
        """Move the buffer into shared memory for forked or spawned processes; call this before they start.

        Each process takes a shared lock to write or to sample, and sees the steps of the other processes. If a process
        is killed while it holds the lock, the other processes continue. The last write of the killed process may be
        incomplete. The other processes therefore remove all steps of the environments in that write, log a warning with
        the environment ids and begin new episodes. If a parent process is killed, a child of multiprocessing that has
        used the buffer ends within seconds.

        Only one process at a time may write to a ring. The first row of another process begins an episode, with or
        without ``is_init``, because two processes never share an episode. This also applies to a process that replaces
        a dead process.

        A process that is stopped (SIGSTOP, a debugger) while it holds the lock blocks the others until it continues or
        is killed. With a ``timeout``, the others raise a TimeoutError with the id of the stopped process; the buffer
        stays unchanged.

        Each process has its own sampler, priorities and transforms. Steps of other processes get the priority of new
        data. Each child process has its own generator. Its seed depends on the generator state of this process at the
        start of the child and on the child's name. Multiprocessing numbers the names by order of start, so runs are
        reproducible. This process must be the first process that writes to the buffer.

        A process shares the buffer if it is forked after this call, or gets the buffer as an argument of
        ``multiprocessing.Process``. All other transfers copy the stored rows into an unshared buffer: ``pickle.dumps``,
        a queue or pipe, Ray's object store, ``copy.deepcopy``.

        Args:
            shared: False does nothing if the buffer is unshared.
            timeout: seconds to wait for the lock or for other processes; None waits without limit. If the buffer is
                already shared, this changes the timeout of this process only, and None keeps the current timeout.

        Returns:
            The buffer itself.

        Raises:
            RuntimeError: the system has no locks that survive the death of a process (Windows).
            ValueError: the timeout is not positive, the cells are memory-mapped, batches are prefetched, or
                ``shared=False`` is combined with a timeout or a shared buffer.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from torchrl_lightning import ExperienceBuffer, RingStorage
            >>> buffer = ExperienceBuffer(storage=RingStorage(4))
            >>> _ = buffer.extend(TensorDict({"a": torch.zeros(1)}, [1]))
            >>> buffer.share(timeout=30.0).storage.is_shared
            True
        """
        if not shared:
            if timeout is not None:
                raise ValueError(f"timeout={timeout!r} has no effect with shared=False. Omit one of them.")
            if self.shared:
                raise ValueError(
                    "shared must not be False for a shared buffer. Use copy.deepcopy(buffer) for an unshared copy."
                )
            return super().share(False)
        if self.prefetches:
            raise ValueError("A buffer that prefetches batches cannot be shared. Build it with prefetch=0.")
        if self.shared:
            if timeout is not None:
                self._lock.timeout = timeout
            return self  # keep the lock, because other processes may use it
        lock = SharedLock(self._on_lock_acquired, self._before_lock_release, timeout)
        self.storage.share()
        self.writer.share()
        super().share(True)
        self.write_lock = lock
        self._sampling_process = process_owned.current
        return self

    @property
    def _rings(self) -> SharedRings:
        rings: SharedRings = self.writer.rings
        return rings

    @property
    def _lock(self) -> SharedLock:
        return cast("SharedLock", self.write_lock)

    def _on_lock_acquired(self) -> None:
        """Apply the changes of other processes; called after this process took the lock."""
        if self._sampling_process != process_owned.current:
            self._sampling_process = process_owned.current
            self._rings.register()
            if parent_process() is not None:
                end_with_parent(os.getppid(), by_signal=False)
            base_seed = int(torch.randint(2**62, (), generator=self.generator, device=self.generator.device))
            self.generator.manual_seed(Random(f"{base_seed} {current_process().name}").getrandbits(63))
        if (changes := self._rings.sync()) is None:
            return
        emptied, removed, written = changes
        self.writer.count_cells()
        if emptied:
            self.clear_sampler()
        elif len(removed):
            self.invalidate_cells(removed)
        if len(written):
            self.mark_update(written)

    def _before_lock_release(self) -> None:
        self._rings.release()

    @property
    def uses_episodes(self) -> bool:
        """Whether samples depend on episode boundaries."""
        raise NotImplementedError

    def invalidate_cells(self, cells: Tensor) -> None:
        """Exclude removed cells from sampling."""
        raise NotImplementedError

    def lock_if_shared(self) -> AbstractContextManager[None]:
        """Return a context that holds the locks if the buffer is shared, and does nothing otherwise."""
        return self.locked() if self.shared else NO_LOCK

    def wait_for(self, attempt: Callable[[], T | None]) -> T | None:
        """Repeat ``attempt`` under the locks until it returns a result or waiting is stopped.

        Returns:
            The result of the attempt; None if waiting was stopped.

        Raises:
            TimeoutError: the timeout of :meth:`share` has passed.
            ValueError: the buffer is not shared, so no other process can change it.
        """
        # Poll, because a multiprocessing condition hangs if a waiting process dies.
        if not self.shared:
            raise ValueError(
                "blocking must be False for an unshared buffer (allow_multiprocess=False), because no other process "
                "can write or remove steps. Omit blocking=True."
            )
        pause, start, timeout = PAUSE, time.monotonic(), self._lock.timeout
        while not self.is_stopped:
            with self.locked():
                result = attempt()
            if result is not None:
                return result
            if timeout is not None and time.monotonic() - start > timeout:
                raise TimeoutError(
                    f"No other process removed or wrote steps within timeout={timeout:g} seconds "
                    f"({len(self.storage)} of {self.storage.max_size} cells are filled). Check that the writing and "
                    "removing processes are alive, restart them, or call share(timeout=...) with more seconds."
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return None

    def stop(self) -> None:
        """Stop waiting in all processes: calls that wait return without a result, now and later.

        Waiting stays stopped until :meth:`resume`, even if the buffer is emptied. The stored steps stay, and calls that
        do not wait still work. This method never waits, because it takes no lock. It does not end the wait for a lock
        that a stopped process holds; only the timeout of :meth:`share` limits that wait.
        """
        if self.shared:
            self._rings.stop()

    def resume(self) -> None:
        """Allow waiting again after :meth:`stop`, and register this process as a new writer.

        The next rows of this process begin new episodes, with or without ``is_init``. Call this after a stop, and in a
        running process after it restarts its environments. A process that replaces a dead process begins new episodes
        with its first row anyway, and does not need this call.

        Raises:
            TimeoutError: another process holds the lock longer than the timeout of :meth:`share`.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from torchrl_lightning import ExperienceBuffer, RingStorage
            >>> buffer = ExperienceBuffer(storage=RingStorage(4))
            >>> row = TensorDict({"next": {"done": torch.zeros(1, 1, dtype=torch.bool)}}, [1])
            >>> _ = buffer.extend(row)
            >>> _ = buffer.share().extend(row)
            >>> buffer.stop()
            >>> buffer.resume()
            >>> _ = buffer.extend(row)
            >>> buffer.is_stopped, buffer.writer.index.begin(torch.zeros(3).long(), torch.arange(3)).tolist()
            (False, [0, 0, 2])
        """
        if self.shared:
            with self.locked():
                self._rings.register()
                self._rings.resume()

    @property
    def is_stopped(self) -> bool:
        """Whether waiting is stopped."""
        return self.shared and self._rings.is_stopped

    def __getstate__(self) -> dict[str, Any]:
        if is_spawning() and not self.shared:
            raise RuntimeError(
                f"A {type(self).__name__} must be shared before another process gets it. {process_owned.SHARE_FIRST}"
            )
        state: dict[str, Any] = super().__getstate__()
        return state if is_spawning() else {**state, "shared": False, "_write_lock": nullcontext()}
