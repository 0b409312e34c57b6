"""Build the networks of a trainer's LightningModule early, and look up its policy."""

from __future__ import annotations

from typing import Any

from torchrl_lightning._core.errors import check_compatible
from torchrl_lightning._core.protocols import LearnerApi


def build_learner(module: Any, data: Any) -> None:
    """Build the networks of a trainer's module before callbacks read the module's parameters in their setup."""
    if LearnerApi.of(module).is_built is not False:
        return
    check_compatible(module, data)
    strategy, precision = data.trainer.strategy, data.trainer.precision_plugin
    with strategy.tensor_init_context(), strategy.model_sharded_context(), precision.module_init_context():
        module.configure_model()


def get_learner(trainer: Any, owner: str) -> LearnerApi:
    """Return the API of a trainer's module; raise RuntimeError without a module, TypeError without a policy."""
    module = trainer.lightning_module if trainer is not None else None
    if module is None:
        raise RuntimeError(
            f"{owner} needs the LightningModule of a trainer, because its policy acts. Iterate the loaders by "
            "Trainer.fit or Trainer.validate."
        )
    learner = LearnerApi.of(module)
    if learner.policy is None:
        raise TypeError(
            f"{type(module).__name__} must have an attribute `policy`, the TensorDict module that writes the action. "
            "Set it, e.g. in configure_model: self.policy = build_actor(self.trainer.datamodule.specs)."
        )
    return learner
