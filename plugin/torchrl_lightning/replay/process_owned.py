"""Ownership of buffer parts by a process, because writes in another process would be lost."""

from __future__ import annotations

import os

from torchrl_lightning._core.mixins import is_spawning
from torchrl_lightning._core.processes import after_fork
from torchrl_lightning._core.tree import Tree, leaves_of

SHARE_FIRST = (
    "Call buffer.share() of an ExperienceBuffer before the first process starts (TorchRL's buffers cannot share "
    "rings), or build a buffer in each process."
)

EXAMPLE_FIRST = (
    "The entries of a row must be known before another process uses a shared buffer, got an empty buffer. Call "
    "buffer.share(example=row) with a row or spec like the rows that will be written, or write the first rows in this "
    "process before you start others."
)

current = os.getpid()
"""The id of this process, cached because ``os.getpid`` would make a write a tenth slower."""


def _note_fork() -> None:
    global current
    current = os.getpid()


after_fork(_note_fork)


class ProcessOwned:
    """An object that only the process that created or copied it may change, unless the object is shared."""

    is_shared = False
    """Whether the object is in shared memory."""

    def claim_ownership(self) -> None:
        """Make this process the owner."""
        self._process = current

    def check_owner(self) -> None:
        """Raise RuntimeError if the object is unshared and another process owns it."""
        if not self.is_shared:
            self.check_process()

    def check_process(self) -> None:
        """Validate that this process created the object, shared or not; raise RuntimeError otherwise."""
        if self._process != current:
            raise RuntimeError(f"This process must not change a buffer of its parent process. {SHARE_FIRST}")

    def check_loadable(self) -> None:
        """Validate that a state may be loaded; raise RuntimeError if other processes use the object."""
        self.check_owner()
        if self.is_shared:
            raise RuntimeError(
                "A state cannot be loaded into a buffer that other processes share. Build the buffer unshared "
                "(allow_multiprocess=False), and load the state before buffer.share()."
            )

    def check_picklable(self) -> None:
        """Raise RuntimeError if an unshared object is pickled for a child process."""
        if is_spawning() and not self.is_shared:
            raise RuntimeError(f"A {type(self).__name__} must be shared before another process gets it. {SHARE_FIRST}")


def share_leaves(tree: Tree) -> None:
    """Move CPU tensors into shared memory."""
    for _, leaf in leaves_of(tree):
        if leaf.device.type == "cpu" and leaf.numel():
            leaf.share_memory_()
