"""Buffers that several processes share.

``share()`` moves the rings into shared memory. From then on, every process takes a shared lock to write or to sample.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import current_process, parent_process
from random import Random
from typing import Any, Self, TypeVar, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite

from torchrl_lightning._core.mixins import is_spawning
from torchrl_lightning._core.processes import end_with_parent
from torchrl_lightning._core.tree import check_tensordict
from torchrl_lightning._core.validators import optional, positive
from torchrl_lightning.replay import process_owned
from torchrl_lightning.replay.locked import LockedBuffer
from torchrl_lightning.replay.shared_lock import PAUSE, SharedLock
from torchrl_lightning.replay.shared_rings import SharedRings

T = TypeVar("T")
LONGEST_PAUSE = 5e-3  # seconds between polls for free cells or new steps
NO_LOCK = nullcontext()


class ShareableBuffer(LockedBuffer):
    """A replay buffer that other processes can write to and sample from after :meth:`share`."""

    shared = False

    def share(
        self,
        shared: bool = True,
        *,
        timeout: float | None = None,
        example: TensorDictBase | Composite | None = None,
    ) -> Self:
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

        The entries of a row must be known, so that the memory exists before other processes start. They are known if
        the buffer has stored rows, has loaded a state, or was built with a spec. Otherwise pass an ``example``. A
        buffer that is built with ``shared=True`` may also write its first rows in this process before others start.

        Args:
            shared: False does nothing if the buffer is unshared.
            timeout: seconds to wait for the lock or for other processes; None waits without limit. If the buffer is
                already shared, this changes the timeout of this process only, and None keeps the current timeout.
            example: a row like the rows that will be written, with any batch size, or its spec. Only its keys, shapes
                and dtypes matter, and nothing is stored. Ignored if the entries are already known.

        Returns:
            The buffer itself.

        Raises:
            RuntimeError: the system has no locks that survive the death of a process (Windows).
            TypeError: the example is neither a TensorDict nor a spec.
            ValueError: the entries of a row are unknown, the example does not fit the buffer, the timeout is not
                positive, the cells are memory-mapped, batches are prefetched, or ``shared=False`` is combined with
                another argument or a shared buffer.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from torchrl_lightning import ExperienceBuffer, RingStorage
            >>> buffer = ExperienceBuffer(storage=RingStorage(4))
            >>> buffer = buffer.share(timeout=30.0, example=TensorDict({"a": torch.tensor(0.0)}))
            >>> buffer.storage.is_shared, len(buffer)
            (True, 0)
        """
        if not shared:
            for name, value in (("timeout", timeout), ("example", example)):
                if value is not None:
                    raise ValueError(f"{name}={value!r} has no effect with shared=False. Omit one of them.")
            if self.shared:
                raise ValueError(
                    "shared must not be False for a shared buffer. Use copy.deepcopy(buffer) for an unshared copy."
                )
            return super().share(False)
        self.check_shareable()
        optional(positive)(timeout, "timeout")
        lock = None if self.shared else SharedLock(self._on_lock_acquired, self._before_lock_release, timeout)
        if self.storage.data is None:
            self._reserve_memory(example)
        if lock is not None:
            return self._share(lock)
        if timeout is not None:
            self._lock.timeout = timeout
        return self  # keep the lock, because other processes may use it

    def check_shareable(self) -> None:
        """Validate that the buffer can be shared; raise ValueError if not."""
        if self.prefetches:
            raise ValueError("A buffer that prefetches batches cannot be shared. Build it with prefetch=0.")
        self.storage.check_shareable()

    def share_before_first_write(self) -> None:
        """Share an empty buffer, whose first rows this process must write before other processes start."""
        self.check_shareable()
        self._share(SharedLock(self._on_lock_acquired, self._before_lock_release))

    def _reserve_memory(self, example: TensorDictBase | Composite | None) -> None:
        """Reserve memory for rows like ``example``: write one row, with all checks of a write, and remove the row."""
        if example is None:
            raise ValueError(process_owned.EXAMPLE_FIRST)
        data = example.zero() if isinstance(example, Composite) else example
        check_tensordict(data)
        if 0 in data.shape:
            raise ValueError(f"example must have a row, got the batch size {list(data.shape)}. Pass a row.")
        row = data[(0,) * data.ndim] if data.ndim else data
        if self.storage.device != "auto":
            row = row.to(self.storage.device)
        self.extend(row.unsqueeze(0).expand(self.writer.num_envs), update_priority=False)
        self.empty()
        if self.storage.data is None:
            raise ValueError(
                "example must become a stored row, but the transforms of the buffer keep it back. Write the first rows "
                "in this process, and call share() then."
            )

    def _share(self, lock: SharedLock) -> Self:
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
