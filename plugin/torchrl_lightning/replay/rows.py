"""Numbers and flags of one step, as the rows that a buffer stores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def numbers(value: Any, name: str) -> Tensor:
    """Read a number, array, tensor, or list of numbers, detached; a TypeError if it is something else."""
    try:
        return torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be numbers, got a {type(value).__name__}; nothing was stored.") from error


def vector(value: Any, name: str, width: int | None, device: torch.device) -> Tensor:
    """Read numbers of any shape as one float32 row ``[1, width]``, detached.

    Raises:
        TypeError: the value is no number, array or tensor.
        ValueError: there are not ``width`` numbers, unless that is None, or they are NaN or infinite.
    """
    row = numbers(value, name).to(device, torch.float32).reshape(1, -1)
    if width is not None and row.shape[1] != width:
        raise ValueError(f"{name} has {row.shape[1]} numbers, expected {width}; nothing was stored.")
    if not bool(torch.isfinite(row).all()):
        raise ValueError(f"{name} holds values that are NaN or infinite; nothing was stored.")
    return row


def flag(value: Any, name: str, device: torch.device) -> Tensor:
    """Read a bool, or a number that is 0 or 1, as ``[1, 1]`` bool; a ValueError if it is something else."""
    given = numbers(value, name)
    if given.numel() != 1 or float(given) not in (0.0, 1.0):
        raise ValueError(f"{name} must be true or false, got {value!r}; nothing was stored.")
    return given.bool().reshape(1, 1).to(device)
