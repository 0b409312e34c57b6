"""Validate that Lightning settings and callbacks have the intended effect on a run."""

from __future__ import annotations

from typing import Any, cast

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.callbacks.spike import SpikeDetection

from torchrl_lightning._core.errors import IncompatibleError
from torchrl_lightning._core.protocols import DataApi, LearnerApi
from torchrl_lightning._core.torch_defaults import check_default_device, check_gradients_allowed

_FOR_MANUAL_OPTIMIZATION: dict[type[Callback], str] = {
    GradientAccumulationScheduler: "Use larger mini-batches",
    LearningRateFinder: "Search for the rate by hparams_search=optuna, or set learning_rate",
    StochasticWeightAveraging: "Use WeightAveraging or EMAWeightAveraging",
    SpikeDetection: "Monitor the logged losses, or clip gradients by max_grad_norm",
}
"""Callbacks that need the result of ``training_step`` or Lightning's automatic optimization, each with a remedy."""

_FOR_OWN_NETWORKS: dict[type[Callback], str] = {
    BaseFinetuning: "Freeze parameters by requires_grad_(False) after build(specs) of the module",
    ModelPruning: "Prune the trained module by torch.nn.utils.prune",
}
"""Callbacks that replace or regroup parameters, which our optimizers store in one block of memory."""


def check_surroundings(trainer: Any, learner: Any, data: Any) -> None:
    """Validate torch's global settings, and the trainer if it is not None."""
    check_default_device()
    check_gradients_allowed()
    if trainer is not None:
        check_trainer(trainer, learner, data)


def check_trainer(trainer: Any, learner: Any, data: Any) -> None:
    """Validate a trainer's ranks, callbacks and settings; raise IncompatibleError if one of them cannot work."""
    for part, api in ((data, DataApi.of(data)), (learner, LearnerApi.of(learner))):
        if trainer.world_size > 1 and not api.supports_several_ranks:
            raise IncompatibleError(
                f"devices of the trainer must be 1 for {type(part).__name__}, which fits one world model to one "
                f"buffer, got {trainer.world_size} ranks. Set devices=1 and num_nodes=1."
            )
    name, builds_networks = type(learner).__name__, LearnerApi.of(learner).is_built is not None
    for callback in trainer.callbacks:
        kind = type(callback).__name__
        if isinstance(callback, BatchSizeFinder):
            raise IncompatibleError(
                f"callbacks must not contain a {kind}: it repeats fits, and each fit would collect frames of the run. "
                "Set the size of mini-batches."
            )
        if not learner.automatic_optimization and (remedy := _remedy(callback, _FOR_MANUAL_OPTIMIZATION)):
            raise IncompatibleError(
                f"callbacks must not contain a {kind}, which needs automatic optimization, but {name} has "
                f"automatic_optimization=False. {remedy}."
            )
        if builds_networks and (remedy := _remedy(callback, _FOR_OWN_NETWORKS)):
            raise IncompatibleError(
                f"callbacks must not contain a {kind}, because it replaces parameters that {name} updates "
                f"in place. {remedy}."
            )
    if trainer.gradient_clip_algorithm is not None and trainer.gradient_clip_val is None:
        raise IncompatibleError(
            f"gradient_clip_val must be set with gradient_clip_algorithm={trainer.gradient_clip_algorithm.value!r} of "
            f"the trainer, got None, which clips nothing. Leave both out, and use max_grad_norm of {name} if it exists."
        )


def check_batches(trainer: Any, training: int, validation: int) -> None:
    """Validate that a trainer's limits leave at least one batch of each loader; raise IncompatibleError if not.

    Lightning's own checks run later, when the loaders exist.

    Args:
        trainer: The trainer.
        training: Batches of the first training epoch.
        validation: Batches of the first validation.
    """
    name = "overfit_batches" if trainer.overfit_batches > 0 else ""
    limits = (name or "limit_train_batches", training, trainer.limit_train_batches)
    for setting, batches, limit in (limits, (name or "limit_val_batches", validation, trainer.limit_val_batches)):
        if isinstance(limit, float) and limit > 0 and int(batches * limit) == 0:
            raise IncompatibleError(
                f"{setting} must be at least {1 / batches:.4g}, 0 or an integer, got {limit}, which leaves none of "
                f"{batches} batches. Set a number of batches."
            )
    limit = limits[2]
    served = min(training, limit) if isinstance(limit, int) else int(training * limit)
    interval = val_check_interval(trainer)
    per_epoch = trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0
    if isinstance(interval, int) and per_epoch and 0 < served < interval:
        raise IncompatibleError(
            f"val_check_interval must be at most {served}, the training batches of the first epoch, got {interval}. "
            "Lower it, or set check_val_every_n_epoch=None, so that it counts the batches of the whole run."
        )


def val_check_interval(trainer: Any) -> int | float:
    """Return ``val_check_interval``. A trainer with time intervals does not have it; return the default then."""
    return cast(int | float, vars(trainer).get("val_check_interval", 1.0))


def is_endless(trainer: Any) -> bool:
    """Return whether a trainer limits neither epochs nor steps nor time.

    Examples:
        >>> from lightning import Trainer
        >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        >>> is_endless(Trainer(max_epochs=-1, **quiet)), is_endless(Trainer(max_time="00:00:01:00", **quiet))
        (True, False)
    """
    timers = (callback for callback in trainer.callbacks if isinstance(callback, Timer))
    is_timed = any(timer.time_remaining() is not None for timer in timers)
    return trainer.max_epochs in (-1, None) and trainer.max_steps in (-1, None) and not is_timed


def _remedy(callback: Callback, remedies: dict[type[Callback], str]) -> str | None:
    return next((remedy for kind, remedy in remedies.items() if isinstance(callback, kind)), None)
