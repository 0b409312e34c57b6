"""Compiled kernels for priorities: one call to sample a batch, one call to write priorities."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchrl_lightning.kernels.compiled import prefetch
from torchrl_lightning.kernels.segments import LEVELS, SUM, climb, descend

NO_GENERATIONS = np.empty(0, np.int32)


def write(
    table: Any,
    starts: Any,
    index: Any,
    priority: Any,
    drawn_generations: Any,
    is_new: bool,
    power: tuple[float, float, float],
) -> tuple[int, int, int, float, int]:
    """Validate all arguments; set priorities, and the powers of these priorities in the sum tree (numba).

    If ``is_new``, the cells were just written and all get the same priority. Otherwise each cell gets its own priority.
    The kernel then skips empty cells and cells with another generation than ``drawn_generations`` (if given). The cell
    -1 is always skipped. Leaves outside of ``starts`` (see :class:`ValidStarts`) are zero.

    Returns:
        Five numbers: position of the first invalid index or priority, or -1; number of cells that were empty before;
        change of the number of nonzero leaves; the largest priority (0 if the cells are new); the highest cell.
    """
    (nodes, priorities, generations), (eps, alpha, limit), (begin, end, length) = table, power, starts
    count, width, stride = len(index), len(nodes) // 2, 0 if is_new else 1
    leaves = np.empty(len(priority), nodes.dtype)
    for i in range(len(priority)):
        leaf = priority[i] + eps
        if alpha != 1.0:
            leaf = leaf**alpha
        leaves[i] = leaf if 0.0 <= priority[i] < np.inf and leaf <= limit else -1.0
    for i in range(count):
        if index[i] < -1 or index[i] >= len(priorities) or leaves[i * stride] < 0.0:
            return i, 0, 0, 0.0, -1
    pending = np.empty(count, np.int64)
    num_pending, last_parent, num_filled, nonzero_change, largest_priority, last = 0, -1, 0, 0, 0.0, -1
    for i in range(count):
        cell = index[i]
        if cell < 0 or (len(drawn_generations) and drawn_generations[i] != generations[cell]):
            continue
        if is_new:
            num_filled += int(priorities[cell] < 0)
            generations[cell] += 1
        elif priorities[cell] < 0:
            continue
        else:
            largest_priority = max(largest_priority, priority[i])
        priorities[cell], leaf = priority[i * stride], leaves[i * stride]
        if length:
            envs = len(begin)
            env = cell % max(envs, 1)
            if not envs or (cell // envs - begin[env]) % length >= end[env] - begin[env]:
                leaf *= 0
        nonzero_change += int(leaf != 0.0) - int(nodes[width + cell] != 0.0)
        nodes[width + cell] = leaf
        last = max(last, cell)
        parent = (width + cell) >> LEVELS
        num_pending += int(parent != last_parent)
        pending[num_pending - 1] = last_parent = parent
    climb(nodes, width, SUM, pending, num_pending)
    return -1, num_filled, nonzero_change, largest_priority, last


def draw(
    table: Any,
    mass: Any,
    stratified: bool,
    beta: float,
    base: float,
    cells: Any,
    weights: Any,
    stamps: Any,
    windows: Any,
) -> None:
    """Sample cells or starts of windows, with their importance weights and generations (numba).

    Args:
        table: nodes of the sum tree (with a positive sum), priorities (prefetched here for the next update), and
            generations.
        mass: uniform numbers in [0, 1), ``[B]``; overwritten.
        stratified: draw each cell from its own stratum.
        beta: the weights are ``(leaf / base) ** -beta``.
        base: divisor of the leaves; zero selects the smallest leaf of the batch.
        cells: output: cells, ``[B]``; with windows ``[B * T]``, one window after another.
        weights: output: importance weights, like ``cells``; every step of a window has the weight of the first step.
        stamps: output: generations, like ``cells``; every step of a window has the generation of the first step.
        windows: None for single cells, so that numba compiles a kernel without windows. Otherwise a tuple: steps of a
            window, distance between the cells of successive steps, number of cells (cell 0 follows the last cell),
            number of nonzero leaves, and an output array for each window's leaf divided by the mean nonzero leaf.
    """
    nodes, priorities, generations = table
    count, width, total = len(mass), len(nodes) // 2, nodes[1]
    scale = total / count if stratified else total
    for i in range(count):
        mass[i] = (mass[i] + i if stratified else mass[i]) * scale
    descend(nodes, width, mass, cells[:count])
    for i in range(count):
        prefetch(generations.ctypes.data + cells[i] * generations.itemsize)
        prefetch(priorities.ctypes.data + cells[i] * priorities.itemsize)
    lowest = np.inf
    for i in range(count):
        leaf = nodes[width + cells[i]]
        mass[i] = leaf
        lowest = min(lowest, leaf)
    if base > 0.0:
        lowest = base
    for i in range(count):
        weights[i] = np.float32(mass[i] / lowest) ** np.float32(-beta)
        stamps[i] = generations[cells[i]]
    if windows is not None:
        steps, stride, size, nonzero, ratios = windows
        scale = nonzero / total
        for i in range(count - 1, -1, -1):  # backwards, to read each entry before it is overwritten
            cell, weight, stamp, ratio = cells[i], weights[i], stamps[i], mass[i] * scale
            for row in range(i * steps, (i + 1) * steps):
                cells[row], weights[row], stamps[row], ratios[row] = cell, weight, stamp, ratio
                cell += stride
                if cell >= size:
                    cell -= size
