"""End a rank that Lightning has started if the first rank ends before the ranks are connected."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist

from torchrl_lightning._core.processes import end_with_parent

_FIRST_RANK = "TORCHRL_LIGHTNING_FIRST_RANK"  # a variable with the process id of the first rank on this machine
_MESSAGE = "error: the first rank has ended, and this rank ends as well.\n"
_watching: set[int] = set()  # ids of the processes that watch their first rank, because a fork copies this set


def become_first_rank() -> None:
    """Pass the id of this process to the processes that it starts, so that they can watch it."""
    os.environ[_FIRST_RANK] = str(os.getpid())


def end_with_first_rank(grace: float = 0.0, until: Callable[[], bool] | None = None) -> None:
    """End this process if the process that called :func:`become_first_rank` ends; further calls change nothing.

    Without this watch, a rank that is not connected to the others waits for the first rank for half an hour.

    Args:
        grace: Seconds that a connected rank gets to report the end of the first rank by itself.
        until: A function that returns True if the watch can end.
    """
    first_rank = os.environ.get(_FIRST_RANK)
    if first_rank is None or os.getpid() in _watching:
        return
    if os.getppid() != int(first_rank) and _is_alive(int(first_rank)):
        return  # another program started this process, and may live longer than the first rank
    _watching.add(os.getpid())
    end_with_parent(int(first_rank), by_signal=False, grace=grace, message=_MESSAGE, until=until)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def are_ranks_connected() -> bool:
    """Return whether this process has joined a process group. A member notices the end of another member."""
    return dist.is_available() and dist.is_initialized()
