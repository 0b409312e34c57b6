"""Soft actor-critic."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lightning.learn.agents import OptimizerFactory
from torchrl_lightning.learn.exploration import StochasticPolicy
from torchrl_lightning.learn.losses import check_distance, soft_value, temperature_loss
from torchrl_lightning.learn.networks import Network
from torchrl_lightning.learn.off_policy import OffPolicyModule, Terms
from torchrl_lightning.learn.q_networks import ActionValue, CriticEnsemble
from torchrl_lightning.learn.schedules import Schedule
from torchrl_lightning.learn.squashed import build_squashed_actor
from torchrl_lightning.learn.transitions import Transitions
from torchrl_lightning.parts import passed_on
from torchrl_lightning.ranges import integer, positive


class SACModule(OffPolicyModule):
    r"""SAC with a learnt temperature (Haarnoja et al., 2018); continuous bounded actions.

    It minimises, with target critics \(\bar Q_i\) and \(a' \sim \pi(s')\), \(\tilde a \sim \pi(s)\):
    critics \(\sum_i d(Q_i(s, a), r + \gamma (\min_j \bar Q_j(s', a') - \alpha \log\pi(a'|s')))\),
    actor \(\alpha \log\pi(\tilde a|s) - \min_i Q_i(s, \tilde a)\),
    temperature \(-\log\alpha\,(\log\pi(\tilde a|s) + \bar H)\).

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
        gamma: As in :class:`OffPolicyModule`, here and below.

    Example:
        >>> from types import SimpleNamespace
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded, Composite, Unbounded
        >>> specs = SimpleNamespace(observation=Composite(observation=Unbounded(3)), action=Bounded(-2.0, 2.0, (1,)))
        >>> module = SACModule().build(specs)
        >>> module.policy(TensorDict(observation=torch.zeros(4, 3), batch_size=4))["action"].shape
        torch.Size([4, 1])
    """

    log_alpha: Tensor
    followed = ("critics",)

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
        compile: bool = False,
    ) -> None:
        super().__init__(**passed_on(OffPolicyModule, locals()))
        integer(num_critics, "num_critics")
        positive(alpha, "alpha")
        if alpha_optimizer is not None and not learn_alpha:
            raise ValueError("alpha_optimizer has nothing to learn with learn_alpha=False; leave one of them out")
        self.num_critics, self.alpha_optimizer = num_critics, alpha_optimizer
        self.loss_function, self.target_entropy = check_distance(loss_function, "loss_function"), target_entropy
        if learn_alpha:
            self.log_alpha = nn.Parameter(torch.tensor(math.log(alpha)))
        else:
            self.register_buffer("log_alpha", torch.tensor(math.log(alpha)))

    def build_networks(self, specs: Any, network: Network) -> StochasticPolicy:
        """Build actor, critics and policy."""
        self.actor_network = build_squashed_actor(specs, network)
        self.critics = CriticEnsemble([ActionValue(specs, network) for _ in range(self.num_critics)])
        if self.target_entropy is None:
            self.target_entropy = -float(specs.action.shape.numel())
        return StochasticPolicy(self.actor_network, self.memory)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return actor, critics (with the memory) and temperature."""
        groups = {
            "actor": list(self.actor_network.parameters()),
            "critic": [*self.critics.parameters(), *self.memory_parameters()],
        }
        if isinstance(self.log_alpha, nn.Parameter) and self.alpha_optimizer is None:
            groups["alpha"] = [self.log_alpha]
        return groups

    def terms(self, batch: Transitions) -> tuple[Terms, Tensor]:
        """Return the parts of the loss and diagnostics, and the greatest absolute errors ``[*B]``."""
        encoder, head, critics = self.actor_network.trunk.encoder, self.actor_network.head, self.critics
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            action, log_prob = head.rsample(head(encoder(*batch.after)))
            after = self.require_built(self.targets).critics(batch.after_target, action)
            target = batch.target(soft_value(after, log_prob, alpha))
        values = critics(batch.now, batch.action)
        loss, error = batch.td_loss(values, target, self.loss_function)
        now = batch.fixed
        action, log_prob = head.rsample(head(encoder(*now)))
        gain = soft_value(critics.judge(now, action), log_prob, alpha)
        terms = {"loss_qvalue": loss, "loss_actor": -batch.mean(gain)}
        if isinstance(self.log_alpha, nn.Parameter):
            terms["loss_alpha"] = batch.mean(temperature_loss(self.log_alpha, log_prob, self.target_entropy or 0.0))
        with torch.no_grad():
            terms |= {"value": batch.mean(values[0]), "entropy": -batch.mean(log_prob), "alpha": alpha}
        return terms, error

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the base, and one for the temperature if it has its own."""
        optimizers = super().configure_optimizers()
        if self.alpha_optimizer is not None:
            assert isinstance(self.log_alpha, nn.Parameter)
            optimizers.append(self.build_optimizer(self.alpha_optimizer, "alpha_grad_norm", [self.log_alpha]))
        return optimizers
