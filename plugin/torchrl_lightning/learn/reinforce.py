"""REINFORCE with a baseline."""

from __future__ import annotations

from typing import Any

from torchrl_lightning.learn.actors import Actor
from torchrl_lightning.learn.base import ActorCriticModule
from torchrl_lightning.learn.critics import Critic
from torchrl_lightning.learn.losses import DirectReinforceLoss
from torchrl_lightning.learn.networks import Network


class ReinforceModule(ActorCriticModule):
    """REINFORCE with a learnt baseline (Williams, 1992), over TorchRL's `ReinforceLoss`.

    Args:
        network: What comes before the heads; `MLPNetwork()` when not given.
        loss_critic_type: `"l2"`, `"smooth_l1"` or `"l1"`.
        kwargs: As for `ActorCriticModule`.

    Raises:
        ValueError: An intrinsic stream is given, for which this loss has no term.

    Example:
        >>> from types import SimpleNamespace
        >>> from torchrl.data import Categorical, Composite, Unbounded
        >>> specs = SimpleNamespace(observation=Composite(observation=Unbounded(4)), action=Categorical(2))
        >>> ReinforceModule().build(specs).policy.log_prob_keys
        ['action_log_prob']
    """

    def __init__(self, network: Network | None = None, *, loss_critic_type: str = "l2", **kwargs: Any) -> None:
        super().__init__(network, **kwargs)
        if self.intrinsic is not None:
            raise ValueError("ReinforceModule has no intrinsic stream; use PPOModule, A2CModule or VTraceModule")
        self.loss_critic_type = loss_critic_type

    def build_loss(self, actor: Actor, critic: Critic) -> DirectReinforceLoss:
        """Return the loss."""
        return DirectReinforceLoss(actor, critic, loss_critic_type=self.loss_critic_type)
