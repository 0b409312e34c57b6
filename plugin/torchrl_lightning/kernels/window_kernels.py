"""Compiled sampling of windows of successive steps.

A step is a candidate for the start of a window if its environment stores enough later steps. Candidates are ranked by
environment, then by age.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchrl_lightning.kernels.episode_kernels import locate


def draw(ranks: Any, relative: bool, rings: Any, episodes: Any, options: Any, cells: Any, mask: Any, found: int) -> int:
    """Write the windows that start at candidates with these ranks, if the options allow their episodes (numba).

    Args:
        ranks: ranks of candidates, ``[n]`` float64.
        relative: whether ranks are fractions of the number of candidates, in [0, 1).
        rings: as in :func:`episodes.locate`.
        episodes: as in :func:`episodes.locate`.
        options: reach (number of steps that must be stored after a window's first step), burn-in, whether windows end
            with their episode, and whether they are padded.
        cells: output: windows, ``[B, T]``, from row ``found`` on.
        mask: output: valid steps, ``[B, T]``.
        found: number of rows that are already filled.

    Returns:
        Number of filled rows after the call; -1 without candidates.
    """
    length, positions, floor = rings
    reach, burn_in, by_episode, pad = options
    width, size, steps, count = len(positions), length * len(positions), cells.shape[1], len(ranks)
    until, total = np.empty(width, np.int64), 0
    for env in range(width):
        total += max(0, min(length, positions[env] - floor[env]) - reach)
        until[env] = total
    if total == 0:
        return -1
    owner, reached = np.empty(count, np.int64), np.empty(count, np.int64)
    for i in range(count):
        rank = min(int(ranks[i] * total if relative else ranks[i]), total - 1)
        owner[i] = env = int(np.searchsorted(until, rank, side="right"))
        reached[i] = positions[env] - (until[env] - rank)
    first, last = np.empty(count, np.int64), np.empty(count, np.int64)
    if by_episode:
        locate(owner, reached, rings, episodes, first, last)
    for i in range(count):
        if found == len(cells):
            break
        env, start = owner[i], reached[i] - reach
        if by_episode and reach and first[i] > start:
            continue
        end = start + steps - 1
        if pad:
            end = min(end, last[i])
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
    """Return the ranks, as float64, of all candidates at which a window may start (numba): O(stored steps)."""
    (_, positions, _), (reach, _, by_episode, _) = rings, options
    kept, found, rank = np.empty(rings[0] * len(positions), np.float64), 0, 0
    for env in range(len(positions)):
        reached, first, _ = _runs(env, rings, episodes, by_episode)
        for i in range(reach, len(reached)):
            kept[found] = rank
            found += not by_episode or not reach or first[i] <= reached[i] - reach
            rank += 1
    return kept[:found].copy()


def longest_run(rings: Any, episodes: Any, options: Any) -> int:
    """Return the number of steps of the longest stored episode, or of the fullest ring across episodes (numba)."""
    by_episode, longest = options[2], 0
    for env in range(len(rings[1])):
        stored, first, last = _runs(env, rings, episodes, by_episode)
        for i in range(len(stored)):
            steps = last[i] - max(first[i], stored[0]) + 1 if by_episode else len(stored)
            longest = max(longest, steps)
    return longest


def _runs(env: int, rings: Any, episodes: Any, by_episode: bool) -> tuple[Any, Any, Any]:
    """Return all stored steps of an environment, and the first and last step of each one's episode (numba)."""
    length, positions, floor = rings
    stored = np.arange(max(positions[env] - length, floor[env]), positions[env])
    first, last = np.empty_like(stored), np.empty_like(stored)
    if by_episode:
        locate(np.full(len(stored), env), stored, rings, episodes, first, last)
    return stored, first, last
