"""Who writes into a run's folder: a lock that ends with its process, however that ends. Imports nothing heavy."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from torchrl_lightning.cli.checks import UsageError

try:
    import fcntl
except ImportError:  # pragma: no cover  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

_NAME = Path(".hydra") / "lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing into a run's folder.

    The lock is POSIX's: the system takes it back when the process ends, also after ``kill -9``, on network
    filesystems, too, and worker processes do not inherit it.

    Raises:
        UsageError: Another process holds it.
    """
    path = folder / _NAME
    if fcntl is None or not path.parent.is_dir():
        yield
        return
    with path.open("a+") as file:
        _take(file, folder)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def check_unlocked(folder: Path) -> None:
    """Refuse a run's folder that another living process is writing, by a UsageError."""
    path = folder / _NAME
    if fcntl is None or not path.is_file():
        return
    with path.open("r+") as file:
        _take(file, folder)


def is_abandoned(folder: Path) -> bool:
    """Return whether a run was begun in a folder that no living process is writing."""
    try:
        check_unlocked(folder)
    except UsageError:
        return False
    return (folder / _NAME).is_file()


def _take(file: TextIO, folder: Path) -> None:
    """Take the lock, which closing the file gives back."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = Path(file.name).read_text() or "another process"
        raise UsageError(f"{folder} is being written by {holder}; wait until that has ended.") from error
