"""Compiled draws of windows of successive steps.

All steps that have room for a window before the newest one of their environment are candidates, ranked by environment,
then by age.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchrl_lightning.kernels.episodes import locate


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
    """Return the ranks, as float64, of all candidates that may begin a window (numba): O(stored steps)."""
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
    """Count the steps of the longest stored episode, or of the fullest ring across episodes (numba)."""
    by_episode, longest = options[2], 0
    for env in range(len(rings[1])):
        stored, first, last = _runs(env, rings, episodes, by_episode)
        for i in range(len(stored)):
            steps = last[i] - max(first[i], stored[0]) + 1 if by_episode else len(stored)
            longest = max(longest, steps)
    return longest


def _runs(env: int, rings: Any, episodes: Any, by_episode: bool) -> tuple[Any, Any, Any]:
    """Return all stored steps of an environment, and first and last one of the episode of each (numba)."""
    length, positions, floor = rings
    stored = np.arange(max(positions[env] - length, floor[env]), positions[env])
    first, last = np.empty_like(stored), np.empty_like(stored)
    if by_episode:
        locate(np.full(len(stored), env), stored, rings, episodes, first, last)
    return stored, first, last
