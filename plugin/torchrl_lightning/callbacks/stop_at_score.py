"""The end of training at an evaluation that is good enough."""

from __future__ import annotations

import logging
import math
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from torchrl_lightning._logging import EVALUATION
from torchrl_lightning.callbacks.monitors import check_monitor, unknown_metric
from torchrl_lightning.callbacks.sparse import SparseCallback
from torchrl_lightning.fitting import Fault
from torchrl_lightning.ranges import Checked
from torchrl_lightning.thresholds import reaches

logger = logging.getLogger(__name__)


def _threshold(value: Any, name: str) -> float:
    """Return a number, infinity included."""
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise Fault(f"{name} must be a number, got {value!r}.")
    return float(value)


class StopAtScore(SparseCallback):
    """End training at the first evaluation whose score reaches a threshold.

    Lightning's ``EarlyStopping`` ends it only above the threshold: a score of 500 never exceeds the 500 that CartPole
    gives at most.

    Args:
        stopping_threshold: The lowest score that ends training; rounding is allowed for.
        monitor: The logged metric that is the score.

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
        """Validate the name of the metric; raise ValueError if no such metric will be logged."""
        check_monitor(self.monitor, trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End training if the score reaches the threshold; raise a ValueError if an evaluation does not log it."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            if any(name.startswith(EVALUATION) for name in metrics):
                raise unknown_metric(self.monitor, metrics)
            return
        score = float(metrics[self.monitor])
        if trainer.strategy.reduce_boolean_decision(reaches(score, self.stopping_threshold), all=False):
            trainer.should_stop = True
            logger.info("%s=%.6g reaches stopping_threshold=%.6g.", self.monitor, score, self.stopping_threshold)
