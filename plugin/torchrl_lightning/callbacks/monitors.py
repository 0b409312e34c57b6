"""Validate the names of metrics that callbacks monitor."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.metric_logging import EVALUATION, TRAINING
from torchrl_lightning._core.protocols import DataApi, LearnerApi
from torchrl_lightning._core.suggestions import closest_name, did_you_mean

_PACKAGE = __name__.partition(".")[0]
logger = logging.getLogger(__name__)


def check_monitor(monitor: Any, trainer: Any, module: Any) -> None:
    """Validate the name of a monitored metric before training, if the metric names of the run are known.

    All training metrics are known if learner, DataModule, buffer and collector are ours, and all callbacks are ours or
    Lightning's. All evaluation metrics are known if one class defines both the learner's evaluation and its metric
    names, and all callbacks are ours or Lightning's. Otherwise, an unfamiliar name may be a metric of the user's code.
    If a training metric has an unfamiliar name, a warning is logged.

    Raises:
        ValueError: The run will not log the metric.
    """
    if not isinstance(monitor, str):
        raise UserError(f"monitor={monitor!r} must be the name of a metric, such as eval/return.")
    if not monitor.startswith(TRAINING):
        known = LearnerApi.of(module).evaluation_metrics
        knows_all = monitor.startswith(EVALUATION) and _knows_evaluation_metrics(trainer, module)
        if monitor not in known and (knows_all or closest_name(monitor, known) is not None):
            raise unknown_metric(monitor, known)
        return
    episode_names = episode_metrics(trainer)
    known = (*episode_names, *LearnerApi.of(module).training_metrics)
    if monitor in known:
        return
    # A user's module may log a metric with a name similar to one of our losses.
    if _knows_training_metrics(trainer, module) or _is_similar_to_any(monitor, episode_names):
        raise unknown_metric(monitor, known)
    logger.warning(
        "monitor=%s is not a metric of torchrl-lightning%s Unless your own code logs it, the run ends with an error at "
        "its first evaluation.",
        monitor,
        _suggestion(monitor, known),
    )


def unknown_metric(monitor: str, known: Iterable[str]) -> UserError:
    """Return the error for an unknown metric."""
    return UserError(f"monitor={monitor}: no such metric is logged{_suggestion(monitor, known)}")


def _suggestion(monitor: str, known: Iterable[str]) -> str:
    """Return the end of a message, with the most similar metric or all metrics; ignore the prefix ``train/``."""
    if not monitor.startswith(TRAINING):
        return did_you_mean(monitor, known)
    known = sorted(known)
    names = [name.removeprefix(TRAINING) for name in known if name.startswith(TRAINING)]
    suggestion = closest_name(monitor.removeprefix(TRAINING), names)
    return f"; known are {', '.join(known)}." if suggestion is None else f"; did you mean {TRAINING}{suggestion}?"


def episode_metrics(trainer: Any) -> tuple[str, ...]:
    """Return the DataModule's metric names for finished episodes; empty if it does not declare them."""
    return DataApi.of_run(trainer).episode_metrics


def _knows_evaluation_metrics(trainer: Any, module: Any) -> bool:
    """Return True if all evaluation metrics are known.

    One class defines both the evaluation and the names of its metrics, and all callbacks are ours or Lightning's.
    """
    owners = (
        next((base for base in type(module).__mro__ if name in vars(base)), None)
        for name in ("validation_step", "evaluation_metrics")
    )
    first, second = owners
    return first is not None and first is second and _has_known_callbacks(trainer)


def _knows_training_metrics(trainer: Any, module: Any) -> bool:
    """Return True if no user code can log a metric in training."""
    data = DataApi.of_run(trainer)
    parts = (module, data.part, data.buffer, data.make_collector or None)
    is_listed = bool(LearnerApi.of(module).training_metrics)
    return is_listed and data.part is not None and all(map(_is_ours, parts)) and _has_known_callbacks(trainer)


def _has_known_callbacks(trainer: Any) -> bool:
    packages = {type(callback).__module__.partition(".")[0] for callback in trainer.callbacks}
    return packages <= {"lightning", _PACKAGE}


def _is_ours(part: Any) -> bool:
    """Return True for None, and if this package defines the object, or the class or function of a partial."""
    part = part.func if isinstance(part, partial) else part
    owner = part if inspect.isclass(part) or inspect.isroutine(part) else type(part)
    return part is None or owner.__module__.partition(".")[0] == _PACKAGE


def _is_similar_to_any(name: str, known: Iterable[str]) -> bool:
    """Return True if a name is similar to a known metric; ignore the prefix ``train/``."""
    return closest_name(name.removeprefix(TRAINING), [entry.removeprefix(TRAINING) for entry in known]) is not None
