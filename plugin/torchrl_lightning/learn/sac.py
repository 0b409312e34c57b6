"""Soft actor-critic."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchrl_lightning.learn.agents import OptimizerFactory
from torchrl_lightning.learn.exploration import StochasticPolicy
from torchrl_lightning.learn.networks import Network
from torchrl_lightning.learn.off_policy import OffPolicyModule
from torchrl_lightning.learn.q_networks import build_action_critic
from torchrl_lightning.learn.schedules import Schedule
from torchrl_lightning.learn.squashed import build_squashed_actor
from torchrl_lightning.learn.td_losses import DirectSACLoss
from torchrl_lightning.learn.trunks import RecurrentTrunk
from torchrl_lightning.ranges import integer, positive


class SACModule(OffPolicyModule):
    """SAC with a learnt temperature (Haarnoja et al., 2018), over TorchRL's ``SACLoss``; continuous bounded actions.

    With a ``RecurrentNetwork``, actor and critics share the features of a memory, which starts from the stored states
    and is trained by the critics' loss.

    Args:
        network: Network in front of the heads; two layers of 256 rectified units by default.
        num_critics: Number of critics; the smallest of their values is used.
        alpha: Initial temperature.
        learn_alpha: Learn the temperature, so that the entropy follows ``target_entropy``.
        target_entropy: Target entropy in nats; minus the number of action dimensions by default.
        alpha_optimizer: A separate optimizer for the temperature, as a callable; optional.
        loss_function: ``"l2"``, ``"smooth_l1"`` or ``"l1"``.
        gamma: Discount of one step.
        learning_rate: Learning rate of the default optimizer, fused Adam over all parameters.
        optimizer: A callable (e.g. a ``functools.partial``) that takes parameters and returns an optimizer.
        critic_optimizer: A separate optimizer for the parameters of the critics (and of a memory); optional.
        max_grad_norm: Clip the gradient of each optimizer's parameters to this norm; None does not clip.
        schedule: Schedule of the learning rates over frames: ``"constant"``, ``"linear"``, ``"cosine"`` or a function
            of progress.
        tau: Fraction by which the target networks move towards the online ones at each of their updates.
        target_interval: Updates between two updates of the target networks.
        refresh_states: Recompute the recurrent states of each batch with the current ``RecurrentNetwork``;
            ``ReplayDataModule`` then replaces the stored ones, so that they do not grow stale.

    Example:
        >>> from types import SimpleNamespace
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded, Composite, Unbounded
        >>> specs = SimpleNamespace(observation=Composite(observation=Unbounded(3)), action=Bounded(-2.0, 2.0, (1,)))
        >>> module = SACModule().build(specs)
        >>> module.policy(TensorDict(observation=torch.zeros(4, 3), batch_size=4))["action"].shape
        torch.Size([4, 1])
    """

    def __init__(
        self,
        network: Network | None = None,
        *,
        num_critics: int = 2,
        alpha: float = 1.0,
        learn_alpha: bool = True,
        target_entropy: float | None = None,
        alpha_optimizer: OptimizerFactory | None = None,
        loss_function: str = "l2",
        gamma: float = 0.99,
        learning_rate: float = 3e-4,
        optimizer: OptimizerFactory | None = None,
        critic_optimizer: OptimizerFactory | None = None,
        max_grad_norm: float | None = None,
        schedule: str | Schedule = "constant",
        tau: float = 0.005,
        target_interval: int = 1,
        refresh_states: bool = False,
    ) -> None:
        super().__init__(
            network,
            gamma=gamma,
            learning_rate=learning_rate,
            optimizer=optimizer,
            critic_optimizer=critic_optimizer,
            max_grad_norm=max_grad_norm,
            schedule=schedule,
            tau=tau,
            target_interval=target_interval,
            refresh_states=refresh_states,
        )
        integer(num_critics, "num_critics")
        positive(alpha, "alpha")
        if alpha_optimizer is not None and not learn_alpha:
            raise ValueError("alpha_optimizer has nothing to learn with learn_alpha=False; leave one of them out")
        self.num_critics, self.alpha_optimizer = num_critics, alpha_optimizer
        self.loss_arguments: dict[str, Any] = {
            "loss_function": loss_function,
            "alpha_init": alpha,
            "fixed_alpha": not learn_alpha,
            "target_entropy": "auto" if target_entropy is None else target_entropy,
        }

    def build_loss(
        self, specs: Any, network: Network, memory: RecurrentTrunk | None
    ) -> tuple[DirectSACLoss, StochasticPolicy]:
        """Return the loss and the policy."""
        actor = build_squashed_actor(specs, network)
        critics = [build_action_critic(specs, network) for _ in range(self.num_critics)]
        loss = DirectSACLoss(actor, critics, memory, gamma=self.gamma, **self.loss_arguments)
        return loss, StochasticPolicy(actor, memory)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return actor, critics (with the memory) and temperature."""
        loss = self.loss
        groups = {"actor": list(loss.actor_network_params.parameters()), "critic": critic_parameters(loss)}
        if not loss.fixed_alpha and self.alpha_optimizer is None:
            groups["alpha"] = [loss.log_alpha]
        return groups

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the base, and one for the temperature if it has its own."""
        optimizers = super().configure_optimizers()
        if self.alpha_optimizer is not None:
            optimizers.append(self.build_optimizer(self.alpha_optimizer, "alpha_grad_norm", [self.loss.log_alpha]))
        return optimizers


def critic_parameters(loss: Any) -> list[nn.Parameter]:
    """Return the parameters that the critics' loss trains: those of the critics and of a memory."""
    memory = list(loss.memory_network_params.parameters()) if loss.has_memory else []
    return [*loss.qvalue_network_params.parameters(), *memory]
