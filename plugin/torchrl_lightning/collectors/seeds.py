"""Seeds of the parts of a run, each on a path of its own."""

from __future__ import annotations

from zlib import crc32

import numpy as np

_INT64 = 0xFFFFFFFFFFFFFFFF
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


def numbered_seed(seed: int, number: int) -> int:
    """Derive the seed of one of very many equal parts, such as the steps of a run, in a microsecond (SplitMix64).

    Args:
        seed: A spawned seed.
        number: Which part.

    Example:
        >>> numbered_seed(7, 0) == numbered_seed(7, 1), numbered_seed(7, 0) == numbered_seed(8, 0)
        (False, False)
    """
    mixed = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _INT64
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _INT64
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _INT64
    return (mixed ^ mixed >> 31) >> 1


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
