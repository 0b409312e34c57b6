"""Compiled readings of rings: which step lies in a cell, and where its episode begins and ends.

Kernels get ``rings`` as the cells of a ring, the next position of every environment, and below which one nothing is
stored, ``[N]``; and ``episodes`` as the arrays of the episode index. They ask for many steps at once: numba counts
references to each array at each call.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def steps_of(cells: Any, length: int, positions: Any, env: Any, position: Any) -> None:
    """Tell which steps lie in cells (numba).

    Args:
        cells: the cells, ``[n]``.
        length: cells of a ring.
        positions: next position of every environment, ``[N]``.
        env: receives environments, ``[n]``.
        position: receives positions, ``[n]``; below the oldest stored one where a cell holds nothing.
    """
    width = len(positions)
    for i in range(len(cells)):
        slot, env[i] = cells[i] // width, cells[i] % width
        newest = positions[env[i]] - 1
        position[i] = newest - (newest - slot) % length


def locate(env: Any, position: Any, rings: Any, episodes: Any, first: Any, last: Any) -> None:
    """Tell where the episodes of stored steps begin and end (numba).

    Args:
        env: environments, ``[n]``.
        position: their steps, ``[n]``.
        rings: see above.
        episodes: the same.
        first: receives the position of the first step, ``[n]``, which may not be stored any more.
        last: receives the position of the last step, ``[n]``.
    """
    (length, positions, floor), (column, _, begin, running, headless_end) = rings, episodes
    width = len(positions)
    for i in range(len(env)):
        e = env[i]
        # A first step notes its own position or a later one, any other step where its episode began.
        first[i] = start = min(column[position[i] % length * width + e], position[i])
        if running[e] and start == begin[e]:
            last[i] = positions[e] - 1
        elif start >= max(positions[e] - length, floor[e]):
            last[i] = column[start % length * width + e]
        else:
            last[i] = headless_end[e]


def bounds(
    env: Any, position: Any, rings: Any, episodes: Any, clip: bool, relative: bool, first: Any, last: Any
) -> bool:
    """Tell where the episodes of steps begin and end (numba), after checking that they are stored.

    Args:
        env: what :func:`locate` gets, here and below.
        position: the same.
        rings: the same.
        episodes: the same.
        clip: let episodes begin at their oldest stored step.
        relative: count from the steps on to their last ones.
        first: receives the position of the first step, ``[n]``; nothing if it is empty.
        last: receives the position of the last step, ``[n]``.

    Returns:
        Whether all steps are stored; if not, nothing was received.
    """
    length, positions, floor = rings
    for i in range(len(env)):
        e = env[i]
        if e < 0 or e >= len(positions):
            return False
        if position[i] < max(positions[e] - length, floor[e]) or position[i] >= positions[e]:
            return False
    begins = first if len(first) else np.empty(len(env), np.int64)
    locate(env, position, rings, episodes, begins, last)
    for i in range(len(env)):
        if clip:
            begins[i] = max(begins[i], positions[env[i]] - length, floor[env[i]])
        if relative:
            last[i] -= position[i]
    return True
