"""Compiled draws of windows of successive steps.

All steps that have room for a window before the newest one of their environment are candidates, ranked by environment,
then by age.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def draw(ranks: Any, relative: bool, rings: Any, episodes: Any, options: Any, cells: Any, mask: Any, found: int) -> int:
    """Lay out the windows that begin at candidates of these ranks, where those may begin one (numba).

    Args:
        ranks: of candidates, ``[n]`` float64.
        relative: whether ranks are shares of their number, in [0, 1).
        rings: cells of a ring; next position of every environment, and below which one nothing is stored, ``[N]``.
        episodes: arrays of the episode index.
        options: reach (how far behind its first step a window has to be stored), burn-in, whether windows end with
            their episode, and whether they are padded.
        cells: receives windows, ``[B, T]``, from row ``found`` on.
        mask: receives which steps count, ``[B, T]``.
        found: how many rows are filled already.

    Returns:
        How many rows are filled then; -1 if there are no candidates.
    """
    length, positions, floor = rings
    column, _, begin, running, headless_end = episodes
    reach, burn_in, by_episode, pad = options
    width, size, steps = len(positions), length * len(positions), cells.shape[1]
    until, total = np.empty(width, np.int64), 0
    for env in range(width):
        total += max(0, min(length, positions[env] - floor[env]) - reach)
        until[env] = total
    if total == 0:
        return -1
    for i in range(len(ranks)):
        if found == len(cells):
            break
        rank = min(int(ranks[i] * total if relative else ranks[i]), total - 1)
        env = int(np.searchsorted(until, rank, side="right"))
        start = positions[env] - reach - (until[env] - rank)
        # A first step notes its own position or a later one, any other step where its episode began.
        if by_episode and reach and column[(start + reach) % length * width + env] > start:
            continue
        end = start + steps - 1
        if pad:
            noted = column[start % length * width + env]
            first = start if noted >= start else noted
            if running[env] and first == begin[env]:
                last = positions[env] - 1
            elif first < max(positions[env] - length, floor[env]):
                last = headless_end[env]
            else:
                last = column[first % length * width + env]
            end = min(end, last)
        cell = start % length * width + env
        for step in range(steps):
            cells[found, step] = cell
            mask[found, step] = burn_in <= step <= end - start
            if step < end - start:  # padding repeats the last step
                cell += width
                if cell >= size:
                    cell -= size
        found += 1
    return found


def all_starts(rings: Any, episodes: Any, options: Any) -> Any:
    """Return the ranks, as float64, of all candidates that may begin a window (numba): O(stored steps)."""
    (length, positions, floor), (reach, _, by_episode, _) = rings, options
    column, width = episodes[0], len(positions)
    kept, found, rank = np.empty(length * width, np.float64), 0, 0
    for env in range(width):
        for start in range(max(positions[env] - length, floor[env]), positions[env] - reach):
            kept[found] = rank
            found += not by_episode or not reach or column[(start + reach) % length * width + env] <= start
            rank += 1
    return kept[:found].copy()


def longest_run(rings: Any, episodes: Any, options: Any) -> int:
    """Count the steps of the longest stored episode, or of the fullest ring across episodes (numba)."""
    (length, positions, floor), by_episode = rings, options[2]
    width, longest = len(positions), 0
    for env in range(width):
        run = 0
        for position in range(max(positions[env] - length, floor[env]), positions[env]):
            begins = by_episode and episodes[0][position % length * width + env] >= position
            run = 1 if begins else run + 1
            longest = max(longest, run)
    return longest
