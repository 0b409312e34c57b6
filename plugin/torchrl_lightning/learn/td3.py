"""Twin delayed deep deterministic policy gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torchrl_lightning.learn.exploration import FramesDecay, NoisyPolicy
from torchrl_lightning.learn.networks import Network
from torchrl_lightning.learn.off_policy import OffPolicyModule
from torchrl_lightning.learn.q_networks import build_action_critic
from torchrl_lightning.learn.sac import critic_parameters
from torchrl_lightning.learn.squashed import build_deterministic_actor
from torchrl_lightning.learn.td_losses import DirectTD3Loss
from torchrl_lightning.learn.transitions import Transitions
from torchrl_lightning.learn.trunks import RecurrentTrunk


class TD3Module(OffPolicyModule):
    """TD3 (Fujimoto et al., 2018), over TorchRL's `TD3Loss`; continuous bounded actions.

    All noise is in units of half the action range. `target_interval` is the policy's delay too, as in the paper.

    Args:
        network: What comes before the heads; two layers of 256 rectified units when not given.
        num_critics: How many critics; the least of their values counts.
        noise: First deviation of the exploration noise.
        noise_end: Last one; `noise` when not given.
        noise_frames: Frames from the first to the last.
        policy_noise: Deviation of the noise on target actions.
        noise_clip: Bound of that noise.
        loss_function: `"l2"`, `"smooth_l1"` or `"l1"`.
        target_interval: Updates between two updates of the policy and of the target networks.
        kwargs: As for `OffPolicyModule`.

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
        **kwargs: Any,
    ) -> None:
        super().__init__(network, target_interval=target_interval, **kwargs)
        if num_critics < 1:
            raise ValueError(f"num_critics={num_critics} must be at least 1")
        self.num_critics = num_critics
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
        """Return the parts of the loss; the policy's only with every `target_interval`-th update."""
        terms: tuple[Mapping[str, Tensor], Tensor] = self.loss.terms(batch, with_actor=self._moves_actor)
        return terms

    @property
    def _moves_actor(self) -> bool:
        return (self.updates + 1) % self.target_interval == 0

    def idle_parameters(self) -> list[nn.Parameter]:
        """Return the policy's parameters where its update is delayed."""
        return [] if self._moves_actor else self.parameter_groups()["actor"]

    def exploration(self, frames: int) -> float:
        """Return the deviation of the exploration noise."""
        return self.noise(frames)
