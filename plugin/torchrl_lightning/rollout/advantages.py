"""Transforms that write ``advantage`` and ``value_target``: their base, Monte-Carlo returns, GAE, V-trace."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs.transforms import Transform

from torchrl_lightning.entries import Path, join, nested_key, next_key, path_of
from torchrl_lightning.estimators import discounted_returns, gae, standardize, vtrace
from torchrl_lightning.keys import REWARD, TERMINATED
from torchrl_lightning.parts import passed_on
from torchrl_lightning.ranges import fraction
from torchrl_lightning.rollout.values import boundaries, current_log_prob, fill_values, require, value_keys
from torchrl_lightning.rollout.writer import check_flags, time_axis, time_major


class AdvantageTransform(Transform):
    """Base of the transforms that write advantages and value targets on a rollout.

    Call it to compute. In a replay buffer, append it with ``invert=True`` or set ``on_write=True`` to compute when a
    rollout is written; otherwise it computes on sampled sequences.

    Args:
        gamma: discount.
        critic: module that writes ``value_key``; may be ``None`` where the rollout holds all values. It is not part of
            the transform's ``state_dict``.
        time_dim: as in :class:`DiscountedReturns`, here and below.
    """

    episodic = True
    lmbda = 1.0
    critic: TensorDictModuleBase | None

    def __init__(
        self,
        gamma: float = 0.99,
        critic: TensorDictModuleBase | None = None,
        *,
        time_dim: int | None = None,
        reward_key: NestedKey = REWARD,
        value_key: NestedKey = "state_value",
        advantage_key: NestedKey = "advantage",
        value_target_key: NestedKey = "value_target",
        recompute_values: bool = False,
        standardize_advantages: bool = False,
        on_write: bool = False,
    ) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self.gamma = fraction(gamma, "gamma")
        self.critic = critic
        self.time_dim = time_dim
        self.reward_key, self.value_key = nested_key(reward_key), nested_key(value_key)
        self.advantage_key, self.value_target_key = nested_key(advantage_key), nested_key(value_target_key)
        self.recompute_values = recompute_values
        self.standardize_advantages = standardize_advantages
        self.on_write = on_write

    # TorchRL's PPO trainer config puts its critic into ``transform.module.value_network``, where its own GAE has it.
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

    # Critic and actor belong to the learner; registering them as submodules would save their weights with every buffer.
    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("critic", "actor", "value_network"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute on a rollout; pass samples through when ``on_write``."""
        return tensordict if self.on_write else self.estimate(tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.estimate(tensordict) if self.on_write else tensordict

    # What append_transform(..., invert=True) runs when a rollout is written.
    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.estimate(next_tensordict)

    def estimate(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write advantages and value targets on a rollout of any layout and return it."""
        axis = time_axis(tensordict, self.time_dim)
        check_flags(tensordict)
        rollout = time_major(tensordict, self.time_dim)
        before = dict(rollout.items(include_nested=True, leaves_only=True))
        self.fill(rollout)
        self.compute(rollout)
        if rollout is not tensordict:
            for key, value in rollout.items(include_nested=True, leaves_only=True):
                if before.get(key) is not value:
                    tensordict.set(key, value.squeeze(1) if tensordict.ndim == 1 else value.transpose(0, axis))
        return tensordict

    def fill(self, rollout: TensorDictBase) -> None:
        """Write the values that :meth:`compute` reads on a time-major rollout."""
        known = () if self.recompute_values else rollout.keys(include_nested=True)
        fill_values(rollout, self.critic, {self.value_key: self.episodic}, known=known)

    def compute(self, rollout: TensorDictBase) -> None:
        """Write advantages and targets of every critic on a time-major rollout that holds all values."""
        for key in value_keys(rollout, None, self.value_key):
            suffix = path_of(key)[len(path_of(self.value_key)) :]
            self._write(rollout, rollout.get(key), rollout.get(next_key(key)), suffix)

    def _write(self, rollout: TensorDictBase, value: Tensor, next_value: Tensor, suffix: Path = ()) -> None:
        reward = self.reward(rollout).to(value.dtype).expand_as(value)
        advantage, target = self.advantages(rollout, reward, value, next_value)
        if self.standardize_advantages:
            advantage = standardize(advantage)
        rollout.set(join(self.advantage_key, suffix), advantage)
        rollout.set(join(self.value_target_key, suffix), target)

    def reward(self, rollout: TensorDictBase) -> Tensor:
        """Return the reward of the stream."""
        reward: Tensor = rollout.get(self.reward_key)
        return reward

    def advantages(
        self, rollout: TensorDictBase, reward: Tensor, value: Tensor, next_value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return advantage and value target of one critic."""
        raise NotImplementedError(f"{type(self).__name__} does not say how advantages are estimated.")


class DiscountedReturns(AdvantageTransform):
    """Discounted Monte-Carlo returns as value targets, and ``A = R - V``.

    ``R[t] = r[t] + γ (V'[t] (1 - term[t]) if done[t] else R[t+1])``, with ``R[T] = V'[T-1]``.

    Args:
        gamma: discount.
        critic: module that writes the values.
        bootstrap: use values; if False, cut-off episodes count as ended, no critic is needed and ``A = R``.
        time_dim: which dimension is time; ``None`` reads the dimension names.
        reward_key: the reward.
        value_key: values, or the parent of several critics' values.
        advantage_key: key of the advantages; nested for several critics.
        value_target_key: key of the value targets; nested for several critics.
        recompute_values: run the critic even if the rollout holds values.
        standardize_advantages: zero mean, unit standard deviation over the whole rollout.
        on_write: compute in a buffer's ``extend`` and pass samples through.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> flag = torch.zeros(3, 1, 1, dtype=torch.bool)
        >>> following = {"reward": torch.ones(3, 1, 1), "done": flag, "terminated": flag}
        >>> rollout = TensorDict({"next": following}, [3, 1])
        >>> DiscountedReturns(0.5, time_dim=0, bootstrap=False)(rollout)["value_target"].flatten().tolist()
        [1.75, 1.5, 1.0]
    """

    def __init__(
        self,
        gamma: float = 0.99,
        critic: TensorDictModuleBase | None = None,
        *,
        bootstrap: bool = True,
        time_dim: int | None = None,
        reward_key: NestedKey = REWARD,
        value_key: NestedKey = "state_value",
        advantage_key: NestedKey = "advantage",
        value_target_key: NestedKey = "value_target",
        recompute_values: bool = False,
        standardize_advantages: bool = False,
        on_write: bool = False,
    ) -> None:
        super().__init__(**passed_on(AdvantageTransform, locals()))
        self.bootstrap = bootstrap

    def fill(self, rollout: TensorDictBase) -> None:
        """Write the values if they are used."""
        if self.bootstrap:
            super().fill(rollout)

    def compute(self, rollout: TensorDictBase) -> None:
        """Write advantages and targets."""
        if self.bootstrap:
            super().compute(rollout)
        else:
            nothing = torch.zeros_like(self.reward(rollout))
            self._write(rollout, nothing, nothing)

    def advantages(
        self, rollout: TensorDictBase, reward: Tensor, value: Tensor, next_value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute returns minus values, and the returns."""
        target = discounted_returns(reward, next_value, *flags(rollout, reward), self.gamma)
        return target - value, target


class GeneralizedAdvantages(AdvantageTransform):
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438).

    ``δ[t] = r[t] + γ (1 - term[t]) V'[t] - V[t]``; ``A[t] = δ[t] + γ λ (1 - done[t]) A[t+1]``; the target is ``A + V``.

    Args:
        gamma: discount.
        lmbda: λ.
        critic: module that writes the values.
        time_dim: as in :class:`DiscountedReturns`, here and below.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> flag, one = torch.zeros(1, 2, 1, dtype=torch.bool), torch.ones(1, 2, 1)
        >>> following = {"reward": one, "done": flag, "terminated": flag, "state_value": one}
        >>> rollout = TensorDict({"state_value": one, "next": following}, [1, 2], names=[None, "time"])
        >>> GeneralizedAdvantages(gamma=0.5, lmbda=1.0)(rollout)["advantage"].flatten().tolist()
        [0.75, 0.5]
    """

    def __init__(
        self,
        gamma: float = 0.99,
        lmbda: float = 0.95,
        critic: TensorDictModuleBase | None = None,
        *,
        time_dim: int | None = None,
        reward_key: NestedKey = REWARD,
        value_key: NestedKey = "state_value",
        advantage_key: NestedKey = "advantage",
        value_target_key: NestedKey = "value_target",
        recompute_values: bool = False,
        standardize_advantages: bool = False,
        on_write: bool = False,
    ) -> None:
        super().__init__(**passed_on(AdvantageTransform, locals()))
        self.lmbda = fraction(lmbda, "lmbda")

    def advantages(
        self, rollout: TensorDictBase, reward: Tensor, value: Tensor, next_value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute GAE of one critic."""
        return gae(reward, value, next_value, *flags(rollout, reward), self.gamma, self.lmbda)


class VTraceAdvantages(AdvantageTransform):
    """V-trace targets and policy-gradient advantages (Espeholt et al. 2018, arXiv:1802.01561).

    ``ρ = π(a|s) / μ(a|s)``; ``δ[t] = min(ρ̄, ρ) (r[t] + γ (1 - term[t]) V'[t] - V[t])``;
    ``v[t] - V[t] = δ[t] + γ (1 - done[t]) λ min(c̄, ρ) (v[t+1] - V[t+1])``.

    Args:
        gamma: discount.
        lmbda: λ.
        critic: module that writes the values.
        actor: current policy; without one ``current_log_prob_key`` must be in the rollout.
        rho_clip: ρ̄.
        c_clip: c̄.
        pg_rho_clip: ρ̄ of the policy gradient; as ``rho_clip`` when ``None``.
        log_prob_key: log-probability under the behaviour policy; never overwritten.
        current_log_prob_key: log-probability under the current policy.
        action_key: the action.
        time_dim: as in :class:`DiscountedReturns`, here and below.

    Example:
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

    def __init__(
        self,
        gamma: float = 0.99,
        lmbda: float = 1.0,
        critic: TensorDictModuleBase | None = None,
        actor: Any = None,
        *,
        rho_clip: float = 1.0,
        c_clip: float = 1.0,
        pg_rho_clip: float | None = None,
        log_prob_key: NestedKey = "action_log_prob",
        current_log_prob_key: NestedKey = "current_action_log_prob",
        action_key: NestedKey = "action",
        time_dim: int | None = None,
        reward_key: NestedKey = REWARD,
        value_key: NestedKey = "state_value",
        advantage_key: NestedKey = "advantage",
        value_target_key: NestedKey = "value_target",
        recompute_values: bool = False,
        standardize_advantages: bool = False,
        on_write: bool = False,
    ) -> None:
        super().__init__(**passed_on(AdvantageTransform, locals()))
        self.lmbda = fraction(lmbda, "lmbda")
        self.actor = actor
        self.rho_clip, self.c_clip, self.pg_rho_clip = rho_clip, c_clip, pg_rho_clip
        self.log_prob_key, self.current_log_prob_key = nested_key(log_prob_key), nested_key(current_log_prob_key)
        self.action_key = nested_key(action_key)

    def fill(self, rollout: TensorDictBase) -> None:
        """Write values and the current policy's log-probabilities."""
        if self.actor is not None or self.current_log_prob_key not in rollout.keys(include_nested=True):
            actor = require(self.actor, "actor", f"to compute {self.current_log_prob_key!r}")
            rollout.set(self.current_log_prob_key, current_log_prob(rollout, actor, self.action_key))
        super().fill(rollout)

    def advantages(
        self, rollout: TensorDictBase, reward: Tensor, value: Tensor, next_value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute V-trace of one critic."""
        log_pi, log_mu = log_probs(rollout, self.current_log_prob_key, self.log_prob_key, value)
        ends = flags(rollout, reward)
        return vtrace(log_pi, log_mu, reward, value, next_value, *ends, self.gamma, lmbda=self.lmbda, **self.clips)

    @property
    def clips(self) -> dict[str, Any]:
        """The thresholds of the importance weights, by the names of :func:`vtrace`."""
        return {"rho_clip": self.rho_clip, "c_clip": self.c_clip, "pg_rho_clip": self.pg_rho_clip}


def flags(rollout: TensorDictBase, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``terminated``, and where the trace ends, in the shape of ``like``."""
    return rollout.get(TERMINATED).expand_as(like), boundaries(rollout).expand_as(like)


def log_probs(rollout: TensorDictBase, current: NestedKey, behaviour: NestedKey, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return current and behaviour log-probabilities with as many dimensions as ``like``."""
    check_behaviour(rollout, behaviour)
    pair = []
    for key in (current, behaviour):
        value = rollout.get(key)
        value = value.unsqueeze(-1) if value.ndim == like.ndim - 1 else value
        pair.append(value.to(like.dtype).expand_as(like))
    return pair[0], pair[1]


def check_behaviour(rollout: TensorDictBase, behaviour: NestedKey) -> None:
    """Check that the log-probabilities of the policy that acted are there."""
    if rollout.get(behaviour, None) is None:
        raise KeyError(
            f"{behaviour!r} is missing: V-trace needs the log-probabilities of the policy that acted; "
            "let it write them (return_log_prob=True)."
        )
