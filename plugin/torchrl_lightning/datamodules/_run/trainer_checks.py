"""Validate that Lightning settings and callbacks have the intended effect on a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

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
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy

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

_TUNER_METHODS: dict[type[Callback], str] = {
    BatchSizeFinder: "Tuner.scale_batch_size",
    LearningRateFinder: "Tuner.lr_find",
}
"""Callbacks that a method of ``Tuner`` adds to the trainer."""


class _Setting(NamedTuple):
    """A setting of ``Trainer`` that would have no effect, or another effect, on a run.

    Attributes:
        name: The name of the setting.
        value: Returns the setting's value in a trainer.
        is_accepted: Returns whether a value has the intended effect.
        expected: The accepted values.
        reason: Why other values are refused, with the remedy.
        manual: True if only modules with manual optimization refuse other values.
    """

    name: str
    value: Callable[[Any], Any]
    is_accepted: Callable[[Any], bool]
    expected: str
    reason: str
    manual: bool = False


def _keeps_weights(strategy: Any) -> bool:
    """Return whether each rank of a strategy has all weights."""
    return isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)


_SETTINGS = (
    _Setting(
        "accumulate_grad_batches",
        lambda trainer: trainer.accumulate_grad_batches,
        lambda value: value == 1,
        "1",
        "the module steps its optimizers itself. Use larger mini-batches",
        manual=True,
    ),
    _Setting(
        "gradient_clip_val",
        lambda trainer: trainer.gradient_clip_val,
        lambda value: not value,
        "None",
        "the module steps its optimizers itself. Use max_grad_norm of the module",
        manual=True,
    ),
    _Setting(
        "overfit_batches",
        lambda trainer: trainer.overfit_batches,
        lambda value: value == 0,
        "0",
        "each epoch draws new batches, so that no batch would be repeated. Limit an epoch by limit_train_batches",
    ),
    _Setting(
        "strategy",
        lambda trainer: trainer.strategy,
        lambda value: (
            isinstance(value, SingleDeviceStrategy | DDPStrategy) and not isinstance(value, DeepSpeedStrategy)
        ),
        "'auto' or a form of 'ddp'",
        "the policy acts between training steps and needs all weights. Use strategy='ddp' for several devices",
    ),
)


def check_surroundings() -> None:
    """Validate torch's global settings."""
    check_default_device()
    check_gradients_allowed()


def check_trainer(trainer: Any, learner: Any, data: Any, stage: str = "fit") -> None:
    """Validate a trainer's ranks, callbacks and settings; raise IncompatibleError if one of them cannot work.

    Args:
        trainer: The trainer.
        learner: The LightningModule.
        data: The DataModule.
        stage: The stage of the trainer. Outside of a fit, only callbacks that would change the run are refused.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, BatchSizeFinder):
            reason = "repeats runs with other batch sizes, and each run would collect frames or play other episodes"
            raise _refused(trainer, callback, reason, "Set the size of mini-batches")
    if stage != "fit":
        return
    for part, api in ((data, DataApi.of(data)), (learner, LearnerApi.of(learner))):
        if trainer.world_size > 1 and not api.supports_several_ranks:
            raise IncompatibleError(
                f"devices of the trainer must be 1 for {type(part).__name__}, which fits one world model to one "
                f"buffer, got {trainer.world_size} ranks. Set devices=1 and num_nodes=1."
            )
    name, builds_networks = type(learner).__name__, LearnerApi.of(learner).is_built is not None
    is_manual = not learner.automatic_optimization
    for callback in trainer.callbacks:
        if is_manual and (remedy := _remedy(callback, _FOR_MANUAL_OPTIMIZATION)):
            reason = f"needs automatic optimization, but {name} has automatic_optimization=False"
            raise _refused(trainer, callback, reason, remedy)
        if builds_networks and (remedy := _remedy(callback, _FOR_OWN_NETWORKS)):
            raise _refused(trainer, callback, f"replaces parameters that {name} updates in place", remedy)
    for setting in _SETTINGS:
        value = setting.value(trainer)
        if (is_manual or not setting.manual) and not setting.is_accepted(value):
            text = repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"
            raise IncompatibleError(f"{setting.name} must be {setting.expected}, got {text}: {setting.reason}.")
    if trainer.gradient_clip_algorithm is not None and trainer.gradient_clip_val is None:
        raise IncompatibleError(
            f"gradient_clip_val must be set with gradient_clip_algorithm={trainer.gradient_clip_algorithm.value!r} of "
            f"the trainer, got None, which clips nothing. Leave both out, and use max_grad_norm of {name} if it exists."
        )


def _refused(trainer: Any, callback: Callback, reason: str, remedy: str) -> IncompatibleError:
    """Return the error for a callback; remove a callback of ``Tuner``, which would make later fits fail."""
    kind = next((kind for kind in _TUNER_METHODS if isinstance(callback, kind)), None)
    subject = f"callbacks must not contain a {type(callback).__name__}, which"
    if kind is not None and vars(callback)["_early_exit"]:
        trainer.callbacks.remove(callback)
        subject = f"{_TUNER_METHODS[kind]} must not be used: it"
    return IncompatibleError(f"{subject} {reason}. {remedy}.")


def check_batches(trainer: Any, training: int, validation: int) -> None:
    """Validate that a trainer's limits leave at least one batch of each loader; raise IncompatibleError if not.

    Lightning's own checks run later, when the loaders exist.

    Args:
        trainer: The trainer.
        training: Batches of the first training epoch.
        validation: Batches of the first validation.
    """
    limit = trainer.limit_train_batches
    limits = (("limit_train_batches", training, limit), ("limit_val_batches", validation, trainer.limit_val_batches))
    for setting, batches, share in limits:
        if isinstance(share, float) and share > 0 and int(batches * share) == 0:
            raise IncompatibleError(
                f"{setting} must be at least {1 / batches:.4g}, 0 or an integer, got {share}, which leaves none of "
                f"{batches} batches. Set a number of batches."
            )
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
