"""Access to the golden vectors: ``c0_reward``, ``c0_gamma``, ``c1_reward``, ... in one file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

DATA = Path(__file__).parents[1] / "data"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def arrays(name: str, prefix: str = "") -> dict[str, Any]:
    """Return the arrays of a file with names that start with ``prefix``, without the prefix."""
    with np.load(DATA / f"{name}.npz") as file:
        return {key.removeprefix(prefix): file[key] for key in file.files if key.startswith(prefix)}


def tensors(name: str, prefix: str = "") -> dict[str, Tensor]:
    return {key: torch.as_tensor(value) for key, value in arrays(name, prefix).items()}


def load(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return the tensors of a file. Floating-point tensors with at least one dimension have ``dtype``."""
    return {
        key: value.to(dtype) if value.dim() and value.is_floating_point() else value
        for key, value in tensors(name).items()
    }


def cases(name: str, dtype: torch.dtype = torch.float64) -> Iterator[dict[str, Tensor]]:
    loaded = load(name, dtype)
    for case in sorted({key.split("_", 1)[0] for key in loaded}):
        yield {key.split("_", 1)[1]: value for key, value in loaded.items() if key.startswith(f"{case}_")}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    error = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=0 if expected.dtype == torch.float64 else error, atol=error)
