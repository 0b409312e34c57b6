"""Twin delayed deep deterministic policy gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lightning.learn.agents import OptimizerFactory
from torchrl_lightning.learn.exploration import FramesDecay, NoisyPolicy
from torchrl_lightning.learn.losses import check_distance, smoothed
from torchrl_lightning.learn.networks import Network
from torchrl_lightning.learn.off_policy import OffPolicyModule, Terms
from torchrl_lightning.learn.q_networks import ActionValue, CriticEnsemble
from torchrl_lightning.learn.schedules import Schedule
from torchrl_lightning.learn.squashed import build_deterministic_actor
from torchrl_lightning.learn.transitions import Transitions
from torchrl_lightning.parts import passed_on
from torchrl_lightning.ranges import integer


class TD3Module(OffPolicyModule):
    r"""TD3 (Fujimoto et al., 2018); continuous bounded actions.

    It minimises, with target networks \(\bar Q_i, \bar\pi\) and clipped noise \(\epsilon\):
    critics \(\sum_i d(Q_i(s, a), r + \gamma \min_j \bar Q_j(s', \bar\pi(s') + \epsilon))\), actor \(-Q_1(s, \pi(s))\).

    All noise is in units of half the action range. ``target_interval`` also delays the policy, as in the paper.

    Args:
        network: Network in front of the heads; two layers of 256 rectified units by default.
        num_critics: Number of critics; the smallest of their values is used.
        noise: Initial standard deviation of the exploration noise.
        noise_end: Final standard deviation; ``noise`` by default.
        noise_frames: Frames over which it moves from the initial to the final one.
        policy_noise: Standard deviation of the noise on target actions.
        noise_clip: Bound of that noise.
        loss_function: ``"l2"``, ``"smooth_l1"`` or ``"l1"``.
        target_interval: Updates between two updates of the policy and of the target networks.
        gamma: As in :class:`OffPolicyModule`, here and below.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded, Composite, Unbounded
        >>> specs = SimpleNamespace(observation=Composite(observation=Unbounded(3)), action=Bounded(-2.0, 2.0, (1,)))
        >>> module = TD3Module().build(specs)
        >>> module.policy(TensorDict(observation=torch.zeros(4, 3), batch_size=4))["action"].shape
        torch.Size([4, 1])
    """

    followed = ("actor_network", "critics")

    def __init__(
        self,
        network: Network | None = None,
        *,
        num_critics: int = 2,
        noise: float = 0.1,
        noise_end: float | None = None,
        noise_frames: int = 1,
        policy_noise: float = 0.2,
        noise_clip: float = 0.5,
        loss_function: str = "l2",
        target_interval: int = 2,
        gamma: float = 0.99,
        learning_rate: float = 3e-4,
        optimizer: OptimizerFactory | None = None,
        critic_optimizer: OptimizerFactory | None = None,
        max_grad_norm: float | None = None,
        schedule: str | Schedule = "constant",
        tau: float = 0.005,
        refresh_states: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__(**passed_on(OffPolicyModule, locals()))
        self.num_critics = integer(num_critics, "num_critics")
        self.noise = FramesDecay(noise, noise if noise_end is None else noise_end, noise_frames)
        self.loss_function = check_distance(loss_function, "loss_function")
        self.policy_noise, self.noise_clip = policy_noise, noise_clip
        self._moves_actor = True

    def build_networks(self, specs: Any, network: Network) -> NoisyPolicy:
        """Build actor, critics and policy."""
        self.actor_network = build_deterministic_actor(specs, network)
        self.critics = CriticEnsemble([ActionValue(specs, network) for _ in range(self.num_critics)])
        return NoisyPolicy(self.actor_network, self.memory)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return actor and critics (with the memory)."""
        return {
            "actor": list(self.actor_network.parameters()),
            "critic": [*self.critics.parameters(), *self.memory_parameters()],
        }

    def compute(self, batch: Transitions) -> tuple[Terms, Tensor]:
        """Return ``terms``; the policy's part only at every ``target_interval``-th update."""
        self._moves_actor = (self.updates + 1) % self.target_interval == 0
        return super().compute(batch)

    def terms(self, batch: Transitions) -> tuple[Terms, Tensor]:
        """Return the parts of the loss and the mean value, and the greatest absolute errors ``[*B]``."""
        targets = self.require_built(self.targets)
        with torch.no_grad():
            actor = targets.actor_network
            action = smoothed(
                actor.head.squashed(actor.trunk.encoder(*batch.after_target)), self.policy_noise, self.noise_clip
            )
            after = targets.critics(batch.after_target, actor.head.scale(action))
            target = batch.target(after.amin(0))
        values = self.critics(batch.now, batch.action)
        loss, error = batch.td_loss(values, target, self.loss_function)
        terms = {"loss_qvalue": loss, "value": batch.mean(values[0].detach())}
        if self._moves_actor:
            actor, now = self.actor_network, batch.fixed
            action = actor.head(actor.trunk.encoder(*now))
            terms["loss_actor"] = -batch.mean(self.critics.judge(now, action, 1)[0])
        return terms, error

    def idle_parameters(self) -> list[nn.Parameter]:
        """Return the policy's parameters if its update is delayed."""
        return [] if self._moves_actor else list(self.actor_network.parameters())

    def exploration(self, frames: int) -> float:
        """Return the deviation of the exploration noise."""
        return self.noise(frames)
