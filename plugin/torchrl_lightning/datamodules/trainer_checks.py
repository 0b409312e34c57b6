"""Settings and callbacks of Lightning that have no effect on a run, or another one than they name."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.spike import SpikeDetection

from torchrl_lightning.datamodules.learner import BuildsNetworks
from torchrl_lightning.fitting import MisfitError
from torchrl_lightning.torch_defaults import check_default_device, check_gradients_allowed

_FOR_MANUAL_OPTIMIZATION: dict[type[Callback], str] = {
    GradientAccumulationScheduler: "Take larger mini-batches",
    LearningRateFinder: "Search for the rate by hparams_search=optuna, or set learning_rate",
    StochasticWeightAveraging: "Use WeightAveraging or EMAWeightAveraging",
    SpikeDetection: "Watch the logged losses, or clip gradients by max_grad_norm",
}
"""Callbacks that act on what ``training_step`` returns, or on Lightning's own optimization; what helps instead."""

_FOR_OWN_NETWORKS: dict[type[Callback], str] = {
    BaseFinetuning: "Freeze parameters by requires_grad_(False) after build(specs) of the module",
    ModelPruning: "Prune the trained module by torch.nn.utils.prune",
}
"""Callbacks that replace parameters, or group them anew, which our optimizers store in one block of memory."""


def check_surroundings(trainer: Any, learner: Any) -> None:
    """Validate what a fit runs in: torch's global settings, and the trainer, if there is one."""
    check_default_device()
    check_gradients_allowed()
    if trainer is not None:
        check_trainer(trainer, learner)


def check_trainer(trainer: Any, learner: Any) -> None:
    """Validate a trainer's callbacks and settings; raise MisfitError if one of them cannot have its effect."""
    name = type(learner).__name__
    for callback in trainer.callbacks:
        kind = type(callback).__name__
        if isinstance(callback, BatchSizeFinder):
            raise MisfitError(
                f"callbacks must not hold a {kind}, which repeats fits, and each would collect frames of the run. Set "
                "the size of mini-batches."
            )
        if not learner.automatic_optimization and (remedy := _remedy(callback, _FOR_MANUAL_OPTIMIZATION)):
            raise MisfitError(
                f"callbacks must not hold a {kind}, which needs automatic optimization, but {name} has "
                f"automatic_optimization=False. {remedy}."
            )
        if isinstance(learner, BuildsNetworks) and (remedy := _remedy(callback, _FOR_OWN_NETWORKS)):
            raise MisfitError(
                f"callbacks must not hold a {kind}, which exchanges parameters that {name} updates in place. {remedy}."
            )
    if trainer.gradient_clip_algorithm is not None and trainer.gradient_clip_val is None:
        raise MisfitError(
            f"gradient_clip_algorithm={trainer.gradient_clip_algorithm} of the trainer must come with "
            f"gradient_clip_val, got None, which clips nothing. Leave it out, and use max_grad_norm of {name}, if it "
            "has one."
        )


def _remedy(callback: Callback, remedies: dict[type[Callback], str]) -> str | None:
    return next((remedy for kind, remedy in remedies.items() if isinstance(callback, kind)), None)
