"""Delay Ctrl-C in a training process until the run is between two steps. This module imports nothing heavy."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torchrl_lightning._core.processes import is_main_thread

_NOTICE = (
    b"\nCtrl-C: the run stops when its step is complete. Press Ctrl-C again to stop now, without saving the step.\n"
)


class InterruptHolder:
    """Delay Ctrl-C while counters, buffer and weights change, so that a checkpoint never mixes two states.

    Python may raise KeyboardInterrupt between any two instructions, for example after a collector has counted a rollout
    and before the DataModule has counted it. A second Ctrl-C acts immediately.

    Attributes:
        pending: Whether a delayed Ctrl-C is waiting.
        between_steps: Whether the last step is complete and the next step has not yet changed the run.
        interrupted_within_step: Whether a second Ctrl-C stopped the run within a step. The state of the run is then
            inconsistent.
        requested: Whether a Ctrl-C was ever delayed. A run that fails before its step is complete does not raise it.
    """

    def __init__(self) -> None:
        self.pending = self.between_steps = self.interrupted_within_step = self.requested = False
        self._owner: object = None
        self._process = -1
        self._raises_now = False

    def hold(self, owner: object) -> None:
        """Delay Ctrl-C from now on; do nothing if another owner delays it, or if another handler is installed."""
        if self._owner is not None or not is_main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._owner, self._process = owner, os.getpid()
            self.pending = self.between_steps = self._raises_now = False
            signal.signal(signal.SIGINT, self._handle)

    def release(self, owner: object) -> bool:
        """Stop delaying Ctrl-C; return whether a delayed Ctrl-C is waiting."""
        if self._owner is not owner:
            return False
        self._owner = None
        if signal.getsignal(signal.SIGINT) == self._handle:  # Lightning ignores Ctrl-C while it shuts down
            signal.signal(signal.SIGINT, signal.default_int_handler)
        pending, self.pending, self.interrupted_within_step = self.pending, False, False
        return pending

    def check(self) -> None:
        """Raise KeyboardInterrupt if a Ctrl-C is pending; call this method when the state of the run is consistent."""
        if self.pending:
            self.pending = self.between_steps = False
            raise KeyboardInterrupt

    def repeat(self) -> None:
        """Delay a Ctrl-C again that the interpreter has ignored."""
        if self._owner is not None:
            self.pending = True

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let Ctrl-C act immediately within a block that can be aborted without side effects."""
        self.check()
        self._raises_now = True
        try:
            yield
        finally:
            self._raises_now = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked process inherits the handler
            raise KeyboardInterrupt
        if self._raises_now:
            self._raises_now = False
            raise KeyboardInterrupt
        if self.pending:
            self.pending, self.interrupted_within_step = False, True
            raise KeyboardInterrupt
        self.pending = self.requested = True
        os.write(2, _NOTICE)  # print is not safe in a signal handler


interrupts = InterruptHolder()
"""The only instance, because Python has one Ctrl-C handler for the whole process."""
