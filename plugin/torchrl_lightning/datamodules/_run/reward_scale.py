"""Divide rewards by the running standard deviation of their discounted sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.moments import Moments
from torchrl_lightning._core.state import Attribute, Stateful, number, sequence, state_error, tensor
from torchrl_lightning._core.torchrl_compat import set_entry
from torchrl_lightning._core.tree import raw_items
from torchrl_lightning._core.validators import Checked, non_negative, optional, positive
from torchrl_lightning.environments.normalization import EPSILON, standardize
from torchrl_lightning.kernels.scan import discounted_scan

_CHUNK = 256  # single steps are reduced to moments in chunks of this size


def _concat_steps(rollouts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [torch.cat(tensors, 1) for tensors in zip(*rollouts, strict=True)]


def _read_pending(value: Any, name: str) -> list[tuple[Tensor, Tensor]]:
    if not sequence(value, name):
        return []
    is_pair = len(value) == 2 and all(
        isinstance(item, Tensor) and item.ndim > 2 and item.layout is torch.strided for item in value
    )
    if not is_pair or value[0].shape[:2] != value[1].shape[:2] or not value[0].is_floating_point():
        raise state_error(value, name, "rewards and ends of the same steps, [N, T, ...] each")
    if value[1].dtype != torch.bool:
        raise state_error(value[1], f"the second of {name}", "ends, of bool")
    return [(value[0], value[1])]


class RewardScale(Stateful):
    r"""Divide rewards by the standard deviation of \(y_t = \gamma y_{t-1} + r_t\), and clip them.

    The sum \(y\) restarts with each episode. Recorded rewards change the deviation only after :meth:`load_moments`.

    Args:
        clip: largest absolute value of a scaled reward.
        epsilon: added to the variance.
    """

    OWNER = "reward scale"
    STATE = {
        "sums": Attribute(tensor(torch.float64, None), "_sums"),
        "noted": Attribute(_read_pending, "_pending", _concat_steps),
        "gamma": Attribute(number(0.0, 1.0), "_gamma"),
        "env_ids": Attribute(optional(tensor(torch.int64, None)), "_env_ids"),
    }

    clip = Checked(positive)
    epsilon = Checked(non_negative)

    def __init__(self, clip: float, epsilon: float = EPSILON) -> None:
        self.clip, self.epsilon = clip, epsilon
        self._gamma = 0.99  # replaced when the first rewards are recorded
        self.moments = Moments.empty()
        """The moments of the sums."""
        # The subtracted value (always zero), and the reciprocal of the standard deviation.
        self._constants = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        self._sums = torch.zeros(0, dtype=torch.float64)  # the last sum of each environment
        self._pending: list[tuple[Tensor, Tensor]] = []  # rewards and end flags of the same environments
        self._env_ids: Tensor | None = None  # ids of these environments
        self._steps = 0  # number of recorded steps

    def scale_(self, data: TensorDictBase) -> None:
        """Replace the raw rewards in ``("next", "reward")`` by scaled rewards."""
        following = raw_items(data)["next"]
        reward = raw_items(following)["reward"]
        zero, factor = self._constants
        if factor.device != reward.device:
            zero, factor = self._constants = (zero.to(reward.device), factor.to(reward.device))
        set_entry(following, "reward", standardize(reward, zero, factor, self.clip))

    def update(self, reward: Tensor, done: Tensor, env_ids: Tensor | None, gamma: float) -> Moments | None:
        """Record rewards and end flags of a rollout.

        Args:
            reward: The rewards ``[N, T, *]``.
            done: The end flags ``[N, T, *]``.
            env_ids: Environment of each row, ``[N]``; None for all environments in order.
            gamma: The discount of the run.

        Returns:
            The moments of the sums if a chunk is full or ``env_ids`` changes, else None.
        """
        earlier, self._gamma = None, gamma
        if env_ids is not self._env_ids:
            earlier, self._env_ids = self.pop_moments(), env_ids
        self._pending.append((reward.clone(), done.clone()))  # a collector may reuse its memory
        self._steps += done.shape[1]
        return earlier if self._steps < _CHUNK else _merge(earlier, self.pop_moments())

    def pop_moments(self) -> Moments | None:
        """Return the moments of the sums, and clear the recorded rewards; None if no rewards are recorded.

        Raises:
            ValueError: A reward is not finite.
        """
        if not self._pending:
            return None
        reward, done = (torch.cat(tensors, 1).cpu() for tensors in zip(*self._pending, strict=True))
        self._pending, self._steps = [], 0
        reward = reward.flatten(2).sum(-1, dtype=torch.float64).T
        continues = ~done.flatten(2).any(-1).T
        ids = torch.arange(reward.shape[1]) if self._env_ids is None else self._env_ids
        missing = int(ids.max()) + 1 - len(self._sums)
        if missing > 0:
            self._sums = torch.cat([self._sums, self._sums.new_zeros(missing)])
        is_known = ids >= 0  # negative ids: the environment is unknown
        initial = torch.where(is_known, self._sums[ids], 0.0)
        discount = torch.full_like(reward, self._gamma)
        discount[1:] *= continues[:-1]
        sums = discounted_scan(reward, discount, initial=initial, reverse=False)
        moments = Moments.from_samples(sums.flatten())
        if not moments.mean.isfinite():
            raise ValueError("rewards must be finite, got NaN or infinity. Correct the environment.")
        self._sums[ids[is_known]] = (sums[-1] * continues[-1])[is_known]
        return moments

    def reset(self, env_ids: Tensor | slice = slice(None)) -> None:
        """Begin new sums for these environments; call :meth:`pop_moments` first."""
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
        ids, pending = values["env_ids"], values["noted"]
        if ids is not None and pending and len(ids) != len(pending[0][0]):
            raise state_error(ids, "'env_ids'", f"the ids of {len(pending[0][0])} environments")

    def _post_load(self) -> None:
        self._steps = sum(done.shape[1] for _, done in self._pending)


def _merge(one: Moments | None, other: Moments | None) -> Moments | None:
    return other if one is None else one if other is None else one.merged(other)
