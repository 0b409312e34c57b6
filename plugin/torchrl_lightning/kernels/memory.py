"""Memory for what kernels read at random."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LINE = 64  # bytes of a cache line


def allocate(size: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Reserve uninitialised memory; on the CPU numpy's, which asks for huge pages: scattered reads miss fewer of them.

    It begins with a cache line.
    """
    if torch.device(device).type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    raw = np.empty(size * dtype.itemsize + LINE, np.uint8)
    begin = -raw.ctypes.data % LINE
    return torch.from_numpy(raw[begin : begin + size * dtype.itemsize]).view(dtype)
