"""Compiled draws of windows of successive steps.

All steps that have room for a window before the newest one of their environment are candidates, ranked by environment,
then by age.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchrl_lightning.kernels.episodes import episode_of, oldest_of


def draw(ranks: Any, relative: bool, rings: Any, episodes: Any, options: Any, cells: Any, mask: Any, found: int) -> int:
    """Lay out the windows that begin at candidates of these ranks, where those may begin one (numba).

    Args:
        ranks: of candidates, ``[n]`` float64.
        relative: whether ranks are shares of their number, in [0, 1).
        rings: what :func:`episodes.locate` gets, here and below.
        episodes: the same.
        options: reach (how far behind its first step a window has to be stored), burn-in, whether windows end with
            their episode, and whether they are padded.
        cells: receives windows, ``[B, T]``, from row ``found`` on.
        mask: receives which steps count, ``[B, T]``.
        found: how many rows are filled already.

    Returns:
        How many rows are filled then; -1 if there are no candidates.
    """
    length, positions, floor = rings
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
        if by_episode and reach and episode_of(env, start + reach, rings, episodes)[0] > start:
            continue
        end = start + steps - 1
        if pad:
            end = min(end, episode_of(env, start, rings, episodes)[1])
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
    (length, positions, _), (reach, _, by_episode, _) = rings, options
    kept, found, rank = np.empty(length * len(positions), np.float64), 0, 0
    for env in range(len(positions)):
        for start in range(oldest_of(env, rings), positions[env] - reach):
            kept[found] = rank
            found += not by_episode or not reach or episode_of(env, start + reach, rings, episodes)[0] <= start
            rank += 1
    return kept[:found].copy()


def longest_run(rings: Any, episodes: Any, options: Any) -> int:
    """Count the steps of the longest stored episode, or of the fullest ring across episodes (numba)."""
    positions, by_episode, longest = rings[1], options[2], 0
    for env in range(len(positions)):
        start = oldest_of(env, rings)
        while start < positions[env]:
            end = episode_of(env, start, rings, episodes)[1] if by_episode else positions[env] - 1
            longest = max(longest, end - start + 1)
            start = end + 1
    return longest
