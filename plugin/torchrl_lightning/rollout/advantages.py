"""Transforms that write ``advantage`` and ``value_target``: Monte-Carlo returns, GAE, V-trace."""

from __future__ import annotations

import dataclasses
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs.transforms import Transform

from torchrl_lightning._core.keys import ACTION, ADVANTAGE, CURRENT_LOG_PROB, LOG_PROB, REWARD, TARGET, VALUE
from torchrl_lightning._core.settings import Boolean, Fraction, Positive, Settings, setting
from torchrl_lightning._core.tree import Key, keyed_leaves
from torchrl_lightning.rollout.estimates import GAE, Estimator, MonteCarlo, RewardKeys, VTrace
from torchrl_lightning.rollout.rollout_writer import check_flags, time_axis, time_major
from torchrl_lightning.rollout.values import RECURRENT_KEYS, fill_values


class AdvantageTransform(Settings, Transform):
    """Base class of transforms that write advantages and value targets to a rollout.

    Call the transform on a rollout to compute the advantages and targets. By default, a replay buffer applies it to
    sampled sequences. To apply it to written rollouts, append it with ``invert=True`` or set ``on_write=True``.

    Args:
        gamma: discount.
        critic: module that writes ``value_key``; may be ``None`` if the rollout holds all values. The transform's
            ``state_dict`` does not include it.
        time_dim: see :class:`DiscountedReturns`, which also documents the remaining arguments.
    """

    gamma: Fraction = setting(default=0.99, kw_only=False)
    critic: TensorDictModuleBase | None = setting(default=None, kw_only=False)
    time_dim: int | None = None
    reward_key: Key = REWARD
    value_key: Key = VALUE
    advantage_key: Key = ADVANTAGE
    value_target_key: Key = TARGET
    recompute_values: Boolean = False
    standardize_advantages: Boolean = False
    on_write: Boolean = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.in_keys: list[Key] = []
        self.out_keys: list[Key] = []

    @property
    def estimator(self) -> Estimator:
        """The advantage estimator."""
        raise NotImplementedError(f"{type(self).__name__} must define the property `estimator`.")

    @property
    def stream(self) -> RewardKeys:
        """Keys of the read and written entries."""
        return RewardKeys(self.reward_key, self.value_key, self.advantage_key, self.value_target_key)

    # TorchRL's PPO trainer config assigns the critic to ``transform.module.value_network``, an attribute of its GAE.
    @property
    def module(self) -> AdvantageTransform:
        """The transform itself, under the name that TorchRL's trainer configs use."""
        return self

    @property
    def value_network(self) -> TensorDictModuleBase | None:
        """The critic, under TorchRL's name."""
        return self.critic

    @value_network.setter
    def value_network(self, critic: TensorDictModuleBase | None) -> None:
        self.critic = critic

    # The learner owns critic and actor. Registered submodules would add their weights to each buffer's state_dict.
    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("critic", "actor", "value_network"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write advantages and targets; return the data unchanged if ``on_write`` is set."""
        return tensordict if self.on_write else self.estimate(tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.estimate(tensordict) if self.on_write else tensordict

    # A buffer calls this method when it writes a rollout, but only after append_transform(..., invert=True).
    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.estimate(next_tensordict)

    def estimate(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write advantages and value targets to a rollout of any layout and return it."""
        axis = time_axis(tensordict, self.time_dim)
        check_flags(tensordict)
        rollout = time_major(tensordict, self.time_dim)
        old_leaves = dict(keyed_leaves(rollout))
        self.compute(rollout)
        if rollout is not tensordict:
            for key, value in keyed_leaves(rollout):
                if old_leaves.get(key) is not value:
                    tensordict.set(key, value.squeeze(1) if tensordict.ndim == 1 else value.transpose(0, axis))
        return tensordict

    def compute(self, rollout: TensorDictBase) -> None:
        """Write values, advantages and targets to a time-major rollout."""
        known = () if self.recompute_values else rollout.keys(include_nested=True)
        if self.stream.bootstrap:
            fill_values(rollout, self.critic, {self.value_key: self.stream.episodic}, known=known)
        self.estimator.compute(rollout, self.gamma, self.stream)


class DiscountedReturns(AdvantageTransform):
    """Write discounted Monte-Carlo returns ``R`` as value targets, and ``A = R - V`` as advantages.

    ``R[t] = r[t] + γ (V'[t] (1 - term[t]) if done[t] else R[t+1])``, with ``R[T] = V'[T-1]``.

    Args:
        gamma: discount.
        critic: module that writes the values.
        bootstrap: use values. If False, truncated episodes count as terminated, and the advantages are ``A = R``, so no
            critic is needed.
        time_dim: time dimension of the rollout; ``None`` reads the dimension names.
        reward_key: key of the rewards.
        value_key: key of the values, or parent key for several critics.
        advantage_key: key of the advantages, or parent key for several critics.
        value_target_key: key of the value targets, or parent key for several critics.
        recompute_values: run the critic even if the rollout holds values.
        standardize_advantages: scale the advantages to zero mean and unit standard deviation over the whole rollout.
        on_write: compute when the ``extend`` of a buffer writes a rollout, not when the buffer samples.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> flag = torch.zeros(3, 1, 1, dtype=torch.bool)
        >>> following = {"reward": torch.ones(3, 1, 1), "done": flag, "terminated": flag}
        >>> rollout = TensorDict({"next": following}, [3, 1])
        >>> DiscountedReturns(0.5, time_dim=0, bootstrap=False)(rollout)["value_target"].flatten().tolist()
        [1.75, 1.5, 1.0]
    """

    bootstrap: Boolean = True

    @property
    def estimator(self) -> Estimator:
        """The Monte-Carlo estimator."""
        return MonteCarlo(standardize=self.standardize_advantages)

    @property
    def stream(self) -> RewardKeys:
        """Keys of the read and written entries."""
        return dataclasses.replace(super().stream, bootstrap=self.bootstrap)


class GeneralizedAdvantages(AdvantageTransform):
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438).

    ``δ[t] = r[t] + γ (1 - term[t]) V'[t] - V[t]``; ``A[t] = δ[t] + γ λ (1 - done[t]) A[t+1]``; the target is ``A + V``.

    Args:
        gamma: discount.
        lmbda: λ.
        critic: module that writes the values.
        time_dim: see :class:`DiscountedReturns`, which also documents the remaining arguments.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> flag, one = torch.zeros(1, 2, 1, dtype=torch.bool), torch.ones(1, 2, 1)
        >>> following = {"reward": one, "done": flag, "terminated": flag, "state_value": one}
        >>> rollout = TensorDict({"state_value": one, "next": following}, [1, 2], names=[None, "time"])
        >>> GeneralizedAdvantages(gamma=0.5, lmbda=1.0)(rollout)["advantage"].flatten().tolist()
        [0.75, 0.5]
    """

    lmbda: Fraction = setting(default=0.95, kw_only=False)
    critic: TensorDictModuleBase | None = setting(default=None, kw_only=False)

    @property
    def estimator(self) -> Estimator:
        """The GAE estimator."""
        return GAE(standardize=self.standardize_advantages, lmbda=self.lmbda)


class VTraceAdvantages(AdvantageTransform):
    """V-trace targets and policy-gradient advantages (Espeholt et al. 2018, arXiv:1802.01561).

    ``ρ = π(a|s) / μ(a|s)``; ``δ[t] = min(ρ̄, ρ) (r[t] + γ (1 - term[t]) V'[t] - V[t])``;
    ``v[t] - V[t] = δ[t] + γ (1 - done[t]) λ min(c̄, ρ) (v[t+1] - V[t+1])``.

    Args:
        gamma: discount.
        lmbda: λ.
        critic: module that writes the values.
        actor: current policy; without it, the rollout must contain ``current_log_prob_key``.
        rho_clip: ρ̄.
        c_clip: c̄.
        pg_rho_clip: ρ̄ of the policy gradient; ``None`` uses ``rho_clip``.
        log_prob_key: key of the behaviour policy's log-probabilities; never overwritten.
        current_log_prob_key: key of the current policy's log-probabilities.
        action_key: key of the actions.
        time_dim: see :class:`DiscountedReturns`, which also documents the remaining arguments.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> flag, one = torch.zeros(1, 2, 1, dtype=torch.bool), torch.ones(1, 2, 1)
        >>> following = {"reward": one, "done": flag, "terminated": flag, "state_value": one}
        >>> entries = {"state_value": one, "action_log_prob": torch.zeros(1, 2), "next": following}
        >>> rollout = TensorDict(entries, [1, 2], names=[None, "time"])
        >>> rollout["current_action_log_prob"] = torch.zeros(1, 2)
        >>> VTraceAdvantages(gamma=0.5)(rollout)["value_target"].flatten().tolist()
        [1.75, 1.5]
    """

    lmbda: Fraction = setting(default=1.0, kw_only=False)
    critic: TensorDictModuleBase | None = setting(default=None, kw_only=False)
    actor: Any = setting(default=None, kw_only=False)
    rho_clip: Positive = 1.0
    c_clip: Positive = 1.0
    pg_rho_clip: Positive | None = None
    log_prob_key: Key = LOG_PROB
    current_log_prob_key: Key = CURRENT_LOG_PROB
    action_key: Key = ACTION

    @property
    def estimator(self) -> VTrace:
        """The V-trace estimator."""
        return VTrace(
            standardize=self.standardize_advantages,
            lmbda=self.lmbda,
            rho_clip=self.rho_clip,
            c_clip=self.c_clip,
            pg_rho_clip=self.pg_rho_clip,
            log_prob_key=self.log_prob_key,
            current_log_prob_key=self.current_log_prob_key,
            action_key=self.action_key,
        )

    def compute(self, rollout: TensorDictBase) -> None:
        """Write values, the current policy's log-probabilities, advantages and targets to a time-major rollout."""
        if self.actor is not None or self.current_log_prob_key not in rollout.keys(include_nested=True):
            rollout.update(self.estimator.current_log_probs(rollout, self.actor, RECURRENT_KEYS))
        super().compute(rollout)
