"""Divide rewards by the running standard deviation of their discounted sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.moments import Moments
from torchrl_lightning._core.state import Attribute, Stateful, number, sequence, state_error, tensor
from torchrl_lightning._core.torchrl_compat import put_entry
from torchrl_lightning._core.tree import raw_items
from torchrl_lightning._core.validators import Checked, non_negative, optional, positive
from torchrl_lightning.environments.normalization import EPSILON, scaled
from torchrl_lightning.kernels.scan import discounted_scan

_CHUNK = 256  # single steps are reduced to moments in chunks of this size


def _side_by_side(noted: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [torch.cat(each, 1) for each in zip(*noted, strict=True)]


def _rewards_and_ends(value: Any, name: str) -> list[tuple[Tensor, Tensor]]:
    if not sequence(value, name):
        return []
    are_two = len(value) == 2 and all(
        isinstance(each, Tensor) and each.ndim > 2 and each.layout is torch.strided for each in value
    )
    if not are_two or value[0].shape[:2] != value[1].shape[:2] or not value[0].is_floating_point():
        raise state_error(value, name, "rewards and ends of the same steps, [N, T, ...] each")
    if value[1].dtype != torch.bool:
        raise state_error(value[1], f"the second of {name}", "ends, of bool")
    return [(value[0], value[1])]


class RewardScale(Stateful):
    r"""Divide rewards by the standard deviation of \(y_t = \gamma y_{t-1} + r_t\), and clip them.

    The sum starts again with each episode. Noted rewards change the deviation only after :meth:`load_moments`.

    Args:
        clip: largest absolute value of a scaled reward.
        epsilon: added to the variance.
    """

    OWNER = "reward scale"
    STATE = {
        "sums": Attribute(tensor(torch.float64, None), "_sums"),
        "noted": Attribute(_rewards_and_ends, "_noted", _side_by_side),
        "gamma": Attribute(number(0.0, 1.0), "_gamma"),
        "env_ids": Attribute(optional(tensor(torch.int64, None)), "_env_ids"),
    }

    clip = Checked(positive)
    epsilon = Checked(non_negative)

    def __init__(self, clip: float, epsilon: float = EPSILON) -> None:
        self.clip, self.epsilon = clip, epsilon
        self._gamma = 0.99  # until the first rewards set another value
        self.moments = Moments.none()
        """The moments of the sums."""
        # Subtracted value (always zero), and one over the standard deviation.
        self._constants = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        self._sums = torch.zeros(0, dtype=torch.float64)  # the last sum of each environment
        self._noted: list[tuple[Tensor, Tensor]] = []  # rewards and end flags of the same environments
        self._env_ids: Tensor | None = None  # ids of these environments
        self._steps = 0  # number of noted steps

    def scale_(self, data: TensorDictBase) -> None:
        """Scale ``("next", "reward")`` in place of the raw rewards."""
        following = raw_items(data)["next"]
        reward = raw_items(following)["reward"]
        zero, factor = self._constants
        if factor.device != reward.device:
            zero, factor = self._constants = (zero.to(reward.device), factor.to(reward.device))
        put_entry(following, "reward", scaled(reward, zero, factor, self.clip))

    def note(self, reward: Tensor, done: Tensor, env_ids: Tensor | None, gamma: float) -> Moments | None:
        """Note rewards and end flags of a rollout.

        Args:
            reward: The rewards ``[N, T, *]``.
            done: The end flags ``[N, T, *]``.
            env_ids: Environment of each row, ``[N]``; None for all environments in order.
            gamma: The discount of the run.

        Returns:
            The moments of the sums if a chunk is full or ``env_ids`` changes, else None.
        """
        before, self._gamma = None, gamma
        if env_ids is not self._env_ids:
            before, self._env_ids = self.reduced(), env_ids
        self._noted.append((reward.clone(), done.clone()))  # a collector may reuse its memory
        self._steps += done.shape[1]
        return before if self._steps < _CHUNK else _joined(before, self.reduced())

    def reduced(self) -> Moments | None:
        """Return the moments of the sums of noted rewards, and clear the rewards; None without noted rewards.

        Raises:
            ValueError: A reward is not finite.
        """
        if not self._noted:
            return None
        reward, done = (torch.cat(each, 1).cpu() for each in zip(*self._noted, strict=True))
        self._noted, self._steps = [], 0
        reward = reward.flatten(2).sum(-1, dtype=torch.float64).T
        goes_on = ~done.flatten(2).any(-1).T
        ids = torch.arange(reward.shape[1]) if self._env_ids is None else self._env_ids
        missing = int(ids.max()) + 1 - len(self._sums)
        if missing > 0:
            self._sums = torch.cat([self._sums, self._sums.new_zeros(missing)])
        known = ids >= 0  # negative ids: the environment is unknown
        before = torch.where(known, self._sums[ids], 0.0)
        discount = torch.full_like(reward, self._gamma)
        discount[1:] *= goes_on[:-1]
        sums = discounted_scan(reward, discount, initial=before, reverse=False)
        moments = Moments.of(sums.flatten())
        if not moments.mean.isfinite():
            raise ValueError("rewards are not finite; their environment is at fault.")
        self._sums[ids[known]] = (sums[-1] * goes_on[-1])[known]
        return moments

    def cut(self, env_ids: Tensor | slice = slice(None)) -> None:
        """Begin new sums for these environments; call :meth:`reduced` first."""
        if isinstance(env_ids, Tensor):
            env_ids = env_ids[env_ids < len(self._sums)]
        self._sums[env_ids] = 0

    def load_moments(self, moments: Moments) -> None:
        """Replace the moments of the sums."""
        self.moments = moments
        if moments.count:
            factor = (moments.variance + self.epsilon).rsqrt().reshape(1)
            self._constants = torch.zeros_like(factor), factor

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        ids, noted = values["env_ids"], values["noted"]
        if ids is not None and noted and len(ids) != len(noted[0][0]):
            raise state_error(ids, "'env_ids'", f"one of each of {len(noted[0][0])} environments")

    def _loaded(self) -> None:
        self._steps = sum(done.shape[1] for _, done in self._noted)


def _joined(one: Moments | None, other: Moments | None) -> Moments | None:
    return other if one is None else one if other is None else one.merged(other)
