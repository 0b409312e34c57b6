"""Proximal policy optimisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning.learn.agents import OptimizerFactory
from torchrl_lightning.learn.base import ActorCriticModule, require
from torchrl_lightning.learn.losses import clipped_surrogate_loss
from torchrl_lightning.learn.networks import Network
from torchrl_lightning.learn.rnd import RandomNetworkDistillation
from torchrl_lightning.learn.schedules import Schedule
from torchrl_lightning.parts import passed_on
from torchrl_lightning.ranges import optional, positive


class PPOModule(ActorCriticModule):
    """PPO with a clipped objective (Schulman et al., 2017).

    Args:
        network: Network in front of the heads; ``MLPNetwork()`` by default.
        clip_epsilon: Clipping range of the probability ratio around 1.
        entropy_coeff: Weight of the entropy bonus.
        target_kl: Skip the rest of an epoch once the approximate divergence exceeds 1.5 times this.
        clip_schedule: Schedule of ``clip_epsilon`` over frames.
        entropy_schedule: Schedule of ``entropy_coeff`` over frames.
        critic_coeff: As in :class:`ActorCriticModule`, like everything that is not named here.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Categorical, Composite, Unbounded
        >>> specs = SimpleNamespace(observation=Composite(observation=Unbounded(4)), action=Categorical(2))
        >>> module = PPOModule(entropy_coeff=0.01).build(specs)
        >>> module.policy(TensorDict(observation=torch.zeros(3, 4), batch_size=3))["action"].shape
        torch.Size([3])
    """

    clip_epsilon: Tensor

    def __init__(
        self,
        network: Network | None = None,
        *,
        clip_epsilon: float = 0.2,
        entropy_coeff: float = 0.0,
        critic_coeff: float = 0.5,
        loss_critic_type: str = "l2",
        clip_value: float | None = None,
        normalize_advantage: bool = True,
        target_kl: float | None = None,
        extrinsic_coeff: float = 1.0,
        intrinsic_coeff: float = 1.0,
        clip_schedule: str | Schedule = "constant",
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
        compile: bool = False,
    ) -> None:
        positive(clip_epsilon, "clip_epsilon")
        optional(positive)(target_kl, "target_kl")
        super().__init__(**passed_on(ActorCriticModule, locals()))
        self.add_coefficient("entropy_coeff", entropy_coeff, entropy_schedule)
        self.add_coefficient("clip_epsilon", clip_epsilon, clip_schedule)
        self.target_kl = target_kl

    def terms(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the clipped objective, the entropy bonus and the critics' losses, and how far the policy moved."""
        log_prob, entropy, values = self.evaluate(batch)
        log_ratio = log_prob - require(batch, "action_log_prob")
        moved = log_ratio.detach()
        return {
            "loss_objective": clipped_surrogate_loss(log_ratio, self.advantage(batch), self.clip_epsilon),
            **self.entropy_terms(entropy),
            **self.critic_terms(batch, values),
            "kl_approx": -moved.mean(),
            "clip_fraction": (moved.expm1().abs() > self.clip_epsilon).float().mean(),
        }

    def should_stop(self, terms: Mapping[str, Tensor]) -> bool:
        """Return whether the policy has moved too far from the one that acted; all ranks decide alike."""
        if self.target_kl is None:
            return False
        divergence = self.trainer.strategy.reduce(terms["kl_approx"], reduce_op="mean")
        return float(divergence) > 1.5 * self.target_kl
