"""Lightning runs without console output, and helpers for their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn


def trainer(folder: Path | None = None, **settings: Any) -> L.Trainer:
    """Make a trainer without output. It writes only the checkpoints of callbacks."""
    names = ("logger", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = {**dict.fromkeys(names, False), "accelerator": "cpu", "num_sanity_val_steps": 0}
    quiet["enable_checkpointing"] = any(isinstance(each, Checkpoint) for each in settings.get("callbacks", ()))
    return L.Trainer(**{**quiet, "log_every_n_steps": 1, "max_epochs": 2, "default_root_dir": folder, **settings})


def parameters(module: nn.Module) -> Tensor:
    """Copy all parameters into one vector."""
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


class ListensToBackward(L.Callback):
    """Implements a hook for backward passes, so that autograd computes them."""

    def on_after_backward(self, *_: Any) -> None: ...


class SaveAt(L.Callback):
    """Writes a checkpoint at the ``count``-th call of a hook; then the run ends or fails.

    If ``epoch`` is given, only the calls in this epoch count.
    """

    def __init__(self, path: Path, hook: str, count: int = 1, *, epoch: int | None = None, then: str = "end") -> None:
        self.path, self.left, self.epoch, self.then = path, count, epoch, then
        setattr(self, hook, self.save)

    def save(self, run: L.Trainer, *_: Any) -> None:
        if self.epoch in (None, run.current_epoch):
            self.left -= 1
            if self.left == 0:
                run.save_checkpoint(self.path)
                run.should_stop = self.then == "end"
                if self.then == "fail":
                    raise RuntimeError("stopped")
