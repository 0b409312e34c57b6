"""Environments and positions of stored steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchrl_lightning.kernels import episode_kernels
from torchrl_lightning.kernels.compiled import jitted

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def steps_between(low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the positions of several runs of steps, one run after the other; each run is ``[low, high]``.

    Returns:
        The run number of each step, the position of each step, and the index of the first step of each run.
    """
    counts = np.maximum(high - low + 1, 0)
    starts = np.cumsum(counts) - counts
    run = np.repeat(np.arange(len(counts)), counts)
    return run, np.arange(len(run)) - (starts - low)[run], starts


def steps_of(cells: Ints, length: int, positions: Ints) -> tuple[Ints, Ints]:
    """Return environments and positions of the steps in cells, in the same shape; see ``Rings.position_of``."""
    env, position = np.empty(cells.shape, np.int64), np.empty(cells.shape, np.int64)
    jitted(episode_kernels.cells_to_positions)(cells.ravel(), length, positions, env.reshape(-1), position.reshape(-1))
    return env, position


class MissingStepsError(ValueError, RuntimeError, AssertionError):
    """An error for requested steps that the buffer does not store.

    It is an AssertionError, as ALF documents, and a RuntimeError, as TorchRL's samplers raise.
    """


def check_steps(env: Ints, position: Ints, oldest: Ints, positions: Ints) -> None:
    """Raise IndexError for the first step that is not in the stored range ``[oldest, positions)``."""
    if env.size and (env.min() < 0 or env.max() >= len(positions)):
        raise IndexError(f"Environment ids must be in [0, {len(positions)}), got {env.min()} to {env.max()}.")
    is_missing = (position < oldest[env]) | (position >= positions[env])
    if is_missing.any():
        env_id, missing = int(env[is_missing][0]), int(position[is_missing][0])
        stored = f"[{int(oldest[env_id])}, {int(positions[env_id])})"
        raise IndexError(f"Step {missing} of environment {env_id} is not stored; the stored steps are {stored}.")
