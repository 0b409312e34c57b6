"""Fork processes from one that has imported all libraries, because a fresh process needs seconds for the imports.

Processes that are forked from the tests' process may only compute with small batches. If the parent has computed in
several threads, a product of large matrices in the child waits for threads that a fork does not copy. A bare process
is forked from one that has only imported third-party libraries, and is without this limit.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from kit.processes import environment
from torchrl_lightning.cli.run_folder.folder import locked
from torchrl_lightning.environments.workers.threads import preserve_num_threads

_FORK, _BARE = multiprocessing.get_context("fork"), multiprocessing.get_context("forkserver")
_LIBRARIES = ["torch", "torchrl.collectors", "torchrl.objectives", "lightning", "gymnasium", "hydra", "numba"]


@contextmanager
def forked_workers() -> Iterator[None]:
    """Fork the processes that collectors and vector environments start here; a user's processes are spawned."""
    with mock.patch.object(multiprocessing, "get_context", return_value=_FORK), preserve_num_threads():
        torch.set_num_threads(1)  # a fork does not copy threads
        yield


class Forked:
    """Run a function in a separate process and in a folder, as a terminal would.

    Args:
        run: The function; a ``SystemExit`` sets the exit status.
        folder: The working directory.
        said: The file for stdout and stderr.
        variables: Additional environment variables.
        session: Makes the process a session leader, so that ``killpg`` also reaches the processes that it starts.
        bare: Forks from a process without our package, and sends ``run`` as a pickle.
    """

    def __init__(
        self,
        run: Callable[[], object],
        folder: Path,
        *,
        said: Path | None = None,
        variables: Mapping[str, str] | None = None,
        session: bool = False,
        bare: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = said or folder / "said"
        with mock.patch.dict(os.environ, PYTHONWARNINGS="ignore"):  # killed processes leave it their locks
            resource_tracker.ensure_running()  # otherwise each process starts its own
        context = _BARE if bare else _FORK
        if bare:
            _BARE.set_forkserver_preload(_LIBRARIES)
            with mock.patch.dict(os.environ, environment() | {"PYTHONWARNINGS": "ignore"}):
                forkserver.ensure_running()
        known = environment() | dict(variables or {})
        self._process = context.Process(target=_run, args=(run, folder, self._file, known, session))
        with preserve_num_threads():
            torch.set_num_threads(1)  # a fork does not copy threads
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def said(self) -> str:
        """The output so far."""
        return self._file.read_text() if self._file.exists() else ""

    def ends(self, seconds: float = 300) -> int:
        """Wait for the end; return the exit status, which is negative for a signal."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"still running after {seconds} s:\n{self.said}"
        return self._process.exitcode

    def waits_for(self, condition: Callable[[], object], seconds: float = 300) -> None:
        """Wait until a condition is true while the process runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self._process.is_alive(), self.said
            assert time.monotonic() < deadline, f"still waiting after {seconds} s:\n{self.said}"
            time.sleep(0.01)

    def send(self, number: int) -> None:
        """Send a signal to this process, not to its children."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process if it still runs."""
        self._process.kill()
        self._process.join()


def as_script(path: Path | str, *arguments: str) -> Callable[[], object]:
    """Return a function that runs a script as ``python path arguments`` does."""
    return partial(_run_script, str(path), arguments)


def _run_script(path: str, arguments: tuple[str, ...]) -> None:
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


@contextmanager
def held_by_another(folder: Path, home: Path, *name: Path) -> Iterator[int]:
    """Let another process, which works in ``home``, hold the lock of a run's folder; yield its process id.

    ``name`` selects a lock other than the run's.
    """

    def hold() -> None:
        with locked(folder, *name):
            sys.stdout.write("held\n")
            time.sleep(600)

    holder = Forked(hold, home)
    try:
        holder.waits_for(lambda: holder.said == "held\n")
        yield holder.pid
    finally:
        holder.kill()


def killed_after(seconds: float, write: Callable[..., Iterator[int]], *arguments: Any, first: int = 1) -> list[int]:
    """Let a process write until it is killed; return the numbers that it has printed.

    Args:
        seconds: The time from the first numbers to the kill.
        write: A function that yields each number after it has written it.
        arguments: The arguments of ``write``.
        first: How many numbers to wait for.
    """

    def run() -> None:
        for number in write(*arguments):
            sys.stdout.write(f"{number}\n")

    with tempfile.TemporaryDirectory() as folder:
        process = Forked(run, Path(folder))
        process.waits_for(lambda: process.said.count("\n") >= first)
        time.sleep(seconds)
        process.kill()
        return [int(line) for line in process.said.splitlines(keepends=True) if line.endswith("\n")]


def as_started(part: Any) -> bytes:
    """Pickle an object for later forked processes as for a started one that imports everything again."""
    popen = SimpleNamespace(duplicate_for_child=os.dup, DupFd=_Inherited)
    multiprocessing.context.set_spawning_popen(popen)
    try:
        return bytes(multiprocessing.reduction.ForkingPickler.dumps(part))
    finally:
        multiprocessing.context.set_spawning_popen(None)


class _Inherited:
    """A file descriptor that the forked process inherits."""

    def __init__(self, file: int) -> None:
        self.file = file

    def detach(self) -> int:
        return self.file


def _run(run: Callable[[], object], folder: Path, said: Path, variables: Mapping[str, str], session: bool) -> None:
    if session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores it by default
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # imports of the tests may have changed it
    os.environ.clear()
    os.environ.update(variables)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    written = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(written, stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    with chdir(folder):
        run()
