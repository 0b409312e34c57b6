"""Conversion of indices to integers, and removal of duplicates: the last of equal indices counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def as_integers(value: Any, name: str, device: torch.device | None = None) -> Tensor:
    """Return integers of any shape as int64; an empty list is allowed.

    Raises:
        TypeError: the values are not integers; the message starts with ``name``.
    """
    try:
        index = torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be integers, got {value!r}.") from error
    if index.numel() and (index.dtype.is_floating_point or index.dtype.is_complex or index.dtype is torch.bool):
        raise TypeError(f"{name} must be integers, got {index.dtype}.")
    return index.to(torch.int64)


def unique_last(index: Tensor) -> Tensor:
    """Return the position of the last occurrence of each distinct index."""
    unique, inverse = torch.unique(index, return_inverse=True)
    positions = torch.arange(index.numel(), device=index.device)
    return torch.zeros_like(unique).scatter_reduce_(0, inverse, positions, "amax", include_self=False)
