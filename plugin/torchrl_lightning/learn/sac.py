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


class SACModule(OffPolicyModule):
    """SAC with a learnt temperature (Haarnoja et al., 2018), over TorchRL's `SACLoss`; continuous bounded actions.

    With a `RecurrentNetwork` the critics' loss trains a memory whose features actor and critics share, from the
    states that the buffer holds.

    Args:
        network: What comes before the heads; two layers of 256 rectified units when not given.
        num_critics: How many critics; the least of their values counts.
        alpha: First temperature.
        learn_alpha: Whether the temperature follows `target_entropy`.
        target_entropy: In nats; minus the number of action dimensions when not given.
        alpha_optimizer: A callable from parameters to an optimizer for the temperature, if it is to have one.
        loss_function: `"l2"`, `"smooth_l1"` or `"l1"`.
        gamma: Discount of one step.
        learning_rate: For the default optimizer, fused Adam over all parameters.
        optimizer: A callable (a `functools.partial`) from parameters to an optimizer.
        critic_optimizer: The same for the critics' (and a memory's) own parameters, if they are to have one.
        max_grad_norm: Clip the gradient of each optimizer's parameters to this norm; None does not clip.
        schedule: Of the learning rates over frames: `"constant"`, `"linear"`, `"cosine"` or a function of progress.
        tau: Share of the online parameters that the target networks take over at each of their updates.
        target_interval: Updates between two updates of the target networks.
        updates_per_step: Equal parts of each batch, with an update on each: spreads Lightning's cost of a step over
            several small updates.
        refresh_states: Whether a `RecurrentNetwork` rewrites the recurrent states of each batch as it would meet them
            now; `ReplayDataModule` then puts them in the place of those stored, so that they do not grow stale.

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
        updates_per_step: int = 1,
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
            updates_per_step=updates_per_step,
            refresh_states=refresh_states,
        )
        if num_critics < 1 or alpha <= 0:
            raise ValueError(f"num_critics={num_critics} must be at least 1 and alpha={alpha} above 0")
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
        """Lightning's hook: as the base, and one for the temperature where asked for."""
        optimizers = super().configure_optimizers()
        if self.alpha_optimizer is not None:
            self._groups.append([self.loss.log_alpha])
            optimizers.append(self.alpha_optimizer(self._groups[-1]))
        return optimizers


def critic_parameters(loss: Any) -> list[nn.Parameter]:
    """Return what the critics' loss trains: the critics and, if there is one, the memory."""
    memory = list(loss.memory_network_params.parameters()) if loss.has_memory else []
    return [*loss.qvalue_network_params.parameters(), *memory]
