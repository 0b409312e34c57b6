"""Schedules over a run: functions from progress in [0, 1] to a factor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Schedule = Callable[[float], float]


@dataclass(frozen=True)
class ConstantSchedule:
    """The constant factor 1.

    Examples:
        >>> ConstantSchedule()(0.5)
        1.0
    """

    def __call__(self, progress: float) -> float:
        """Return the factor at this progress."""
        return 1.0


@dataclass(frozen=True)
class LinearSchedule:
    """Decrease linearly from 1 to ``final``.

    Examples:
        >>> LinearSchedule(final=0.5)(0.5)
        0.75
    """

    final: float = 0.0

    def __call__(self, progress: float) -> float:
        """Return the factor at this progress."""
        return 1.0 + (self.final - 1.0) * min(max(progress, 0.0), 1.0)


@dataclass(frozen=True)
class CosineSchedule:
    """Decrease from 1 to ``final`` along half a cosine (Loshchilov and Hutter, 2017).

    Examples:
        >>> round(CosineSchedule()(0.5), 3)
        0.5
    """

    final: float = 0.0

    def __call__(self, progress: float) -> float:
        """Return the factor at this progress."""
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


_NAMED: dict[str, Schedule] = {"constant": ConstantSchedule(), "linear": LinearSchedule(), "cosine": CosineSchedule()}


def as_schedule(schedule: str | Schedule | None) -> Schedule:
    """Return the schedule with this name, or a function unchanged. None returns the constant schedule."""
    if schedule is None:
        return ConstantSchedule()
    if not isinstance(schedule, str):
        return schedule
    if schedule not in _NAMED:
        raise ValueError(f"A schedule must be one of {', '.join(_NAMED)}, or a function of progress, got {schedule!r}.")
    return _NAMED[schedule]


def progress_of(trainer: Any) -> float | None:
    """Return the completed fraction of a run; None if its end is unknown.

    The length of the run is the DataModule's ``total_frames`` if set. Otherwise it is the trainer's ``max_epochs`` or
    ``max_steps``, whichever is reached first.
    """
    data = getattr(trainer, "datamodule", None)
    total = getattr(data, "total_frames", None) or -1
    if total > 0:
        return float(getattr(data, "frames", 0) / total)
    limits = ((trainer.current_epoch, trainer.max_epochs), (trainer.global_step, trainer.max_steps))
    known = ((completed, limit) for completed, limit in limits if limit is not None and limit >= 0)
    return max((completed / limit if limit else 1.0 for completed, limit in known), default=None)
