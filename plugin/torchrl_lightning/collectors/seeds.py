"""Seeds of the parts of a run, each on a path of its own."""

from __future__ import annotations

from zlib import crc32

import numpy as np

_INT31 = 0x7FFFFFFF  # some environments hand their seed to C libraries that take 31 bits


def spawn_seeds(seed: int, *path: str | int, count: int) -> list[int]:
    """Derive the seeds of ``count`` equal parts of a run, such as the environments of one collector.

    The first seeds do not depend on ``count``.

    Args:
        seed: Seed of the run, or of the part that the path begins at.
        *path: What the seeds are for: a name, then numbers such as rank, worker or batch.
        count: How many.

    Raises:
        ValueError: A negative seed.

    Example:
        >>> spawn_seeds(0, "environment", 1, count=3)
        [1182787810, 741764484, 1639611303]
    """
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}.")
    key = [crc32(step.encode()) if isinstance(step, str) else step for step in path]
    words = np.random.SeedSequence(seed, spawn_key=key).generate_state(count, np.uint64)
    return [int(word) & _INT31 for word in words]


def spawn_seed(seed: int, *path: str | int) -> int:
    """Derive the seed of one part of a run from the run's seed.

    Neighbouring seeds, ranks or numbers give unrelated seeds, which adding them up would not.

    Args:
        seed: Seed of the run, or of the part that the path begins at.
        *path: What the seed is for: a name, then numbers such as rank, worker or batch.

    Raises:
        ValueError: A negative seed.

    Example:
        >>> spawn_seed(0, "evaluation", 0, 1) == spawn_seed(1, "evaluation", 0, 0)
        False
    """
    return spawn_seeds(seed, *path, count=1)[0]
