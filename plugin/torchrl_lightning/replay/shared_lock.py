"""A lock between processes that is released when its holder dies."""

from __future__ import annotations

import errno
import os
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Any

from torchrl_lightning._core.processes import after_fork
from torchrl_lightning._core.validators import positive

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PAUSE = 2e-4  # seconds between polls
# Layout of C's struct flock, the index of its field for the lock type, and the index of its field for the holder.
_LAYOUT, _LOCK_TYPE, _HOLDER_PID = ("hhqqi4x", 0, 4) if sys.platform == "linux" else ("qqihhi", 3, 2)
_locks: weakref.WeakSet[SharedLock] = weakref.WeakSet()


def _renew_locks() -> None:
    for lock in list(_locks):
        lock.renew()


after_fork(_renew_locks)


class SharedLock:
    """A reentrant lock between processes and their threads, which the kernel releases when its holder dies.

    It is a POSIX record lock on a file without a name. All threads of a process share its record locks, so a second
    lock excludes the threads from each other. A process loses its record locks when it closes any descriptor of the
    file, so each process has only one descriptor. A forked process inherits no record locks, so it starts without
    holding the lock.

    A process that is stopped (SIGSTOP, a debugger) keeps the lock. The other processes wait until it continues or ends.
    With a timeout, the waiting processes raise a TimeoutError instead, and their polling costs a few percent of a core.
    Do not set a timeout for processes that may be suspended together, because the suspended time counts.

    Args:
        on_acquire: called after the lock is acquired, e.g. to apply changes of other processes.
        before_release: called before the lock is released.
        timeout: seconds to wait for another process before a TimeoutError; None waits without limit.

    Raises:
        RuntimeError: the system has no record locks (Windows).
        ValueError: the timeout is not positive.

    Examples:
        >>> lock = SharedLock(lambda: print("in"), lambda: print("out"), timeout=5.0)
        >>> with lock, lock:
        ...     print("once")
        in
        once
        out
    """

    def __init__(
        self, on_acquire: Callable[[], None], before_release: Callable[[], None], timeout: float | None = None
    ) -> None:
        self.timeout = timeout
        if fcntl is None:
            raise RuntimeError(
                "This system cannot share buffers, because it has no record locks (fcntl), which are released when a "
                "process dies. Build a buffer in each process."
            )
        file, name = tempfile.mkstemp()
        os.unlink(name)
        self._open(file, (on_acquire, before_release))

    @property
    def timeout(self) -> float | None:
        """Seconds that this process waits for another process; None waits without limit."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._timeout = None if seconds is None else positive(seconds, "timeout")

    def _open(self, file: int, callbacks: tuple[Callable[[], None], Callable[[], None]]) -> None:
        self._file, self._callbacks = file, callbacks
        weakref.finalize(self, os.close, file).atexit = False
        _locks.add(self)
        self.renew()

    def renew(self) -> None:
        """Reset the lock between threads, because a fork copies it in the state that the parent's threads left."""
        self._thread_lock, self._depth = threading.RLock(), 0

    def __enter__(self) -> None:
        self._thread_lock.acquire()
        self._depth += 1
        if self._depth > 1:
            return
        try:
            self._acquire_file_lock()
            self._callbacks[0]()
        except BaseException:
            self._release()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            if self._depth == 1:
                self._callbacks[1]()
        finally:
            self._release()

    def _acquire_file_lock(self) -> None:
        # A blocking lockf has no timeout, so poll if a timeout is set.
        timeout, start = self._timeout, time.monotonic()
        operation = fcntl.LOCK_EX if timeout is None else fcntl.LOCK_EX | fcntl.LOCK_NB
        while True:
            try:
                fcntl.lockf(self._file, operation)
                return
            except OSError as error:  # the kernel does not see threads, so two waiting threads may look like a deadlock
                if error.errno not in (errno.EDEADLK, errno.EAGAIN, errno.EACCES):
                    raise
            if timeout is not None and time.monotonic() - start > timeout and (holder := self._holder()) is not None:
                raise TimeoutError(
                    f"Process {holder} held the lock of a shared buffer longer than timeout={timeout:g} seconds. If it "
                    f"is stopped, continue it (kill -CONT {holder}) or end it (kill -KILL {holder}); if it is slow, "
                    "call share(timeout=...) with more seconds."
                )
            time.sleep(PAUSE)

    def _holder(self) -> int | None:
        request: list[int] = [0] * len(struct.unpack(_LAYOUT, bytes(struct.calcsize(_LAYOUT))))
        request[_LOCK_TYPE] = fcntl.F_WRLCK
        reply = struct.unpack(_LAYOUT, fcntl.fcntl(self._file, fcntl.F_GETLK, struct.pack(_LAYOUT, *request)))
        return None if reply[_LOCK_TYPE] == fcntl.F_UNLCK else reply[_HOLDER_PID]

    def _release(self) -> None:
        self._depth -= 1
        if not self._depth:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        self._thread_lock.release()

    def __getstate__(self) -> dict[str, Any]:
        return {"file": DupFd(self._file), "calls": self._callbacks, "timeout": self._timeout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.timeout = state["timeout"]
        self._open(state["file"].detach(), state["calls"])
