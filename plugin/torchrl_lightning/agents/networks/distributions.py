"""Distributions over actions that TorchRL does not provide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributions as D

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class MultiCategorical(D.Distribution):
    r"""Several independent categorical distributions with one joint log-probability.

    \(\log p(a) = \sum_i \log p_i(a_i)\); actions are integers ``[*B, K]``.

    Args:
        logits: The concatenated logits ``[*B, sum(sizes)]``.
        sizes: The number of categories in each of the K parts.

    Examples:
        >>> dist = MultiCategorical(torch.zeros(2, 5), [2, 3])
        >>> dist.sample().shape, dist.log_prob(torch.zeros(2, 2, dtype=torch.long))
        (torch.Size([2, 2]), tensor([-1.7918, -1.7918]))
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = False

    def __init__(self, logits: Tensor, sizes: Sequence[int]) -> None:
        self.parts = [part.log_softmax(-1) for part in logits.split(list(sizes), -1)]
        super().__init__(logits.shape[:-1], torch.Size([len(self.parts)]), validate_args=False)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Sample actions ``[*S, *B, K]``."""
        return torch.stack(
            [D.Categorical(logits=part, validate_args=False).sample(sample_shape) for part in self.parts], -1
        )

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the joint log-probability ``[*B]`` of actions ``[*B, K]``."""
        log_probs = []
        for part, choice in zip(self.parts, value.long().unbind(-1), strict=True):
            part = part.expand(*choice.shape, part.shape[-1])
            log_probs.append(part.gather(-1, choice.unsqueeze(-1)).squeeze(-1))
        return torch.stack(log_probs).sum(0)

    def entropy(self) -> Tensor:
        """Return the joint entropy ``[*B]``."""
        return torch.stack([-(part.exp() * part.clamp_min(-1e30)).sum(-1) for part in self.parts]).sum(0)

    @property
    def mode(self) -> Tensor:
        """The most likely actions ``[*B, K]``."""
        return torch.stack([part.argmax(-1) for part in self.parts], -1)

    deterministic_sample = mode  # TorchRL reads this name under deterministic exploration


def clipped_normal_log_prob(
    value: Tensor, loc: Tensor, scale: Tensor, log_scale: Tensor, low: Tensor, high: Tensor
) -> Tensor:
    r"""Return the log-probability ``[*B]`` of a Normal's samples ``[*B, A]`` that were clipped to a box.

    A component inside the box has the Normal's density. A component on a bound has the mass of the whole tail.
    At ``low`` this means \(\log p(a_i) = \log\Phi((l_i - \mu_i)/\sigma_i)\), and at ``high`` it is the upper tail.
    Bounds may be infinite. Mean and deviation refer to the Normal before clipping.
    """
    z = (value - loc) / scale
    inside = torch.addcmul((log_scale + _HALF_LOG_2PI).neg(), z, z, value=-0.5)
    below, above = value <= low, value >= high
    # On a bound, value equals the bound, so the tail beyond it has the mass ndtr(z) or ndtr(-z).
    tail = torch.special.log_ndtr(torch.where(above, -z, z))
    return torch.where(below | above, tail, inside).sum(-1)


def normal_entropy(log_scale: Tensor) -> Tensor:
    """Return the entropy ``[*B]`` of a diagonal Normal from its log standard deviations ``[*B, A]``."""
    return (log_scale + (0.5 + _HALF_LOG_2PI)).sum(-1)


class ClippedNormal(D.Distribution):
    r"""A diagonal Normal with samples clipped to a box and the exact log-probability of the clipped action.

    See :func:`clipped_normal_log_prob`. The policy gradient stays unbiased and has less variance than with the
    log-probability of the unclipped Normal (Fujita and Maeda, "Clipped Action Policy Gradient", ICML 2018). The
    stored action equals the executed action.

    Args:
        loc: Mean before clipping ``[*B, A]``.
        scale: Standard deviation before clipping ``[*B, A]``.
        low: Lower bound ``[A]``; may be -inf.
        high: Upper bound ``[A]``; may be inf.

    Examples:
        >>> one = torch.ones(1)
        >>> ClippedNormal(0 * one, one, -one, one).log_prob(one).exp()  # the mass beyond one sigma
        tensor(0.1587)
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = False

    def __init__(self, loc: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> None:
        self.loc, self.scale = loc, scale.expand_as(loc)
        self.low, self.high = low.to(loc.device), high.to(loc.device)
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=False)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Sample actions ``[*S, *B, A]`` inside the box."""
        with torch.no_grad():
            noise = torch.randn(*sample_shape, *self.loc.shape, dtype=self.loc.dtype, device=self.loc.device)
            return torch.addcmul(self.loc, noise, self.scale).clamp(self.low, self.high)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability ``[*B]`` of actions ``[*B, A]``: a density inside the box, a mass on bounds."""
        return clipped_normal_log_prob(value, self.loc, self.scale, self.scale.log(), self.low, self.high)

    def entropy(self) -> Tensor:
        """Return the entropy ``[*B]`` before clipping; it does not reward a collapse onto the bounds."""
        return normal_entropy(self.scale.log())

    @property
    def mode(self) -> Tensor:
        """The mean of the Normal, clipped to the box."""
        return self.loc.clamp(self.low, self.high)

    mean = mode  # not the mean of the clipped samples
    deterministic_sample = mode  # TorchRL reads this name under deterministic exploration
