"""Metrics of each rollout in the loggers, over environment frames."""

from __future__ import annotations

__all__ = ["ExperienceLog"]

import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from torchrl_lightning._compat import logger_connector
from torchrl_lightning._modules import clock_of
from torchrl_lightning.callbacks.sparse import SparseCallback
from torchrl_lightning.ranges import integer


class ExperienceLog(SparseCallback):
    """Log the DataModule's ``metrics()``: returns, lengths, timings, and the buffer's own metrics.

    It writes to the loggers directly, because ``self.log`` costs about 0.4 ms for each key, which is a tenth of the
    learning time of a small agent. What a module logs by ``self.log`` gets environment frames as its step, too, unless
    it logs a ``step`` of its own; that costs nothing where no row is written. It does nothing with a DataModule that
    does not count ``frames``.

    Args:
        every_n_epochs: Log a row every so many epochs.

    Raises:
        ValueError: ``every_n_epochs`` is below 1.

    Example:
        >>> ExperienceLog(every_n_epochs=0)
        Traceback (most recent call last):
        ValueError: every_n_epochs must be a positive integer, got 0.
    """

    def __init__(self, every_n_epochs: int = 1) -> None:
        super().__init__()
        self.every_n_epochs = integer(every_n_epochs, "every_n_epochs")
        self._began = 0.0
        self._counted = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let rows that Lightning writes stand over what the DataModule counts."""
        logger_connector(trainer).log_metrics = _OverFrames(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave them to Lightning again."""
        vars(logger_connector(trainer)).pop("log_metrics", None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave them to Lightning again: after an exception it does not call :meth:`teardown`."""
        self.teardown(trainer, pl_module, "fit")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting frames per second."""
        self._began = time.perf_counter()
        self._counted = (clock_of(getattr(trainer, "datamodule", None)) or (0,))[0]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write one row."""
        data: Any = getattr(trainer, "datamodule", None)
        clock = clock_of(data)
        if clock is None or (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        now, (count, unit) = time.perf_counter(), clock
        metrics = dict(getattr(data, "metrics", dict)())
        metrics[f"{unit}_per_second"] = (count - self._counted) / max(now - self._began, 1e-9)
        self._began, self._counted = now, count
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=count)


class _OverFrames:
    """Write a row of what modules and callbacks have logged, as Lightning's trainer does, over another step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __call__(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if metrics and "step" not in metrics:  # which Lightning takes for the step
            clock = clock_of(getattr(self._trainer, "datamodule", None))
            step = step if clock is None else clock[0]
        connector = logger_connector(self._trainer)
        type(connector).log_metrics(connector, metrics, step)
