"""Derive the seeds of the parts of a run from named paths, and run blocks with separate random streams."""

from __future__ import annotations

from operator import index
from zlib import crc32

import numpy as np
import torch

_INT64 = 0xFFFFFFFFFFFFFFFF
_INT31 = 0x7FFFFFFF  # some environments pass their seed to C libraries that accept only 31 bits


def spawn_seeds(seed: int, *path: str | int, count: int) -> list[int]:
    """Derive the seeds of ``count`` similar parts, such as environments; the first seeds do not depend on ``count``.

    The arguments and errors are the same as in :func:`spawn_seed`.

    Examples:
        >>> spawn_seeds(0, "environment", 1, count=3)
        [1182787810, 741764484, 1639611303]
    """
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}.")
    key = [crc32(step.encode()) if isinstance(step, str) else step for step in path]
    words = np.random.SeedSequence(seed, spawn_key=key).generate_state(count, np.uint64)
    return [int(word) & _INT31 for word in words]


def numbered_seed(seed: int, number: int) -> int:
    """Derive the seed of a numbered part, such as a step of a run. SplitMix64 takes only a microsecond."""
    mixed = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _INT64
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _INT64
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _INT64
    return (mixed ^ mixed >> 31) >> 1


def spawn_seed(seed: int, *path: str | int) -> int:
    """Derive the seed of one part of a run from the run's seed.

    Neighbouring seeds, ranks or numbers give unrelated seeds. Sums such as seed + rank would coincide.

    Args:
        seed: Seed of the run, or of the part at the start of the path.
        *path: Purpose of the seed: a name, then numbers such as rank, worker or batch.

    Raises:
        ValueError: The seed is negative.

    Examples:
        >>> spawn_seed(0, "evaluation", 0, 1) == spawn_seed(1, "evaluation", 0, 0)
        False
    """
    return spawn_seeds(seed, *path, count=1)[0]


def check_seed(seed: int | None) -> int:
    """Return the seed; draw it from torch's global generator if it is None; raise ValueError if it is invalid."""
    if seed is None:
        return int(torch.randint(2**31, ()).item())
    try:
        index(seed)
    except TypeError:
        raise ValueError(f"seed must be an integer of at least 0 or None, got {seed!r}.") from None
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}.")
    return seed


class IsolatedRng:
    """Run a block with the torch random stream of a seed, and restore the global stream afterwards.

    If the seed is None, the block continues the global stream.

    Distributions can only draw from torch's global generators of CPU and device, so the block reseeds these.
    """

    def __init__(self, seed: int | None, device: torch.device) -> None:
        self._seed = seed
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])

    def __enter__(self) -> None:
        self._states = list(map(torch.Generator.get_state, self._generators))
        if self._seed is not None:
            for generator in self._generators:
                generator.manual_seed(self._seed)

    def __exit__(self, *error: object) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
