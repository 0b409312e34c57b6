"""Normalise intrinsic rewards by the running standard deviation of their discounted sum."""

from __future__ import annotations

import math
import sys
from typing import Any, Literal, Self

import torch
from torch import Tensor

from torchrl_lightning._core.state import Attribute, Stateful, number, tensor
from torchrl_lightning._core.validators import Checked, fraction, one_of
from torchrl_lightning.kernels.scan import discounted_scan

DIRECTIONS = ("forward", "backward")


def _check_sums(value: Any, name: str) -> Tensor | None:
    """Validate the sums of a filter: a tensor of any shape, or None."""
    if value is None:
        return None
    shape, largest = value.shape if isinstance(value, Tensor) else (), sys.float_info.max
    sums: Tensor = tensor(torch.float64, *shape, low=-largest, high=largest, anywhere=True)(value, name)
    return sums.detach()


class IntrinsicRewardNormalizer(Stateful):
    r"""Divide intrinsic rewards by a running standard deviation of their discounted sum.

    .. math::
        x_t = \gamma x_{t-1} + r_t, \qquad r_t \leftarrow r_t / \sqrt{\mathrm{Var}[x]}

    The mean is not subtracted. The variance covers all rollouts so far, including the current one.

    ``"forward"`` follows Burda et al., "Exploration by Random Network Distillation", https://arxiv.org/abs/1810.12894,
    and the code of that paper. It uses the population variance. The filter continues across episode ends and rollouts,
    but not across cut trajectories. ``"backward"`` uses the reward-to-go :math:`x_t = \gamma x_{t+1} + r_t` and the
    unbiased variance, and restarts in each rollout.

    Args:
        gamma: discount of the filter in [0, 1].
        direction: ``"forward"`` or ``"backward"``.

    Raises:
        ValueError: ``gamma`` is outside [0, 1] or the direction is unknown.

    >>> import torch
    >>> normalizer = IntrinsicRewardNormalizer(gamma=0.0)
    >>> normalizer.normalize(torch.tensor([[0.0], [4.0]])).round(decimals=3)
    tensor([[0.],
            [2.]])
    """

    OWNER, VERSION = "normaliser", 1
    gamma = Checked(fraction, "IntrinsicRewardNormalizer: gamma")
    direction = Checked(lambda value, name: one_of(value, name, DIRECTIONS), "IntrinsicRewardNormalizer: direction")
    STATE = {
        "gamma": Attribute(),
        "direction": Attribute(),
        "mean": Attribute(number(), "_mean"),
        "variance": Attribute(number(0), "_variance"),
        "count": Attribute(number(0), "_count"),
        "filter": Attribute(_check_sums, "_filter"),
    }

    def __init__(self, gamma: float = 0.99, direction: Literal["forward", "backward"] = "forward") -> None:
        self.direction = direction
        self.gamma = gamma
        self._filter: Tensor | None = None  # for each environment, the sum after its last step
        self._last: dict[int, tuple[int, bool]] = {}  # by environment: trajectory id and done flag of its last step
        self._mean, self._variance, self._count = 0.0, 1.0, 1e-4

    def discounted_by(self, gamma: float) -> Self:
        """Return a normaliser with another discount that continues from these statistics."""
        normalizer = type(self)(gamma, self.direction)
        normalizer.load_state_dict({**self.state_dict(), "gamma": normalizer.gamma})
        normalizer._last = self._last
        return normalizer

    @property
    def variance(self) -> float:
        """The running variance of the discounted sum."""
        return self._variance

    @torch.no_grad()
    def normalize(
        self,
        reward: Tensor,
        env_ids: Tensor | None = None,
        *,
        traj_ids: Tensor | None = None,
        done: Tensor | None = None,
    ) -> Tensor:
        """Update the statistics with a rollout of intrinsic rewards and return the normalised rewards.

        Args:
            reward: ``[T, N, ...]``, time first, floating point.
            env_ids: distinct environment ids of the columns, ``[N]``; -1 means unknown and restarts the filter. None
                means the same ``N`` environments in each rollout.
            traj_ids: trajectory ids, ``[T, N]``. The filter restarts if the id changes after a step that is not
                ``done``, within or between rollouts. With None, no trajectory is cut.
            done: end-of-episode flags, ``[T, N, ...]``; None means False for all steps.

        Returns:
            A new tensor in the shape and dtype of ``reward``.

        Raises:
            TypeError: the rewards are not a floating-point tensor.
            ValueError: ``reward`` is empty or not finite, or the environments do not fit; the statistics stay
                unchanged.
        """
        if not isinstance(reward, Tensor) or not reward.dtype.is_floating_point:
            received = f"a tensor of {reward.dtype}" if isinstance(reward, Tensor) else type(reward).__name__
            raise TypeError(f"IntrinsicRewardNormalizer: rewards must be floating point, got {received}")
        if reward.dim() == 0 or reward.numel() == 0:
            raise ValueError(
                f"IntrinsicRewardNormalizer: reward must be [T, N, ...], got the shape {tuple(reward.shape)}"
            )
        forward = self.direction == "forward"
        reward64 = reward.detach().double()
        initial = self._initial_sums(reward64, env_ids) if forward else None
        cuts, last = (None, self._last) if traj_ids is None else self._cuts(reward64, env_ids, traj_ids, done)
        sums = discounted_scan(reward64, self._discount(reward64, cuts), initial=initial, reverse=not forward)
        batch_variance, batch_mean = torch.var_mean(sums, correction=0 if forward or sums.numel() == 1 else 1)
        mean, variance = float(batch_mean), float(batch_variance)
        if not math.isfinite(variance):
            invalid = torch.nonzero(~torch.isfinite(reward64))
            cause = (
                f"got {len(invalid)} others, the first at {invalid[0].tolist()}"
                if len(invalid)
                else "their sums overflow"
            )
            raise ValueError(f"IntrinsicRewardNormalizer: rewards must be finite, {cause}")
        self._last = last
        if forward:
            self._store_sums(sums[-1], env_ids)
        self._update(mean, variance, sums.numel())
        # PyTorchRL's backward filter uses a single-precision deviation; do the same for comparable rewards.
        dtype = torch.float64 if forward else torch.float32
        deviation = float(torch.tensor(self._variance, dtype=dtype).sqrt())
        return (reward64 / deviation).to(reward.dtype)

    def _cuts(
        self, reward: Tensor, env_ids: Tensor | None, traj_ids: Tensor, done: Tensor | None
    ) -> tuple[Tensor, dict[int, tuple[int, bool]]]:
        """Return the mask ``[T, N]`` of trajectory cuts, and each environment's last trajectory id and done flag."""
        steps, envs = shape = tuple(reward.shape[:2])
        for name, value in (("traj_ids", traj_ids), ("done", done)):
            if value is not None and tuple(value.shape[:2]) != shape:
                raise ValueError(
                    f"IntrinsicRewardNormalizer: {name} must have the shape {shape} of time and environments, got "
                    f"{tuple(value.shape)}. Pass one value for each step."
                )
        ids = traj_ids.reshape(steps, envs, -1)[..., 0].cpu()
        ended = torch.zeros(shape, dtype=torch.bool) if done is None else done.reshape(steps, envs, -1).any(-1).cpu()
        env = list(range(envs)) if env_ids is None else env_ids.tolist()
        begin, end = ids[0].tolist(), zip(ids[-1].tolist(), ended[-1].tolist(), strict=True)
        previous = [self._last.get(env_id, (first, True)) for env_id, first in zip(env, begin, strict=True)]
        cuts = torch.empty(shape, dtype=torch.bool)
        cuts[0] = torch.tensor(
            [not was_done and first != last for first, (last, was_done) in zip(begin, previous, strict=True)]
        )
        cuts[1:] = (ids[1:] != ids[:-1]) & ~ended[:-1]
        return cuts, {**self._last, **{env_id: last for env_id, last in zip(env, end, strict=True) if env_id >= 0}}

    def _discount(self, reward: Tensor, cuts: Tensor | None) -> float | Tensor:
        """Return the discount between each step and the step that the filter visits before; 0 across cuts."""
        if cuts is None or not bool(cuts.any()):
            return self.gamma
        if self.direction == "backward":
            cuts = torch.cat([cuts[1:], torch.zeros_like(cuts[:1])])
        continues = ~cuts.to(reward.device).view(*cuts.shape, *[1] * (reward.ndim - 2))
        return self.gamma * continues.to(reward.dtype).expand_as(reward)

    def _post_load(self) -> None:
        self._last = {}  # a new collector may restart its trajectory ids at 0

    def _initial_sums(self, reward: Tensor, env_ids: Tensor | None) -> Tensor | None:
        """Return the sums from the previous rollout, or None."""
        sums, shape = self._filter, reward.shape[1:]
        if env_ids is not None:
            if env_ids.shape != shape[:1]:
                raise ValueError(
                    f"IntrinsicRewardNormalizer: env_ids must have the shape {tuple(shape[:1])}, one id for each "
                    f"environment, got {tuple(env_ids.shape)}"
                )
            known = env_ids[env_ids >= 0]
            if len(known.unique()) < len(known):
                raise ValueError(f"IntrinsicRewardNormalizer: env_ids must be distinct, got {env_ids.tolist()}")
            shape = shape[1:]
        if sums is None:
            return None
        if (sums.shape if env_ids is None else sums.shape[1:]) != shape:
            raise ValueError(
                f"IntrinsicRewardNormalizer: the rollout must have the shape {tuple(sums.shape)} after time, got "
                f"{tuple(reward.shape[1:])}; use one normaliser for each set of environments"
            )
        if env_ids is not None:
            index = env_ids.to(sums.device)
            stored = (index >= 0) & (index < len(sums))
            matched = sums.new_zeros(reward.shape[1:])
            matched[stored] = sums[index[stored]]
            sums = matched
        return sums.to(reward.device)

    def _store_sums(self, sums: Tensor, env_ids: Tensor | None) -> None:
        """Store the sums for the next rollout."""
        if env_ids is None:
            self._filter = sums.clone()
            return
        index = env_ids.to(sums.device)
        known = index >= 0
        size = int(index.max()) + 1
        stored = sums.new_zeros(0, *sums.shape[1:]) if self._filter is None else self._filter.to(sums.device)
        if size > len(stored):
            stored = torch.cat([stored, stored.new_zeros(size - len(stored), *sums.shape[1:])])
        stored[index[known]] = sums[known]
        self._filter = stored

    def _update(self, mean: float, variance: float, count: int) -> None:
        """Merge the moments of a batch into the running moments (Chan et al. 1979)."""
        total = self._count + count
        shift = mean - self._mean
        spread = self._variance * self._count + variance * count + shift**2 * self._count * count / total
        self._mean += shift * count / total
        self._variance = spread / total
        self._count = total
