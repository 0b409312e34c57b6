"""The intrinsic stream: normalised rewards and non-episodic returns with their own critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning.entries import nested_keys
from torchrl_lightning.environments.origins import env_ids
from torchrl_lightning.estimators import IntrinsicRewardNormalizer, gae, vtrace
from torchrl_lightning.keys import NORMALIZED_REWARD
from torchrl_lightning.parts import passed_on
from torchrl_lightning.ranges import fraction
from torchrl_lightning.rollout.advantages import AdvantageTransform, log_probs


class IntrinsicReturns(AdvantageTransform):
    """Advantages and targets of the intrinsic rewards (Burda et al. 2018, arXiv:1810.12894).

    The rewards are divided by the running standard deviation of their discounted sum. The stream does not end with the
    episode: it is GAE with ``terminated = done = 0``, its own γ and its own critic. The raw reward stays as it is; the
    normalised one is ``("next", "normalized_intrinsic_reward")``.

    Args:
        gamma: discount of the intrinsic stream.
        lmbda: λ; 1 gives plain discounted returns.
        critic: module that writes ``intrinsic_state_value``.
        normalize: divide rewards by their running standard deviation.
        direction: ``"forward"`` keeps the filter across rollouts, ``"backward"`` restarts it in each.
        log_prob_keys: keys of the current and the behaviour policy's log-probabilities; with them V-trace replaces GAE.
        time_dim: as in :class:`DiscountedReturns`, here and below, with keys of their own for this stream.

    Example:
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

    episodic = False

    def __init__(
        self,
        gamma: float = 0.99,
        lmbda: float = 0.95,
        critic: TensorDictModuleBase | None = None,
        *,
        normalize: bool = True,
        direction: Literal["forward", "backward"] = "forward",
        log_prob_keys: tuple[NestedKey, NestedKey] | None = None,
        time_dim: int | None = None,
        reward_key: NestedKey = ("next", "intrinsic_reward"),
        value_key: NestedKey = "intrinsic_state_value",
        advantage_key: NestedKey = "intrinsic_advantage",
        value_target_key: NestedKey = "intrinsic_value_target",
        recompute_values: bool = False,
        standardize_advantages: bool = False,
        on_write: bool = False,
    ) -> None:
        super().__init__(**passed_on(AdvantageTransform, locals()))
        self.lmbda = fraction(lmbda, "lmbda")
        self.normalize = normalize
        self.normalizer = IntrinsicRewardNormalizer(gamma, direction)
        self.log_prob_keys = None if log_prob_keys is None else nested_keys(log_prob_keys)
        self.clips: dict[str, Any] = {}

    def fill(self, rollout: TensorDictBase) -> None:
        """Normalise the rewards and write the values."""
        self.normalize_rewards(rollout)
        super().fill(rollout)

    def normalize_rewards(self, rollout: TensorDictBase) -> None:
        """Write the normalised rewards of a time-major rollout and advance the running statistics."""
        reward = rollout.get(self.reward_key, None)
        if reward is None:
            raise KeyError(f"{self.reward_key!r} is missing: the intrinsic stream needs intrinsic rewards.")
        if self.normalize:
            reward = self.normalizer.normalize(reward, env_ids(rollout, time_dim=0))
        rollout.set(NORMALIZED_REWARD, reward)

    def reward(self, rollout: TensorDictBase) -> Tensor:
        """Return the normalised intrinsic reward."""
        reward: Tensor = rollout.get(NORMALIZED_REWARD)
        return reward

    def advantages(
        self, rollout: TensorDictBase, reward: Tensor, value: Tensor, next_value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute GAE, or V-trace, across episode ends."""
        never = torch.zeros_like(reward, dtype=torch.bool)
        if self.log_prob_keys is None:
            return gae(reward, value, next_value, never, never, self.gamma, self.lmbda)
        current, behaviour = self.log_prob_keys
        log_pi, log_mu = log_probs(rollout, current, behaviour, value)
        return vtrace(
            log_pi, log_mu, reward, value, next_value, never, never, self.gamma, lmbda=self.lmbda, **self.clips
        )

    def get_extra_state(self) -> dict[str, Any]:
        """Return the running statistics, so that ``state_dict`` includes them."""
        return dict(self.normalizer.state_dict())

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the running statistics."""
        self.normalizer.load_state_dict(dict(state))
