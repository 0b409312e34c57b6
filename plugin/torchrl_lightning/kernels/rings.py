"""Compiled readings of rings: which step lies in a cell, and where its episode begins and ends."""

from __future__ import annotations

from typing import Any


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


def bounds(
    env: Any, position: Any, rings: Any, episodes: Any, clip: bool, relative: bool, first: Any, last: Any
) -> bool:
    """Tell where the episodes of steps begin and end (numba).

    Args:
        env: environments, ``[n]``.
        position: their steps, ``[n]``.
        rings: cells of a ring; next position of every environment, and below which one nothing is stored, ``[N]``.
        episodes: arrays of the episode index.
        clip: let episodes begin at their oldest stored step.
        relative: count from the steps on to their last ones.
        first: receives the position of the first step, ``[n]``; nothing if it is empty.
        last: receives the position of the last step, ``[n]``.

    Returns:
        Whether all steps are stored; if not, what was received is not to be used.
    """
    (length, positions, floor), (column, _, begin, running, headless_end) = rings, episodes
    width = len(positions)
    for i in range(len(env)):
        e, step = env[i], position[i]
        if e < 0 or e >= width:
            return False
        oldest = max(positions[e] - length, floor[e])
        if step < oldest or step >= positions[e]:
            return False
        # A first step notes its own position or a later one, any other step where its episode began.
        start = min(column[step % length * width + e], step)
        if running[e] and start == begin[e]:
            end = positions[e] - 1
        elif start >= oldest:
            end = column[start % length * width + e]
        else:
            end = headless_end[e]
        last[i] = end - step if relative else end
        if len(first):
            first[i] = max(start, oldest) if clip else start
    return True
