"""Log the metrics of each rollout over environment frames."""

from __future__ import annotations

import time

from lightning.pytorch import LightningModule, Trainer

from torchrl_lightning._core.metric_logging import log_over_clock, log_over_lightning_steps, publish_metrics
from torchrl_lightning._core.protocols import DataApi
from torchrl_lightning._core.validators import Checked, integer
from torchrl_lightning.callbacks.sparse import SparseCallback


class RolloutMetricsLogger(SparseCallback):
    """Log the DataModule's ``metrics()`` over all ranks: returns, lengths, timings, and the buffer's own metrics.

    The callback writes to the loggers directly, because ``self.log`` takes about 0.4 ms per key, a tenth of a small
    agent's learning time. It also adds the metrics to ``trainer.callback_metrics``, so that other callbacks can monitor
    them. If a module does not log ``step`` itself, the metrics that it logs with ``self.log`` also have environment
    frames as their step. Our DataModules set this step also without the callback. The callback does nothing if the
    DataModule does not count ``frames``.

    Args:
        every_n_epochs: The number of epochs between two logged rows.

    Raises:
        ValueError: ``every_n_epochs`` is below 1.

    Examples:
        >>> RolloutMetricsLogger(every_n_epochs=0)
        Traceback (most recent call last):
        ValueError: every_n_epochs must be a positive integer, got 0.
    """

    every_n_epochs = Checked(integer)

    def __init__(self, every_n_epochs: int = 1) -> None:
        super().__init__()
        self.every_n_epochs = every_n_epochs
        self._last_time = 0.0
        self._last_count = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make Lightning use the DataModule's count as the step of logged rows."""
        log_over_clock(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore Lightning's own step for logged rows."""
        log_over_lightning_steps(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore Lightning's own step, because Lightning skips :meth:`teardown` after an exception."""
        self.teardown(trainer, pl_module, "fit")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to measure frames per second."""
        self._last_time = time.perf_counter()
        self._last_count = (DataApi.of_run(trainer).clock or (0,))[0]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write one row."""
        data = DataApi.of_run(trainer)
        clock = data.clock
        if clock is None or (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        now, (count, unit) = time.perf_counter(), clock
        metrics = dict(data.metrics())
        metrics[f"{unit}_per_second"] = (count - self._last_count) / max(now - self._last_time, 1e-9)
        self._last_time, self._last_count = now, count
        metrics = publish_metrics(trainer, metrics)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=count)
