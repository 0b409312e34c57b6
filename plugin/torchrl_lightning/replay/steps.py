"""Environments and positions of stored steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchrl_lightning.kernels import episodes as episode_kernels
from torchrl_lightning.kernels.compiled import jitted

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def steps_between(low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    """List the positions of several runs of steps, ``[low, high]`` each, one run after the other.

    Returns:
        Number of the run and position of each step, and where each run begins in them.
    """
    counts = np.maximum(high - low + 1, 0)
    starts = np.cumsum(counts) - counts
    run = np.repeat(np.arange(len(counts)), counts)
    return run, np.arange(len(run)) - (starts - low)[run], starts


def steps_of(cells: Ints, length: int, positions: Ints) -> tuple[Ints, Ints]:
    """Return environments and positions of the steps in cells of rings, of their shape; see ``Rings.position_of``."""
    env, position = np.empty(cells.shape, np.int64), np.empty(cells.shape, np.int64)
    jitted(episode_kernels.steps_of)(cells.ravel(), length, positions, env.reshape(-1), position.reshape(-1))
    return env, position


class StepsMissing(ValueError, RuntimeError, AssertionError):
    """The buffer does not hold the steps that were asked for.

    ALF documents an AssertionError for that, and TorchRL's samplers raise a RuntimeError, so it is both.
    """


def check_steps(env: Ints, position: Ints, oldest: Ints, positions: Ints) -> None:
    """Refuse steps that are not stored, of rings that hold ``[oldest, positions)``; the error names the first."""
    if env.size and (env.min() < 0 or env.max() >= len(positions)):
        raise IndexError(f"Environment ids must lie in [0, {len(positions)}), got {env.min()} to {env.max()}.")
    wrong = (position < oldest[env]) | (position >= positions[env])
    if wrong.any():
        e, p = int(env[wrong][0]), int(position[wrong][0])
        raise IndexError(
            f"Step {p} of environment {e} is not stored; it holds steps [{int(oldest[e])}, {int(positions[e])})."
        )
