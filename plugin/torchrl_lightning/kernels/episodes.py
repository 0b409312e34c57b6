"""Compiled readings of rings: which step lies in a cell, and where its episode begins and ends.

Kernels get ``rings`` as the cells of a ring, the next position of every environment, and below which one nothing is
stored, ``[N]``; and ``episodes`` as the arrays of the episode index.
"""

from __future__ import annotations

from typing import Any


def locate(cell: int, rings: Any, episodes: Any) -> tuple[int, int, int, int]:
    """Tell environment and position of the step in a cell, and first and last step of its episode (numba)."""
    env, position = step_in(cell, rings[0], rings[1])
    first, last = episode_of(env, position, rings, episodes)
    return env, position, first, last


def step_in(cell: int, length: int, positions: Any) -> tuple[int, int]:
    """Tell environment and position of the step in a cell (numba); below the oldest one where it holds nothing."""
    env = cell % len(positions)
    newest = positions[env] - 1
    return env, newest - (newest - cell // len(positions)) % length


def oldest_of(env: int, rings: Any) -> int:
    """Tell the position of the oldest stored step (numba)."""
    length, positions, floor = rings
    return max(positions[env] - length, floor[env])


def episode_of(env: int, position: int, rings: Any, episodes: Any) -> tuple[int, int]:
    """Tell the first step of a stored step's episode, which may not be stored any more, and the last one (numba)."""
    (length, positions, _), (column, _, begin, running, headless_end) = rings, episodes
    width = len(positions)
    # A first step notes its own position or a later one, any other step where its episode began.
    first = min(column[position % length * width + env], position)
    if running[env] and first == begin[env]:
        return first, positions[env] - 1
    if first >= oldest_of(env, rings):
        return first, column[first % length * width + env]
    return first, headless_end[env]


def steps_of(cells: Any, length: int, positions: Any, env: Any, position: Any) -> None:
    """Tell which steps lie in cells (numba).

    Args:
        cells: the cells, ``[n]``.
        length: cells of a ring.
        positions: next position of every environment, ``[N]``.
        env: receives environments, ``[n]``.
        position: receives positions, ``[n]``; below the oldest stored one where a cell holds nothing.
    """
    for i in range(len(cells)):
        env[i], position[i] = step_in(cells[i], length, positions)


def bounds(
    env: Any, position: Any, rings: Any, episodes: Any, clip: bool, relative: bool, first: Any, last: Any
) -> bool:
    """Tell where the episodes of steps begin and end (numba).

    Args:
        env: environments, ``[n]``.
        position: their steps, ``[n]``.
        rings: what :func:`locate` gets, here and below.
        episodes: the same.
        clip: let episodes begin at their oldest stored step.
        relative: count from the steps on to their last ones.
        first: receives the position of the first step, ``[n]``; nothing if it is empty.
        last: receives the position of the last step, ``[n]``.

    Returns:
        Whether all steps are stored; if not, what was received is not to be used.
    """
    positions = rings[1]
    for i in range(len(env)):
        e, step = env[i], position[i]
        if e < 0 or e >= len(positions):
            return False
        oldest = oldest_of(e, rings)
        if step < oldest or step >= positions[e]:
            return False
        start, end = episode_of(e, step, rings, episodes)
        last[i] = end - step if relative else end
        if len(first):
            first[i] = max(start, oldest) if clip else start
    return True
