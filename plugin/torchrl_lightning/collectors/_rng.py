"""Random streams of a collector, separate from the global ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def check_seed(seed: int | None) -> int:
    """Return the seed; if it is None, draw one from torch's global generator.

    Raises:
        ValueError: The seed is negative.
    """
    if seed is None:
        return int(torch.randint(2**31, ()).item())
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}.")
    return seed


@contextmanager
def isolated_rng(seed: int | None, device: torch.device) -> Iterator[None]:
    """Run a block with its own torch random stream, and restore the global one afterwards.

    Distributions can only draw from torch's global generators, so these are reseeded for the time being.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]
    try:
        if seed is not None:
            for generator in generators:
                generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
