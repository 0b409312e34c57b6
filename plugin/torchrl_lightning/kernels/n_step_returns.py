"""Compiled sums of rewards in cells: returns of ended episodes, and n-step returns."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchrl_lightning.kernels.episode_kernels import locate, steps_of
from torchrl_lightning.kernels.scan_rows import scan_rows


def write_returns(
    cells: Any, rings: Any, episodes: Any, reward: Any, ends: Any, at_zero: bool, shift: int, factors: Any, out: Any
) -> bool:
    """Write the returns of the episodes that end in these cells (numba).

    Args:
        cells: the cells, ``[n]``; cells without an episode end are skipped.
        rings: as in :func:`locate`.
        episodes: as in :func:`locate`.
        reward: rewards of all cells, ``[C, F]``.
        ends: markers of terminal steps in all cells, ``[C]``.
        at_zero: whether zero marks a terminal step; otherwise nonzero does.
        shift: number of rows from a step to its reward.
        factors: gamma, and the bounds to which rewards are clipped.
        out: output: returns, ``[C, F]``.

    Returns:
        Whether an episode ends in one of the cells.
    """
    (length, positions, floor), (gamma, lowest, highest) = rings, factors
    width, features = len(positions), reward.shape[1]
    closing = cells[episodes[1][cells]]
    count = len(closing)
    ids, final, first, last = np.empty((4, count), np.int64)
    steps_of(closing, length, positions, ids, final)
    locate(ids, final, rings, episodes, first, last)
    carry = np.zeros(features, out.dtype)
    for i in range(count):
        env, end = ids[i], final[i]
        low = max(first[i], positions[env] - length, floor[env]) + shift
        known = end - low + 1  # rows up to the last terminal step
        while known > 0 and (ends[(low + known - 1) % length * width + env] == 0) != at_zero:
            known -= 1
        if known <= 0:
            continue
        returns, discount = np.empty(known * features, out.dtype), np.empty(known * features, out.dtype)
        for k in range(known):
            cell = (low + k) % length * width + env
            over = (ends[cell] == 0) == at_zero
            for f in range(features):
                returns[k * features + f] = min(max(reward[cell, f], lowest), highest)
                discount[k * features + f] = 0.0 if over else gamma
        scan_rows(returns, discount, carry, features, True)
        for k in range(known):
            cell = (low + k - shift) % length * width + env
            for f in range(features):
                out[cell, f] = returns[k * features + f]
    return count > 0


def n_step_returns(
    cells: Any, rings: Any, episodes: Any, how: Any, rewards: Any, last: Any, total: Any, steps: Any, gamma: Any
) -> None:
    """Sum the rewards of n steps from each cell within its episode (numba).

    Args:
        cells: cells of the first steps, any shape ``[*B]``.
        rings: as in :func:`locate`.
        episodes: as in :func:`locate`.
        how: maximum number of steps, and the discount of one step.
        rewards: rewards of all cells, ``[cells, *F]``.
        last: output: cells of the last steps, ``[*B]``.
        total: output: discounted sums of rewards, ``[*B, *F]``.
        steps: output: numbers of steps, ``[*B]``.
        gamma: output: discounts after the last steps, ``[*B]``.
    """
    (length, positions, _), (most, factor) = rings, how
    chosen, width, size = cells.reshape(-1), len(positions), len(rewards)
    final, taken, discounts = last.reshape(-1), steps.reshape(-1), gamma.reshape(-1)
    reward, sums = rewards.reshape(size, -1), total.reshape(len(chosen), -1)
    env, position, first, end = np.empty((4, len(chosen)), np.int64)
    steps_of(chosen, length, positions, env, position)
    locate(env, position, rings, episodes, first, end)
    for row in range(len(chosen)):
        cell, count, discount = chosen[row], min(most, end[row] - position[row] + 1), factor
        for place in range(reward.shape[1]):
            sums[row, place] = reward[cell, place]
        for _ in range(count - 1):
            cell += width
            if cell >= size:
                cell -= size
            for place in range(reward.shape[1]):
                sums[row, place] += discount * reward[cell, place]
            discount *= factor
        final[row], taken[row], discounts[row] = cell, count, discount
