"""Advantage actor-critic."""

from __future__ import annotations

from typing import Any

from torchrl_lightning.learn.actors import Actor
from torchrl_lightning.learn.base import ActorCriticModule
from torchrl_lightning.learn.critics import Critic
from torchrl_lightning.learn.losses import DirectA2CLoss
from torchrl_lightning.learn.networks import Network


class A2CModule(ActorCriticModule):
    """Advantage actor-critic (Mnih et al., 2016), over TorchRL's `A2CLoss`.

    Args:
        network: What comes before the heads; `MLPNetwork()` when not given.
        entropy_coeff: Weight of the entropy bonus.
        critic_coeff: Weight of the critic's loss.
        loss_critic_type: `"l2"`, `"smooth_l1"` or `"l1"`.
        normalize_advantage: Standardise the advantage within each mini-batch.
        extrinsic_coeff: Weight of the advantage of the environment's reward.
        intrinsic_coeff: Weight of the intrinsic advantage, where `intrinsic` is given.
        kwargs: As for `ActorCriticModule`.

    Example:
        >>> from types import SimpleNamespace
        >>> from torchrl.data import Categorical, Composite, Unbounded
        >>> specs = SimpleNamespace(observation=Composite(observation=Unbounded(4)), action=Categorical(2))
        >>> A2CModule().build(specs).critic.out_keys
        ['state_value']
    """

    def __init__(
        self,
        network: Network | None = None,
        *,
        entropy_coeff: float = 0.0,
        critic_coeff: float = 0.5,
        loss_critic_type: str = "l2",
        normalize_advantage: bool = False,
        extrinsic_coeff: float = 1.0,
        intrinsic_coeff: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        self.loss_arguments: dict[str, Any] = {
            "entropy_coeff": entropy_coeff,
            "critic_coeff": critic_coeff,
            "loss_critic_type": loss_critic_type,
            "normalize_advantage": normalize_advantage,
            "extrinsic_coeff": extrinsic_coeff,
            "intrinsic_coeff": intrinsic_coeff if self.intrinsic is not None else 0.0,
        }

    def build_loss(self, actor: Actor, critic: Critic) -> DirectA2CLoss:
        """Return the actor-critic loss."""
        return DirectA2CLoss(actor, critic, **self.loss_arguments)
