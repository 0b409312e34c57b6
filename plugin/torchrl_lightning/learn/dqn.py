"""Deep Q-learning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lightning.learn.agents import OptimizerFactory
from torchrl_lightning.learn.exploration import EpsilonGreedyPolicy, FramesDecay
from torchrl_lightning.learn.losses import check_distance, double_q_value, value_of_action
from torchrl_lightning.learn.networks import MLPNetwork, Network
from torchrl_lightning.learn.off_policy import OffPolicyModule, Terms
from torchrl_lightning.learn.q_networks import build_q_network
from torchrl_lightning.learn.schedules import Schedule
from torchrl_lightning.learn.transitions import Transitions
from torchrl_lightning.parts import passed_on


class DQNModule(OffPolicyModule):
    r"""DQN (Mnih et al., 2015), by default double (van Hasselt et al., 2016).

    It minimises \(d(Q(s, a), r + \gamma \bar Q(s', a^*))\) with the target network \(\bar Q\); \(a^*\) is the best
    action of the target network or, if double, of the online one.

    With a ``RecurrentNetwork`` it is R2D2's learner (Kapturowski et al., 2019): sequences, stored states,
    burn-in by mask.

    Args:
        network: Network in front of the heads; two layers of 64 rectified units by default.
        double: Let the online network choose the successor's action.
        dueling: Use separate heads for state values and advantages.
        loss_function: ``"smooth_l1"``, ``"l2"`` or ``"l1"``.
        epsilon_start: Initial probability of a random action.
        epsilon_end: Final probability.
        epsilon_frames: Frames over which it moves from the initial to the final one.
        gamma: As in :class:`OffPolicyModule`, here and below.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Categorical, Composite, Unbounded
        >>> specs = SimpleNamespace(observation=Composite(observation=Unbounded(4)), action=Categorical(2))
        >>> module = DQNModule(dueling=True).build(specs)
        >>> module.policy(TensorDict(observation=torch.zeros(3, 4), batch_size=3))["action"].shape
        torch.Size([3])
    """

    followed = ("q_network",)

    def __init__(
        self,
        network: Network | None = None,
        *,
        double: bool = True,
        dueling: bool = False,
        loss_function: str = "smooth_l1",
        epsilon_start: float = 1.0,
        epsilon_end: float = 0.05,
        epsilon_frames: int = 10_000,
        learning_rate: float = 1e-3,
        max_grad_norm: float | None = 10.0,
        gamma: float = 0.99,
        optimizer: OptimizerFactory | None = None,
        critic_optimizer: OptimizerFactory | None = None,
        schedule: str | Schedule = "constant",
        tau: float = 0.005,
        target_interval: int = 1,
        refresh_states: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__(**passed_on(OffPolicyModule, locals()))
        self.double_q, self.dueling = double, dueling
        self.loss_function = check_distance(loss_function, "loss_function")
        if max(epsilon_start, epsilon_end) > 1.0:
            raise ValueError(f"epsilon is a probability, got epsilon_start={epsilon_start}, epsilon_end={epsilon_end}")
        self.epsilon = FramesDecay(epsilon_start, epsilon_end, epsilon_frames)

    @classmethod
    def default_network(cls) -> Network:
        """Return two layers of 64 rectified units."""
        return MLPNetwork([64, 64], "relu")

    def build_networks(self, specs: Any, network: Network) -> EpsilonGreedyPolicy:
        """Build the action values and the policy."""
        self.q_network = build_q_network(specs, network, dueling=self.dueling)
        return EpsilonGreedyPolicy(self.q_network, self.memory)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return everything as ``critic``."""
        return {"critic": [*self.q_network.parameters(), *self.memory_parameters()]}

    def terms(self, batch: Transitions) -> tuple[Terms, Tensor]:
        """Return the loss and the mean value, and the absolute errors ``[*B]``."""
        network, targets = self.q_network, self.require_built(self.targets)
        values = value_of_action(network.values(batch.now), batch.action, one_hot=network.action_space == "one_hot")
        with torch.no_grad():
            after = targets.q_network.values(batch.after_target)
            after = double_q_value(after, network.values(batch.after)) if self.double_q else after.amax(-1)
            target = batch.target(after)
        loss, error = batch.td_loss(values, target, self.loss_function)
        return {"loss_value": loss, "value": batch.mean(values.detach())}, error

    def exploration(self, frames: int) -> float:
        """Return epsilon."""
        return self.epsilon(frames)
