"""Processes that this one starts: how they end when it does, or when they are no longer needed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

_PAUSE = 1.0  # seconds between looks at the parent
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def is_main_thread() -> bool:
    """Return whether this thread is the one in which signals are handled."""
    return threading.current_thread() is threading.main_thread()


def end_with_parent(parent: int, by_signal: bool) -> None:
    """End this process when the one that started it ends, whatever it is doing.

    Args:
        parent: its id.
        by_signal: whether Linux may send a signal, which ends also what never returns to Python. It sends it when the
            thread ends that has started this process, which must therefore be the parent's main thread.
    """
    if by_signal and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(1)
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PAUSE)
    os._exit(1)


def end_processes(processes: Sequence[BaseProcess], patience: float) -> None:
    """Wait for processes to end, terminate those that have not in time, and kill what does not heed that."""
    for end in (None, "terminate", "kill"):
        for process in processes:
            if end is not None and process.is_alive():
                getattr(process, end)()
        deadline = time.monotonic() + patience
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))


def how_it_died(process: BaseProcess) -> str:
    """Say how a process ended that should be there."""
    process.join(1.0)
    return (
        f"died with exit code {process.exitcode}. A negative code is the signal that killed it; -9 is often the "
        "system's memory limit."
    )
