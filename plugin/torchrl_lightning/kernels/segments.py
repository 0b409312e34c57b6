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

LEVELS, FAN_OUT = 3, 8
"""The compiled kernels store only every third level above the leaves, and the first levels below the root. The eight
nodes three levels below a stored node share a cache line. It is faster to compute the nodes between from these eight
than to load them."""

LEVELS_PER_STEP = 5  # levels per step of the torch search; with several levels, there are fewer and larger operations


def assign(
    nodes: Any, width: int, capacity: int, code: int, index: Any, values: Any, largest: float
) -> tuple[int, int]:
    """Set leaves and recompute their ancestors (numba), after validating all arguments.

    Returns:
        First, the position of the first invalid index, or the number of indices plus the position of the first invalid
        value, or -1 if all are valid. Second, the change of the number of nonzero leaves.
    """
    count = len(index)
    stride = 0 if len(values) == 1 else 1
    for i in range(count):
        if index[i] < 0 or index[i] >= capacity:
            return i, 0
        value = values[i * stride]
        if math.isnan(value) or (code == 0 and not 0.0 <= value <= largest):
            return count + i, 0
    nonzero_change, num_pending, last_parent = 0, 0, -1
    pending = np.empty(count, np.int64)
    for i in range(count):
        leaf = width + index[i]
        value = values[i * stride]
        nonzero_change += int(value != 0.0) - int(nodes[leaf] != 0.0)
        nodes[leaf] = value
        parent = leaf >> LEVELS
        num_pending += int(parent != last_parent)
        pending[num_pending - 1] = last_parent = parent
    climb(nodes, width, code, pending, num_pending)
    return -1, nonzero_change


def climb(nodes: Any, width: int, code: int, pending: Any, size: int) -> None:
    """Recompute the stored ancestors of changed leaves, level by level (numba).

    Args:
        nodes: nodes of the tree.
        width: number of its leaves.
        code: code of the operation.
        pending: the first nodes to recompute, in any order, or zeros for the levels near the root; overwritten.
        size: number of pending nodes.
    """
    while size > 0 and pending[0] > 0:
        num_parents, last_parent = 0, -1
        for i in range(size):
            node = pending[i]
            first_child = node << LEVELS
            # Combine pairs in the same order as a tree that stores all levels.
            if code == 0:
                low = (nodes[first_child] + nodes[first_child + 1]) + (nodes[first_child + 2] + nodes[first_child + 3])
                high = (nodes[first_child + 4] + nodes[first_child + 5]) + (
                    nodes[first_child + 6] + nodes[first_child + 7]
                )
                nodes[node] = low + high
            else:
                value = nodes[first_child]
                for other in nodes[first_child + 1 : first_child + FAN_OUT]:
                    value = min(value, other) if code == 1 else max(value, other)
                nodes[node] = value
            # Neighbours share ancestors, so a run of indices becomes shorter on each level.
            parent = node >> LEVELS
            num_parents += int(parent != last_parent)
            pending[num_parents - 1] = last_parent = parent
        size = num_parents
    top_width = width
    while top_width >= FAN_OUT:
        top_width >>= LEVELS
    for node in range(top_width - 1, 0, -1):
        left, right = nodes[2 * node], nodes[2 * node + 1]
        nodes[node] = left + right if code == 0 else min(left, right) if code == 1 else max(left, right)


def descend(nodes: Any, width: int, thresholds: Any, leaf: Any) -> None:
    """Find the first leaf at which the partial sum exceeds each threshold (numba); overwrites ``thresholds``."""
    count, top_width, level = len(thresholds), width, 1
    address, size = nodes.ctypes.data, nodes.itemsize
    while top_width >= FAN_OUT:
        top_width >>= LEVELS
    leaf[:] = 1
    # Rounding may leave a remainder above the sum of the right side, but the search never enters an empty side. The
    # loop avoids branches, because a branch that the processor predicts wrongly costs more than the arithmetic.
    while level < top_width:
        for i in range(count):
            first_child = 2 * leaf[i]
            goes_right = int(thresholds[i] >= nodes[first_child]) & int(nodes[first_child + 1] > 0.0)
            thresholds[i] -= goes_right * nodes[first_child]
            leaf[i] = first_child + goes_right
        level *= 2
    while level < width:
        for i in range(count):
            first_child, threshold = leaf[i] << LEVELS, thresholds[i]
            left_sum = (nodes[first_child] + nodes[first_child + 1]) + (nodes[first_child + 2] + nodes[first_child + 3])
            right_sum = (nodes[first_child + 4] + nodes[first_child + 5]) + (
                nodes[first_child + 6] + nodes[first_child + 7]
            )
            goes_right = int(threshold >= left_sum) & int(right_sum > 0.0)
            threshold -= goes_right * left_sum
            first_child += 4 * goes_right
            left_sum, right_sum = (
                nodes[first_child] + nodes[first_child + 1],
                nodes[first_child + 2] + nodes[first_child + 3],
            )
            goes_right = int(threshold >= left_sum) & int(right_sum > 0.0)
            threshold -= goes_right * left_sum
            first_child += 2 * goes_right
            left_sum, right_sum = nodes[first_child], nodes[first_child + 1]
            goes_right = int(threshold >= left_sum) & int(right_sum > 0.0)
            thresholds[i] = threshold - goes_right * left_sum
            leaf[i] = first_child + goes_right
            # Prefetch the children of this node. The search reads them after it has processed this level for all draws.
            prefetch(address + (leaf[i] << LEVELS) * size)
        level <<= LEVELS
    for i in range(count):
        leaf[i] -= width


def reduce_pairs(code: int, children: Tensor, out: Tensor) -> None:
    """Compute one whole level from the level below."""
    _PAIRWISE[code](children[0::2], children[1::2], out=out)


def assign_torch(
    nodes: Tensor, width: int, capacity: int, code: int, index: Tensor, values: Tensor, largest: float
) -> tuple[int, int | Tensor]:
    """Set leaves like :func:`assign`, on any device."""
    count = index.numel()
    is_invalid = values.isnan() if code != SUM else ~((values >= 0) & (values <= largest))
    is_invalid = torch.cat([(index < 0) | (index >= capacity), is_invalid.expand(count)])
    if is_invalid.any():
        return int(is_invalid.to(torch.uint8).argmax()), 0
    last_positions = unique_last(index)  # on some devices, the order of writes to one element is undefined
    leaves = index[last_positions] + width
    values = values.expand(count)[last_positions]
    nonzero_change = values.count_nonzero() - nodes[leaves].count_nonzero()
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
    return -1, nonzero_change


def descend_torch(nodes: Tensor, width: int, thresholds: Tensor) -> Tensor:
    """Search like :func:`descend`, on any device, several levels at a time."""
    node = torch.ones(thresholds.shape, dtype=torch.int64, device=nodes.device)
    remaining = width.bit_length() - 1
    while remaining:
        fan_out = 1 << min(LEVELS_PER_STEP, remaining)
        remaining -= min(LEVELS_PER_STEP, remaining)
        order = torch.arange(fan_out, device=nodes.device)
        children = nodes.view(-1, fan_out).index_select(0, node)
        sums = children.cumsum(1)
        # Choose the first part that contains the threshold, or the last nonempty part if rounding excludes all parts.
        score = torch.where(thresholds.unsqueeze(1) < sums, 2 * fan_out - order, order)
        chosen = score.masked_fill_(children <= 0, -1).argmax(1)
        sum_before = (sums - children).gather(1, chosen.unsqueeze(1)).squeeze(1)
        thresholds = (thresholds - sum_before).clamp_(min=0)
        node = node * fan_out + chosen
    return node - width
