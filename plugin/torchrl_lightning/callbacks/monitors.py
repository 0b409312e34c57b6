"""Names of metrics that callbacks monitor."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

from torchrl_lightning._logging import EVALUATION, TRAINING
from torchrl_lightning.fitting import Fault
from torchrl_lightning.protocols import DataApi, LearnerApi
from torchrl_lightning.suggestions import did_you_mean, nearest

_PACKAGE = __name__.partition(".")[0]
logger = logging.getLogger(__name__)


def check_monitor(monitor: Any, trainer: Any, module: Any) -> None:
    """Validate the name of a monitored metric before training, as far as the names of all metrics are known.

    All metrics of training are known if learner, DataModule, buffer, collector and callbacks are ours or Lightning's,
    and all metrics of an evaluation if the evaluation and the callbacks are. Otherwise a name that resembles none of
    ours may be a metric of the user's own: of a metric of training there is a warning.

    Raises:
        ValueError: No such metric will be logged.
    """
    if not isinstance(monitor, str):
        raise Fault(f"monitor={monitor!r} must be the name of a metric, such as eval/return.")
    if not monitor.startswith(TRAINING):
        known = LearnerApi.of(module).evaluation_metrics
        all_are_known = monitor.startswith(EVALUATION) and _evaluates_alone(trainer, module)
        if monitor not in known and (all_are_known or nearest(monitor, known) is not None):
            raise unknown_metric(monitor, known)
        return
    of_episodes = episode_metrics(trainer)
    known = (*of_episodes, *LearnerApi.of(module).training_metrics)
    if monitor in known:
        return
    # A module of the user's own may log a metric whose name resembles a loss of ours.
    if _trains_alone(trainer, module) or _resembles(monitor, of_episodes):
        raise unknown_metric(monitor, known)
    logger.warning(
        "monitor=%s is not a metric of torchrl-lightning%s Unless your own code logs it, the run ends with an error at "
        "its first evaluation.",
        monitor,
        _suggestion(monitor, known),
    )


def unknown_metric(monitor: str, known: Iterable[str]) -> Fault:
    """Return the error for a metric that is not among the known ones."""
    return Fault(f"monitor={monitor}: no such metric is logged{_suggestion(monitor, known)}")


def _suggestion(monitor: str, known: Iterable[str]) -> str:
    """End a message by the metric that is likely the right one, or by all; ``train/`` in front counts for nothing."""
    if not monitor.startswith(TRAINING):
        return did_you_mean(monitor, known)
    known = sorted(known)
    names = [name.removeprefix(TRAINING) for name in known if name.startswith(TRAINING)]
    meant = nearest(monitor.removeprefix(TRAINING), names)
    return f"; known are {', '.join(known)}." if meant is None else f"; did you mean {TRAINING}{meant}?"


def episode_metrics(trainer: Any) -> tuple[str, ...]:
    """Return the names of what a DataModule says about finished episodes, none if it does not say them."""
    return DataApi.of_run(trainer).episode_metrics


def _evaluates_alone(trainer: Any, module: Any) -> bool:
    """Return whether a learner's evaluation is ours, and no callback could log more in it."""
    owners = (
        next((base for base in type(module).__mro__ if name in vars(base)), None)
        for name in ("validation_step", "evaluation_metrics")
    )
    first, second = owners
    return first is not None and first is second and _has_known_callbacks(trainer)


def _trains_alone(trainer: Any, module: Any) -> bool:
    """Return whether nothing of the user's own takes part in training that could log a metric."""
    data = DataApi.of_run(trainer)
    parts = (module, data.part, data.buffer, data.make_collector or None)
    is_listed = bool(LearnerApi.of(module).training_metrics)
    return is_listed and data.part is not None and all(map(_is_ours, parts)) and _has_known_callbacks(trainer)


def _has_known_callbacks(trainer: Any) -> bool:
    packages = {type(callback).__module__.partition(".")[0] for callback in trainer.callbacks}
    return packages <= {"lightning", _PACKAGE}


def _is_ours(part: Any) -> bool:
    """Return whether an object, or the class or function in a partial, is ours; None counts as ours."""
    part = part.func if isinstance(part, partial) else part
    owner = part if inspect.isclass(part) or inspect.isroutine(part) else type(part)
    return part is None or owner.__module__.partition(".")[0] == _PACKAGE


def _resembles(name: str, known: Iterable[str]) -> bool:
    """Return whether a metric is likely one of the known ones; the common group ``train/`` counts for nothing."""
    return nearest(name.removeprefix(TRAINING), [entry.removeprefix(TRAINING) for entry in known]) is not None
