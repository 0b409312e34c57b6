"""Metrics of each rollout in the loggers, over environment frames."""

from __future__ import annotations

import time

from lightning.pytorch import LightningModule, Trainer

from torchrl_lightning._logging import count_rows_by_clock, count_rows_by_lightning, publish
from torchrl_lightning.callbacks.sparse import SparseCallback
from torchrl_lightning.protocols import DataApi
from torchrl_lightning.ranges import Checked, integer


class ExperienceLog(SparseCallback):
    """Log the DataModule's ``metrics()``: returns, lengths, timings, and the buffer's own metrics.

    It writes to the loggers directly, because ``self.log`` costs about 0.4 ms for each key, which is a tenth of the
    learning time of a small agent, and adds the same metrics to ``trainer.callback_metrics``, so that other callbacks
    can monitor them. Metrics that a module logs by ``self.log`` get environment frames as their step, too, as with any
    of our DataModules, unless the module logs a ``step`` itself. It does nothing with a DataModule that does not count
    ``frames``.

    Args:
        every_n_epochs: Log a row every so many epochs.

    Raises:
        ValueError: ``every_n_epochs`` is below 1.

    Examples:
        >>> ExperienceLog(every_n_epochs=0)
        Traceback (most recent call last):
        ValueError: every_n_epochs must be a positive integer, got 0.
    """

    every_n_epochs = Checked(integer)

    def __init__(self, every_n_epochs: int = 1) -> None:
        super().__init__()
        self.every_n_epochs = every_n_epochs
        self._began = 0.0
        self._counted = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the rows that Lightning writes have the DataModule's count as their step."""
        count_rows_by_clock(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the rows to Lightning again."""
        count_rows_by_lightning(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the rows to Lightning again: after an exception it does not call :meth:`teardown`."""
        self.teardown(trainer, pl_module, "fit")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting frames per second."""
        self._began = time.perf_counter()
        self._counted = (DataApi.of_run(trainer).clock or (0,))[0]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write one row."""
        data = DataApi.of_run(trainer)
        clock = data.clock
        if clock is None or (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        now, (count, unit) = time.perf_counter(), clock
        metrics = dict(data.metrics())
        metrics[f"{unit}_per_second"] = (count - self._counted) / max(now - self._began, 1e-9)
        self._began, self._counted = now, count
        publish(trainer, metrics)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=count)
