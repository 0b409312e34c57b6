"""A limit for the seconds that a call of an environment may take: one thread watches those of a process."""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakSet

import gymnasium

from torchrl_lightning.environments.faults import numbered
from torchrl_lightning.processes import after_fork, is_main_thread

_MEND = "Mend the environment, or give it more seconds by step_timeout of its recipe."
_LONGEST_PAUSE = 1.0  # seconds until calls are seen that were added meanwhile
_GRACE = 1.0  # seconds in which an interrupted call has to return
_INTERRUPT = getattr(signal, "SIGURG", None)  # ignored where nobody handles it


class OverdueError(TimeoutError):
    """A call of an environment was interrupted, because it took longer than it may."""


class Terminated(SystemExit):
    """A call of an environment was interrupted, because the process shall end."""


class TimedCalls:
    """The calls of one environment, of which at most one is running.

    Args:
        seconds: how long each may take.
        after_sigterm: how long it has at most when the process shall end.
    """

    def __init__(self, seconds: float, after_sigterm: float = 5.0) -> None:
        self.seconds, self.after_sigterm = seconds, min(seconds, after_sigterm)
        self.moves = 0  # odd while a call is running
        self.thread = threading.get_ident()
        self.begun = time.monotonic()
        _watch.add(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what a block does as a call."""
        self.moves += 1
        try:
            yield
        finally:
            self.moves += 1


class _Watch:
    """The thread that looks at the running calls, a few times in the seconds that the shortest of them has."""

    def __init__(self) -> None:
        self._calls: WeakSet[TimedCalls] = WeakSet()
        self._thread: threading.Thread | None = None
        self._signals = -1  # from which the numbers of signals are read that have come
        self._interrupted: tuple[TimedCalls, int] | None = None
        self._terminated = -math.inf  # when the process was told to end
        self.tell: Callable[[str], object] = _write

    def add(self, calls: TimedCalls) -> None:
        self._calls.add(calls)
        if self._thread is not None:
            return
        if _INTERRUPT is not None and is_main_thread():
            signal.signal(_INTERRUPT, self._interrupt)
            self._signals, written = os.pipe()
            for file in (self._signals, written):
                os.set_blocking(file, False)
            signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="environment-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        seen: dict[TimedCalls, tuple[int, float]] = {}
        while True:
            self._pause(min([_LONGEST_PAUSE, *(self._limit(calls) / 4 for calls in list(self._calls))]))
            now, before, seen = time.monotonic(), seen, {}
            for calls in list(self._calls):
                moves = calls.moves
                if moves % 2:
                    known, since = before.get(calls, (moves, now))
                    seen[calls] = (moves, since if known == moves else now)
                    if now - seen[calls][1] >= self._limit(calls):
                        self._end(calls, moves)

    def _limit(self, calls: TimedCalls) -> float:
        return calls.after_sigterm if self._is_ending(calls) else calls.seconds

    def _is_ending(self, calls: TimedCalls) -> bool:
        """Return whether the process shall end: one that builds another environment after SIGTERM goes on."""
        return calls.begun < self._terminated

    def _pause(self, seconds: float) -> None:
        if self._signals < 0:
            time.sleep(seconds)
        elif select.select([self._signals], [], [], seconds)[0] and signal.SIGTERM in os.read(self._signals, 4096):
            self._terminated = time.monotonic()

    def _end(self, calls: TimedCalls, moves: int) -> None:
        """Interrupt a call, and end the process if it does not return then."""
        main = threading.main_thread().ident
        if self._signals >= 0 and calls.thread == main and _INTERRUPT is not None:
            self._interrupted = calls, moves
            signal.pthread_kill(calls.thread, _INTERRUPT)
            deadline = time.monotonic() + _GRACE
            while time.monotonic() < deadline:
                if calls.moves != moves:
                    return
                time.sleep(0.01)
        self._pause(0.0)
        self.tell(self._overdue(calls, sys._current_frames().get(calls.thread)))
        os._exit(128 + signal.SIGTERM if self._is_ending(calls) else 1)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        interrupted, self._interrupted = self._interrupted, None
        if interrupted is None or interrupted[0].moves != interrupted[1]:
            return  # it has returned meanwhile
        if self._is_ending(interrupted[0]):
            _write(self._overdue(interrupted[0], frame))
            raise Terminated(128 + signal.SIGTERM)
        raise OverdueError(f"it took more than step_timeout={interrupted[0].seconds:g} seconds")

    def _overdue(self, calls: TimedCalls, frame: FrameType | None) -> str:
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        environment, step = numbered(frames)
        whose = "the environment" if environment is None else f"environment {environment}"
        where = "" if step is None else f"At step {step} of the rollout, "
        why = "when the process was to end" if self._is_ending(calls) else f"in step_timeout={calls.seconds:g} seconds"
        return f"{where}{whose} did not return {why}. {_MEND}"


def _write(line: str) -> None:
    os.write(2, f"\nerror: {line}\n".encode())  # a progress bar may be in the midst of its line


_watch = _Watch()


def _watch_anew() -> None:
    global _watch
    _watch = _Watch()


def tell_by(tell: Callable[[str], object]) -> None:
    """Let the last line of this process, of a call that cannot be interrupted, go elsewhere than to stderr."""
    _watch.tell = tell


after_fork(_watch_anew)


def time_calls(env: Any, calls: TimedCalls) -> None:
    """Let a TorchRL environment count its calls, which may take only so many seconds."""
    for name in ("_step", "_reset", "close"):
        setattr(env, name, partial(_timed, calls, getattr(env, name)))


def _timed(calls: TimedCalls, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with calls.running():
        return call(*args, **kwargs)


class TimedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose calls may take only so many seconds.

    Args:
        env: the environment.
        calls: what counts them.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], calls: TimedCalls) -> None:
        super().__init__(env)
        self._calls = calls

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        with self._calls.running():
            return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment."""
        calls = self._calls
        calls.moves += 1
        try:
            return self.env.step(action)
        finally:
            calls.moves += 1

    def close(self) -> None:
        """Close the environment."""
        with self._calls.running():
            self.env.close()
