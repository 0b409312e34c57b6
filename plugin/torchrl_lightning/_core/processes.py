"""Child processes: end them with their parent or on request, and explain why they died or cannot start."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from torchrl_lightning._core.errors import UserError

SHARED_MEMORY = "/dev/shm"
_POLL_SECONDS = 1.0  # seconds between checks of the parent
_REAPING = 10.0  # seconds for the system to report a killed process
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def is_main_thread() -> bool:
    """Return whether this thread is the main thread, which handles signals."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def handled_signal(number: int, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call a handler for a signal within a block; outside the main thread, do nothing."""
    if not is_main_thread():
        yield
        return
    previous_handler = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous_handler)


def after_fork(function: Callable[[], object]) -> None:
    """Register a function that runs in every process forked from this process; do nothing on Windows."""
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=function)


def end_with_parent(
    parent: int, by_signal: bool, grace: float = 0.0, message: str = "", until: Callable[[], bool] | None = None
) -> None:
    """End this process when its parent ends, even in the middle of a computation.

    Args:
        parent: The parent's process id.
        by_signal: Whether Linux may send a signal, which also ends code that never returns to Python. Linux sends it
            when the thread that started this process ends; that thread must therefore be the parent's main thread.
        grace: Seconds in which this process may end without help after its parent has ended.
        message: A line for stderr that is written after the grace period.
        until: A function that is called several times a second. After it returns True, this process can outlive its
            parent.
    """
    if by_signal and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)
    arguments = (parent, grace, message, until)
    threading.Thread(target=_watch_parent, args=arguments, name="parent-watch", daemon=True).start()


def _watch_parent(parent: int, grace: float, message: str, until: Callable[[], bool] | None) -> None:
    while os.getppid() == parent:
        if until is not None and until():
            return
        time.sleep(_POLL_SECONDS)
    time.sleep(grace)
    os.write(2, message.encode())
    os._exit(1)


def end_processes(processes: Sequence[BaseProcess], timeout: float) -> None:
    """Wait ``timeout`` seconds for processes to end, then terminate and finally kill the remaining processes."""
    processes = [process for process in processes if process.pid is not None]  # without a pid, a process never started
    for method in (None, "terminate", "kill"):
        for process in processes:
            if method is not None and process.is_alive():
                getattr(process, method)()
        # A busy machine may need more time to report that a killed process has ended.
        deadline = time.monotonic() + (max(timeout, _REAPING) if method == "kill" else timeout)
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))


def exit_description(process: BaseProcess) -> str:
    """Describe the exit of a process that should still be running."""
    process.join(1.0)
    return (
        f"died with exit code {process.exitcode}. A negative code is the signal that killed it; -9 is often the "
        "system's memory limit."
    )


def check_descriptors(count: int, per_process: int) -> None:
    """Validate that this process may open enough files to start other processes.

    Args:
        count: The number of processes.
        per_process: The minimum number of descriptors that this process opens for each started process.

    Raises:
        UserError: The limit of open files is too low; the user may raise the limit.
    """
    if sys.platform == "win32":
        return
    import resource

    descriptors = Path("/proc/self/fd")
    open_files = len(list(descriptors.iterdir())) if descriptors.exists() else 0
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], open_files + count * per_process
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise UserError(
            f"{count} processes need about {needed} open files, but the limit is {limit}. Raise it before the run "
            f"(ulimit -n {2 * needed}), or use fewer environments or workers in processes."
        )


def resource_error(error: BaseException) -> str | None:
    """Describe the exhausted system resource: processes, files or shared memory. Return None for other errors.

    Examples:
        >>> print(resource_error(BlockingIOError(errno.EAGAIN, "no fork")))
        the system cannot start more processes for this user (no fork); use fewer, or raise the limit (ulimit -u).
    """
    if not isinstance(error, OSError | RuntimeError) or isinstance(error, UserError):
        return None
    system = error if isinstance(error, OSError) else OSError()
    if str(system.filename).startswith(SHARED_MEMORY) or "shared memory(shm)" in str(error):
        return (
            f"{SHARED_MEMORY}, the shared memory of processes, is full or cannot be written ({error}); enlarge it "
            f"(mount -o remount,size=2g {SHARED_MEMORY}; docker run --shm-size=2g), or use no processes."
        )
    code, reason = system.errno, system.strerror
    if code in (errno.EMFILE, errno.ENFILE):
        return (
            f"no more files can be opened ({reason}); raise the limit before the run (ulimit -n), or use fewer workers."
        )
    if code == errno.EAGAIN:
        remedy = "use fewer, or raise the limit (ulimit -u)"
        return f"the system cannot start more processes for this user ({reason}); {remedy}."
    return None
