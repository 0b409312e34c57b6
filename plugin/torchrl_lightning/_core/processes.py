"""Child processes: end them with their parent or on request, and explain why they died or cannot start."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from torchrl_lightning._core.errors import UserError

SHARED_MEMORY = "/dev/shm"
_PAUSE = 1.0  # seconds between checks of the parent
_REAPING = 10.0  # seconds for the system to report a killed process
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def is_main_thread() -> bool:
    """Return whether this thread is the main thread, which handles signals."""
    return threading.current_thread() is threading.main_thread()


def after_fork(renew: Callable[[], object]) -> None:
    """Register a function that every process forked from this one calls; do nothing on Windows."""
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=renew)


def end_with_parent(parent: int, by_signal: bool) -> None:
    """End this process when its parent ends, even in the middle of a computation.

    Args:
        parent: The parent's process id.
        by_signal: Whether Linux may send a signal, which also ends code that never returns to Python. Linux sends it
            when the thread that started this process ends; that thread must therefore be the parent's main thread.
    """
    if by_signal and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PAUSE)
    os._exit(1)


def end_processes(processes: Sequence[BaseProcess], patience: float) -> None:
    """Wait ``patience`` seconds for processes to end, then terminate and finally kill the remaining ones."""
    processes = [process for process in processes if process.pid is not None]  # started ones only
    for end in (None, "terminate", "kill"):
        for process in processes:
            if end is not None and process.is_alive():
                getattr(process, end)()
        # A killed process ends for certain, but a busy machine may need more time to report it.
        deadline = time.monotonic() + (max(patience, _REAPING) if end == "kill" else patience)
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))


def exit_description(process: BaseProcess) -> str:
    """Describe the exit of a process that should still be running."""
    process.join(1.0)
    return (
        f"died with exit code {process.exitcode}. A negative code is the signal that killed it; -9 is often the "
        "system's memory limit."
    )


def check_descriptors(count: int, each: int) -> None:
    """Validate that this process may open enough files to start other processes.

    Args:
        count: The number of processes.
        each: The least number of descriptors that this process keeps open for each.

    Raises:
        Fault: The limit of open files is too low; a user may raise it.
    """
    if sys.platform == "win32":
        return
    import resource

    folder = Path("/proc/self/fd")
    known = len(list(folder.iterdir())) if folder.exists() else 0
    allowed, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], known + count * each
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        raise UserError(
            f"{count} processes need some {needed} open files, but this one may have {allowed}; allow more before the "
            f"run (ulimit -n {2 * needed}), or take fewer environments or workers in processes."
        )


def resource_error(error: BaseException) -> str | None:
    """Describe the system resource that processes or their shared memory lack; return None for other errors.

    Examples:
        >>> print(resource_error(BlockingIOError(errno.EAGAIN, "no fork")))
        the system starts no more processes for this user (no fork); take fewer, or raise the limit (ulimit -u).
    """
    if not isinstance(error, OSError | RuntimeError) or isinstance(error, UserError):
        return None
    system = error if isinstance(error, OSError) else OSError()
    if str(system.filename).startswith(SHARED_MEMORY) or "shared memory(shm)" in str(error):
        return (
            f"{SHARED_MEMORY}, which holds the memory that processes share, is full or cannot be written ({error}); "
            f"enlarge it (mount -o remount,size=2g {SHARED_MEMORY}; docker run --shm-size=2g), or do without processes."
        )
    number, said = system.errno, system.strerror
    if number in (errno.EMFILE, errno.ENFILE):
        return f"no more files can be opened ({said}); allow more before the run (ulimit -n), or take fewer processes."
    if number == errno.EAGAIN:
        return (
            f"the system starts no more processes for this user ({said}); take fewer, or raise the limit (ulimit -u)."
        )
    return None
