"""End training when the evaluation score reaches a threshold."""

from __future__ import annotations

import logging
import math
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.metric_logging import EVALUATION
from torchrl_lightning._core.return_threshold import reaches
from torchrl_lightning._core.validators import Checked
from torchrl_lightning.callbacks.monitors import check_monitor, unknown_metric
from torchrl_lightning.callbacks.sparse import SparseCallback

logger = logging.getLogger(__name__)


def _threshold(value: Any, name: str) -> float:
    """Return the value as a float; raise ValueError if it is not a number. Infinity is valid."""
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise UserError(f"{name} must be a number, got {value!r}.")
    return float(value)


class StopAtScore(SparseCallback):
    """End training at the first evaluation whose score reaches a threshold.

    Lightning's ``EarlyStopping`` requires a score above the threshold. With a threshold of 500, CartPole would never
    stop, because its maximum return is 500.

    Args:
        stopping_threshold: The lowest score that ends training. Rounding errors are tolerated.
        monitor: The name of the logged metric to use as the score.

    Raises:
        ValueError: ``stopping_threshold`` is not a number.

    Examples:
        >>> StopAtScore(475).monitor
        'eval/return'
    """

    stopping_threshold = Checked(_threshold)

    def __init__(self, stopping_threshold: float, monitor: str = "eval/return") -> None:
        super().__init__()
        self.stopping_threshold, self.monitor = stopping_threshold, monitor

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Validate the name of the metric; raise ValueError if the run will not log it."""
        check_monitor(self.monitor, trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End training if the score reaches the threshold; raise ValueError if an evaluation does not log the score."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        metrics = trainer.callback_metrics
        if self.monitor not in metrics and any(name.startswith(EVALUATION) for name in metrics):
            raise unknown_metric(self.monitor, metrics)
        score = float(metrics.get(self.monitor, math.nan))
        # A rank without the metric must also reduce, because the other ranks wait for it.
        if trainer.strategy.reduce_boolean_decision(reaches(score, self.stopping_threshold), all=False):
            trainer.should_stop = True
            logger.info("%s=%.6g reaches stopping_threshold=%.6g.", self.monitor, score, self.stopping_threshold)
