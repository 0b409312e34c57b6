"""Compute advantages and value targets from rewards and values: Monte-Carlo returns, GAE, V-trace."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import (
    ACTION,
    ADVANTAGE,
    CURRENT_LOG_PROB,
    INTRINSIC_ADVANTAGE,
    INTRINSIC_TARGET,
    INTRINSIC_VALUE,
    LOG_PROB,
    NORMALIZED_REWARD,
    POLICY_VERSION,
    REWARD,
    TARGET,
    TERMINATED,
    VALUE,
)
from torchrl_lightning._core.tree import join, keys_below, next_key, path_of
from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning.estimators import discounted_returns, gae, standardize, vtrace
from torchrl_lightning.rollout.values import current_log_prob, require_module, trace_ends


@dataclass(frozen=True)
class RewardKeys:
    """Keys of the rewards, values, advantages and targets for one kind of reward: extrinsic or intrinsic.

    Args:
        reward: Key of the rewards.
        value: Key of the values, or parent key for several critics.
        advantage: Key of the advantages, or parent key for several critics.
        target: Key of the value targets, or parent key for several critics.
        episodic: Whether the sum of rewards stops at the end of an episode.
        bootstrap: Whether to use values; if False, values count as 0 and no critic is needed.
    """

    reward: NestedKey = REWARD
    value: NestedKey = VALUE
    advantage: NestedKey = ADVANTAGE
    target: NestedKey = TARGET
    episodic: bool = True
    bootstrap: bool = True


class Steps(NamedTuple):
    """Inputs to compute the advantages of one critic: time-major tensors of equal shape."""

    reward: Tensor
    value: Tensor
    next_value: Tensor
    terminated: Tensor
    done: Tensor


EXTRINSIC = RewardKeys()
INTRINSIC = RewardKeys(NORMALIZED_REWARD, INTRINSIC_VALUE, INTRINSIC_ADVANTAGE, INTRINSIC_TARGET, episodic=False)


@dataclass(frozen=True, kw_only=True)
class Estimator(ConfigSafe):
    """Base class of the advantage estimators.

    Args:
        standardize: Whether to scale advantages to zero mean and unit standard deviation over the whole rollout.
    """

    standardize: bool = False
    required_keys: ClassVar[tuple[NestedKey, ...]] = (ACTION,)
    """Entries that the policy must write."""
    follows_policy: ClassVar[bool] = False
    """Whether each pass over the data needs new :meth:`current_log_probs` and new values of the current critic."""

    def compute(self, rollout: TensorDictBase, gamma: float, keys: RewardKeys = EXTRINSIC) -> None:
        """Write advantages and targets of every critic to a time-major rollout that holds all values.

        Args:
            rollout: ``[T, N]``.
            gamma: Discount of these rewards.
            keys: Keys of the read and written entries.
        """
        reward: Tensor = rollout.get(keys.reward)
        for key in keys_below(rollout, keys.value) if keys.bootstrap else [keys.value]:
            value: Tensor = rollout.get(key) if keys.bootstrap else torch.zeros_like(reward)
            next_value = rollout.get(next_key(key)) if keys.bootstrap else value
            terminated = done = torch.zeros_like(value, dtype=torch.bool)
            if keys.episodic:
                terminated, done = rollout.get(TERMINATED).expand_as(value), trace_ends(rollout).expand_as(value)
            steps = Steps(reward.to(value.dtype).expand_as(value), value, next_value, terminated, done)
            advantage, target = self.advantages(steps, gamma, rollout)
            critic_path = path_of(key)[len(path_of(keys.value)) :]
            rollout.set(join(keys.advantage, critic_path), self.standardized(advantage))
            rollout.set(join(keys.target, critic_path), target)

    def advantages(self, steps: Steps, gamma: float, rollout: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return the advantages and value targets of one critic."""
        raise NotImplementedError(f"{type(self).__name__} must define the method `advantages`.")

    def returns(self, steps: Steps, gamma: float) -> Tensor:
        """Return the value targets of one critic; the data must come from the current policy."""
        return discounted_returns(steps.reward, steps.next_value, steps.terminated, steps.done, gamma)

    def standardized(self, advantage: Tensor) -> Tensor:
        """Standardise the advantages if ``standardize`` is set, and return them."""
        return standardize(advantage) if self.standardize else advantage

    def current_log_probs(
        self, rollout: TensorDictBase, actor: Any, recurrent_keys: Collection[NestedKey]
    ) -> dict[NestedKey, Tensor]:
        """Return the current policy's log-probabilities by key; without ``follows_policy``, return an empty dict."""
        return {}

    def metrics(self, rollout: TensorDictBase, policy_version: int | None) -> dict[str, float]:
        """Return metrics of a rollout with advantages; without ``follows_policy``, return an empty dict."""
        return {}


class MonteCarlo(Estimator):
    """Discounted returns ``R`` as value targets, and advantages ``R - V``.

    See :func:`~torchrl_lightning.discounted_returns`.
    """

    def advantages(self, steps: Steps, gamma: float, rollout: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return ``R - V``, and the returns ``R`` as value targets."""
        target = self.returns(steps, gamma)
        return target - steps.value, target


@dataclass(frozen=True, kw_only=True)
class GAE(Estimator):
    """Generalised advantage estimation; see :func:`~torchrl_lightning.gae`.

    Args:
        standardize: See :class:`Estimator`.
        lmbda: λ.
    """

    lmbda: float = 0.95

    def advantages(self, steps: Steps, gamma: float, rollout: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return GAE advantages and value targets."""
        return gae(*steps, gamma, self.lmbda)

    def returns(self, steps: Steps, gamma: float) -> Tensor:
        """Return the value targets of GAE."""
        return gae(*steps, gamma, self.lmbda)[1]


@dataclass(frozen=True, kw_only=True)
class VTrace(Estimator):
    """V-trace, which corrects for data of an older policy; see :func:`~torchrl_lightning.vtrace`.

    Args:
        standardize: See :class:`Estimator`.
        lmbda: λ.
        rho_clip: ρ̄.
        c_clip: c̄.
        pg_rho_clip: ρ̄ of the policy gradient; ``None`` uses ``rho_clip``.
        log_prob_key: key of the behaviour policy's log-probabilities; never overwritten.
        current_log_prob_key: key of the current policy's log-probabilities.
        action_key: key of the actions.
    """

    lmbda: float = 1.0
    rho_clip: float = 1.0
    c_clip: float = 1.0
    pg_rho_clip: float | None = None
    log_prob_key: NestedKey = LOG_PROB
    current_log_prob_key: NestedKey = CURRENT_LOG_PROB
    action_key: NestedKey = ACTION
    follows_policy: ClassVar[bool] = True

    @property
    def required_keys(self) -> tuple[NestedKey, ...]:  # type: ignore[override]
        """Entries that the policy must write."""
        return self.action_key, self.log_prob_key

    def advantages(self, steps: Steps, gamma: float, rollout: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return V-trace advantages and value targets."""
        self._check_log_probs(rollout)
        log_probs = []
        for key in (self.current_log_prob_key, self.log_prob_key):
            log_prob = rollout.get(key)
            log_prob = log_prob.unsqueeze(-1) if log_prob.ndim == steps.value.ndim - 1 else log_prob
            log_probs.append(log_prob.to(steps.value.dtype).expand_as(steps.value))
        current, behaviour = log_probs
        return vtrace(
            current,
            behaviour,
            *steps,
            gamma,
            lmbda=self.lmbda,
            rho_clip=self.rho_clip,
            c_clip=self.c_clip,
            pg_rho_clip=self.pg_rho_clip,
        )

    def current_log_probs(
        self, rollout: TensorDictBase, actor: Any, recurrent_keys: Collection[NestedKey]
    ) -> dict[NestedKey, Tensor]:
        """Return the log-probabilities of the stored actions under the current policy."""
        self._check_log_probs(rollout)
        actor = require_module(actor, "actor", f"to compute {self.current_log_prob_key!r}")
        return {self.current_log_prob_key: current_log_prob(rollout, actor, self.action_key, recurrent_keys)}

    def _check_log_probs(self, rollout: TensorDictBase) -> None:
        if rollout.get(self.log_prob_key, None) is None:
            raise KeyError(
                f"The rollout must have the entry {self.log_prob_key!r}: V-trace needs the log-probabilities of the "
                "policy that collected the data. Set return_log_prob=True in that policy."
            )

    def metrics(self, rollout: TensorDictBase, policy_version: int | None) -> dict[str, float]:
        """Return the mean ``|ρ - 1|``, and the policy lag if the versions of both policies are known."""
        metrics: dict[str, float] = {}
        current, version = (rollout.get(key, None) for key in (self.current_log_prob_key, POLICY_VERSION))
        if current is not None:
            ratio = (current - rollout.get(self.log_prob_key)).exp()
            metrics["mean_abs_rho_minus_1"] = float((ratio - 1).abs().mean())
        if version is not None and policy_version is not None:
            metrics["policy_lag"] = policy_version - float(version.double().mean())
        return metrics
