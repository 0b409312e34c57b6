"""The clock of a training run."""

from __future__ import annotations

import time
from collections.abc import Callable

CELLS, WARMUP = 48_000, 1000

Training = Callable[[int], float]
"""Train with a seed and return frames per second: processor time, or wall-clock time with networks on a GPU."""


class Stopwatch:
    """Frames and time since :meth:`start`: processor time, or wall-clock time if a run waits for another device."""

    def __init__(self, device: str = "cpu") -> None:
        self._now = time.process_time if device == "cpu" else time.perf_counter
        self._began: tuple[float, int] | None = None

    def start(self, frames: int) -> None:
        """Start the clock; later calls do not change it."""
        if self._began is None:
            self._began = self._now(), frames

    def speed(self, frames: int) -> float:
        """Return frames per second since the start."""
        assert self._began is not None, "the run ended before its timed part began"
        seconds, first = self._now() - self._began[0], frames - self._began[1]
        return first / seconds
