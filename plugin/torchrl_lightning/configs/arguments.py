"""Convert arguments that YAML cannot write as a constructor wants them: dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def dtype_of(name: Any) -> torch.dtype:
    """Return the dtype of that name.

    Raises:
        ValueError: torch has no dtype of that name.

    Example:
        >>> dtype_of("float64"), dtype_of("torch.float32")
        (torch.float64, torch.float32)
    """
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {name!r}; expected the name of a torch dtype, such as float64.")
    return dtype


def with_dtype(component: Callable[..., T]) -> Callable[..., T]:
    """Wrap a constructor so that its ``dtype`` may be a name.

    Example:
        >>> with_dtype(lambda **kwargs: kwargs)(dtype="float32")
        {'dtype': torch.float32}
    """

    @functools.wraps(component, updated=())
    def make(*args: Any, **kwargs: Any) -> T:
        if "dtype" in kwargs:
            kwargs["dtype"] = dtype_of(kwargs["dtype"])
        return component(*args, **kwargs)

    return make
