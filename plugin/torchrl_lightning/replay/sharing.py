"""Memory and a lock that processes share, and checks of which process a buffer belongs to."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrl_lightning.parts import is_spawning

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SHARE_FIRST = (
    "call buffer.share() before the first process starts (of an ExperienceBuffer; TorchRL's own cannot share rings), "
    "or give each process a buffer of its own"
)


_process = os.getpid()
_locks: weakref.WeakSet[SharedLock] = weakref.WeakSet()


def _note_fork() -> None:
    global _process
    _process = os.getpid()
    for lock in list(_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def this_process() -> int:
    """Return the id of this process; asking the system each time would cost a write a tenth more."""
    return _process


def check_owner(process: int, shared: bool) -> None:
    """Refuse to write to the buffer that another process made, unless it is shared: the rows would be lost."""
    if not shared and process != _process:
        raise RuntimeError(f"This process writes to the buffer of the one that it was started from; {SHARE_FIRST}.")


def check_unshared(shared: bool) -> None:
    """Refuse to load into what other processes are using."""
    if shared:
        raise RuntimeError(
            "The buffer is shared with other processes; build it unshared (allow_multiprocess=False), load the state "
            "before buffer.share()."
        )


class SharedLock:
    """A lock between processes, and between their threads, that the kernel frees when the process that holds it dies.

    A record lock of POSIX on a file without a name. A process has its record locks in common and loses them with any
    descriptor of the file that it closes, and a forked process has none: hence another lock between threads, one
    descriptor, and a fresh start after a fork. Who enters again what it holds already just goes on.

    Args:
        entered: called when the lock is held: time to see what others did.
        leaving: called before it is given back.

    Raises:
        RuntimeError: the system has no such locks (Windows).
    """

    def __init__(self, entered: Callable[[], None], leaving: Callable[[], None]) -> None:
        if fcntl is None:
            raise RuntimeError(
                "This system has no locks that outlive a process that dies (fcntl), so that buffers "
                "cannot be shared; give each process a buffer of its own."
            )
        file, name = tempfile.mkstemp()
        os.unlink(name)
        self._open(file, (entered, leaving))

    def _open(self, file: int, calls: tuple[Callable[[], None], Callable[[], None]]) -> None:
        self._file, self._calls = file, calls
        weakref.finalize(self, os.close, file).atexit = False
        _locks.add(self)
        self.renew()

    def renew(self) -> None:
        """Forget what threads of this process hold, which in a forked one are those of its parent."""
        self._threads, self._depth = threading.RLock(), 0

    def __enter__(self) -> None:
        self._threads.acquire()
        self._depth += 1
        if self._depth > 1:
            return
        try:
            self._seize()
            self._calls[0]()
        except BaseException:
            self._release()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            if self._depth == 1:
                self._calls[1]()
        finally:
            self._release()

    def _seize(self) -> None:
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX)
                return
            except OSError as error:  # the kernel sees no threads, and takes two of a process for a circle
                if error.errno != errno.EDEADLK:
                    raise
                time.sleep(1e-3)

    def _release(self) -> None:
        self._depth -= 1
        if not self._depth:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        self._threads.release()

    def __getstate__(self) -> dict[str, Any]:
        return {"file": DupFd(self._file), "calls": self._calls}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._open(state["file"].detach(), state["calls"])


class SharedArrays:
    """Numpy arrays of an object, which can be moved into memory that processes share.

    A pickle for a starting process hands the shared memory on; any other copy gets memory of its own.
    """

    ARRAYS: ClassVar[tuple[str, ...]]
    """Names of the attributes that hold the arrays."""
    _memory: dict[str, Tensor] | None = None

    @property
    def is_shared(self) -> bool:
        """Whether the arrays lie in memory that processes share."""
        return self._memory is not None

    def share_arrays(self) -> None:
        """Move the arrays into memory that processes share; views of them stay behind."""
        if self._memory is None:
            self._memory = {name: torch.from_numpy(getattr(self, name)).share_memory_() for name in self.ARRAYS}
            self._bind()

    def _bind(self) -> None:
        for name, tensor in (self._memory or {}).items():
            setattr(self, name, tensor.numpy())

    def __getstate__(self) -> dict[str, Any]:
        if not is_spawning():
            return {**self.__dict__, "_memory": None}
        if self._memory is None:
            raise RuntimeError(f"A {type(self).__name__} was handed to another process unshared; {SHARE_FIRST}.")
        return {name: value for name, value in self.__dict__.items() if name not in self.ARRAYS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bind()
