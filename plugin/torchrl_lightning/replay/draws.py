"""What a draw is asked for, and random numbers as torch's generators give them, in half of its time on the CPU."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Own = Literal["own"]
"""The length of windows that a sampler was built with."""


def integers_below(high: int, count: int, generator: torch.Generator | None) -> Tensor:
    """Draw what ``torch.randint(high, (count,))`` draws, on the generator's device."""
    try:
        return torch.from_numpy(np.empty(count, np.int64)).random_(0, high, generator=generator)
    except RuntimeError:  # a generator of another device; asking for it first would cost as much as the draw
        device = None if generator is None else generator.device
        return torch.randint(high, (count,), generator=generator, device=device)


def uniform(count: int, generator: torch.Generator, dtype: Any = np.float64) -> NDArray[Any]:
    """Draw what ``torch.rand(count)`` draws on the generator's device."""
    shares: NDArray[Any] = np.empty(count, dtype)
    tensor = torch.from_numpy(shares)
    try:
        tensor.uniform_(generator=generator)
    except RuntimeError:  # as above
        tensor.copy_(torch.rand(count, dtype=tensor.dtype, generator=generator, device=generator.device))
    return shares
