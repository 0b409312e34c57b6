"""Limit the seconds that a call of an environment may take.

A call only stores its start time. One watchdog thread checks the running calls. If a call in the main thread is
overdue, the watchdog sends a signal that raises an exception in the main thread. If the call still does not return, the
thread ends the process. An alarm for each call (``setitimer``) would need no thread, but makes steps of CartPole 20 %
slower.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from time import monotonic
from types import FrameType
from typing import Any
from weakref import ref

import gymnasium

from torchrl_lightning._core.processes import after_fork, is_main_thread
from torchrl_lightning._core.signal_observer import observer
from torchrl_lightning.environments.env_errors import position

_REMEDY = "Fix the environment, or increase step_timeout of its recipe."
_GRACE = 1.0  # seconds for an interrupted call to return
_PERIOD = 0.1  # seconds between two checks of the running calls


class OverdueError(TimeoutError):
    """A call of an environment was interrupted because it took longer than its limit."""


class Terminated(SystemExit):
    """A call of an environment was interrupted because the process must end."""


class TimedCalls:
    """Limit the seconds of the calls of one environment; at most one call runs at a time.

    Args:
        seconds: the limit of each call.
        after_sigterm: the limit after SIGTERM, if the environment was made before the signal.
    """

    def __init__(self, seconds: float, after_sigterm: float = 5.0) -> None:
        self.seconds, self.limit = seconds, seconds
        self.after_sigterm = min(seconds, after_sigterm)
        self.sigterm_time = -math.inf  # time of SIGTERM
        self.started = math.inf  # start time of the running call
        self.interrupted_call = math.inf  # start time of the last interrupted call
        self.overdue_call = math.inf, 0.0  # start time of the last overdue call, and the seconds that it was overdue
        self.thread = get_ident()  # thread of the running call
        self.environment: int | None = None  # number of the environment
        self.step: int | None = None  # step of the rollout
        _watchdog.add(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Limit the seconds of a block; a nested block of the same environment does not add a limit."""
        if self.started < math.inf:
            yield
            return
        self.environment, self.step = position.environment, position.step
        self.thread, self.started = get_ident(), monotonic()
        try:
            yield
        finally:
            self.started = math.inf

    def is_overdue(self) -> bool:
        """Return whether the running call has exceeded its limit."""
        return monotonic() - max(self.started, self.sigterm_time) >= self.limit

    def overdue_seconds(self, elapsed: float) -> float:
        """Add the seconds since the last check, and return the seconds that the running call has been overdue."""
        started = self.started
        if not self.is_overdue():
            return -math.inf
        last, seconds = self.overdue_call
        self.overdue_call = started, seconds + elapsed if last == started else 0.0
        return self.overdue_call[1]

    def end_soon(self) -> None:
        """Reduce the limit to ``after_sigterm``, counted from now for the running call."""
        self.limit, self.sigterm_time = self.after_sigterm, monotonic()

    def interrupt(self) -> None:
        """Interrupt the running call by a signal, once."""
        if self.interrupted_call != self.started:
            self.interrupted_call = self.started
            signal.pthread_kill(self.thread, signal.SIGURG)

    @property
    def is_ending(self) -> bool:
        """Return whether the process has received SIGTERM since the environment was made."""
        return self.sigterm_time > -math.inf

    def message(self) -> str:
        """Return the error message for a call that has exceeded its limit."""
        subject = "the environment" if self.environment is None else f"environment {self.environment}"
        place = "" if self.step is None else f"At step {self.step} of the rollout, "
        reason = "before the process had to exit" if self.is_ending else f"within step_timeout={self.seconds:g} seconds"
        return f"{place}{subject} did not return {reason}. {_REMEDY}"


class _Watchdog:
    """A thread that ends the process if a call does not return."""

    def __init__(self) -> None:
        self.handle_overdue: Callable[[str], object] = _write
        self._calls: list[ref[TimedCalls]] = []
        self._main = 0  # id of the main thread if signals can interrupt it
        self._has_thread = False
        self._sigterm = threading.Event()

    def add(self, calls: TimedCalls) -> None:
        self._calls = [*(reference for reference in self._calls if reference() is not None), ref(calls)]
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=self._run, name="environment-watchdog", daemon=True).start()
        if sys.platform != "win32" and is_main_thread() and signal.getsignal(signal.SIGURG) != self._interrupt:
            # The handler is missing if another thread built the first environment, or a Trainer restored the old one.
            signal.signal(signal.SIGURG, self._interrupt)  # ignored by default
            self._main = get_ident()
            observer.add(self._note)  # Lightning can still set its handler for SIGTERM

    def _note(self, number: int) -> None:
        if number == signal.SIGTERM:
            self._sigterm.set()

    def _live_calls(self) -> list[TimedCalls]:
        return [calls for reference in self._calls if (calls := reference()) is not None]

    def _run(self) -> None:
        checked = monotonic()
        while True:
            if self._sigterm.wait(_PERIOD):
                self._sigterm.clear()
                for calls in self._live_calls():
                    calls.end_soon()
            # Do not count pauses of the whole process, because an interrupted call needs time to return.
            elapsed, checked = min(monotonic() - checked, 2 * _PERIOD), monotonic()
            for calls in self._live_calls():
                seconds = calls.overdue_seconds(elapsed)
                if seconds >= _GRACE:
                    self.handle_overdue(calls.message())
                    if not calls.is_ending:
                        faulthandler.dump_traceback(2)
                    os._exit(128 + signal.SIGTERM if calls.is_ending else 1)
                if seconds >= 0 and calls.thread == self._main:
                    calls.interrupt()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        for calls in self._live_calls():
            if calls.thread == self._main and calls.is_overdue():  # the call may have returned meanwhile
                if calls.is_ending:
                    _write(calls.message())
                    raise Terminated(128 + signal.SIGTERM)
                raise OverdueError(f"the call took more than step_timeout={calls.seconds:g} seconds")


def _write(message: str) -> None:
    os.write(2, f"\nerror: {message}\n".encode())  # a progress bar may have left an incomplete line


_watchdog = _Watchdog()


def _replace_watchdog() -> None:
    global _watchdog
    _watchdog = _Watchdog()


after_fork(_replace_watchdog)


def set_overdue_handler(handler: Callable[[str], object]) -> None:
    """Set the function that receives the message about an uninterruptible call; by default it goes to stderr."""
    _watchdog.handle_overdue = handler


class TimedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment with a time limit for each call.

    Args:
        env: the environment.
        calls: the limit.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], calls: TimedCalls) -> None:
        super().__init__(env)
        self._calls = calls

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        with self._calls.running():
            return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment; :meth:`TimedCalls.running` is inlined, because its block calls four functions."""
        calls = self._calls
        calls.environment, calls.step = position.environment, position.step
        calls.thread, calls.started = get_ident(), monotonic()
        try:
            return self.env.step(action)
        finally:
            calls.started = math.inf

    def close(self) -> None:
        """Close the environment."""
        with self._calls.running():
            self.env.close()


def time_calls(env: Any, calls: TimedCalls) -> None:
    """Limit the seconds of each call of a TorchRL environment."""
    env._step = partial(_timed, calls, env._step)
    env._reset = partial(_timed, calls, env._reset)
    env.close = partial(_timed, calls, env.close)


def _timed(calls: TimedCalls, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with calls.running():
        return call(*args, **kwargs)
