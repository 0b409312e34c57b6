"""Compiled kernels over priorities: one call for a whole draw, one for a whole update."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchrl_lightning import segment_kernels

NOTHING = np.empty(0, np.int32)


def mark(
    nodes: Any, priorities: Any, generations: Any, index: Any, priority: float, eps: float, alpha: float, limit: float
) -> tuple[int, int, int, int]:
    """Record that cells were written, all of one priority (numba), after checking everything; -1 stands for no cell.

    Returns:
        Place of the first bad index, their number if the priority is bad, or -1; how many of the cells held nothing
        before; by how much the number of leaves that are not zero has changed; the last cell.
    """
    count, width = len(index), len(nodes) // 2
    for i in range(count):
        if index[i] < -1 or index[i] >= len(priorities):
            return i, 0, 0, -1
    leaf = priority + eps
    if alpha != 1.0:
        leaf = leaf**alpha
    if not leaf <= limit:
        return count, 0, 0, -1
    pending = np.empty(count, np.int64)
    size, above, fresh, change, last = 0, -1, 0, 0, -1
    for i in range(count):
        cell = index[i]
        if cell < 0:
            continue
        fresh += int(priorities[cell] < 0)
        priorities[cell] = priority
        generations[cell] += 1
        change += int(leaf != 0.0) - int(nodes[width + cell] != 0.0)
        nodes[width + cell] = leaf
        last = max(last, cell)
        parent = (width + cell) >> segment_kernels.LEVELS
        size += int(parent != above)
        pending[size - 1] = above = parent
    segment_kernels.climb(nodes, width, segment_kernels.SUM, pending, size)
    return -1, fresh, change, last


def update(
    nodes: Any,
    priorities: Any,
    generations: Any,
    index: Any,
    priority: Any,
    given: Any,
    eps: float,
    alpha: float,
    limit: float,
) -> tuple[int, int, float]:
    """Set priorities and the sum tree over their powers (numba), after checking everything.

    Returns:
        Place of the first bad index or priority, or -1; by how much the number of leaves that are not zero has
        changed; the largest new priority.
    """
    count, width = len(index), len(nodes) // 2
    leaves = np.empty(count, nodes.dtype)
    for i in range(count):
        value = priority[i]
        leaf = value + eps
        if alpha != 1.0:
            leaf = leaf**alpha
        leaves[i] = leaf
        sound = 0.0 <= value < np.inf and leaf <= limit
        if index[i] < -1 or index[i] >= len(priorities) or not sound:
            return i, 0, 0.0
    pending = np.empty(count, np.int64)
    size, last, change, largest = 0, -1, 0, 0.0
    for i in range(count):
        cell = index[i]
        if cell < 0 or priorities[cell] < 0 or (len(given) and given[i] != generations[cell]):
            continue
        priorities[cell] = priority[i]
        largest = max(largest, priority[i])
        change += int(leaves[i] != 0.0) - int(nodes[width + cell] != 0.0)
        nodes[width + cell] = leaves[i]
        parent = (width + cell) >> segment_kernels.LEVELS
        size += int(parent != last)
        pending[size - 1] = last = parent
    segment_kernels.climb(nodes, width, segment_kernels.SUM, pending, size)
    return -1, change, largest


def draw(
    nodes: Any,
    priorities: Any,
    generations: Any,
    mass: Any,
    stratified: bool,
    beta: float,
    base: float,
    cells: Any,
    weights: Any,
    stamps: Any,
) -> bool:
    """Draw cells, and give each its importance weight and its generation (numba); uses ``mass`` up.

    Args:
        nodes: of the sum tree.
        priorities: of all cells; only fetched, for the update that follows.
        generations: of all cells.
        mass: uniform numbers in [0, 1).
        stratified: each number falls into a share of its own.
        beta: the weights are ``(leaf / base) ** -beta``.
        base: what leaves are divided by; zero takes the smallest of the batch.
        cells: is filled.
        weights: is filled.
        stamps: is filled, with generations.

    Returns:
        Whether there was anything to draw.
    """
    count, width, total = len(mass), len(nodes) // 2, nodes[1]
    if not total > 0.0:
        return False
    scale = total / count if stratified else total
    for i in range(count):
        mass[i] = (mass[i] + i if stratified else mass[i]) * scale
    segment_kernels.descend(nodes, width, mass, cells)
    for i in range(count):
        segment_kernels.prefetch(generations.ctypes.data + cells[i] * generations.itemsize)
        segment_kernels.prefetch(priorities.ctypes.data + cells[i] * priorities.itemsize)
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
    return True
