"""The folder of a run: the lock that says who writes into it, and the record of its config. Imports nothing heavy.

A lock ends with its process, however that ends. The record has the files that Hydra writes by itself: Hydra would write
them before it calls the task, also into the folder of another run that is going on.
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

from torchrl_lightning.cli.checks import UsageError

try:
    import fcntl
except ImportError:  # pragma: no cover  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

FOLDER = ".hydra"
_NAME = Path(FOLDER) / "lock"
SWEEP = Path(FOLDER) / "sweep.lock"
"""Of the folder of a sweep, in which runs have folders of their own."""


@contextmanager
def locked(folder: Path, name: Path = _NAME) -> Iterator[None]:
    """Keep other processes from writing into a run's folder.

    The lock is POSIX's: the system takes it back when the process ends, also after ``kill -9``, on network
    filesystems, too, and worker processes do not inherit it.

    Raises:
        UsageError: Another process holds it, or the folder cannot be written to.
    """
    path = folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = open(path, "r+", opener=_open_own)  # noqa: SIM115
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


def _open_own(path: str, flags: int) -> int:
    """Open the file of a lock, which is emptied, without following a link in a folder that somebody sent."""
    return os.open(path, flags | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)


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


class RunRecord:
    """The three files of a run, as its config was composed.

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
        """Write the files below a folder, each of them whole; a process without Hydra has nothing to write.

        Args:
            folder: The folder of the run.
            replace: Whether the record of another run is replaced.
        """
        if not replace and (folder / FOLDER / "config.yaml").exists():
            return
        for name, content in self._contents.items():
            path = folder / FOLDER / name
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{name}.{os.getpid()}.tmp")
            temporary.write_text(content, encoding="utf-8")
            temporary.replace(path)


def recorded(task: Callable[[Any], float]) -> Callable[[Any], float]:
    """Return a task that first writes its record, unless its folder belongs to a training run."""

    @wraps(task)
    def recorded_task(cfg: Any) -> float:
        from hydra.core.hydra_config import HydraConfig

        if HydraConfig.initialized():
            folder = Path(HydraConfig.get().runtime.output_dir)
            if not has_lock(folder):
                RunRecord(cfg).write(folder)
        return task(cfg)

    return recorded_task
