"""Names of metrics that callbacks monitor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchrl_lightning.fitting import Fault
from torchrl_lightning.suggestions import did_you_mean, nearest

EVALUATION, TRAINING = "eval/", "train/"


def check_monitor(monitor: Any, trainer: Any, module: Any) -> None:
    """Validate the name of a monitored metric before training, as far as the names of all metrics are known.

    A name that resembles none of ours may be a metric of the user's own, except for one of an evaluation that is
    entirely ours.

    Raises:
        ValueError: no such metric will be logged.
    """
    if not isinstance(monitor, str):
        raise Fault(f"monitor={monitor!r} must be the name of a metric, such as eval/return.")
    known = episode_metrics(trainer) if monitor.startswith(TRAINING) else getattr(module, "evaluation_metrics", ())
    if monitor in known:
        return
    all_are_known = monitor.startswith(EVALUATION) and _evaluates_alone(trainer, module)
    if all_are_known or _is_misspelt(monitor, known):
        raise unknown_metric(monitor, known)


def unknown_metric(monitor: str, known: Iterable[str]) -> Fault:
    """Return the error for a metric that is not among the known ones."""
    return Fault(f"monitor={monitor}: no such metric is logged{did_you_mean(monitor, known)}")


def episode_metrics(trainer: Any) -> tuple[str, ...]:
    """Return the names of what a DataModule says about finished episodes, none if it does not say them."""
    names: tuple[str, ...] = getattr(getattr(trainer, "datamodule", None), "episode_metrics", ())
    return names


def _evaluates_alone(trainer: Any, module: Any) -> bool:
    """Return whether a learner's evaluation is ours, and no callback could log more in it."""
    owners = (
        next((base for base in type(module).__mro__ if name in vars(base)), None)
        for name in ("validation_step", "evaluation_metrics")
    )
    packages = {type(callback).__module__.partition(".")[0] for callback in getattr(trainer, "callbacks", ())}
    first, second = owners
    return first is not None and first is second and packages <= {"lightning", __name__.partition(".")[0]}


def _is_misspelt(name: str, known: Iterable[str]) -> bool:
    """Return whether a metric is likely one of the known ones; a common group, such as ``train/``, says nothing."""
    if name.startswith(TRAINING):
        name, known = name.removeprefix(TRAINING), [each.removeprefix(TRAINING) for each in known]
    return nearest(name, known) is not None
