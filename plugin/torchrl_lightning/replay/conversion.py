"""Conversion of numbers and flags of one step to stored rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_tensor(value: Any, name: str) -> Tensor:
    """Convert a number, array, tensor or list of numbers to a detached tensor; raise TypeError for other values."""
    try:
        return torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be numbers, got a {type(value).__name__}; nothing was stored.") from error


def to_row(value: Any, name: str, width: int | None, device: torch.device) -> Tensor:
    """Convert numbers of any shape to one detached float32 row ``[1, width]``.

    Raises:
        TypeError: the value is not a number, list, array or tensor.
        ValueError: the number of values is not ``width`` (unless None), or a value is NaN or infinite.
    """
    row = to_tensor(value, name).to(device, torch.float32).reshape(1, -1)
    if width is not None and row.shape[1] != width:
        raise ValueError(f"{name} must have {width} numbers, got {row.shape[1]}; nothing was stored.")
    if not bool(torch.isfinite(row).all()):
        raise ValueError(f"{name} must be finite, got NaN or infinite values; nothing was stored.")
    return row


def to_flag(value: Any, name: str, device: torch.device) -> Tensor:
    """Convert a bool, or the number 0 or 1, to bool ``[1, 1]``; raise ValueError for other numbers."""
    tensor = to_tensor(value, name)
    if tensor.numel() != 1 or float(tensor) not in (0.0, 1.0):
        raise ValueError(f"{name} must be true or false, got {value!r}; nothing was stored.")
    return tensor.bool().reshape(1, 1).to(device)
