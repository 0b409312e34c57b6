"""Random streams of a collector, separate from the global ones."""

from __future__ import annotations

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


class IsolatedRng:
    """Run a block with its own torch random stream, and restore the global one afterwards.

    Distributions can only draw from torch's global generators, so these are reseeded for the time being.

    Args:
        seed: Of the block's stream; None goes on with the global one.
        device: Where the block draws, beside the CPU.
    """

    def __init__(self, seed: int | None, device: torch.device) -> None:
        self._seed = seed
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])

    def __enter__(self) -> None:
        self._states = [generator.get_state() for generator in self._generators]
        if self._seed is not None:
            for generator in self._generators:
                generator.manual_seed(self._seed)

    def __exit__(self, *error: object) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
