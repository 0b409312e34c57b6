"""Log metrics with the DataModule's frame count as their step, and publish the metrics that callbacks monitor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchrl_lightning._core.protocols import DataApi
from torchrl_lightning._core.rank_metrics import reduce_metrics
from torchrl_lightning._core.ranks import all_gather
from torchrl_lightning._core.torchrl_compat import logger_connector

EVALUATION, TRAINING = "eval/", "train/"
"""Prefixes of metric names."""
RESERVED = frozenset({"step", "epoch"})
"""Names that Lightning uses in checkpoint file names and logged rows."""


class _LogMetricsOverClock:
    """A replacement for Lightning's ``log_metrics`` that uses the DataModule's frame count as the step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __call__(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if metrics and "step" not in metrics:  # Lightning uses a metric of this name as the step
            clock = DataApi.of_run(self._trainer).clock
            step = step if clock is None else clock[0]
        connector = logger_connector(self._trainer)
        type(connector).log_metrics(connector, metrics, step)


def log_over_clock(trainer: Any) -> None:
    """Use the DataModule's frame count as the step of all logged rows of a trainer.

    A logged metric ``step`` would have the same effect, but Lightning would also use it in checkpoint names.
    """
    logger_connector(trainer).log_metrics = _LogMetricsOverClock(trainer)


def log_over_lightning_steps(trainer: Any) -> None:
    """Undo :func:`log_over_clock`; may be called repeatedly."""
    vars(logger_connector(trainer)).pop("log_metrics", None)


def publish_metrics(trainer: Any, metrics: Mapping[str, float]) -> dict[str, float]:
    """Add metrics to a trainer's ``callback_metrics``, the input of checkpointing and early stopping.

    All ranks must call this together, also without metrics.

    Returns:
        The metrics of all ranks, which are equal on all ranks. Log these metrics.
    """
    reduced = reduce_metrics(all_gather(dict(metrics)))
    names = [name for name in reduced if name not in RESERVED]
    values = torch.tensor([reduced[name] for name in names], dtype=torch.float64)
    trainer.callback_metrics.update(zip(names, values.unbind(), strict=True))
    return reduced
