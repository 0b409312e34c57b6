"""The hooks of a DataModule that Lightning calls on callbacks alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from torchrl_lightning.callbacks.sparse import SparseCallback


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


class StepHooks(DataHooks):
    """Tell a DataModule that a step has ended.

    The DataModule puts this callback before all others, so that a checkpoint that another callback writes after a step
    holds what the step has made.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step."""
        if self.is_of(trainer):
            self.data.end_step()


class ReplayHooks(StepHooks):
    """End each step, which takes priorities back, and write the buffer with each checkpoint."""

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
    """Leave the autocast of a training step, in which a rollout is collected, and forget its copies of old weights."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                torch.clear_autocast_cache()  # of copies of the weights, which the update has outdated
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
