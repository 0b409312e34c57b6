"""Memory and a lock that processes share, and checks of which process a buffer belongs to."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrl_lightning.parts import is_spawning

SHARE_FIRST = (
    "call buffer.share() before the first process starts (of an ExperienceBuffer; TorchRL's own cannot share rings), "
    "or give each process a buffer of its own"
)


_process = os.getpid()


def _note_fork() -> None:
    global _process
    _process = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def this_process() -> int:
    """Return the id of this process; asking the system each time would cost a write a tenth more."""
    return _process


def check_owner(process: int, shared: bool) -> None:
    """Refuse to write to the buffer that another process made, unless it is shared: the rows would be lost."""
    if not shared and process != _process:
        raise RuntimeError(f"This process writes to the buffer of the one that it was started from; {SHARE_FIRST}.")


def check_unshared(shared: bool) -> None:
    """Refuse to load into what other processes are using."""
    if shared:
        raise RuntimeError("The buffer is shared with other processes; load the state before buffer.share().")


class SharedLock:
    """A lock between processes; on entering, it is held, and ``follow`` takes note of what the others wrote."""

    def __init__(self, follow: Callable[[], None]) -> None:
        # A lock of the "spawn" context serves forked processes too, but not the other way round.
        self._lock = multiprocessing.get_context("spawn").RLock()
        self._follow = follow

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self._follow()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class SharedArrays:
    """Numpy arrays of an object, which can be moved into memory that processes share.

    A pickle for a starting process hands the shared memory on; any other copy gets memory of its own.
    """

    ARRAYS: ClassVar[tuple[str, ...]]
    """Names of the attributes that hold the arrays."""
    _memory: dict[str, Tensor] | None = None

    @property
    def is_shared(self) -> bool:
        """Whether the arrays lie in memory that processes share."""
        return self._memory is not None

    def share_arrays(self) -> None:
        """Move the arrays into memory that processes share; views of them stay behind."""
        if self._memory is None:
            self._memory = {name: torch.from_numpy(getattr(self, name)).share_memory_() for name in self.ARRAYS}
            self._bind()

    def _bind(self) -> None:
        for name, tensor in (self._memory or {}).items():
            setattr(self, name, tensor.numpy())

    def __getstate__(self) -> dict[str, Any]:
        if not is_spawning():
            return {**self.__dict__, "_memory": None}
        if self._memory is None:
            raise RuntimeError(f"A {type(self).__name__} was handed to another process unshared; {SHARE_FIRST}.")
        return {name: value for name, value in self.__dict__.items() if name not in self.ARRAYS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bind()
