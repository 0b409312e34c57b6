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
        UsageError: Another process holds it, or the folder cannot be written to.
    """
    path = folder / _NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a+")
    except OSError as error:
        raise UsageError(
            f"the folder of the run cannot be written to: {error.filename}: {error.strerror}; name another one, as "
            "paths.log_dir=FOLDER or hydra.run.dir=FOLDER."
        ) from error
    with opened as file:
        if fcntl is None:
            yield
            return
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


def has_lock(folder: Path) -> bool:
    """Return whether a training run was begun in a folder."""
    return (folder / _NAME).is_file()


def is_abandoned(folder: Path) -> bool:
    """Return whether a run was begun in a folder that no living process is writing."""
    try:
        check_unlocked(folder)
    except UsageError:
        return False
    return has_lock(folder)


def is_follower() -> bool:
    """Return whether this is one of several processes of a run, and not the first, which writes its folder."""
    ranks = ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")  # Lightning's, torchrun's and SLURM's
    return any(os.environ.get(name, "0") not in ("", "0") for name in ranks)


def _take(file: TextIO, folder: Path) -> None:
    """Take the lock, which closing the file gives back."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = Path(file.name).read_text() or "another process"
        raise UsageError(f"{folder} is being written by {holder}; wait until that has ended.") from error
