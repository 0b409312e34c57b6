"""Generators of random numbers."""

from __future__ import annotations

import torch


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
