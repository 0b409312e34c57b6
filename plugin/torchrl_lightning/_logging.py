"""Metrics of a run over what its DataModule counts: rows of loggers, and the numbers that callbacks monitor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchrl_lightning._compat import logger_connector
from torchrl_lightning.protocols import DataApi
from torchrl_lightning.ranks import gathered

EVALUATION, TRAINING = "eval/", "train/"
"""Beginnings of the names of metrics."""
RESERVED = frozenset({"step", "epoch"})
"""Names that Lightning itself gives to checkpoints and rows."""


class _RowsOverClock:
    """Write a row of logged metrics as Lightning's trainer does, with the DataModule's count as its step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __call__(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if metrics and "step" not in metrics:  # Lightning writes a row over a metric of this name
            clock = DataApi.of_run(self._trainer).clock
            step = step if clock is None else clock[0]
        connector = logger_connector(self._trainer)
        type(connector).log_metrics(connector, metrics, step)


def count_rows_by_clock(trainer: Any) -> None:
    """Let all rows that a trainer writes have the DataModule's count of frames as their step.

    A logged metric ``step`` would do so, too, but Lightning names checkpoints by it.
    """
    logger_connector(trainer).log_metrics = _RowsOverClock(trainer)


def count_rows_by_lightning(trainer: Any) -> None:
    """Undo :func:`count_rows_by_clock`; may be called repeatedly."""
    vars(logger_connector(trainer)).pop("log_metrics", None)


def publish(trainer: Any, metrics: Mapping[str, float]) -> None:
    """Add metrics to a trainer's ``callback_metrics``, which checkpoints and early stopping monitor.

    All ranks call it together, and monitor the same numbers: the mean of each metric over the ranks that have it.
    """
    rows = gathered(dict(metrics))
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in RESERVED]
    columns = [[float(row[name]) for row in rows if name in row] for name in names]
    means = torch.tensor([sum(column) / len(column) for column in columns], dtype=torch.float64)
    trainer.callback_metrics.update(zip(names, means.unbind(), strict=True))
