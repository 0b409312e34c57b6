"""Observe signals in a thread, even while the main thread is outside Python. This module imports nothing heavy."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

from torchrl_lightning._core.processes import after_fork, is_main_thread

Listener = Callable[[int], object]


class SignalObserver:
    """Call listeners with the number of each received signal that has a Python handler.

    Python runs a handler when the main thread returns to Python. A process that waits in a library, for example for
    other ranks, never runs the handler. But Python writes the number to a pipe immediately, and a thread reads this
    pipe.
    """

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._write_end = -1  # of the pipe

    def add(self, listener: Listener) -> None:
        """Call a listener in the observer's thread from now on; do nothing on Windows or outside the main thread.

        Another library may have replaced the file descriptor for signal numbers, so every call sets it again.
        """
        if sys.platform == "win32" or not is_main_thread():  # Windows accepts only sockets
            return
        if self._write_end < 0:
            read_end, self._write_end = os.pipe()
            os.set_blocking(self._write_end, False)
            threading.Thread(target=self._run, args=(read_end,), name="signal-observer", daemon=True).start()
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        if listener not in self._listeners:
            self._listeners = (*self._listeners, listener)

    def remove(self, listener: Listener) -> None:
        """Stop calling a listener."""
        self._listeners = tuple(known for known in self._listeners if known != listener)

    def reset(self) -> None:
        """Forget pipe and listeners, in a forked process: the pipe and its thread belong to the parent."""
        if self._write_end >= 0:
            signal.set_wakeup_fd(-1)
        self._listeners, self._write_end = (), -1

    def _run(self, read_end: int) -> None:
        while numbers := os.read(read_end, 4096):
            for number in numbers:
                for listener in self._listeners:
                    listener(number)


observer = SignalObserver()
"""The only instance, because a process has one file descriptor for signal numbers."""

after_fork(observer.reset)
