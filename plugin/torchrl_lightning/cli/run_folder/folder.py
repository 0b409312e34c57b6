"""Lock the folder of a run and write the record of its config. This module has only light imports.

The system releases a lock when the process ends for any reason. The record consists of the files that Hydra writes by
default. This module writes them instead. Hydra would write them before the task starts, even into the folder of another
active run.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig, OmegaConf

from torchrl_lightning.cli.error_messages import UsageError

try:
    import fcntl
except ImportError:  # pragma: no cover  # Windows does not support these locks
    fcntl = None  # type: ignore[assignment]

FOLDER = ".hydra"
_LOCK_FILE = Path(FOLDER) / "lock"
SWEEP = Path(FOLDER) / "sweep.lock"
"""Lock file in the folder of a sweep, where each run has its own folder."""


@contextmanager
def locked(folder: Path, name: Path = _LOCK_FILE) -> Iterator[None]:
    """Lock a run's folder against other processes.

    The system releases this POSIX lock when the process ends, even after ``kill -9`` and on network filesystems.
    Worker processes do not inherit the lock.

    Raises:
        UsageError: Another process holds the lock, or the folder is not writable.
    """
    path = folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock_file = open(path, "r+", opener=_open_lock)  # noqa: SIM115
    except OSError as error:
        raise UsageError(
            f"the run folder cannot be written to: {error.filename}: {error.strerror}; set another one with "
            "paths.log_dir=FOLDER or hydra.run.dir=FOLDER."
        ) from error
    with lock_file as file:
        if fcntl is None:
            yield
            return
        _acquire(file, folder)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _open_lock(path: str, flags: int) -> int:
    """Open a lock file without following a link, because the file will be truncated and the folder may be untrusted."""
    return os.open(path, flags | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)


def check_unlocked(folder: Path) -> None:
    """Raise UsageError if another running process is writing to a run's folder."""
    path = folder / _LOCK_FILE
    if fcntl is None or not path.is_file():
        return
    with path.open("r+") as file:
        _acquire(file, folder)


def has_lock(folder: Path) -> bool:
    """Return True if a training run has started in a folder."""
    return (folder / _LOCK_FILE).is_file()


def is_locked(path: Path) -> bool:
    """Return True if another process holds the lock of a file. Without support for locks, return True."""
    if fcntl is None:
        return True
    with path.open() as file:
        try:
            # A shared lock, so that two processes that check the same file at the same time do not see each other.
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait for the lock of a file, and hold the lock within the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "r+", opener=_open_lock) as file:
        if fcntl is not None:
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def is_follower() -> bool:
    """Return True if this process is not the first process of a distributed run.

    Only the first process writes the run's folder.
    """
    ranks = ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")  # variables of Lightning, torchrun and SLURM
    return any(os.environ.get(name, "0") not in ("", "0") for name in ranks)


def _acquire(file: TextIO, folder: Path) -> None:
    """Acquire the lock; closing the file releases it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = Path(file.name).read_text() or "another process"
        raise UsageError(f"{folder} is being written by {holder}; wait until it has ended.") from error


class RunRecord:
    """The three files that record the composed config of a run.

    Args:
        cfg: The config of the task.
    """

    def __init__(self, cfg: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        self._contents: dict[str, str] = {}
        if HydraConfig.initialized():
            hydra: Any = HydraConfig.instance().cfg
            nodes = {"config": cfg, "hydra": hydra, "overrides": hydra.hydra.overrides.task}
            self._contents = {f"{name}.yaml": OmegaConf.to_yaml(node) for name, node in nodes.items()}

    def write(self, folder: Path, *, replace: bool = True) -> None:
        """Write each file atomically below a folder. Without Hydra, write nothing.

        Args:
            folder: The folder of the run.
            replace: Replace an existing record.
        """
        if not replace and (folder / FOLDER / "config.yaml").exists():
            return
        for name, content in self._contents.items():
            path = folder / FOLDER / name
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{name}.{os.getpid()}.tmp")
            temporary.write_text(content, encoding="utf-8")
            temporary.replace(path)


def with_run_record(task: Callable[[Any], float]) -> Callable[[Any], float]:
    """Wrap a task so that the record of its config is written first, unless the folder belongs to a training run."""

    @wraps(task)
    def recorded_task(cfg: Any) -> float:
        from hydra.core.hydra_config import HydraConfig

        if HydraConfig.initialized():
            folder = Path(HydraConfig.get().runtime.output_dir)
            if not has_lock(folder):
                RunRecord(cfg).write(folder)
        return task(cfg)

    return recorded_task
