"""Compiled sampling of windows of successive steps.

A step is a candidate for the start of a window if its environment stores enough later steps. Candidates are ranked by
environment, then by age.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchrl_lightning.kernels.episode_kernels import episode_bounds


def draw(
    ranks: Any, relative: bool, rings: Any, episodes: Any, options: Any, cells: Any, mask: Any, num_filled: int
) -> int:
    """Write windows that start at the candidates with these ranks; skip windows that the options forbid (numba).

    Args:
        ranks: ranks of candidates, ``[n]`` float64.
        relative: whether ranks are fractions of the number of candidates, in [0, 1).
        rings: as in :func:`episode_bounds`.
        episodes: as in :func:`episode_bounds`.
        options: reach (number of steps that must be stored after a window's first step), burn-in, whether a window must
            stay in one episode, and whether windows are padded.
        cells: output: windows, ``[B, T]``; the first new window is row ``num_filled``.
        mask: output: valid steps, ``[B, T]``.
        num_filled: number of rows that are already filled.

    Returns:
        Number of filled rows after the call; -1 without candidates.
    """
    length, positions, valid_from = rings
    reach, burn_in, by_episode, pad = options
    width, size, steps, count = len(positions), length * len(positions), cells.shape[1], len(ranks)
    cumulative_counts, num_candidates = np.empty(width, np.int64), 0
    for env in range(width):
        num_candidates += max(0, min(length, positions[env] - valid_from[env]) - reach)
        cumulative_counts[env] = num_candidates
    if num_candidates == 0:
        return -1
    envs, newest_needed = np.empty(count, np.int64), np.empty(count, np.int64)
    for i in range(count):
        rank = min(int(ranks[i] * num_candidates if relative else ranks[i]), num_candidates - 1)
        envs[i] = env = int(np.searchsorted(cumulative_counts, rank, side="right"))
        newest_needed[i] = positions[env] - (cumulative_counts[env] - rank)
    first, last = np.empty(count, np.int64), np.empty(count, np.int64)
    if by_episode:
        episode_bounds(envs, newest_needed, rings, episodes, first, last)
    for i in range(count):
        if num_filled == len(cells):
            break
        env, start = envs[i], newest_needed[i] - reach
        if by_episode and reach and first[i] > start:
            continue
        end = start + steps - 1
        if pad:
            end = min(end, last[i])
        cell = start % length * width + env
        for step in range(steps):
            cells[num_filled, step] = cell
            mask[num_filled, step] = burn_in <= step <= end - start
            if step < end - start:  # padding repeats the last step
                cell += width
                if cell >= size:
                    cell -= size
        num_filled += 1
    return num_filled


def all_starts(rings: Any, episodes: Any, options: Any) -> Any:
    """Return the ranks, as float64, of all candidates at which a window may start, in O(stored steps) (numba)."""
    (_, positions, _), (reach, _, by_episode, _) = rings, options
    ranks, num_starts, rank = np.empty(rings[0] * len(positions), np.float64), 0, 0
    for env in range(len(positions)):
        positions_of_env, first, _ = _stored_episodes(env, rings, episodes, by_episode)
        for i in range(reach, len(positions_of_env)):
            ranks[num_starts] = rank
            num_starts += not by_episode or not reach or first[i] <= positions_of_env[i] - reach
            rank += 1
    return ranks[:num_starts].copy()


def longest_run(rings: Any, episodes: Any, options: Any) -> int:
    """Return the length of the longest stored episode, or of the fullest ring if windows cross episodes (numba)."""
    by_episode, longest = options[2], 0
    for env in range(len(rings[1])):
        positions_of_env, first, last = _stored_episodes(env, rings, episodes, by_episode)
        for i in range(len(positions_of_env)):
            run_length = last[i] - max(first[i], positions_of_env[0]) + 1 if by_episode else len(positions_of_env)
            longest = max(longest, run_length)
    return longest


def _stored_episodes(env: int, rings: Any, episodes: Any, by_episode: bool) -> tuple[Any, Any, Any]:
    """Return all stored steps of an environment, and the first and last step of the episode of each step (numba)."""
    length, positions, valid_from = rings
    positions_of_env = np.arange(max(positions[env] - length, valid_from[env]), positions[env])
    first, last = np.empty_like(positions_of_env), np.empty_like(positions_of_env)
    if by_episode:
        episode_bounds(np.full(len(positions_of_env), env), positions_of_env, rings, episodes, first, last)
    return positions_of_env, first, last
