"""Updates and searches of a segment tree, level by level for a batch, with numba and with torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning.kernels.compiled import prefetch
from torchrl_lightning.kernels.indices import unique_last

SUM, MIN, MAX = 0, 1, 2
OPERATIONS = {"sum": (SUM, 0.0), "min": (MIN, math.inf), "max": (MAX, -math.inf)}
"""Code and neutral element of each operation."""
_PAIRWISE: tuple[Callable[..., Tensor], ...] = (torch.add, torch.minimum, torch.maximum)

LEVELS, FAN = 3, 8
"""The compiled kernels store only every third level above the leaves, and the first levels below the root. The eight
nodes below a stored node share a cache line, so that computing the sums between is faster than loading them."""

JUMP = 5  # levels per step of the torch search: fewer, larger operations


def assign(
    nodes: Any, width: int, capacity: int, code: int, index: Any, values: Any, largest: float
) -> tuple[int, int]:
    """Set leaves and recompute their ancestors (numba), after validating all arguments.

    Returns:
        Position of the first invalid index, or the number of indices plus the position of the first invalid value, or
        -1; and the change of the number of nonzero leaves.
    """
    count = len(index)
    stride = 0 if len(values) == 1 else 1
    for i in range(count):
        if index[i] < 0 or index[i] >= capacity:
            return i, 0
        value = values[i * stride]
        if math.isnan(value) or (code == 0 and not 0.0 <= value <= largest):
            return count + i, 0
    change, size, last = 0, 0, -1
    pending = np.empty(count, np.int64)
    for i in range(count):
        leaf = width + index[i]
        value = values[i * stride]
        change += int(value != 0.0) - int(nodes[leaf] != 0.0)
        nodes[leaf] = value
        parent = leaf >> LEVELS
        size += int(parent != last)
        pending[size - 1] = last = parent
    climb(nodes, width, code, pending, size)
    return -1, change


def climb(nodes: Any, width: int, code: int, pending: Any, size: int) -> None:
    """Recompute the stored ancestors of changed leaves, level by level (numba).

    Args:
        nodes: nodes of the tree.
        width: number of its leaves.
        code: code of the operation.
        pending: first nodes to recompute, in any order; zeros if only the levels near the root need it; overwritten.
        size: number of pending nodes.
    """
    while size > 0 and pending[0] > 0:
        kept, last = 0, -1
        for i in range(size):
            node = pending[i]
            below = node << LEVELS
            # In pairs, in the same order as with the levels between.
            if code == 0:
                low = (nodes[below] + nodes[below + 1]) + (nodes[below + 2] + nodes[below + 3])
                high = (nodes[below + 4] + nodes[below + 5]) + (nodes[below + 6] + nodes[below + 7])
                nodes[node] = low + high
            else:
                value = nodes[below]
                for other in nodes[below + 1 : below + FAN]:
                    value = min(value, other) if code == 1 else max(value, other)
                nodes[node] = value
            # Neighbours share ancestors, so a run of indices becomes shorter on each level.
            parent = node >> LEVELS
            kept += int(parent != last)
            pending[kept - 1] = last = parent
        size = kept
    top = width
    while top >= FAN:
        top >>= LEVELS
    for node in range(top - 1, 0, -1):
        left, right = nodes[2 * node], nodes[2 * node + 1]
        nodes[node] = left + right if code == 0 else min(left, right) if code == 1 else max(left, right)


def descend(nodes: Any, width: int, thresholds: Any, found: Any) -> None:
    """Find the leaf that contains each partial sum (numba); overwrites ``thresholds``."""
    count, top, level = len(thresholds), width, 1
    address, size = nodes.ctypes.data, nodes.itemsize
    while top >= FAN:
        top >>= LEVELS
    found[:] = 1
    # Rounding may leave a remainder above the right sum, but an empty side is never entered. Without branches, because
    # the processor cannot predict them and a wrong prediction costs more than the arithmetic.
    while level < top:
        for i in range(count):
            below = 2 * found[i]
            right = int(thresholds[i] >= nodes[below]) & int(nodes[below + 1] > 0.0)
            thresholds[i] -= right * nodes[below]
            found[i] = below + right
        level *= 2
    while level < width:
        for i in range(count):
            below, rest = found[i] << LEVELS, thresholds[i]
            left = (nodes[below] + nodes[below + 1]) + (nodes[below + 2] + nodes[below + 3])
            other = (nodes[below + 4] + nodes[below + 5]) + (nodes[below + 6] + nodes[below + 7])
            right = int(rest >= left) & int(other > 0.0)
            rest -= right * left
            below += 4 * right
            left, other = nodes[below] + nodes[below + 1], nodes[below + 2] + nodes[below + 3]
            right = int(rest >= left) & int(other > 0.0)
            rest -= right * left
            below += 2 * right
            left, other = nodes[below], nodes[below + 1]
            right = int(rest >= left) & int(other > 0.0)
            thresholds[i] = rest - right * left
            found[i] = below + right
            # Prefetch the children of this node; the search reads them after the other draws of this level.
            prefetch(address + (found[i] << LEVELS) * size)
        level <<= LEVELS
    for i in range(count):
        found[i] -= width


def reduce_pairs(code: int, below: Tensor, out: Tensor) -> None:
    """Compute one whole level from the level below."""
    _PAIRWISE[code](below[0::2], below[1::2], out=out)


def assign_torch(
    nodes: Tensor, width: int, capacity: int, code: int, index: Tensor, values: Tensor, largest: float
) -> tuple[int, int | Tensor]:
    """Set leaves like :func:`assign`, on any device."""
    count = index.numel()
    bad = values.isnan() if code != SUM else ~((values >= 0) & (values <= largest))
    bad = torch.cat([(index < 0) | (index >= capacity), bad.expand(count)])
    if bad.any():
        return int(bad.to(torch.uint8).argmax()), 0
    places = unique_last(index)  # not every device defines the order of writes to one element
    leaves = index[places] + width
    values = values.expand(count)[places]
    change = values.count_nonzero() - nodes[leaves].count_nonzero()
    nodes[leaves] = values
    pairs = nodes.view(-1, 2)
    parents = leaves
    level = width
    while level > 1:
        parents = parents >> 1
        if level // 2 <= parents.numel():
            reduce_pairs(code, nodes[level : 2 * level], nodes[level // 2 : level])
        else:
            nodes[parents] = _PAIRWISE[code](*pairs.index_select(0, parents).unbind(1))
        level //= 2
    return -1, change


def descend_torch(nodes: Tensor, width: int, thresholds: Tensor) -> Tensor:
    """Search like :func:`descend`, on any device, several levels at a time."""
    node = torch.ones(thresholds.shape, dtype=torch.int64, device=nodes.device)
    remaining = width.bit_length() - 1
    while remaining:
        fan = 1 << min(JUMP, remaining)
        remaining -= min(JUMP, remaining)
        order = torch.arange(fan, device=nodes.device)
        parts = nodes.view(-1, fan).index_select(0, node)
        sums = parts.cumsum(1)
        # First choice: the first part that contains the threshold. After rounding: the last nonempty part.
        score = torch.where(thresholds.unsqueeze(1) < sums, 2 * fan - order, order)
        chosen = score.masked_fill_(parts <= 0, -1).argmax(1)
        before = (sums - parts).gather(1, chosen.unsqueeze(1)).squeeze(1)
        thresholds = (thresholds - before).clamp_(min=0)
        node = node * fan + chosen
    return node - width
