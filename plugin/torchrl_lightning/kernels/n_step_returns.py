"""Compiled sums of rewards in cells: returns of ended episodes, and n-step returns."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchrl_lightning.kernels.episode_kernels import cells_to_positions, episode_bounds
from torchrl_lightning.kernels.scan_rows import scan_rows


def write_returns(
    cells: Any, rings: Any, episodes: Any, reward: Any, ends: Any, at_zero: bool, shift: int, factors: Any, out: Any
) -> bool:
    """Write the returns of the episodes that end in these cells (numba).

    Args:
        cells: the cells, ``[n]``; cells without an episode end are skipped.
        rings: as in :func:`episode_bounds`.
        episodes: as in :func:`episode_bounds`.
        reward: rewards of all cells, ``[C, F]``.
        ends: markers of terminal steps in all cells, ``[C]``.
        at_zero: True if zero marks a terminal step; False if all other numbers mark a terminal step.
        shift: number of rows from a step to its reward.
        factors: gamma, and the lower and upper bound of clipped rewards.
        out: output: returns, ``[C, F]``.

    Returns:
        Whether an episode ends in one of the cells.
    """
    (length, positions, valid_from), (gamma, lowest, highest) = rings, factors
    width, features = len(positions), reward.shape[1]
    ending_cells = cells[episodes[1][cells]]
    count = len(ending_cells)
    ids, end_positions, first, last = np.empty((4, count), np.int64)
    cells_to_positions(ending_cells, length, positions, ids, end_positions)
    episode_bounds(ids, end_positions, rings, episodes, first, last)
    carry = np.zeros(features, out.dtype)
    for i in range(count):
        env, end_position = ids[i], end_positions[i]
        start = max(first[i], positions[env] - length, valid_from[env]) + shift
        num_rows = end_position - start + 1  # rows up to the last terminal step
        while num_rows > 0 and (ends[(start + num_rows - 1) % length * width + env] == 0) != at_zero:
            num_rows -= 1
        if num_rows <= 0:
            continue
        returns, discount = np.empty(num_rows * features, out.dtype), np.empty(num_rows * features, out.dtype)
        for k in range(num_rows):
            cell = (start + k) % length * width + env
            is_terminal = (ends[cell] == 0) == at_zero
            for f in range(features):
                returns[k * features + f] = min(max(reward[cell, f], lowest), highest)
                discount[k * features + f] = 0.0 if is_terminal else gamma
        scan_rows(returns, discount, carry, features, True)
        for k in range(num_rows):
            cell = (start + k - shift) % length * width + env
            for f in range(features):
                out[cell, f] = returns[k * features + f]
    return count > 0


def n_step_returns(
    cells: Any, rings: Any, episodes: Any, horizon: Any, rewards: Any, last: Any, total: Any, steps: Any, gamma: Any
) -> None:
    """Sum the rewards of up to n steps of one episode, from each cell (numba).

    Args:
        cells: cells of the first steps, any shape ``[*B]``.
        rings: as in :func:`episode_bounds`.
        episodes: as in :func:`episode_bounds`.
        horizon: maximum number of steps, and the discount of one step.
        rewards: rewards of all cells, ``[cells, *F]``.
        last: output: cells of the last steps, ``[*B]``.
        total: output: discounted sums of rewards, ``[*B, *F]``.
        steps: output: numbers of steps, ``[*B]``.
        gamma: output: discounts after the last steps, ``[*B]``.
    """
    (length, positions, _), (max_steps, step_discount) = rings, horizon
    flat_cells, width, size = cells.reshape(-1), len(positions), len(rewards)
    flat_last, flat_steps, flat_gamma = last.reshape(-1), steps.reshape(-1), gamma.reshape(-1)
    reward, sums = rewards.reshape(size, -1), total.reshape(len(flat_cells), -1)
    env, position, first, end = np.empty((4, len(flat_cells)), np.int64)
    cells_to_positions(flat_cells, length, positions, env, position)
    episode_bounds(env, position, rings, episodes, first, end)
    for row in range(len(flat_cells)):
        cell, count, discount = flat_cells[row], min(max_steps, end[row] - position[row] + 1), step_discount
        for feature in range(reward.shape[1]):
            sums[row, feature] = reward[cell, feature]
        for _ in range(count - 1):
            cell += width
            if cell >= size:
                cell -= size
            for feature in range(reward.shape[1]):
                sums[row, feature] += discount * reward[cell, feature]
            discount *= step_discount
        flat_last[row], flat_steps[row], flat_gamma[row] = cell, count, discount
