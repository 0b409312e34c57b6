"""Normalise intrinsic rewards, and compute non-episodic returns with a separate critic."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from torchrl_lightning._core.keys import (
    DONE,
    INTRINSIC_ADVANTAGE,
    INTRINSIC_REWARD,
    INTRINSIC_TARGET,
    INTRINSIC_VALUE,
    NORMALIZED_REWARD,
    TRAJ_IDS,
)
from torchrl_lightning._core.settings import Boolean
from torchrl_lightning._core.tree import Key, Keys
from torchrl_lightning.environments.env_ids import env_ids
from torchrl_lightning.estimators import IntrinsicRewardNormalizer
from torchrl_lightning.rollout.advantages import GeneralizedAdvantages
from torchrl_lightning.rollout.estimates import Estimator, RewardKeys, VTrace


class IntrinsicReturns(GeneralizedAdvantages):
    """Advantages and targets of the intrinsic rewards (Burda et al. 2018, arXiv:1810.12894).

    Rewards are divided by the running standard deviation of their discounted sum. The sum restarts when
    ``("collector", "traj_ids")`` changes without a done step. Returns continue across episode ends, because GAE treats
    ``terminated`` and ``done`` as 0. They have a separate γ and critic. The normalised reward is written to
    ``("next", "normalized_intrinsic_reward")``; the raw reward stays unchanged.

    Args:
        gamma: discount of the intrinsic rewards.
        lmbda: λ; 1 gives plain discounted returns.
        critic: module that writes ``intrinsic_state_value``.
        normalize: divide rewards by their running standard deviation.
        direction: ``"forward"`` continues the sum across rollouts; ``"backward"`` restarts the sum in each rollout.
        log_prob_keys: keys of the log-probabilities of the current policy and of the behaviour policy. If given,
            V-trace replaces GAE.
        time_dim: see :class:`DiscountedReturns`, which also documents the remaining arguments. The default keys are the
            intrinsic keys.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> flag, one = torch.zeros(1, 2, 1, dtype=torch.bool), torch.ones(1, 2, 1)
        >>> following = {"intrinsic_reward": one, "reward": one, "done": ~flag, "terminated": ~flag}
        >>> following["intrinsic_state_value"] = one
        >>> entries = {"intrinsic_state_value": one, "next": following}
        >>> rollout = TensorDict(entries, [1, 2], names=[None, "time"])
        >>> result = IntrinsicReturns(gamma=0.5, lmbda=1.0, normalize=False)(rollout)
        >>> result["intrinsic_value_target"].flatten().tolist()
        [1.75, 1.5]
    """

    normalize: Boolean = True
    direction: Literal["forward", "backward"] = "forward"
    log_prob_keys: Keys | None = None
    reward_key: Key = INTRINSIC_REWARD
    value_key: Key = INTRINSIC_VALUE
    advantage_key: Key = INTRINSIC_ADVANTAGE
    value_target_key: Key = INTRINSIC_TARGET

    def __post_init__(self) -> None:
        super().__post_init__()
        self.normalizer = IntrinsicRewardNormalizer(self.gamma, self.direction)

    @property
    def estimator(self) -> Estimator:
        """The GAE estimator, or V-trace if ``log_prob_keys`` are given."""
        if self.log_prob_keys is None:
            return super().estimator
        current, behaviour = self.log_prob_keys
        return VTrace(
            standardize=self.standardize_advantages,
            lmbda=self.lmbda,
            log_prob_key=behaviour,
            current_log_prob_key=current,
        )

    @property
    def stream(self) -> RewardKeys:
        """Keys of the read and written entries, for returns that continue across episode ends."""
        return dataclasses.replace(super().stream, reward=NORMALIZED_REWARD, episodic=False)

    def compute(self, rollout: TensorDictBase) -> None:
        """Write normalised rewards, values, advantages and targets to a time-major rollout."""
        write_normalized(rollout, self.reward_key, self.normalizer if self.normalize else None)
        super().compute(rollout)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the running statistics, so that ``state_dict`` includes them."""
        return self.normalizer.state_dict()

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the running statistics."""
        self.normalizer.load_state_dict(state)


def write_normalized(
    rollout: TensorDictBase, reward_key: NestedKey, normalizer: IntrinsicRewardNormalizer | None
) -> None:
    """Write the normalised rewards of a time-major rollout; without a normaliser, write the raw rewards."""
    reward = rollout.get(reward_key, None)
    if reward is None:
        raise KeyError(f"The rollout must have intrinsic rewards in the entry {reward_key!r}.")
    if normalizer is not None:
        ids, done = rollout.get(TRAJ_IDS, None), rollout.get(DONE, None)
        reward = normalizer.normalize(reward, env_ids(rollout, time_dim=0), traj_ids=ids, done=done)
    rollout.set(NORMALIZED_REWARD, reward)


def has_intrinsic(rollout: TensorDictBase) -> bool:
    """Return True if a rollout has intrinsic rewards."""
    return rollout.get(INTRINSIC_REWARD, None) is not None
