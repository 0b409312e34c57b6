"""Standardise columns to zero mean and unit standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from torchrl_lightning._core.moments import Moments

SMALLEST_STD = 1e-8


class StandardScaler(nn.Module):
    """Scale columns to zero mean and unit standard deviation, and back.

    The standard deviation is unbiased. A deviation below 1e-8, as in a constant column or a single row, counts as 1.
    Moments are summed in float64. Floating-point values are scaled in their dtype, and integers in float64.
    Before the first fit, values stay unchanged. The scaler is a module, so the parent's ``state_dict`` contains mean
    and deviation, and both move to the parent's device.

    Args:
        columns: names of the columns, for error messages.

    Examples:
        >>> scaler = StandardScaler(["height", "width"]).fit(torch.tensor([[1.0, 7.0], [3.0, 7.0], [5.0, 7.0]]))
        >>> scaler.mean.tolist(), scaler.std.tolist()
        ([3.0, 7.0], [2.0, 1.0])
        >>> scaler.inverse(scaler(torch.tensor([5.0, 7.0])))
        tensor([5., 7.])
    """

    mean: Tensor
    """``[D]``, float64."""
    std: Tensor
    """``[D]``, float64."""
    count: Tensor
    """Number of rows in the last fit; 0 before the first fit."""

    def __init__(self, columns: Sequence[str]) -> None:
        super().__init__()
        self.columns = tuple(columns)
        self.register_buffer("mean", torch.zeros(len(columns), dtype=torch.float64))
        self.register_buffer("std", torch.ones(len(columns), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def fit(self, rows: Tensor) -> Self:
        """Compute mean and standard deviation from the rows ``[N, D]``; return the scaler.

        Raises:
            ValueError: the rows are empty or have another width, or a number is NaN or infinite; the message names
                the column.
        """
        if rows.ndim != 2 or rows.shape[1] != len(self.columns) or not len(rows):
            raise ValueError(
                f"The rows to fit must be [N, {len(self.columns)}] with the columns {', '.join(self.columns)}, got the "
                f"shape {list(rows.shape)}."
            )
        check_finite(rows, self.columns)
        # Subtract the first row, so that the deviation of a constant column is exactly 0.
        first = rows[:1].detach().to("cpu", torch.float64)
        moments = Moments.from_samples(rows.detach().to("cpu", torch.float64) - first)
        std = (moments.spread / max(moments.count - 1, 1)).sqrt()
        self.mean.copy_(moments.mean + first[0])
        self.std.copy_(torch.where(std < SMALLEST_STD, 1.0, std))
        self.count.fill_(moments.count)
        return self

    def forward(self, values: Tensor) -> Tensor:
        """Scale values ``[..., D]``."""
        if not values.is_floating_point():
            values = values.double()
        return (values - self.mean.to(values.dtype)) / self.std.to(values.dtype)

    def inverse(self, values: Tensor) -> Tensor:
        """Scale values ``[..., D]`` back."""
        return values * self.std.to(values.dtype) + self.mean.to(values.dtype)


def check_finite(rows: Tensor, columns: Sequence[str]) -> None:
    """Validate rows ``[N, D]``; raise ValueError with the column's name if a number is NaN or infinite."""
    finite = rows.isfinite()
    if finite.all():
        return
    column = int((~finite).any(0).nonzero()[0])
    invalid = rows[~finite[:, column], column]
    raise ValueError(
        f"Column {columns[column]} must be finite, got {invalid[0].item()} in {len(invalid)} of {len(rows)} rows. Do "
        "not store these steps in the buffer."
    )
