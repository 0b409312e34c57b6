"""The walks up and down a segment tree, level by level over a batch: for numba and for torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning.scan import compiled

__all__ = ["OPERATIONS", "assign", "assign_torch", "descend", "descend_torch", "jitted", "last_of_each", "reduce_pairs"]

SUM, MIN, MAX = 0, 1, 2
OPERATIONS = {"sum": (SUM, 0.0), "min": (MIN, math.inf), "max": (MAX, -math.inf)}
"""Code and neutral element of each operation."""

JUMP = 5  # levels that the torch search descends at a time: fewer, larger operations


def assign(
    nodes: Any, width: int, capacity: int, code: int, index: Any, values: Any, largest: float
) -> tuple[int, int]:
    """Set leaves and recompute their ancestors (numba), after checking everything.

    Returns:
        Place of the first bad index, or the number of indices plus the place of the first bad value, or -1; and by how
        much the number of leaves that are not zero has changed.
    """
    count = len(index)
    stride = 0 if len(values) == 1 else 1
    for i in range(count):
        if index[i] < 0 or index[i] >= capacity:
            return i, 0
        value = values[i * stride]
        if math.isnan(value) or (code == 0 and not 0.0 <= value <= largest):
            return count + i, 0
    change = 0
    pending = np.empty(count, np.int64)
    size = 0
    for i in range(count):
        leaf = width + index[i]
        value = values[i * stride]
        change += int(value != 0.0) - int(nodes[leaf] != 0.0)
        nodes[leaf] = value
        parent = leaf >> 1
        if size == 0 or pending[size - 1] != parent:
            pending[size] = parent
            size += 1
    climb(nodes, code, pending, size)
    return -1, change


def climb(nodes: Any, code: int, pending: Any, size: int) -> None:
    """Recompute inner nodes of one level, and all their ancestors (numba); uses ``pending`` up.

    Args:
        nodes: of the tree.
        code: of the operation.
        pending: nodes of one level, in any order; zeros if there are no inner nodes.
        size: how many of them.
    """
    while size > 0 and pending[0] > 0:
        kept = 0
        for i in range(size):
            node = pending[i]
            left, right = nodes[2 * node], nodes[2 * node + 1]
            if code == 0:
                nodes[node] = left + right
            elif code == 1:
                nodes[node] = min(left, right)
            else:
                nodes[node] = max(left, right)
            parent = node >> 1
            # Neighbours share their ancestors: a run of indices thins out on the way up.
            if kept == 0 or pending[kept - 1] != parent:
                pending[kept] = parent
                kept += 1
        size = kept


def descend(nodes: Any, width: int, thresholds: Any, found: Any) -> None:
    """Find the leaf in which each partial sum falls (numba); uses ``thresholds`` up."""
    count = len(thresholds)
    found[:] = 1
    level = 1
    while level < width:
        for i in range(count):
            node = 2 * found[i]
            left = nodes[node]
            # Rounding may leave a remainder above the right sum, but an empty side is never entered. Without branches:
            # which way a draw goes cannot be predicted, and a wrong guess costs more than the arithmetic.
            right = int(thresholds[i] >= left) & int(nodes[node + 1] > 0.0)
            found[i] = node + right
            thresholds[i] -= right * left
        level *= 2
    for i in range(count):
        found[i] -= width


_CALLEES = {"climb": climb, "descend": descend}


@functools.cache
def jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel that may call :func:`climb` and :func:`descend`, without importing numba before it is needed."""
    # numba resolves what a kernel calls when it compiles it, and wants compiled functions there.
    for name, callee in _CALLEES.items():
        globals()[name] = compiled(callee)
    return compiled(_CALLEES.get(function.__name__, function))


def allocate(size: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Uninitialised memory; on the CPU numpy's, which asks for huge pages: scattered reads miss fewer of them."""
    if torch.device(device).type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(size, dtype=str(dtype).removeprefix("torch.")))


def reduce_pairs(code: int, below: Tensor, out: Tensor) -> None:
    """Compute one whole level from the one below it."""
    left, right = below[0::2], below[1::2]
    if code == SUM:
        torch.add(left, right, out=out)
    elif code == MIN:
        torch.minimum(left, right, out=out)
    else:
        torch.maximum(left, right, out=out)


def last_of_each(index: Tensor) -> Tensor:
    """Places of the last occurrence of each distinct index."""
    unique, inverse = torch.unique(index, return_inverse=True)
    places = torch.arange(index.numel(), device=index.device)
    return torch.zeros_like(unique).scatter_reduce_(0, inverse, places, "amax", include_self=False)


def assign_torch(
    nodes: Tensor, width: int, capacity: int, code: int, index: Tensor, values: Tensor, largest: float
) -> tuple[int, int | Tensor]:
    """What :func:`assign` does, on any device."""
    count = index.numel()
    bad = values.isnan() if code != SUM else ~((values >= 0) & (values <= largest))
    bad = torch.cat([(index < 0) | (index >= capacity), bad.expand(count)])
    if bad.any():
        return int(bad.to(torch.uint8).argmax()), 0
    places = last_of_each(index)  # the order of writes to one element is not defined on every device
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
            children = pairs.index_select(0, parents)
            if code == SUM:
                nodes[parents] = children.sum(1)
            else:
                nodes[parents] = children.amin(1) if code == MIN else children.amax(1)
        level //= 2
    return -1, change


def descend_torch(nodes: Tensor, width: int, thresholds: Tensor) -> Tensor:
    """What :func:`descend` does, on any device, several levels at a time."""
    node = torch.ones(thresholds.shape, dtype=torch.int64, device=nodes.device)
    remaining = width.bit_length() - 1
    while remaining:
        fan = 1 << min(JUMP, remaining)
        remaining -= min(JUMP, remaining)
        order = torch.arange(fan, device=nodes.device)
        parts = nodes.view(-1, fan).index_select(0, node)
        sums = parts.cumsum(1)
        # First choice: the first part that holds the threshold; else, after rounding, the last that is not empty.
        score = torch.where(thresholds.unsqueeze(1) < sums, 2 * fan - order, order)
        chosen = score.masked_fill_(parts <= 0, -1).argmax(1)
        before = (sums - parts).gather(1, chosen.unsqueeze(1)).squeeze(1)
        thresholds = (thresholds - before).clamp_(min=0)
        node = node * fan + chosen
    return node - width
