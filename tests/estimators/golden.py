"""Access to the golden vectors: ``c0_reward``, ``c0_gamma``, ``c1_reward``, ... in one file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

DATA = Path(__file__).parents[1] / "data"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def load(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    with np.load(DATA / f"{name}.npz") as file:
        arrays = {key: torch.as_tensor(file[key]) for key in file.files}
    return {
        key: value.to(dtype) if value.dim() and value.is_floating_point() else value for key, value in arrays.items()
    }


def cases(name: str, dtype: torch.dtype = torch.float64) -> Iterator[dict[str, Tensor]]:
    arrays = load(name, dtype)
    for case in sorted({key.split("_", 1)[0] for key in arrays}):
        yield {key.split("_", 1)[1]: value for key, value in arrays.items() if key.startswith(f"{case}_")}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    error = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=0 if expected.dtype == torch.float64 else error, atol=error)
