"""Numbers and flags of one step, as the rows that a buffer stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def check_step(step: Any) -> None:
    """Refuse a step that is not a mapping.

    Raises:
        TypeError: the message says what it is.
    """
    if not isinstance(step, Mapping):
        raise TypeError(f"A step is a dict of documented entries, got a {type(step).__name__}; nothing was stored.")


def numbers(value: Any, name: str) -> Tensor:
    """Read numbers of any shape, detached.

    Args:
        value: a number, array, tensor, or list of numbers.
        name: its name in error messages.

    Raises:
        TypeError: it is something else.

    Example:
        >>> numbers([1, 2], "obs")
        tensor([1, 2])
    """
    try:
        return torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be numbers, got a {type(value).__name__}; nothing was stored.") from error


def vector(value: Any, name: str, width: int | None, device: torch.device) -> Tensor:
    """Read numbers of any shape as one float32 row ``[1, width]``, detached.

    Args:
        value: a number, array or tensor.
        name: its name in error messages.
        width: how many numbers are expected; any number if ``None``.
        device: device of the row.

    Raises:
        TypeError: it is something else.
        ValueError: there are more or fewer numbers, or they are NaN or infinite.

    Example:
        >>> vector([1, 2], "obs", 2, torch.device("cpu"))
        tensor([[1., 2.]])
    """
    row = numbers(value, name).to(device, torch.float32).reshape(1, -1)
    if width is not None and row.shape[1] != width:
        raise ValueError(f"{name} has {row.shape[1]} numbers, expected {width}; nothing was stored.")
    if not bool(torch.isfinite(row).all()):
        raise ValueError(f"{name} holds values that are NaN or infinite; nothing was stored.")
    return row


def flag(value: Any, name: str, device: torch.device) -> Tensor:
    """Read a flag as ``[1, 1]`` bool.

    Args:
        value: a bool, or a number that is 0 or 1.
        name: its name in error messages.
        device: device of the row.

    Raises:
        ValueError: there are several values, or one that is neither true nor false.

    Example:
        >>> flag(1.0, "done", torch.device("cpu"))
        tensor([[True]])
    """
    given = numbers(value, name)
    if given.numel() != 1 or float(given) not in (0.0, 1.0):
        raise ValueError(f"{name} must be true or false, got {value!r}; nothing was stored.")
    return given.bool().reshape(1, 1).to(device)
