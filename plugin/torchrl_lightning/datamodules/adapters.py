"""What Lightning asks for beside a DataModule: a sized loader, and the hooks that it calls on callbacks alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from torchrl_lightning.callbacks.sparse import SparseCallback
from torchrl_lightning.entries import is_tensordict


class Batches:
    """A sized, re-iterable stream of ``length`` batches that does nothing before it is iterated.

    When a loader has no length, Lightning fetches one batch ahead of the training step, so that every batch would be
    one update stale. It is not a :class:`torch.utils.data.DataLoader`, whose collation takes a TensorDict apart.
    """

    def __init__(self, length: int, make_iterator: Callable[[], Iterator[Any]]) -> None:
        self._length = length
        self._make_iterator = make_iterator

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._make_iterator()

    def state_dict(self) -> dict[str, int]:
        """Return nothing, as the DataModule knows where the stream is; Lightning resumes within an epoch unwarned."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Do nothing, as there is nothing to load."""


def is_there(batch: Any, device: torch.device) -> bool:
    """Return whether a batch lies on a device, as the first tensor of a TensorDict tells."""
    for value in batch.values() if is_tensordict(batch) else ():
        if isinstance(value, torch.Tensor):
            return value.device == device
    return False


def batches_served(trainer: Any) -> int:
    """Return how many batches of this epoch were served before a checkpoint that was written within it."""
    loop = getattr(trainer, "fit_loop", None)
    return loop.epoch_loop.batch_progress.current.ready if loop is not None else 0


def reopen_epoch(trainer: Trainer) -> None:
    """Let a resumed run go on within the epoch in which it ended, as by ``max_steps``, ``max_time`` or its last frame.

    Lightning counts such an epoch as done. Call it when a loader is asked for.
    """
    loop: Any = trainer.fit_loop
    batches, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress
    is_done = epochs.current.processed == epochs.current.ready
    if loop.is_resuming and is_done and batches.current.ready and not batches.is_last_batch:
        for count in (epochs.current, epochs.total):
            count.processed -= 1
            count.completed = count.processed
        loop.restarting = True


class DataHooks(SparseCallback):
    """A callback by which a DataModule hears of what Lightning tells callbacks alone."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data

    def attach(self, trainer: Trainer) -> None:
        """Put this callback before all others of a trainer, once."""
        callbacks: list[Any] = getattr(trainer, "callbacks")  # noqa: B009  # Lightning gives it no type
        if self not in callbacks:
            callbacks.insert(0, self)

    def is_of(self, trainer: Trainer) -> bool:
        """Return whether the trainer fits with this DataModule: it may fit with another one later."""
        return getattr(trainer, "datamodule", None) is self.data


class ReplayHooks(DataHooks):
    """Take priorities back after each update, and write the buffer with each checkpoint.

    The DataModule puts this callback before all others, so that a checkpoint that another callback writes after an
    update holds the priorities of that update.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take priorities and rewritten entries back."""
        if self.is_of(trainer):
            self.data.take_back()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the buffer, where it is kept beside the checkpoint, and refer to it."""
        if self.is_of(trainer) and self.data.save_buffer():
            checkpoint[type(self.data).__qualname__] = self.data.state_dict()


class FitHooks(DataHooks):
    """End a run with the last fit of a model, which validation may have ended."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop where all frames are collected and learned from."""
        if self.is_of(trainer):
            self.data.stop_if_spent()


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Act with the weights as they are now, where a step with mixed precision goes on around this."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                torch.clear_autocast_cache()  # of copies of the weights, which the update has outdated
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
