"""Twin delayed deep deterministic policy gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torchrl_lightning.learn.agents import OptimizerFactory
from torchrl_lightning.learn.exploration import FramesDecay, NoisyPolicy
from torchrl_lightning.learn.networks import Network
from torchrl_lightning.learn.off_policy import OffPolicyModule
from torchrl_lightning.learn.q_networks import build_action_critic
from torchrl_lightning.learn.sac import critic_parameters
from torchrl_lightning.learn.schedules import Schedule
from torchrl_lightning.learn.squashed import build_deterministic_actor
from torchrl_lightning.learn.td_losses import DirectTD3Loss
from torchrl_lightning.learn.transitions import Transitions
from torchrl_lightning.learn.trunks import RecurrentTrunk
from torchrl_lightning.ranges import integer


class TD3Module(OffPolicyModule):
    """TD3 (Fujimoto et al., 2018), over TorchRL's ``TD3Loss``; continuous bounded actions.

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
        gamma: Discount of one step.
        learning_rate: Learning rate of the default optimizer, fused Adam over all parameters.
        optimizer: A callable (e.g. a ``functools.partial``) that takes parameters and returns an optimizer.
        critic_optimizer: A separate optimizer for the parameters of the critics (and of a memory); optional.
        max_grad_norm: Clip the gradient of each optimizer's parameters to this norm; None does not clip.
        schedule: Schedule of the learning rates over frames: ``"constant"``, ``"linear"``, ``"cosine"`` or a function
            of progress.
        tau: Fraction by which the target networks move towards the online ones at each of their updates.
        refresh_states: Recompute the recurrent states of each batch with the current ``RecurrentNetwork``;
            ``ReplayDataModule`` then replaces the stored ones, so that they do not grow stale.

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
        self.num_critics = integer(num_critics, "num_critics")
        self.noise = FramesDecay(noise, noise if noise_end is None else noise_end, noise_frames)
        self.loss_arguments: dict[str, Any] = {
            "loss_function": loss_function,
            "policy_noise": policy_noise,
            "noise_clip": noise_clip,
        }

    def build_loss(
        self, specs: Any, network: Network, memory: RecurrentTrunk | None
    ) -> tuple[DirectTD3Loss, NoisyPolicy]:
        """Return the loss and the policy."""
        actor = build_deterministic_actor(specs, network)
        critics = [build_action_critic(specs, network) for _ in range(self.num_critics)]
        loss = DirectTD3Loss(actor, critics, memory, gamma=self.gamma, **self.loss_arguments)
        return loss, NoisyPolicy(actor, memory)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return actor and critics (with the memory)."""
        return {
            "actor": list(self.loss.actor_network_params.parameters()),
            "critic": critic_parameters(self.loss),
        }

    def terms(self, batch: Transitions) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return the parts of the loss; the policy's part only at every ``target_interval``-th update."""
        terms: tuple[Mapping[str, Tensor], Tensor] = self.loss.terms(batch, with_actor=self._moves_actor)
        return terms

    @property
    def _moves_actor(self) -> bool:
        return (self.updates + 1) % self.target_interval == 0

    def idle_parameters(self) -> list[nn.Parameter]:
        """Return the policy's parameters if its update is delayed."""
        return [] if self._moves_actor else self.parameter_groups()["actor"]

    def exploration(self, frames: int) -> float:
        """Return the deviation of the exploration noise."""
        return self.noise(frames)
