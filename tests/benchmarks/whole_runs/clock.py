"""The clock of a training run."""

from __future__ import annotations

import time
from collections.abc import Callable

CELLS, WARMUP = 48_000, 1000

Training = Callable[[int], float]
"""Train with a seed and return frames per second of processor time."""


class Stopwatch:
    """Frames and processor time since :meth:`start`."""

    def __init__(self) -> None:
        self._began: tuple[float, int] | None = None

    def start(self, frames: int) -> None:
        """Start once; later calls change nothing."""
        if self._began is None:
            self._began = time.process_time(), frames

    def speed(self, frames: int) -> float:
        """Return frames per second since the start."""
        assert self._began is not None, "the run ended before its timed part began"
        seconds, first = time.process_time() - self._began[0], frames - self._began[1]
        return first / seconds
