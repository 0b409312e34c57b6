"""Stop all ranks of a run at the same step after any rank has received a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from torchrl_lightning._core.processes import is_main_thread
from torchrl_lightning._core.ranks import this_rank, world_size
from torchrl_lightning._core.signal_observer import observer
from torchrl_lightning._core.slurm import job_id, requeue

_TARGET = 0.5  # seconds between two agreements
_PATIENCE = 30.0  # seconds after which a process ends if the ranks do not agree
_REPEATED = 1.0  # signals within these seconds count as one, because schedulers and launchers send several
_PRIORITY: list[int] = [signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if sys.platform != "win32" else [])]

_NOTE = (
    b"\nCtrl-C: the run stops when all ranks have completed a step. Press Ctrl-C again to stop now, without saving.\n"
)


class RankStop:
    """Agree with the other ranks on the step at which all of them stop.

    If a rank stopped on its own, the other ranks would wait forever in a collective operation. A checkpoint also needs
    all ranks. Therefore a signal only sets a flag. All ranks reduce their flags after the same number of steps, about
    twice a second, and raise the same exception at the same step. A second signal, or 30 seconds without an agreement,
    ends the process.

    Attributes:
        is_active: Whether this object handles the signals of a run with several ranks.
        agreed: The signal after which the ranks have agreed to stop, or None.
        processes: The processes of the other ranks that this rank has launched and must wait for, in order of rank.
        first_rank_reports: Whether the machine's first rank reports the end of this rank.
    """

    def __init__(self) -> None:
        self.is_active = False
        self.agreed: int | None = None
        self._owner: object = None
        self._device = torch.device("cpu")
        self._launched: list[subprocess.Popen[bytes]] = []  # Lightning's list, which its process observer reads
        self.processes: list[subprocess.Popen[bytes]] = []
        self.first_rank_reports = False
        self._handlers: dict[int, Any] = {}
        self._signals: dict[int, float] = {}  # received signals, and the time when each first arrived
        self._steps = _Interval(1)
        self._evaluation: _Interval | None = None

    @property
    def is_requested(self) -> bool:
        """Whether this process has received a signal to stop."""
        return bool(self._signals)

    def begin(self, owner: object, trainer: Any) -> None:
        """Handle Ctrl-C, SIGTERM and SLURM's SIGUSR1 for all ranks; do nothing for a single rank or a second owner."""
        if self._owner is not None or world_size() == 1 or sys.platform == "win32" or not is_main_thread():
            return
        self.is_active, self._owner, self._device = True, owner, trainer.strategy.root_device
        self._launched = getattr(trainer.strategy.launcher, "procs", [])
        self.agreed, self._signals, self._steps, self.processes = None, {}, _Interval(1), []
        handled = [signal.SIGTERM, *([signal.SIGUSR1] if job_id() is not None else [])]
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            handled.append(signal.SIGINT)
        self._handlers = {number: signal.signal(number, _only_observed) for number in handled}
        observer.add(self._note)

    def end(self, owner: object) -> None:
        """Restore the signal handlers; after an agreement, ignore signals and wait for the other ranks' processes."""
        if self._owner is not owner or owner is None:
            return
        self.is_active, self._owner = False, None
        observer.remove(self._note)
        for number, handler in self._handlers.items():
            if self.agreed is not None:  # the process is about to end: further signals must not change its status
                signal.signal(number, signal.SIG_IGN)
            elif signal.getsignal(number) is _only_observed:  # not if Lightning has restored the earlier handler
                signal.signal(number, handler)
        for process in self.processes:
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()

    def check(self, now: bool = False) -> None:
        """Raise the common exception if any rank has received a signal; all ranks call this after the same steps.

        Args:
            now: Agree in this call, even if the last agreement was less than half a second ago.

        Raises:
            KeyboardInterrupt: A rank has received Ctrl-C.
            SIGTERMException: A rank has received SIGTERM or SIGUSR1.
        """
        if self._owner is not None and (self._steps.is_due() or now):
            self._agree(self._steps)

    def raise_pending(self) -> None:
        """Raise the exception of a signal that came after the last agreement of a run that has ended."""
        if self._signals and self.agreed is None:
            self._stop(max(self._signals, key=_PRIORITY.index))

    def check_evaluation(self) -> None:
        """Raise the common exception within an evaluation; ranks may take different numbers of steps there."""
        if self._evaluation is not None and self._evaluation.is_due():
            self._agree(self._evaluation)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let all ranks stop within an evaluation; after the block, wait until all ranks have completed it."""
        if self._owner is None:
            yield
            return
        self._evaluation = _Interval(32)
        try:
            yield
            while not self._agree(self._evaluation, is_done=True):
                pass
        finally:
            self._evaluation = None

    def _agree(self, interval: _Interval, is_done: bool = False) -> bool:
        """Reduce the flags of all ranks; return whether all ranks have completed the evaluation."""
        priority = max((_PRIORITY.index(number) + 1 for number in self._signals), default=0)
        # All ranks receive the same maximum of the elapsed times, so they compute the same next interval.
        values = torch.tensor([priority, not is_done, interval.elapsed()], dtype=torch.float32, device=self._device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        agreed, going, elapsed = values.tolist()
        interval.renew(elapsed)
        if agreed and self.agreed is None:
            self._stop(_PRIORITY[int(agreed) - 1])
        return not going

    def _stop(self, number: int) -> None:
        self.agreed = number
        self.keep_process()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        from lightning.pytorch.utilities.exceptions import SIGTERMException

        raise SIGTERMException(128 + signal.SIGTERM)

    def keep_process(self) -> None:
        """Let this process close and report before it ends.

        Lightning's observer kills all ranks within five seconds after one rank has ended. The observer stops when its
        list of processes is empty.
        """
        if self._launched:
            self.processes = list(self._launched)
            self._launched.clear()

    def _note(self, number: int) -> None:
        if number not in self._handlers:
            return
        now = monotonic()
        first = min(self._signals.values(), default=now)
        if now - first > _REPEATED:
            self._end_process(number, "by a second signal")
        if not self._signals:
            timer = threading.Timer(_PATIENCE, self._give_up, [number])
            timer.daemon = True
            timer.start()
            if number == signal.SIGINT and this_rank() == 0:
                os.write(2, _NOTE)
        self._signals.setdefault(number, now)

    def _give_up(self, number: int) -> None:
        if self.agreed is None and self._owner is not None:
            self._end_process(number, f"because the other ranks did not agree to stop within {_PATIENCE:g} seconds")

    def _end_process(self, number: int, why: str) -> None:
        """End this process and the ranks that it has launched, which may be suspended."""
        os.write(2, f"\nrank {this_rank()} ended {why}; the last checkpoint is kept.\n".encode())
        for process in (*self._launched, *self.processes):
            process.kill()
        os._exit(128 + (number if number == signal.SIGINT else signal.SIGTERM))

    @contextmanager
    def requeued(self) -> Iterator[None]:
        """Requeue SLURM's job once, after the block, if the ranks have stopped because of SIGUSR1."""
        try:
            yield
        finally:
            if self.agreed is not None and self.agreed not in (signal.SIGINT, signal.SIGTERM) and this_rank() == 0:
                requeue()


class _Interval:
    """The number of steps until the next agreement, which is the same on all ranks.

    Args:
        steps: Steps until the first agreement.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._count, self._begun = steps, 0, monotonic()

    def is_due(self) -> bool:
        """Count a step, and return whether the ranks agree after it."""
        self._count += 1
        return self._count >= self._steps

    def elapsed(self) -> float:
        """Return the seconds since the last agreement."""
        return monotonic() - self._begun

    def renew(self, elapsed: float) -> None:
        """Adapt the interval to the elapsed seconds of the slowest rank."""
        factor = min(max(_TARGET / max(elapsed, 1e-6), 0.25), 2.0)
        self._steps, self._count, self._begun = max(int(self._steps * factor), 1), 0, monotonic()


def _only_observed(number: int, frame: FrameType | None) -> None:
    """Do nothing, because the observer has received the signal."""


rank_stop = RankStop()
"""The only instance, because a process has one handler for each signal."""
