"""Buffers that processes share: rings in shared memory, and what is mended behind a process that dies.

Ordinary rings know nothing of this. ``share()`` puts the same rings into shared memory, and from then on whoever
writes or samples holds a lock between the processes.
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

from torchrl_lightning.parts import is_spawning
from torchrl_lightning.processes import end_with_parent
from torchrl_lightning.replay import processes
from torchrl_lightning.replay.episode_index import EpisodeIndex
from torchrl_lightning.replay.locked import LockedBuffer
from torchrl_lightning.replay.rings import EVERYTHING, Rings
from torchrl_lightning.replay.shared_lock import PAUSE, SharedLock
from torchrl_lightning.replay.steps import Flags, Ints, steps_between

T = TypeVar("T")
LONGEST_PAUSE = 5e-3  # seconds between looks for room or steps
UNLOCKED = nullcontext()
_logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------- rings in shared memory


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


class _SharedArrays:
    """What an object holds in numpy arrays, in memory that processes share.

    A pickle for a process that is being started hands the memory on; any other copy is an ordinary object again.
    """

    ORDINARY: ClassVar[type]
    ARRAYS: ClassVar[tuple[str, ...]]
    """Names of the attributes that hold the arrays."""
    OWN: ClassVar[tuple[str, ...]] = ()
    """Names of those that an ordinary object lacks."""
    _memory: dict[str, Tensor]

    def _share(self) -> None:
        self._memory = {name: torch.from_numpy(getattr(self, name)).share_memory_() for name in self.ARRAYS}
        self._bind()

    def _bind(self) -> None:
        for name, tensor in self._memory.items():
            setattr(self, name, tensor.numpy())

    def __reduce_ex__(self, protocol: Any) -> Any:
        starts = is_spawning()
        left_out = self.ARRAYS if starts else ("_memory", *self.OWN)
        state = {name: value for name, value in vars(self).items() if name not in left_out}
        if starts:
            return _new, (type(self),), state
        return _new, (self.ORDINARY,), self._packed(state)

    def _packed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of an ordinary copy."""
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._bind()


class SharedEpisodeIndex(_SharedArrays, EpisodeIndex):
    """An episode index in memory that processes share."""

    ORDINARY = EpisodeIndex
    ARRAYS = ("_column", "_done", "_begin", "_open", "_headless_end")

    def __init__(self, index: EpisodeIndex, positions: Ints, floor: Ints) -> None:
        vars(self).update(vars(index))
        self.has_cuts = True  # perhaps: other processes cut, too
        self.attach(positions, floor)
        self._share()

    def _packed(self, state: dict[str, Any]) -> dict[str, Any]:
        return self.packed(state)


class SharedRings(_SharedArrays, Rings):
    """Rings in memory that processes share; who changes them holds the lock between the processes.

    Args:
        rings: ordinary ones, which are not to be used any more.
    """

    ORDINARY = Rings
    OWN = ("_marks", "_pending", "_writers", "_number", "_seen", "_is_locked")
    ARRAYS = ("_positions", "_floor", "_counters", "_marks", "_pending", "_writers")
    is_shared = True

    def __init__(self, rings: Rings) -> None:
        vars(self).update(vars(rings))
        # How many changes were made, whether one is under way, whether nobody waits any more, and the newest number.
        self._marks: Ints = np.zeros(4, np.int64)
        # Which steps of a ring, all those below a position, are lost if the process dies that is at it.
        self._pending: Ints = np.zeros(self.num_envs, np.int64)
        # Who has written last to a ring; by numbers, as the system gives the id of a dead process to a new one.
        self._writers: Ints = np.zeros(self.num_envs, np.int64)
        self._number = 0
        self._is_locked = False  # whether this process holds the lock
        self._share()
        self._share_index()
        self._see()

    def _share_index(self) -> None:
        if self.index is not None:
            self.index = SharedEpisodeIndex(self.index, self._positions, self._floor)

    @property
    def is_even(self) -> bool:
        """Whether all rings are equally filled."""
        self._refresh()
        return self._even

    def position_of(self, index: Tensor) -> Tensor:
        """Return the positions of the steps in cells."""
        self._refresh()
        return super().position_of(index)

    def make_index(self) -> None:
        """Keep an index of episodes from now on."""
        super().make_index()
        self._share_index()

    def enroll(self) -> None:
        """Count this process as a new one, under the lock: what it writes continues nobody's episodes."""
        self._marks[3] += 1
        self._number = self._marks.item(3)

    def write(self, leaves: tuple[Ints, Ints], ids: Ints | None, steps: int, done: Flags, init: Flags) -> Ints:
        """Write steps; see :meth:`Rings.write`. They do not continue an episode that another process has written."""
        env = self._ids if ids is None else ids
        taken = env[self._writers[env] != self._number]
        if taken.size:
            self.cut(taken)
            self._writers[taken] = self._number
        return super().write(leaves, ids, steps, done, init)

    def before(self, env: Any, below: Any = EVERYTHING) -> None:
        """Note which steps are lost if this process dies before it leaves the lock."""
        if self._is_locked:
            self._marks[1] = 1
            self._pending[env] = below

    def after(self) -> None:
        """Let the others know that something has changed."""
        self._marks[0] += 1
        self._see()

    def follow(self) -> tuple[bool, Tensor, Tensor] | None:
        """Take note of what other processes did, under the lock that was just entered; mend what a dead one left.

        Returns:
            None if they did nothing; otherwise whether they emptied the rings, cells that hold nothing any more, and
            cells that were written.
        """
        if self._marks.item(1):
            self._mend()
            self.leave()
        self._is_locked = True
        changes, era, positions, oldest = self._seen
        if self._marks.item(0) == changes:
            return None
        emptied = era != self.era
        if emptied:
            positions = oldest = np.zeros_like(positions)
        self._refresh()
        now = self._oldest()
        gone = self._cells_between(np.maximum(oldest, self._positions - self.length), np.minimum(now, positions))
        written = self._cells_between(np.maximum(positions, now), self._positions)
        self._see()
        return emptied, gone, written

    def leave(self) -> None:
        """Declare that everything is whole, before the lock is given back."""
        if self._marks.item(1):
            self._pending[:] = 0
            self._marks[1] = 0  # last, as it was the first to be set
        self._is_locked = False

    def _mend(self) -> None:
        env = np.flatnonzero(self._pending)
        end, held = self._pending[env], self._positions[env] - self._oldest()[env]
        torn = end == EVERYTHING
        if self.index is not None:
            self.index.keep_headless_end(env[~torn], end[~torn])
            self.index.forget(env[torn])
        self._floor[env] = np.minimum(end, self._positions[env])
        self._marks[0] += 1
        self._counters[2] += 1
        if torn.any():
            _logger.warning(
                "a process died while it wrote steps of the environments %s: the %d steps stored of them were dropped, "
                "because nobody knows which are whole, and what comes next begins new episodes.",
                env[torn].tolist(), int(held[torn].clip(0).sum()),
            )  # fmt: skip

    def _cells_between(self, low: Ints, high: Ints) -> Tensor:
        env, position, _ = steps_between(low, high - 1)
        return self.cell(torch.from_numpy(env), torch.from_numpy(position))

    def _see(self) -> None:
        self._seen = self._marks.item(0), self.era, self._positions.copy(), self._oldest()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._is_locked = False
        if self.index is not None:
            self.index.attach(self._positions, self._floor)

    def stop(self) -> None:
        """Let nobody wait any more, in any process."""
        self._marks[2] = 1

    def revive(self) -> None:
        """Let them wait again."""
        self._marks[2] = 0

    @property
    def is_stopped(self) -> bool:
        """Whether nobody shall wait any more."""
        return bool(self._marks.item(2))


# ---------------------------------------------------------------------- the buffer


class ShareableBuffer(LockedBuffer):
    """A buffer over rings that other processes may write to and read from, once it is shared."""

    shared = False

    def share(self, shared: bool = True, *, timeout: float | None = None) -> Self:
        """Move what is stored into memory that other processes share, forked or spawned; call before they start.

        Whoever writes or samples holds a lock between the processes and sees what the others wrote. If a process dies
        (is killed) while it holds the lock, the others go on. What it was writing may be half done, so that they drop
        the rings of these environments, log a warning that names them, and begin new episodes there. A process of
        multiprocessing that has used the buffer ends within seconds when the one that started it is killed.

        A ring has one writer at a time. Where another process writes to it, be it in the place of a dead one, its
        first row begins an episode, whether or not rows have an ``is_init``: two processes never share an episode.

        A process that is stopped (SIGSTOP, a debugger) while it holds the lock holds up the others until it goes on or
        is killed. With a ``timeout``, each of them raises a TimeoutError that names it; the buffer is as it was.

        Samplers, priorities among them, and transforms stay each process's own; new steps of others get the priority of
        new data. Another process draws from a generator of its own, seeded by what this process's one would give at
        the start of the other and by the other's name: those of multiprocessing are numbered in order of their start,
        so that a run can be repeated. Write some data first, or let this process be the first to write.

        Processes share the buffer if they are forked after this call, or get it as an argument of
        ``multiprocessing.Process``. Any other pickle is a copy of the rows that are stored now, unshared and in memory
        of its own: ``pickle.dumps``, a queue or pipe, Ray's object store, ``copy.deepcopy``.

        Args:
            shared: False does nothing to a buffer that is not shared.
            timeout: seconds to wait for the lock, and in calls that wait for what other processes do; for ever if None.
                For a buffer that is shared already, this process's own from now on; None leaves it.

        Returns:
            The buffer itself.

        Raises:
            RuntimeError: the system has no locks that outlive a process that dies (Windows).
            ValueError: the timeout is not above 0, or comes with ``shared=False``, the cells are memory-mapped files,
                batches are prefetched, or the buffer is shared and shall not be any more.

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
                raise ValueError(f"timeout={timeout!r} has no effect with shared=False; drop one of them.")
            if self.shared:
                raise ValueError("A shared buffer stays shared; copy.deepcopy(buffer) gives one that is not.")
            return super().share(False)
        if self.prefetches:
            raise ValueError("A buffer that prefetches batches cannot be shared; build it with prefetch=0.")
        if self.shared:
            if timeout is not None:
                self._lock.timeout = timeout
            return self  # others may use the lock
        lock = SharedLock(self._enter, self._leave, timeout)
        self.storage.share()
        self.writer.share()
        super().share(True)
        self.write_lock = lock
        self._drawing = processes.current
        return self

    @property
    def _rings(self) -> SharedRings:
        rings: SharedRings = self.writer.rings
        return rings

    @property
    def _lock(self) -> SharedLock:
        return cast("SharedLock", self.write_lock)

    def _enter(self) -> None:
        """Take note of what other processes did; done on entering the lock between them."""
        if self._drawing != processes.current:
            self._drawing = processes.current
            self._rings.enroll()
            if parent_process() is not None:
                end_with_parent(os.getppid(), by_signal=False)
            start = int(torch.randint(2**62, (), generator=self.generator, device=self.generator.device))
            self.generator.manual_seed(Random(f"{start} {current_process().name}").getrandbits(63))
        if (done := self._rings.follow()) is None:
            return
        emptied, gone, written = done
        self.writer.count_cells()
        if emptied:
            self.clear_sampler()
        elif len(gone):
            self.forget_cells(gone)
        if len(written):
            self.mark_update(written)

    def _leave(self) -> None:
        self._rings.leave()

    @property
    def uses_episodes(self) -> bool:
        """Whether samples depend on where episodes begin and end."""
        raise NotImplementedError

    def forget_cells(self, cells: Tensor) -> None:
        """Let the sampler never draw cells again that hold nothing any more."""
        raise NotImplementedError

    def undisturbed(self) -> AbstractContextManager[None]:
        """Hold the locks where other processes may write; one thread does not disturb itself."""
        return self.locked() if self.shared else UNLOCKED

    def wait_for(self, attempt: Callable[[], T | None]) -> T | None:
        """Try again and again, under the locks, until an attempt succeeds or waiting is stopped.

        Returns:
            What the attempt returned; None where waiting was stopped.

        Raises:
            TimeoutError: the timeout of :meth:`share` is over.
            ValueError: the buffer is not shared, so that nobody else could change anything.
        """
        # By looking again and again: conditions of multiprocessing hang when a process dies that waits for them.
        if not self.shared:
            raise ValueError(
                "Nobody else could make room or bring steps: this buffer serves one process (allow_multiprocess=False)."
                " Drop blocking=True."
            )
        pause, began, timeout = PAUSE, time.monotonic(), self._lock.timeout
        while not self.is_stopped:
            with self.locked():
                found = attempt()
            if found is not None:
                return found
            if timeout is not None and time.monotonic() - began > timeout:
                raise TimeoutError(
                    f"No other process made room or brought steps within timeout={timeout:g} seconds "
                    f"({len(self.storage)} of {self.storage.max_size} cells are filled). Look whether those that write "
                    "and take out are alive, start them again, or call share(timeout=...) with more seconds."
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return None

    def stop(self) -> None:
        """Let no process wait any more: calls that wait, now or later, do nothing and return.

        This lasts until :meth:`revive`, also after the buffer is emptied; what is stored stays, and all other calls
        work on. It takes no lock, so that it never waits itself. Who waits for a lock that a stopped process holds goes
        on waiting, up to the timeout of :meth:`share`.
        """
        if self.shared:
            self._rings.stop()

    def revive(self) -> None:
        """Let processes wait again after :meth:`stop`, and let this one take its place anew.

        What this process writes next begins episodes, also where the rows have no ``is_init``. A process that takes the
        place of a dead one does that by itself, with its first row; it calls this if waiting was stopped, and a process
        that lives on calls it when it has started its environments again.

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
            >>> buffer.revive()
            >>> _ = buffer.extend(row)
            >>> buffer.is_stopped, buffer.writer.index.begin(torch.zeros(3).long(), torch.arange(3)).tolist()
            (False, [0, 0, 2])
        """
        if self.shared:
            with self.locked():
                self._rings.enroll()
                self._rings.revive()

    @property
    def is_stopped(self) -> bool:
        """Whether no process waits any more."""
        return self.shared and self._rings.is_stopped

    def __getstate__(self) -> dict[str, Any]:
        if is_spawning() and not self.shared:
            raise RuntimeError(
                f"A {type(self).__name__} was handed to another process unshared; {processes.SHARE_FIRST}."
            )
        state: dict[str, Any] = super().__getstate__()
        return state if is_spawning() else {**state, "shared": False, "_write_lock": nullcontext()}
