"""Running means and variances in float64, and the dtype for subtracting a mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_lightning._core.state import bounded_integer, check_state, tensor


def precision_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for subtracting a mean: float64 if the values are float64 or integers, else float32.

    Rounding the mean to float32 first would lose small variations at a large offset, such as seconds since 1970.
    """
    return torch.float32 if dtype.is_floating_point and dtype is not torch.float64 else torch.float64


@dataclass(frozen=True)
class Moments:
    r"""Count, mean and summed squared deviations \(\sum (x - \bar x)^2\) of samples, float64.

    Attributes:
        count: The number of samples.
        mean: The mean, ``[*F]``.
        spread: The summed squared deviations, ``[*F]``.

    Examples:
        >>> one, other = Moments.from_samples(torch.tensor([[1.0], [3.0]])), Moments.from_samples(torch.tensor([[8.0]]))
        >>> both = one.merged(other)
        >>> both.count, both.mean.item(), both.variance.item()
        (3, 4.0, 8.666666666666666)
    """

    count: int
    mean: Tensor
    spread: Tensor

    @classmethod
    def empty(cls, *shape: int) -> Moments:
        """Return the moments of zero samples."""
        return cls(0, torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))

    @classmethod
    def from_samples(cls, samples: Tensor) -> Moments:
        """Return the moments of samples ``[B, *F]``, on the CPU; equal samples have an exact mean and zero spread."""
        values = samples.detach().to("cpu", torch.float64)
        mean = values.mean(0)
        mean += (values - mean).mean(0)  # correct the rounding of the sum
        return cls(len(values), mean, (values - mean).square_().sum(0))

    @property
    def variance(self) -> Tensor:
        """Population variance ``[*F]``; NaN without a sample."""
        return self.spread / self.count

    def merged(self, other: Moments) -> Moments:
        """Return the moments of both sets of samples (Chan et al., 1979)."""
        count = self.count + other.count
        if not self.count or not other.count:
            return self if other.count == 0 else other
        shift = other.mean - self.mean
        spread = self.spread + other.spread + shift.square() * (self.count * other.count / count)
        return Moments(count, self.mean + shift * (other.count / count), spread)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the moments."""
        return {"count": self.count, "mean": self.mean.clone(), "spread": self.spread.clone()}

    def restored(self, state: Mapping[str, Any], owner: str) -> Moments:
        """Return the moments of a :meth:`state_dict`; raise ValueError if the state does not fit this shape."""
        shape, largest = self.mean.shape, torch.finfo(torch.float64).max
        schema = {
            "count": bounded_integer(),
            "mean": tensor(torch.float64, *shape, low=-largest, high=largest, anywhere=True),
            "spread": tensor(torch.float64, *shape, low=0.0, high=largest, anywhere=True),
        }
        check_state(state, schema, owner)
        return Moments(state["count"], state["mean"].cpu().clone(), state["spread"].cpu().clone())
