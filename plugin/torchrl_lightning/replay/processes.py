"""Which process the parts of a buffer belong to: in another one, what is written would be lost."""

from __future__ import annotations

import os

from torchrl_lightning.entries import Tree, leaves_of
from torchrl_lightning.parts import is_spawning
from torchrl_lightning.processes import after_fork

SHARE_FIRST = (
    "call buffer.share() before the first process starts (of an ExperienceBuffer; TorchRL's own cannot share rings), "
    "or give each process a buffer of its own"
)

current = os.getpid()
"""The id of this process; asking the system each time would cost a write a tenth more."""


def _note_fork() -> None:
    global current
    current = os.getpid()


after_fork(_note_fork)


class Owned:
    """A part that only the process which made or copied it may change, unless it is shared."""

    is_shared = False
    """Whether it lies in memory that processes share."""

    def own(self) -> None:
        """Let this process be the one that may change it."""
        self._process = current

    def check_owner(self) -> None:
        """Refuse to write to what another process made, unless it is shared: the rows would be lost."""
        if not self.is_shared:
            self.check_maker()

    def check_maker(self) -> None:
        """Refuse what only the process that made the buffer may do, shared or not."""
        if self._process != current:
            raise RuntimeError(f"This process writes to the buffer of the one that it was started from; {SHARE_FIRST}.")

    def check_loadable(self) -> None:
        """Refuse to load a state into what other processes are using."""
        self.check_owner()
        if self.is_shared:
            raise RuntimeError(
                "The buffer is shared with other processes; build it unshared (allow_multiprocess=False), load the "
                "state before buffer.share()."
            )

    def check_travel(self) -> None:
        """Refuse to be handed to a process that is being started, unless it is shared."""
        if is_spawning() and not self.is_shared:
            raise RuntimeError(f"A {type(self).__name__} was handed to another process unshared; {SHARE_FIRST}.")


def share_leaves(tree: Tree) -> None:
    """Move tensors on the CPU into memory that processes share."""
    for _, leaf in leaves_of(tree):
        if leaf.device.type == "cpu" and leaf.numel():
            leaf.share_memory_()
