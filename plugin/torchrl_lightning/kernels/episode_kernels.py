"""Compiled queries on rings: the step in a cell, and the first and last step of its episode.

The argument ``rings`` of kernels holds the cells of a ring, the next position of each environment, ``[N]``, and the
lowest valid position of each environment, ``[N]``. ``episodes`` holds the arrays of the episode index. Kernels process
many steps in one call, because numba counts references to each array at each call.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def cells_to_positions(cells: Any, length: int, positions: Any, env: Any, position: Any) -> None:
    """Write the environments and positions of the steps in cells (numba).

    Args:
        cells: the cells, ``[n]``.
        length: cells of a ring.
        positions: next position of each environment, ``[N]``.
        env: output: environments, ``[n]``.
        position: output: positions, ``[n]``; below the oldest stored position if the cell is empty.
    """
    width = len(positions)
    for i in range(len(cells)):
        slot, env[i] = cells[i] // width, cells[i] % width
        newest = positions[env[i]] - 1
        position[i] = newest - (newest - slot) % length


def episode_bounds(env: Any, position: Any, rings: Any, episodes: Any, first: Any, last: Any) -> None:
    """Write the first and last positions of the episodes of stored steps (numba).

    Args:
        env: environments of the steps, ``[n]``.
        position: positions of the steps, ``[n]``.
        rings: see the module's docstring.
        episodes: see the module's docstring.
        first: output: position of the episode's first step, ``[n]``, even if this step is already overwritten.
        last: output: position of the episode's last step, ``[n]``.
    """
    (length, positions, valid_from), (column, _, begin, running, headless_end) = rings, episodes
    width = len(positions)
    for i in range(len(env)):
        ring = env[i]
        # The first step of an episode stores its own position or the position of the last step. Every other step stores
        # the position of the first step.
        first[i] = start = min(column[position[i] % length * width + ring], position[i])
        if running[ring] and start == begin[ring]:
            last[i] = positions[ring] - 1
        elif start >= max(positions[ring] - length, valid_from[ring]):
            last[i] = column[start % length * width + ring]
        else:
            last[i] = headless_end[ring]


def checked_episode_bounds(
    env: Any, position: Any, rings: Any, episodes: Any, clip: bool, relative: bool, first: Any, last: Any
) -> bool:
    """Write the first and last positions of the episodes of steps if all steps are stored (numba).

    Args:
        env: as in :func:`episode_bounds`.
        position: as in :func:`episode_bounds`.
        rings: as in :func:`episode_bounds`.
        episodes: as in :func:`episode_bounds`.
        clip: replace the first position by the oldest stored position if the first step is overwritten.
        relative: write the distance from the step to the last position instead of the position.
        first: output: position of the first step, ``[n]``; an empty array is not written.
        last: output: position of the last step, ``[n]``.

    Returns:
        Whether all steps are stored; if not, nothing is written.
    """
    length, positions, valid_from = rings
    for i in range(len(env)):
        ring = env[i]
        if ring < 0 or ring >= len(positions):
            return False
        if position[i] < max(positions[ring] - length, valid_from[ring]) or position[i] >= positions[ring]:
            return False
    first_positions = first if len(first) else np.empty(len(env), np.int64)
    episode_bounds(env, position, rings, episodes, first_positions, last)
    for i in range(len(env)):
        if clip:
            first_positions[i] = max(first_positions[i], positions[env[i]] - length, valid_from[env[i]])
        if relative:
            last[i] -= position[i]
    return True
