"""Runs of Lightning, without noise, and what one looks at behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn


def trainer(folder: Path | None = None, **settings: Any) -> L.Trainer:
    """Make a trainer that says nothing, and writes nothing but the checkpoints of callbacks."""
    names = ("logger", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = {**dict.fromkeys(names, False), "accelerator": "cpu", "num_sanity_val_steps": 0}
    quiet["enable_checkpointing"] = any(isinstance(each, Checkpoint) for each in settings.get("callbacks", ()))
    return L.Trainer(**{**quiet, "log_every_n_steps": 1, "max_epochs": 2, "default_root_dir": folder, **settings})


def parameters(module: nn.Module) -> Tensor:
    """Copy all parameters into one vector."""
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


class ListensToBackward(L.Callback):
    """Waits for backward passes, so that autograd makes them."""

    def on_after_backward(self, *_: Any) -> None: ...


class SaveAt(L.Callback):
    """Writes a checkpoint when a hook is called the ``count``-th time, or in an epoch; then the run ends or fails."""

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
