"""The LightningModule around an on-policy loss: networks from specs, updates, schedules, metrics, evaluation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives import LossModule, ValueEstimators

from torchrl_lightning.learn.actors import Actor, build_actor
from torchrl_lightning.learn.agents import AgentModule, OptimizerFactory
from torchrl_lightning.learn.critics import Critic, build_critic
from torchrl_lightning.learn.losses import target_key
from torchrl_lightning.learn.networks import MLPNetwork, Network
from torchrl_lightning.learn.rnd import RandomNetworkDistillation
from torchrl_lightning.learn.schedules import Schedule, as_schedule
from torchrl_lightning.ranges import positive

STATE = "on_policy"


class ActorCriticModule(AgentModule):
    """An actor and a critic that learn from the mini-batches of an on-policy DataModule.

    The networks are built in ``configure_model`` from ``trainer.datamodule.specs``, or by ``build(specs)`` without a
    trainer, and are registered in ``loss`` only. Subclasses define the loss in ``build_loss``.

    Args:
        network: Network in front of the heads; ``MLPNetwork()`` by default.
        distribution: Distribution of continuous actions: ``"normal"`` (clipped; the default) or ``"tanh_normal"``.
        initial_std: Initial standard deviation of continuous actions, in units of half the action range.
        critics: Names of several critics of the same reward; their keys are ``("state_value", name)``.
        separate_critics: Give each critic head its own trunk.
        intrinsic: Source of intrinsic rewards, trained along; adds an ``intrinsic_state_value`` head.
        optimizer: A callable (e.g. a ``functools.partial``) that takes parameters and returns an optimizer; fused Adam
            by default.
        critic_optimizer: A separate optimizer for the critic's own parameters; optional.
        learning_rate: Learning rate of the default optimizer.
        max_grad_norm: Clip the gradient of each optimizer's parameters to this norm; None does not clip.
        schedule: Schedule of the learning rates over frames: ``"constant"``, ``"linear"``, ``"cosine"`` or a function
            of progress.
        entropy_schedule: Schedule of the entropy coefficient, likewise.

    Raises:
        ValueError: The trainer's precision is ``64-true``, ``bf16-true`` or the like.
    """

    adam_eps: ClassVar[float] = 1e-5

    def __init__(
        self,
        network: Network | None = None,
        *,
        distribution: str = "auto",
        initial_std: float = 1.0,
        critics: Sequence[str] | None = None,
        separate_critics: bool = False,
        intrinsic: RandomNetworkDistillation | None = None,
        optimizer: OptimizerFactory | None = None,
        critic_optimizer: OptimizerFactory | None = None,
        learning_rate: float = 3e-4,
        max_grad_norm: float | None = 0.5,
        schedule: str | Schedule = "constant",
        entropy_schedule: str | Schedule = "constant",
    ) -> None:
        positive(initial_std, "initial_std")
        super().__init__(
            network or MLPNetwork(),
            learning_rate=learning_rate,
            optimizer=optimizer,
            critic_optimizer=critic_optimizer,
            max_grad_norm=max_grad_norm,
            schedule=schedule,
        )
        self.distribution, self.initial_std = distribution, initial_std
        self.critic_names, self.separate_critics = critics, separate_critics
        self.intrinsic = intrinsic
        self.entropy_schedule = as_schedule(entropy_schedule)
        self.loss: LossModule | None = None
        self._coefficients: dict[str, float] = {}
        self._stopped = False

    @abstractmethod
    def build_loss(self, actor: Actor, critic: Critic) -> LossModule:
        """Return the loss; it must have a method ``terms(batch)`` that returns ``loss_...`` parts and diagnostics."""

    # -- networks ---------------------------------------------------------------------------------------------------

    @property
    def value_keys(self) -> list[NestedKey]:
        """Keys that the critic writes, the intrinsic value last."""
        keys: list[NestedKey] = [("state_value", name) for name in self.critic_names or ()] or ["state_value"]
        return [*keys, "intrinsic_state_value"] if self.intrinsic is not None else keys

    def build(self, specs: Any) -> Self:
        """Build networks and loss for an environment's specs, once; return the module."""
        if self.loss is None:
            actor = build_actor(specs, self.network, distribution=self.distribution, initial_std=self.initial_std)
            critic = build_critic(
                specs, self.network, out_keys=self.value_keys, actor=actor, separate=self.separate_critics
            )
            loss = self.build_loss(actor, critic)
            # Made here: a loss that makes it at first use changes its state-dict keys then.
            loss.make_value_estimator(ValueEstimators.GAE, gamma=0.99, lmbda=0.95)
            if self.intrinsic is not None:
                self.intrinsic.build(specs)
            self.loss = loss
            self._coefficients = {
                name: float(value) for name, value in loss.named_buffers() if name in self.scheduled_coefficients
            }
        return self

    @property
    def policy(self) -> Actor:
        """The actor."""
        return self._built().actor_network

    @property
    def critic(self) -> Critic:
        """The critic."""
        return self._built().critic_network

    def annotate(self, rollout: TensorDictBase) -> None:
        """Add ``("next", "intrinsic_reward")`` to a time-major rollout, where the module has an intrinsic stream."""
        if self.intrinsic is not None:
            self.intrinsic.annotate(rollout)

    # -- optimizers and schedules -----------------------------------------------------------------------------------

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return one optimizer, or a second one for the critic's own parameters."""
        actor, critic = list(self.policy.parameters()), list(self.critic.parameters())
        extra = list(self.intrinsic.predictor_parameters()) if self.intrinsic is not None else []
        return self.build_optimizers(actor, critic, extra)

    @property
    def scheduled_coefficients(self) -> Mapping[str, Schedule]:
        """Buffers of the loss that follow a schedule."""
        return {"entropy_coeff": self.entropy_schedule}

    def on_train_epoch_start(self) -> None:
        """Set learning rates and coefficients from the frames, so that a resumed run has the same."""
        self._stopped = False
        super().on_train_epoch_start()
        for name, schedule in self.scheduled_coefficients.items():
            if name in self._coefficients:
                getattr(self._built(), name).fill_(self._coefficients[name] * schedule(self.progress))

    # -- state ------------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save whether the rest of the epoch is skipped."""
        checkpoint[STATE] = {"stopped": self._stopped}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore whether the rest of the epoch is skipped.

        Raises:
            ValueError: The checkpoint belongs to another environment.
        """
        super().on_load_checkpoint(checkpoint)
        self._stopped = bool(checkpoint.get(STATE, {}).get("stopped", False))

    # -- learning ---------------------------------------------------------------------------------------------------

    def training_step(self, batch: TensorDictBase, batch_idx: int) -> None:
        """Update on one mini-batch."""
        if self._stopped:
            return
        terms = self._built().terms(batch)
        if self.intrinsic is not None:
            terms["loss_intrinsic_predictor"] = self.intrinsic.loss(batch)
        if self.should_stop(terms):
            self._stopped = True
            return
        losses = [value for name, value in terms.items() if name.startswith("loss_")]
        norms = self.update(sum(losses[1:], start=losses[0]))
        self.accumulate(terms | norms)
        key = self.critic.out_keys[0]
        value, target = batch.get(key, None), batch.get(target_key(key), None)
        if value is not None and target is not None:
            self.metric_sums.add_prediction(value, target)

    def should_stop(self, terms: Mapping[str, Tensor]) -> bool:
        """Return whether to skip this update and the rest of the epoch."""
        return False
