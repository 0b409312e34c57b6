"""The compiled pass over episodes that have ended: rewards in their cells become returns in their cells."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchrl_lightning.kernels.scan_rows import scan_rows


def write_returns(
    cells: Any, rings: Any, episodes: Any, reward: Any, ends: Any, at_zero: bool, shift: int, factors: Any, out: Any
) -> bool:
    """Write the returns of the episodes that end in some cells (numba).

    Args:
        cells: the cells, ``[n]``; those in which no episode ends are passed over.
        rings: cells of a ring; next position of every environment, and below which one nothing is stored, ``[N]``.
        episodes: arrays of the episode index.
        reward: of all cells, ``[C, F]``.
        ends: whether nothing comes after a step, of all cells, ``[C]``.
        at_zero: whether that is said by a zero.
        shift: how many rows before its reward the step is to which a reward belongs.
        factors: gamma, and lowest and highest reward that counts.
        out: receives the returns, ``[C, F]``.

    Returns:
        Whether an episode ends in any of them.
    """
    (length, positions, floor), (gamma, lowest, highest) = rings, factors
    column, done = episodes[0], episodes[1]
    width, features = len(positions), reward.shape[1]
    carry, written = np.zeros(features, out.dtype), False
    for closing in cells:
        if not done[closing]:
            continue
        written = True
        env, newest = closing % width, positions[closing % width] - 1
        end = newest - (newest - closing // width) % length
        # A first step notes its own position or a later one, any other step where its episode began.
        first = end if column[closing] >= end else column[closing]
        low = max(first, newest + 1 - length, floor[env]) + shift
        known = end - low + 1  # rows up to the last one after which nothing comes
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
    return written
