"""Callbacks that cost nothing at an update."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback


class SparseCallback(Callback):
    """A callback without the hooks that Lightning calls at each batch and update.

    Lightning calls a hook of each callback that has it, also where it does nothing, for about 4 us: five callbacks
    would take a fortieth of a small agent's training. It skips a hook that is None. A subclass defines what it needs.
    """

    on_train_batch_start: Any = None
    on_train_batch_end: Any = None
    on_before_zero_grad: Any = None
    on_before_backward: Any = None
    on_after_backward: Any = None
    on_before_optimizer_step: Any = None
