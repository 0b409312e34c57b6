"""Report the end of another rank of a run in one line."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchrl_lightning._core.rank_stop import rank_stop
from torchrl_lightning._core.ranks import is_lost_rank

_PATIENCE = 5.0  # seconds until the status of an ended process is known


@contextmanager
def reported_rank_failures(trainer: Any) -> Iterator[None]:
    """End this process with one line if another rank has ended. The failed rank reports its own error.

    The exit status is the status of the first rank that has ended, or 1 if another process launched that rank.
    """
    parent = os.getppid()
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        rank, status = _ended_rank()
        if trainer.global_rank != 0 and os.getppid() == parent:  # rank 0 reports the failure
            sys.exit(status)
        who = "rank 0" if trainer.global_rank != 0 else "another rank" if rank is None else f"rank {rank}"
        if status > 128:
            print(f"error: {who} was killed by {signal.Signals(status - 128).name}; {_hint(trainer)}", file=sys.stderr)
        elif rank is None:
            print(f"error: {who} has ended; {_hint(trainer)}", file=sys.stderr)
        sys.exit(status)


def _ended_rank() -> tuple[int | None, int]:
    """Return the first rank that this process launched and that has ended with an error, and its exit status."""
    deadline = time.monotonic() + (_PATIENCE if rank_stop.processes else 0.0)
    while True:
        for rank, process in enumerate(rank_stop.processes, 1):
            if code := process.poll():
                return rank, code if code > 0 else 128 - code
        if time.monotonic() >= deadline:
            return None, 1
        time.sleep(0.05)


def _hint(trainer: Any) -> str:
    from torchrl_lightning.callbacks.checkpoints import LastCheckpoint, resume_hint

    paths = (callback.path for callback in trainer.callbacks if isinstance(callback, LastCheckpoint))
    return next(map(resume_hint, paths), "this run has no checkpoints.")
