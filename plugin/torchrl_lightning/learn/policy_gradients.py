"""Agents that follow the policy gradient: REINFORCE with a baseline, advantage actor-critic, IMPALA's, and PPO."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning.keys import REPLAYED
from torchrl_lightning.learn.base import ActorCriticModule, require
from torchrl_lightning.learn.losses import clipped_surrogate_loss, kl_estimate, policy_gradient_loss
from torchrl_lightning.learn.reports import train_names
from torchrl_lightning.learn.schedules import Schedule, as_schedule
from torchrl_lightning.protocols import DataApi
from torchrl_lightning.settings import Finite, NotNegative, Positive, Switch

logger = logging.getLogger(__name__)


class ReinforceModule(ActorCriticModule):
    """REINFORCE with a learnt baseline (Williams, 1992); arguments as of :class:`ActorCriticModule`.

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

    critic_coeff: NotNegative = 1.0

    def terms(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the policy gradient's objective and the baseline's loss."""
        log_prob, entropy, values = self.evaluate(batch)
        critics = self.critic_terms(batch, values)
        return {
            "loss_actor": policy_gradient_loss(log_prob, self.advantage(batch)),
            "loss_value": critics.pop("loss_critic"),
            **critics,
            "entropy": entropy.detach().mean(),
        }


class EntropyModule(ActorCriticModule):
    """An actor and a critic whose objective has an entropy bonus.

    Args:
        entropy_coeff: Weight of the entropy bonus.
        entropy_schedule: Schedule of ``entropy_coeff`` over frames.
        critic_coeff: As in :class:`ActorCriticModule`, like everything that is not named here.
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
        """Return the entropy bonus as a loss, which costs no gradient where it weighs 0, and the entropy."""
        mean = entropy.mean()
        weighs = self._coefficients["entropy_coeff"][0] != 0.0
        return {
            "loss_entropy": -self.get_buffer("entropy_coeff") * (mean if weighs else mean.detach()),
            "entropy": mean.detach(),
        }


class A2CModule(EntropyModule):
    """Advantage actor-critic (Mnih et al., 2016); arguments as of :class:`EntropyModule`.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("CartPole-v1", 1))
        >>> A2CModule().build(specs).critic.out_keys
        ['state_value']
    """

    training_metrics = (*EntropyModule.training_metrics, *train_names("ratio_deviation"))

    def terms(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the policy gradient's objective, the entropy bonus and the critics' losses."""
        log_prob, entropy, values = self.evaluate(batch)
        terms = {
            "loss_objective": policy_gradient_loss(log_prob, self.advantage(batch)),
            **self.entropy_terms(entropy),
            **self.critic_terms(batch, values),
        }
        behaviour = batch.get("action_log_prob", None)
        if behaviour is not None:
            # |rho - 1|: how far the policy is from the one that acted; zero on fresh data.
            terms["ratio_deviation"] = own_mean((log_prob.detach() - behaviour).expm1().abs(), batch)
        return terms


class VTraceModule(A2CModule):
    """Policy gradient and value regression on V-trace targets (IMPALA, Espeholt et al., 2018).

    ``VTraceBuffer`` provides ``advantage`` and ``value_target``, corrected for the difference between the policy that
    acted and the current one; the losses are then those of A2C. Logs ``train/ratio_deviation``, the mean of
    |pi / mu - 1|.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("CartPole-v1", 1))
        >>> VTraceModule(entropy_coeff=0.01).build(specs).policy.out_keys
        ['action', 'action_log_prob']
    """


class PPOModule(EntropyModule):
    r"""PPO with a clipped objective (Schulman et al., 2017).

    It logs two estimates of the KL divergence between the policy that acted, \(\mu\), and the current one, \(\pi\), of
    steps that the policy made itself. With \(\rho = \pi(a|s) / \mu(a|s)\), ``train/kl_approx`` is the mean of
    \(\rho - 1 - \log\rho\). It is never negative, and ``target_kl`` is compared with it. ``train/kl_approx_k1`` is the
    mean of \(-\log\rho\), which TorchRL's losses call ``kl_approx``. They are k3 and k1 of Schulman (2020),
    Approximating KL Divergence, http://joschu.net/blog/kl-approx.html.

    Args:
        network: Network in front of the heads; ``MLPNetwork()`` by default.
        clip_epsilon: Clipping range of the probability ratio around 1.
        clip_schedule: Schedule of ``clip_epsilon`` over frames.
        normalize_advantage: Standardise the advantage within each mini-batch; None does so unless the buffer has
            standardised it over the rollout. False over such a buffer is refused.
        target_kl: Skip an update and the rest of its epoch if ``kl_approx`` of its mini-batch exceeds 1.5 times this.
        entropy_coeff: As in :class:`EntropyModule`, like everything that is not named here.

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
    normalize_advantage: Switch | None = None
    target_kl: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.add_coefficient("clip_epsilon", self.clip_epsilon, self.clip_schedule)

    def setup(self, stage: str) -> None:
        """Refuse what does not fit, and announce settings without effect."""
        super().setup(stage)
        data = DataApi.of(self._data)
        replays = getattr(data.buffer, "replay", None) is not None  # its ratio is not 1
        value, schedule = self._coefficients["clip_epsilon"]
        usual = self.settings_of_class["clip_epsilon"].default, as_schedule("constant")
        if stage == "fit" and (value, schedule) != usual and _learns_once(data) and not replays:
            logger.warning(
                "clip_epsilon=%s and clip_schedule=%s have no effect with one update of each rollout (num_epochs=1, "
                "num_mini_batch=1): the probability ratio is 1 before that update. Raise num_epochs or num_mini_batch.",
                value,
                self.clip_schedule,
            )

    def misfit(self, data: Any) -> str | None:
        """Return which setting does not fit how a DataModule serves or standardises rollouts; None if all fit."""
        abilities = DataApi.of(data)
        if _learns_once(abilities):
            for name, value in (("target_kl", self.target_kl), ("clip_value", self.clip_value)):
                if value is not None:
                    return (
                        f"{name} must be None with one update of each rollout, got {value}: nothing has changed before "
                        "that update. Raise num_epochs or num_mini_batch, or leave it out."
                    )
        standardized_by = abilities.advantages_standardized_by if self.normalize_advantage is False else None
        if standardized_by is None:
            return super().misfit(data)
        return (
            f"normalize_advantage=False, but {standardized_by} has standardised the advantages over each rollout. "
            "Give the buffer standardize_advantages=False (data.buffer.standardize_advantages=false), or leave "
            "normalize_advantage at None."
        )

    def terms(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the clipped objective, the entropy bonus and the critics' losses, and how far the policy moved."""
        log_prob, entropy, values = self.evaluate(batch)
        log_ratio = log_prob - require(batch, "action_log_prob")
        moved = log_ratio.detach()
        return {
            "loss_objective": clipped_surrogate_loss(log_ratio, self.advantage(batch), self.clip_epsilon),
            **self.entropy_terms(entropy),
            **self.critic_terms(batch, values),
            "kl_approx": own_mean(kl_estimate(moved), batch),
            "kl_approx_k1": -own_mean(moved, batch),
            "clip_fraction": own_mean((moved.expm1().abs() > self.clip_epsilon).float(), batch),
        }

    def should_stop(self, terms: Mapping[str, Tensor]) -> bool:
        """Return whether the policy has moved too far from the one that acted; all ranks decide alike."""
        if self.target_kl is None:
            return False
        divergence = self.trainer.strategy.reduce(terms["kl_approx"], reduce_op="mean")
        return float(divergence) > 1.5 * self.target_kl


def _learns_once(data: DataApi) -> bool:
    """Return whether a DataModule serves one update of each rollout, by the policy that acted in it."""
    return not data.make_collector and data.updates_of_epoch == 1  # a user's collector may act with older weights


def own_mean(values: Tensor, batch: TensorDictBase) -> Tensor:
    """Return the mean of values ``[*B]`` over the steps that the policy made itself; 0 where all were replayed.

    What is stored as the log-probability of a replayed action does not say how likely the policy was to take it.
    """
    replayed = batch.get(REPLAYED, None)
    if replayed is None:
        return values.mean()
    own = ~replayed.reshape(values.shape)
    return values.where(own, 0.0).sum() / own.sum().clamp(min=1)
