"""Agents that learn action values from replayed transitions: DQN, SAC and TD3."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_lightning._core.protocols import DataApi
from torchrl_lightning._core.settings import (
    Finite,
    FinitePositive,
    Fraction,
    NonNegative,
    Positive,
    PositiveInt,
    computed,
    setting,
)
from torchrl_lightning.agents.base import OptimizerFactory
from torchrl_lightning.agents.loss_functions import (
    Distance,
    double_q_value,
    margin_loss,
    smooth_action,
    soft_value,
    temperature_loss,
    value_of_action,
)
from torchrl_lightning.agents.metrics import train_names
from torchrl_lightning.agents.networks.encoders import MLPNetwork
from torchrl_lightning.agents.networks.exploration import (
    EpsilonGreedyPolicy,
    FramesDecay,
    NoisyPolicy,
    StochasticPolicy,
)
from torchrl_lightning.agents.networks.network_protocol import Network, network_check
from torchrl_lightning.agents.networks.q_networks import ActionValue, CriticEnsemble, build_q_network
from torchrl_lightning.agents.networks.squashed import build_deterministic_actor, build_squashed_actor
from torchrl_lightning.agents.off_policy import LossTerms, OffPolicyModule
from torchrl_lightning.agents.transitions import Transitions
from torchrl_lightning.environments.masks import allowed_values


class DQNModule(OffPolicyModule):
    r"""DQN (Mnih et al., 2015), or double DQN (van Hasselt et al., 2016) by default.

    It minimises \(d(Q(s, a), r + \gamma \bar Q(s', a^*))\) with the target network \(\bar Q\). The action \(a^*\) is
    the best of the actions that an ``action_mask`` allows. Double DQN selects \(a^*\) with the online network, and DQN
    with the target network.

    With a ``RecurrentNetwork`` this is the learner of R2D2 (Kapturowski et al., 2019). It learns from sequences with
    stored states and masked burn-in steps.

    Args:
        network: Network in front of the heads; two layers of 64 rectified units by default.
        double: Select the next action with the online network.
        dueling: Use separate heads for state values and advantages.
        loss_function: ``"smooth_l1"``, ``"l2"`` or ``"l1"``.
        epsilon_start: Initial probability of a random action.
        epsilon_end: Final probability.
        epsilon_frames: Number of frames from the initial to the final probability.
        epsilon_spread: Spread of the probabilities over the workers of a collector. Worker ``i`` of ``N`` raises the
            probability to the power ``1 + epsilon_spread * i / (N - 1)``, as in Ape-X (Horgan et al., 2018).
        margin_coeff: Weight of DQfD's margin loss (Hester et al., 2018) on the demonstrations of a batch. A
            positive weight requires ``dataset_share`` of the DataModule.
        margin: Margin of the demonstrated action's value over the other actions' values.
        gamma: As in :class:`OffPolicyModule`, like the following arguments.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("CartPole-v1", 1))
        >>> module = DQNModule(dueling=True).build(specs)
        >>> module.policy(specs.observation.zero([3]))["action"].shape
        torch.Size([3])
    """

    supports_action_masks = True
    target_names = ("q_network",)
    training_metrics = (*OffPolicyModule.training_metrics, *train_names("loss_value", "value", "loss_margin"))

    network: Annotated[Network, network_check(lambda: MLPNetwork([64, 64], "relu"))] = setting(
        default=None, kw_only=False
    )
    double_q: bool = setting(default=True, alias="double")
    dueling: bool = False
    loss_function: Distance = "smooth_l1"
    epsilon_start: Fraction = 1.0
    epsilon_end: Fraction = 0.05
    epsilon_frames: int = 10_000
    epsilon_spread: NonNegative = 0.0
    margin_coeff: NonNegative = 0.0
    margin: NonNegative = 0.8
    learning_rate: Positive = 1e-3
    max_grad_norm: Positive | None = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_effect("margin", self.margin_coeff, "margin_coeff")
        self.epsilon = FramesDecay(self.epsilon_start, self.epsilon_end, self.epsilon_frames)

    def incompatibility(self, data: Any) -> str | None:
        """Return an error message if a setting needs workers or demonstrations that the DataModule lacks, else None."""
        data_api = DataApi.of(data)
        if self.epsilon_spread and data_api.make_collector is None:
            return (
                f"epsilon_spread must be 0 without collector=, got {self.epsilon_spread}: it needs a collector with "
                "workers. Leave it out, or set data.collector=."
            )
        if not self.margin_coeff or data_api.dataset_share is not None:
            return super().incompatibility(data)
        return (
            f"margin_coeff must be 0 without demonstrations in each batch, got {self.margin_coeff}. Set data.dataset= "
            "and data.dataset_share= (of a ReplayDataModule), or leave it out."
        )

    def build_networks(self, specs: Any, network: Network) -> EpsilonGreedyPolicy:
        """Build the Q-network and the policy."""
        self.q_network = build_q_network(specs, network, dueling=self.dueling)
        return EpsilonGreedyPolicy(self.q_network, self.memory, spread=self.epsilon_spread, masked=self.masked)

    def network_outputs(self, step: TensorDictBase) -> list[Tensor]:
        """Return the action values."""
        return [self.q_network.values(self.network_inputs(step))]

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return all parameters under the name ``critic``."""
        return {"critic": [*self.q_network.parameters(), *self.memory_parameters()]}

    def losses(self, batch: Transitions) -> tuple[LossTerms, Tensor]:
        """Return the loss terms (TD loss, mean value, optional margin loss) and the absolute errors ``[*B]``."""
        network, targets = self.q_network, self.require_built(self.targets)
        all_values, one_hot = network.values(batch.now), network.action_space == "one_hot"
        values = value_of_action(all_values, batch.action, one_hot=one_hot)
        with torch.no_grad():
            target_values = targets.q_network.values(batch.after_target)
            selector = network.values(batch.after) if self.double_q else target_values
            if batch.allowed is not None:
                selector = allowed_values(selector, batch.allowed)
            target = batch.target(double_q_value(target_values, selector) if self.double_q else selector.amax(-1))
        loss, error = batch.td_loss(values, target, self.loss_function)
        terms = {"loss_value": loss, "value": batch.mean(values.detach())}
        if self.margin_coeff:
            assert batch.source is not None  # incompatibility() has checked it
            margin_losses = margin_loss(all_values, batch.action, self.margin, one_hot=one_hot)
            terms["loss_margin"] = self.margin_coeff * batch.mean(torch.where(batch.source > 0, margin_losses, 0.0))
        return terms, error

    def exploration(self, frames: int) -> float:
        """Return epsilon."""
        return self.epsilon(frames)


class SACModule(OffPolicyModule):
    r"""SAC with a learnt temperature, for continuous bounded actions (Haarnoja et al., 2018).

    It minimises these losses, with target critics \(\bar Q_i\), \(a' \sim \pi(s')\) and \(\tilde a \sim \pi(s)\):

    * critics: \(\sum_i d(Q_i(s, a), r + \gamma (\min_j \bar Q_j(s', a') - \alpha \log\pi(a'|s')))\),
    * actor: \(\alpha \log\pi(\tilde a|s) - \min_i Q_i(s, \tilde a)\),
    * temperature: \(-\log\alpha\,(\log\pi(\tilde a|s) + \bar H)\).

    With a ``RecurrentNetwork``, actor and critics share the features of a memory. The memory starts from the stored
    states, and the critics' loss trains it.

    Args:
        network: Network in front of the heads; two layers of 256 rectified units by default.
        num_critics: Number of critics; the losses use the minimum of their values.
        alpha: Initial temperature.
        learn_alpha: Learn the temperature so that the entropy approaches ``target_entropy``.
        target_entropy: The target entropy in nats; minus the number of action dimensions by default.
        alpha_optimizer: A factory of a separate optimizer for the temperature; optional.
        loss_function: ``"l2"``, ``"smooth_l1"`` or ``"l1"``.
        gamma: As in :class:`OffPolicyModule`, like the following arguments.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("Pendulum-v1", 1))
        >>> module = SACModule().build(specs)
        >>> module.policy(specs.observation.zero([4]))["action"].shape
        torch.Size([4, 1])
    """

    target_names = ("critics",)
    training_metrics = (
        *OffPolicyModule.training_metrics,
        *train_names("loss_qvalue", "loss_actor", "loss_alpha", "value", "entropy", "alpha", "alpha_grad_norm"),
    )

    num_critics: PositiveInt = 2
    alpha: FinitePositive = 1.0
    learn_alpha: bool = True
    target_entropy: Finite | None = None
    alpha_optimizer: OptimizerFactory | None = None
    loss_function: Distance = "l2"
    log_alpha: Tensor = computed()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha_optimizer is not None and not self.learn_alpha:
            raise ValueError(
                f"alpha_optimizer must be None with learn_alpha=False, got {self.alpha_optimizer!r}. Leave one of them "
                "out."
            )
        self.require_effect("target_entropy", self.learn_alpha, "learn_alpha=True")
        log_alpha = torch.tensor(math.log(self.alpha), dtype=torch.float32)
        if self.learn_alpha:
            self.log_alpha = nn.Parameter(log_alpha)
        else:
            self.register_buffer("log_alpha", log_alpha)

    def build_networks(self, specs: Any, network: Network) -> StochasticPolicy:
        """Build actor, critics and policy."""
        self.actor_network = build_squashed_actor(specs, network)
        self.critics = CriticEnsemble([ActionValue(specs, network) for _ in range(self.num_critics)])
        if self.target_entropy is None:
            self.target_entropy = -float(specs.action.shape.numel())
        return StochasticPolicy(self.actor_network, self.memory)

    def network_outputs(self, step: TensorDictBase) -> list[Tensor]:
        """Return the log-probabilities of sampled actions, and the critics' values of these actions."""
        entries, actor = self.network_inputs(step), self.actor_network
        action, log_prob = actor.head.rsample(actor.head(actor.trunk.encoder(*entries)))
        return [log_prob, self.critics(entries, action)]

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of the actor, the critics (with the memory) and the temperature."""
        groups = {
            "actor": list(self.actor_network.parameters()),
            "critic": [*self.critics.parameters(), *self.memory_parameters()],
        }
        if isinstance(self.log_alpha, nn.Parameter) and self.alpha_optimizer is None:
            groups["alpha"] = [self.log_alpha]
        return groups

    def apply_schedules(self) -> None:
        """Set the learning rates. Set a constant temperature again, because a checkpoint may contain another value."""
        super().apply_schedules()
        if not isinstance(self.log_alpha, nn.Parameter):
            self.log_alpha.fill_(math.log(self.alpha))

    def losses(self, batch: Transitions) -> tuple[LossTerms, Tensor]:
        """Return the losses with diagnostics, and the largest absolute error over the critics ``[*B]``."""
        encoder, head, critics = self.actor_network.trunk.encoder, self.actor_network.head, self.critics
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            action, log_prob = head.rsample(head(encoder(*batch.after)))
            next_values = self.require_built(self.targets).critics(batch.after_target, action)
            target = batch.target(soft_value(next_values, log_prob, alpha))
        values = critics(batch.now, batch.action)
        loss, error = batch.td_loss(values, target, self.loss_function)
        now = batch.detached
        action, log_prob = head.rsample(head(encoder(*now)))
        soft_values = soft_value(critics.q_values(now, action), log_prob, alpha)
        terms = {"loss_qvalue": loss, "loss_actor": -batch.mean(soft_values)}
        if isinstance(self.log_alpha, nn.Parameter):
            terms["loss_alpha"] = batch.mean(temperature_loss(self.log_alpha, log_prob, self.target_entropy or 0.0))
        with torch.no_grad():
            terms |= {"value": batch.mean(values[0]), "entropy": -batch.mean(log_prob), "alpha": alpha}
        return terms, error

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the base class, and the temperature's optimizer if it is separate."""
        optimizers = super().configure_optimizers()
        if self.alpha_optimizer is not None:
            assert isinstance(self.log_alpha, nn.Parameter)
            optimizers.append(self.build_optimizer(self.alpha_optimizer, "alpha_grad_norm", [self.log_alpha]))
        return optimizers


class TD3Module(OffPolicyModule):
    r"""TD3 for continuous bounded actions (Fujimoto et al., 2018).

    It minimises these losses, with target networks \(\bar Q_i, \bar\pi\) and clipped noise \(\epsilon\):

    * critics: \(\sum_i d(Q_i(s, a), r + \gamma \min_j \bar Q_j(s', \bar\pi(s') + \epsilon))\),
    * actor: \(-Q_1(s, \pi(s))\).

    All noise is in units of half the action range. ``target_interval`` also delays the updates of the policy, as in the
    paper.

    Args:
        network: Network in front of the heads; two layers of 256 rectified units by default.
        num_critics: Number of critics; the target uses the minimum of their values.
        noise: Initial standard deviation of the exploration noise.
        noise_end: Final standard deviation; ``noise`` by default.
        noise_frames: Number of frames from the initial to the final standard deviation.
        policy_noise: Standard deviation of the noise on target actions.
        noise_clip: Bound of the target noise.
        loss_function: ``"l2"``, ``"smooth_l1"`` or ``"l1"``.
        target_interval: Number of updates between two updates of the policy and of the target networks.
        gamma: As in :class:`OffPolicyModule`, like the following arguments.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("Pendulum-v1", 1))
        >>> module = TD3Module().build(specs)
        >>> module.policy(specs.observation.zero([4]))["action"].shape
        torch.Size([4, 1])
    """

    target_names = ("actor_network", "critics")
    training_metrics = (*OffPolicyModule.training_metrics, *train_names("loss_qvalue", "loss_actor", "value"))

    num_critics: PositiveInt = 2
    noise: NonNegative = 0.1
    noise_end: NonNegative | None = None
    noise_frames: PositiveInt = 1
    policy_noise: NonNegative = 0.2
    noise_clip: Positive = 0.5
    loss_function: Distance = "l2"
    target_interval: PositiveInt = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        end = self.noise if self.noise_end is None else self.noise_end
        self.require_effect("noise_frames", end != self.noise, "a noise_end that differs from noise")
        self.require_effect("noise_clip", self.policy_noise, "policy_noise")
        self.deviation = FramesDecay(self.noise, end, self.noise_frames)
        self._updates_actor = True

    def build_networks(self, specs: Any, network: Network) -> NoisyPolicy:
        """Build actor, critics and policy."""
        self.actor_network = build_deterministic_actor(specs, network)
        self.critics = CriticEnsemble([ActionValue(specs, network) for _ in range(self.num_critics)])
        return NoisyPolicy(self.actor_network, self.memory)

    def network_outputs(self, step: TensorDictBase) -> list[Tensor]:
        """Return the critics' values of the actor's actions."""
        entries, actor = self.network_inputs(step), self.actor_network
        return [self.critics(entries, actor.head(actor.trunk.encoder(*entries)))]

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of the actor and of the critics (with the memory)."""
        return {
            "actor": list(self.actor_network.parameters()),
            "critic": [*self.critics.parameters(), *self.memory_parameters()],
        }

    def compute(self, batch: Transitions) -> tuple[LossTerms, Tensor]:
        """Return ``losses``; they contain the policy's loss only at every ``target_interval``-th update."""
        self.is_actor_update()
        return super().compute(batch)

    def is_actor_update(self) -> bool:
        """Return whether this update also updates the policy, and store the result for ``losses``."""
        self._updates_actor = (self.updates + 1) % self.target_interval == 0
        return self._updates_actor

    def losses(self, batch: Transitions) -> tuple[LossTerms, Tensor]:
        """Return the losses with the mean value, and the largest absolute error over the critics ``[*B]``."""
        targets = self.require_built(self.targets)
        with torch.no_grad():
            actor = targets.actor_network
            action = smooth_action(
                actor.head.squashed(actor.trunk.encoder(*batch.after_target)), self.policy_noise, self.noise_clip
            )
            next_values = targets.critics(batch.after_target, actor.head.scale(action))
            target = batch.target(next_values.amin(0))
        values = self.critics(batch.now, batch.action)
        loss, error = batch.td_loss(values, target, self.loss_function)
        terms = {"loss_qvalue": loss, "value": batch.mean(values[0].detach())}
        if self._updates_actor:
            actor, now = self.actor_network, batch.detached
            action = actor.head(actor.trunk.encoder(*now))
            terms["loss_actor"] = -batch.mean(self.critics.q_values(now, action, 1)[0])
        return terms, error

    def idle_parameters(self) -> list[nn.Parameter]:
        """Return the policy's parameters if its update is delayed."""
        return [] if self._updates_actor else list(self.actor_network.parameters())

    def exploration(self, frames: int) -> float:
        """Return the standard deviation of the exploration noise."""
        return self.deviation(frames)
