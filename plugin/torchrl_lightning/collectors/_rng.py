"""Random streams that belong to a collector and leave the global ones alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_INT31 = 0x7FFFFFFF  # some environments hand their seed to C libraries that take 31 bits


def check_seed(seed: int | None) -> int:
    """Return the seed, or draw one from torch's global generator.

    Raises:
        ValueError: A negative seed.
    """
    if seed is None:
        return int(torch.randint(_INT31, ()).item())
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}.")
    return seed


def reset_seeds(seed: int, batch: int, num_envs: int) -> list[int]:
    """Seeds of the resets before a batch: ``seed + i`` at first, later derived from ``(seed, batch)``."""
    if batch == 0:
        return [seed + index for index in range(num_envs)]
    words = np.random.SeedSequence([seed, batch]).generate_state(num_envs, np.uint64)
    return [int(word) & _INT31 for word in words]


def action_seed(seed: int, batch: int) -> int:
    """The seed of the policy's randomness in a batch; another stream than that of the resets."""
    return int(np.random.SeedSequence([seed, batch, 1]).generate_state(1, np.uint64)[0]) & 0x7FFFFFFFFFFFFFFF


@contextmanager
def isolated_rng(seed: int | None, device: torch.device) -> Iterator[None]:
    """Run a block on its own torch random stream, and put the global one back afterwards.

    Distributions draw from torch's global generators and take no other; so these are borrowed.
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
