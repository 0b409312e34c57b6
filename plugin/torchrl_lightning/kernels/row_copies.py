"""Compiled writing and reading of cells: one call for all leaves, positions and the episode index."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchrl_lightning._core.memory import LINE
from torchrl_lightning.kernels.compiled import copy_bytes, load, prefetch

NO_LEAVES = (np.empty(0, np.int64), np.empty((0, 2), np.int64))
NO_FLAGS = np.empty((0, 0), np.bool_)

PREFETCH_ROWS = 8  # rows are prefetched this many rows before they are read


def write_steps(
    sources: Any,
    leaves: Any,
    cells: Any,
    ids: Any,
    in_lockstep: bool,
    steps: int,
    length: int,
    positions: Any,
    valid_from: Any,
    counters: Any,
    episodes: Any,
    done: Any,
    init: Any,
) -> None:
    """Write steps of some environments, time-major (numba). Python's signal handlers cannot interrupt the write.

    Args:
        sources: address of the rows of each leaf, ``[L]``; empty if the rows are already in their cells.
        leaves: for each leaf, the address of its cells and the bytes of a row, ``[L, 2]``.
        cells: output: cell of each row, ``[steps * M]``.
        ids: the environments, ``[M]``.
        in_lockstep: whether ``ids`` are all environments in order and all are at the same position; rows are then one
            block.
        steps: number of steps of each environment.
        length: cells of a ring.
        positions: next position of each environment, ``[num_envs]``; updated.
        valid_from: lowest valid position of each environment, ``[num_envs]``; updated.
        counters: rows written, restart offset, and version of the rings; the first and the last are increased.
        episodes: arrays of the episode index; may be empty.
        done: whether a step ends its episode, ``[steps, M]``; empty without an episode index.
        init: whether a step starts an episode even if no done flag ended the previous one, ``[steps, M]``; may be
            empty.
    """
    column, done_column, begin, running, headless_end = episodes
    count, num_envs = len(ids), len(positions)
    for i in range(count):
        env = ids[i]
        start, lowest_valid = positions[env], valid_from[env]
        # Mark the overwritten steps as invalid before the copy.
        valid_from[env] = max(lowest_valid, start + steps - length)
        for step in range(steps):
            position = start + step
            cell = position % length * num_envs + env
            cells[step * count + i] = cell
            if len(done) == 0:
                continue
            oldest = max(position - length, lowest_valid)
            if running[env] and len(init) and init[step, i]:
                running[env] = False
                if begin[env] >= oldest:
                    column[begin[env] % length * num_envs + env] = position - 1
                else:
                    headless_end[env] = position - 1
            # If the first step of an episode is overwritten, keep the last position of the episode, which it stores.
            if oldest == position - length and column[cell] >= oldest:
                headless_end[env] = column[cell]
            if not running[env]:
                begin[env] = position
            column[cell], done_column[cell] = begin[env], done[step, i]
            running[env] = not done[step, i]
            if done[step, i]:
                if begin[env] >= max(position - length + 1, lowest_valid):
                    column[begin[env] % length * num_envs + env] = position
                else:
                    headless_end[env] = position
    skipped = max(0, steps - length)  # later steps would overwrite these
    for leaf in range(len(sources)):
        source, (target, size) = sources[leaf], leaves[leaf]
        if in_lockstep:
            slot, remaining = (positions[ids[0]] + skipped) % length, steps - skipped
            source += skipped * count * size
            while remaining > 0:
                rows = min(remaining, length - slot)
                copy_bytes(target + slot * count * size, source, rows * count * size)
                source += rows * count * size
                slot, remaining = 0, remaining - rows
        else:
            for row in range(skipped * count, steps * count):
                copy_bytes(target + cells[row] * size, source + row * size, size)
    for i in range(count):
        positions[ids[i]] += steps
    counters[0] += steps * count
    counters[2] += 1


def gather(targets: Any, leaves: Any, first_after_leaf: int, cells: int, after: int, count: int, limit: int) -> int:
    """Read cells (numba).

    Args:
        targets: output address of each leaf, ``[L]``.
        leaves: for each leaf, the address of its cells and the bytes of a row, ``[L, 2]``.
        first_after_leaf: number of the first leaf that reads the cells ``after``.
        cells: address of the cell numbers, int64.
        after: address of the cell numbers for the leaves from ``first_after_leaf``, int64; may equal ``cells``.
        count: number of cells.
        limit: number of cells in the buffer; larger or negative cell numbers are invalid.

    Returns:
        Position of the first invalid cell, or -1.
    """
    index = np.empty(count, np.int64)
    for leaf in range(len(leaves)):
        if leaf == 0 or (leaf == first_after_leaf and after != cells):
            numbers_address = cells if leaf < first_after_leaf else after
            for i in range(count):
                index[i] = load(numbers_address + 8 * i)
                if index[i] < 0 or index[i] >= limit:
                    return i
        target, (source, size) = targets[leaf], leaves[leaf]
        # A copy of a constant size is one instruction.
        if size == 1:
            for i in range(count):
                copy_bytes(target + i, source + index[i], 1)
        elif size == 4:
            for i in range(count):
                copy_bytes(target + i * 4, source + index[i] * 4, 4)
        elif size == 8:
            for i in range(count):
                copy_bytes(target + i * 8, source + index[i] * 8, 8)
        else:
            for i in range(count):
                if i + PREFETCH_ROWS < count:
                    address = source + index[i + PREFETCH_ROWS] * size
                    for line_address in range(address, address + min(size, 4 * LINE), LINE):
                        prefetch(line_address)
                copy_bytes(target + i * size, source + index[i] * size, size)
    return -1
