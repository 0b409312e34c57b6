"""Detect and requeue SLURM batch jobs through SLURM's environment variables. This module imports nothing heavy."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torchrl_lightning._core.processes import handled_signal

_log = logging.getLogger(__name__)


def job_id() -> str | None:
    """Return the id of this process's batch job; None outside SLURM and in an interactive session."""
    job = os.environ.get("SLURM_JOB_ID", "")
    # Lightning uses the same names for interactive sessions.
    return job if job.isdecimal() and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive") else None


def is_requeued() -> bool:
    """Return True if SLURM has restarted this job."""
    count = os.environ.get("SLURM_RESTART_COUNT", "")
    return job_id() is not None and count.isdecimal() and int(count) > 0


@contextmanager
def requeued_on_signal() -> Iterator[None]:
    """Treat SIGUSR1 as SIGTERM within the block; after a SIGUSR1, requeue the job at the end of the block.

    SLURM sends SIGUSR1 before a job's time limit. Lightning's own handler would save in the middle of an operation and
    continue. SIGTERM ends the current batch and saves the state before the job is requeued.
    """
    is_requested = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_requested
        is_requested = True
        signal.raise_signal(signal.SIGTERM)

    if job_id() is None:
        yield
        return
    try:
        with handled_signal(signal.SIGUSR1, handle):
            yield
    finally:
        if is_requested:
            requeue()


def requeue() -> None:
    """Requeue this process's batch job; log a warning if that fails."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK"))
    job = f"{array}_{task}" if array and task else str(job_id())
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        _log.warning("job %s cannot be requeued: %s", job, error)
