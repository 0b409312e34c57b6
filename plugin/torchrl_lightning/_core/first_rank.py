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
    """Give the processes that this process starts its id, so that they can watch it."""
    os.environ[_FIRST_RANK] = str(os.getpid())


def end_with_first_rank(grace: float = 0.0, until: Callable[[], bool] | None = None) -> None:
    """End this process if the process that called :func:`become_first_rank` ends; further calls change nothing.

    A rank that is not connected to the others would wait for the first rank for half an hour.

    Args:
        grace: Seconds in which a connected rank may notice and report the end of the first rank without help.
        until: A function that returns True when the watch is no longer needed.
    """
    first_rank = int(os.environ.get(_FIRST_RANK, "0"))
    is_grandchild = os.getppid() != first_rank and _is_alive(first_rank)  # another program started this process
    if first_rank and not is_grandchild and os.getpid() not in _watching:
        _watching.add(os.getpid())
        end_with_parent(first_rank, by_signal=False, grace=grace, message=_MESSAGE, until=until)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def are_ranks_connected() -> bool:
    """Return whether this process has joined a process group. A member notices the end of another member."""
    return dist.is_available() and dist.is_initialized()
