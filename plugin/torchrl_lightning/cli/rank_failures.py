"""Report the end of another rank of a run in one line."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from torchrl_lightning._core.rank_stop import rank_stop
from torchrl_lightning._core.ranks import is_lost_rank
from torchrl_lightning.callbacks.checkpoints import LastCheckpoint, resume_hint

_PATIENCE = 5.0  # seconds until the status of an ended process is known
_CLOSING = 3.0  # seconds between the end of a process's connections and the end of the process


@contextmanager
def reported_rank_failures(trainer: Any) -> Iterator[None]:
    """End this process with one line if another rank has ended. A rank that fails with an error reports the error.

    Lightning launches the other ranks of a machine from the machine's first rank. This rank reports for them and ends
    with the status of the rank that ended first. With another launcher, every remaining rank reports, with status 1.
    """
    parent = os.getppid()
    is_launched = trainer.local_rank > 0 and isinstance(trainer.strategy.cluster_environment, LightningEnvironment)
    rank_stop.first_rank_reports = is_launched
    try:
        yield
    except Exception as error:
        if not is_lost_rank(error):
            for process in rank_stop.processes:
                process.terminate()  # it must not report this rank, which reports its own error
            raise
        first = trainer.global_rank - trainer.local_rank
        if is_launched:
            if rank_stop.is_requested or not _has_ended(parent):
                sys.exit(1)  # the first rank reports
            _exit(trainer, f"rank {first} has ended", 1)
        index, code = _ended_process()
        if code is None:
            _exit(trainer, "another rank has ended", 1)
        if code >= 0:
            _exit(trainer, f"rank {first + index} ended with status {code}", code or 1)
        _exit(trainer, f"rank {first + index} was killed by {signal.Signals(-code).name}", 128 - code)


def _has_ended(parent: int) -> bool:
    """Return whether the parent process has ended; the system closes its connections some time before."""
    deadline = time.monotonic() + _CLOSING
    while os.getppid() == parent:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _ended_process() -> tuple[int, int | None]:
    """Wait for a failed rank; return its number on this machine and its exit code, or None if it is unknown."""
    deadline = time.monotonic() + (_PATIENCE if rank_stop.processes else 0.0)
    while True:
        for index, process in enumerate(rank_stop.processes, 1):
            if (code := process.poll()) is not None:
                return index, code
        if time.monotonic() >= deadline:
            return 0, None
        time.sleep(0.05)


def _exit(trainer: Any, reason: str, status: int) -> NoReturn:
    paths = (callback.path for callback in trainer.callbacks if isinstance(callback, LastCheckpoint))
    hint = next((resume_hint(path, trainer) for path in paths), "this run has no checkpoints.")
    print(f"error: {reason}; {hint}", file=sys.stderr)
    sys.exit(status)
