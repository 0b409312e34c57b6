"""On-policy agents: REINFORCE with a baseline, A2C, V-trace (IMPALA) and PPO."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.keys import REPLAYED
from torchrl_lightning._core.protocols import DataApi
from torchrl_lightning._core.settings import Boolean, Finite, NonNegative, Positive
from torchrl_lightning.agents.actor_critic import ActorCriticModule, required_entry
from torchrl_lightning.agents.loss_functions import clipped_surrogate_loss, kl_estimate, policy_gradient_loss
from torchrl_lightning.agents.metrics import train_names
from torchrl_lightning.agents.schedules import Schedule, as_schedule

logger = logging.getLogger(__name__)


class ReinforceModule(ActorCriticModule):
    """REINFORCE with a learnt baseline (Williams, 1992); arguments as in :class:`ActorCriticModule`.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("CartPole-v1", 1))
        >>> ReinforceModule().build(specs).policy.log_prob_keys
        ['action_log_prob']
    """

    training_metrics = (
        *ActorCriticModule.training_metrics,
        *train_names("loss_actor", "loss_value", "entropy"),
    )

    critic_coeff: NonNegative = 1.0

    def losses(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the policy gradient loss, the baseline's loss and the entropy."""
        log_prob, entropy, values = self.evaluate(batch)
        critics = self.critic_terms(batch, values)
        return {
            "loss_actor": policy_gradient_loss(log_prob, self.advantage(batch)),
            "loss_value": critics.pop("loss_critic"),
            **critics,
            "entropy": entropy.detach().mean(),
        }


class EntropyModule(ActorCriticModule):
    """Base of actor-critic agents with an entropy bonus.

    Args:
        entropy_coeff: Weight of the entropy bonus.
        entropy_schedule: Schedule of ``entropy_coeff`` over frames.
        critic_coeff: As in :class:`ActorCriticModule`, like all arguments that are not listed here.
    """

    training_metrics = (
        *ActorCriticModule.training_metrics,
        *train_names("loss_objective", "loss_entropy", "entropy"),
    )

    entropy_coeff: Finite = 0.0
    entropy_schedule: str | Schedule = "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_effect("entropy_schedule", self.entropy_coeff, "entropy_coeff")
        self.add_coefficient("entropy_coeff", self.entropy_coeff, self.entropy_schedule)

    def entropy_terms(self, entropy: Tensor) -> dict[str, Tensor]:
        """Return the entropy, and the entropy bonus as a loss; a bonus with weight 0 has no gradient."""
        mean = entropy.mean()
        has_weight = self._coefficients["entropy_coeff"][0] != 0.0
        return {
            "loss_entropy": -self.get_buffer("entropy_coeff") * (mean if has_weight else mean.detach()),
            "entropy": mean.detach(),
        }


class A2CModule(EntropyModule):
    """Advantage actor-critic (Mnih et al., 2016); arguments as in :class:`EntropyModule`.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("CartPole-v1", 1))
        >>> A2CModule().build(specs).critic.out_keys
        ['state_value']
    """

    training_metrics = (*EntropyModule.training_metrics, *train_names("ratio_deviation"))

    def losses(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the policy gradient loss, the entropy bonus and the critic's losses."""
        log_prob, entropy, values = self.evaluate(batch)
        terms = {
            "loss_objective": policy_gradient_loss(log_prob, self.advantage(batch)),
            **self.entropy_terms(entropy),
            **self.critic_terms(batch, values),
        }
        behaviour = batch.get("action_log_prob", None)
        if behaviour is not None:
            # |rho - 1| is the distance between current and behaviour policy. It is zero on fresh data.
            terms["ratio_deviation"] = mean_over_agent_steps((log_prob.detach() - behaviour).expm1().abs(), batch)
        return terms


class VTraceModule(A2CModule):
    """Policy gradient and value regression on V-trace targets (IMPALA, Espeholt et al., 2018).

    ``VTraceBuffer`` computes ``advantage`` and ``value_target`` and corrects them for the difference between the
    behaviour policy mu and the current policy pi. The losses are those of A2C. The module logs
    ``train/ratio_deviation``, the mean of |pi / mu - 1|.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("CartPole-v1", 1))
        >>> VTraceModule(entropy_coeff=0.01).build(specs).policy.out_keys
        ['action', 'action_log_prob']
    """


class PPOModule(EntropyModule):
    r"""PPO with a clipped objective (Schulman et al., 2017).

    It logs two estimates of the KL divergence between the behaviour policy \(\mu\) and the current policy \(\pi\). Both
    exclude replayed steps. Let \(\rho = \pi(a|s) / \mu(a|s)\).

    * ``train/kl_approx`` is the mean of \(\rho - 1 - \log\rho\). It is never negative, and ``target_kl`` limits it.
    * ``train/kl_approx_k1`` is the mean of \(-\log\rho\). TorchRL's losses call it ``kl_approx``.

    These are the estimators k3 and k1 of Schulman (2020), Approximating KL Divergence,
    http://joschu.net/blog/kl-approx.html.

    Args:
        network: Network in front of the heads; ``MLPNetwork()`` by default.
        clip_epsilon: Clipping range of the probability ratio around 1.
        clip_schedule: Schedule of ``clip_epsilon`` over frames.
        normalize_advantage: Standardise the advantage within each mini-batch. With None, it is standardised only if the
            buffer does not standardise it. False is an error if the buffer standardises the advantage.
        target_kl: Skip an update and the rest of the rollout's updates if the ``kl_approx`` of the update exceeds
            1.5 times this value.
        entropy_coeff: As in :class:`EntropyModule`, like all arguments that are not listed here.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("CartPole-v1", 1))
        >>> module = PPOModule(entropy_coeff=0.01).build(specs)
        >>> module.policy(specs.observation.zero([3]))["action"].shape
        torch.Size([3])
    """

    training_metrics = (
        *EntropyModule.training_metrics,
        *train_names("kl_approx", "kl_approx_k1", "clip_fraction"),
    )

    clip_epsilon: Positive = 0.2
    clip_schedule: str | Schedule = "constant"
    normalize_advantage: Boolean | None = None
    target_kl: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.add_coefficient("clip_epsilon", self.clip_epsilon, self.clip_schedule)

    def setup(self, stage: str) -> None:
        """Validate the settings against the data, and warn about settings without effect."""
        super().setup(stage)
        data = DataApi.of(self._data)
        has_replay = getattr(data.buffer, "replay", None) is not None  # replayed steps make the ratio differ from 1
        value, schedule = self._coefficients["clip_epsilon"]
        default = self.settings_of_class["clip_epsilon"].default, as_schedule("constant")
        if stage == "fit" and (value, schedule) != default and _learns_once(data) and not has_replay:
            logger.warning(
                "clip_epsilon=%s and clip_schedule=%s have no effect with one update of each rollout (num_epochs=1, "
                "num_mini_batch=1): the probability ratio is 1 before that update. Raise num_epochs or num_mini_batch.",
                value,
                self.clip_schedule,
            )

    def incompatibility(self, data: Any) -> str | None:
        """Return an error message if a setting does not fit the DataModule's rollouts, else None."""
        data_api = DataApi.of(data)
        if _learns_once(data_api):
            for name, value in (("target_kl", self.target_kl), ("clip_value", self.clip_value)):
                if value is not None:
                    return (
                        f"{name} must be None with one update of each rollout, got {value}: the networks have not "
                        "changed before that update. Raise num_epochs or num_mini_batch, or leave it out."
                    )
        standardized_by = data_api.advantages_standardized_by if self.normalize_advantage is False else None
        if standardized_by is None:
            return super().incompatibility(data)
        return (
            f"normalize_advantage must not be False, because {standardized_by} standardises the advantages over each "
            "rollout. Set standardize_advantages=False in the buffer (data.buffer.standardize_advantages=false), or "
            "leave normalize_advantage at None."
        )

    def losses(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the clipped objective, entropy bonus, critic's losses, KL estimates and clip fraction."""
        log_prob, entropy, values = self.evaluate(batch)
        log_ratio = log_prob - required_entry(batch, "action_log_prob")
        detached = log_ratio.detach()
        return {
            "loss_objective": clipped_surrogate_loss(log_ratio, self.advantage(batch), self.clip_epsilon),
            **self.entropy_terms(entropy),
            **self.critic_terms(batch, values),
            "kl_approx": mean_over_agent_steps(kl_estimate(detached), batch),
            "kl_approx_k1": -mean_over_agent_steps(detached, batch),
            "clip_fraction": mean_over_agent_steps((detached.expm1().abs() > self.clip_epsilon).float(), batch),
        }

    def should_stop(self, terms: Mapping[str, Tensor]) -> bool:
        """Return whether the KL divergence from the behaviour policy exceeds its limit; all ranks return the same."""
        if self.target_kl is None:
            return False
        divergence = self.trainer.strategy.reduce(terms["kl_approx"], reduce_op="mean")
        return float(divergence) > 1.5 * self.target_kl


def _learns_once(data: DataApi) -> bool:
    """Return whether rollouts are collected by the current policy and used for one update."""
    return not data.make_collector and data.resolved_updates_per_epoch == 1  # a user's collector may use older weights


def mean_over_agent_steps(values: Tensor, batch: TensorDictBase) -> Tensor:
    """Return the mean of values ``[*B]`` over the policy's own steps; 0 if all steps were replayed.

    The stored log-probability of a replayed action is not the behaviour policy's probability of that action.
    """
    replayed = batch.get(REPLAYED, None)
    if replayed is None:
        return values.mean()
    is_agent_step = ~replayed.reshape(values.shape)
    return values.where(is_agent_step, 0.0).sum() / is_agent_step.sum().clamp(min=1)
