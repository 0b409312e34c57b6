"""The priority of every cell of a buffer, and draws in proportion to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning.scan import compiled
from torchrl_lightning.segment_kernels import last_of_each
from torchrl_lightning.segment_tree import Backend, MaxSegmentTree, MinSegmentTree, SumSegmentTree

ABSENT = -1.0  # the priority of a cell that holds nothing
STATE_KEYS = ("capacity", "priorities", "leaves", "generations", "largest")


class Priorities:
    """Priorities ``p`` of cells, and a sum tree over ``(p + eps) ** alpha`` from which cells are drawn.

    The plain priorities are kept beside the tree, so that ``alpha`` can be changed exactly. Every cell counts how often
    it was written (its generation), by which an update that comes too late is recognised.

    Args:
        capacity: number of cells.
        alpha: the exponent.
        eps: what is added to each priority.
        dtype: of priorities and tree.
        device: where they live.
        keep_lowest: know the lowest stored priority (a further tree).
        keep_highest: know the highest stored priority (a further tree), not only the highest ever given.
        backend: of the trees.

    Example:
        >>> table = Priorities(4, alpha=1.0, eps=0.0)
        >>> table.mark(torch.tensor([0, 1]), 2.0)
        >>> table.update(torch.tensor([1, 3]), torch.tensor([6.0, 9.0], dtype=torch.float64))
        >>> table.priorities.tolist(), table.total
        ([2.0, 6.0, -1.0, -1.0], 8.0)
    """

    def __init__(
        self,
        capacity: int,
        alpha: float,
        eps: float,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        keep_lowest: bool = False,
        keep_highest: bool = False,
        backend: Backend = "auto",
    ) -> None:
        self.tree = SumSegmentTree(capacity, dtype, device, "PrioritizedSampler", backend=backend)
        self.alpha, self.eps = alpha, eps
        self.priorities = torch.full((capacity,), ABSENT, dtype=dtype, device=device)
        self.generations = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.count = 0
        self.extent = 0  # every cell that was ever written lies below
        self.largest = 0.0
        kwargs: dict[str, Any] = {"dtype": dtype, "device": device, "backend": backend}
        self.lowest = MinSegmentTree(capacity, initial=math.inf, **kwargs) if keep_lowest else None
        self.highest = MaxSegmentTree(capacity, initial=0.0, **kwargs) if keep_highest else None
        self._compiled = backend != "torch" and self.priorities.device.type == "cpu"
        self._strata = torch.empty(0, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Number of cells."""
        return self.tree.capacity

    @property
    def total(self) -> float:
        """Sum of ``(p + eps) ** alpha`` over the stored cells."""
        return float(self.tree.summary())

    @property
    def maximum(self) -> float:
        """The highest stored priority if that is known, else the highest that was ever given; zero at first."""
        return self.largest if self.highest is None else float(self.highest.summary())

    def power(self, priority: Tensor) -> Tensor:
        """``(priority + eps) ** alpha``."""
        shifted = priority + self.eps
        return shifted if self.alpha == 1.0 else shifted.pow_(self.alpha)

    def mark(self, index: Tensor, priority: float) -> None:
        """Take note that cells were written: ``[n]`` int64 on this device, -1 for a row that no cell took.

        Raises:
            IndexError: a cell out of range.
        """
        if not index.numel():
            return
        low, high = (int(bound) for bound in index.aminmax())
        if low == -1:
            self.mark(index[index != -1], priority)
            return
        if low < 0 or high >= self.capacity:
            raise IndexError(
                f"Cell {low if low < 0 else high} was written, but there are priorities for {self.capacity} cells; "
                "give the sampler the max_size of the storage as max_capacity."
            )
        value = torch.full((1,), priority, dtype=self.priorities.dtype, device=self.priorities.device)
        self.tree.assign(index, self.power(value))
        if self._compiled:
            self.count += compiled(_mark)(self.priorities.numpy(), self.generations.numpy(), index.numpy(), priority)
        else:
            cells = index[last_of_each(index)]
            self.count += int((self.priorities[cells] < 0).sum())
            self.priorities[cells] = priority
            self.generations[cells] += 1
        self.extent = max(self.extent, high + 1)
        self._follow(index, value)

    def update(self, index: Tensor, priority: Tensor, generation: Tensor | None = None) -> None:
        """Change priorities; what is not stored (or no longer what it was when drawn) is left alone.

        Args:
            index: ``[n]`` int64; -1 stands for nothing.
            priority: ``[n]``, in the dtype of this table.
            generation: ``[n]``, the generations of the cells when they were drawn; None updates whatever they hold now.

        Raises:
            IndexError: a cell out of range.
            ValueError: a priority is negative, NaN or infinite.
        """
        if not index.numel():
            return
        leaves = self.power(priority)
        limit = torch.finfo(leaves.dtype).max / self.capacity
        if self._compiled:
            kept, accepted = torch.empty_like(index), torch.empty_like(leaves)
            given = np.empty(0, np.int32) if generation is None else generation.numpy()
            table = (self.priorities.numpy(), self.generations.numpy())
            data = (index.numpy(), priority.numpy(), leaves.numpy(), given)
            place, size, largest = compiled(_accept)(*table, *data, limit, kept.numpy(), accepted.numpy())
            if place >= 0:
                raise self._error(index, priority, place)
            cells, accepted = kept[:size], accepted[:size]
        else:
            bad = (index < -1) | (index >= self.capacity) | ~((priority >= 0) & (leaves <= limit) & priority.isfinite())
            if bad.any():
                raise self._error(index, priority, int(bad.nonzero()[0]))
            safe = index.clamp(min=0)
            valid = (index >= 0) & (self.priorities[safe] >= 0)
            if generation is not None:
                valid &= self.generations[safe] == generation
            cells, changed, accepted = index[valid], priority[valid], leaves[valid]
            if not cells.numel():
                return
            last = last_of_each(cells)
            cells, accepted = cells[last], accepted[last]
            self.priorities[cells] = changed[last]
            largest = float(changed.max())
        if cells.numel():
            self.largest = max(self.largest, largest)
            self.tree.assign(cells, accepted)
            if self.lowest is not None or self.highest is not None:
                self._follow(cells, self.priorities[cells])

    def draw(self, count: int, generator: torch.Generator, stratified: bool) -> tuple[Tensor, Tensor]:
        """Draw cells in proportion to ``(p + eps) ** alpha``.

        Args:
            count: how many.
            generator: where the randomness comes from.
            stratified: one draw from each of ``count`` equal shares of the total, in order.

        Returns:
            Cells ``[count]`` int64, and their ``(p + eps) ** alpha``.

        Raises:
            RuntimeError: every priority is zero.
        """
        total = self.total
        if total <= 0:
            raise RuntimeError(
                f"All {self.count} stored priorities are zero, so that nothing can be drawn; "
                "give a positive priority, or eps > 0."
            )
        mass = torch.rand(count, dtype=self.tree.dtype, generator=generator, device=generator.device)
        mass = mass.to(self.tree.device)
        if stratified:
            if len(self._strata) != count:
                self._strata = torch.arange(count, dtype=mass.dtype, device=mass.device)
            mass.add_(self._strata).mul_(total / count)
        else:
            mass.mul_(total)
        cells = self.tree.descend(mass)
        return cells, self.tree.leaves.index_select(0, cells)

    def change_alpha(self, alpha: float) -> None:
        """Raise the priorities to another power: ``O(capacity)``."""
        if alpha != self.alpha:
            self.alpha = alpha
            stored = self.priorities[: self.extent]
            self.tree.set_all(torch.where(stored >= 0, self.power(stored.clamp(min=0)), 0.0))

    def clear(self) -> None:
        """Forget every cell; the generations go on, so that late updates are recognised."""
        self.priorities.fill_(ABSENT)
        self.count, self.largest = 0, 0.0
        for tree in (self.tree, self.lowest, self.highest):
            if tree is not None:
                tree.clear()

    def state_dict(self) -> dict[str, Any]:
        """Copies of what is stored: tensors and scalars."""
        part = slice(self.extent)
        return {
            "capacity": self.capacity,
            "priorities": self.priorities[part].clone(),
            "leaves": self.tree.leaves[part].clone(),
            "generations": self.generations[part].clone(),
            "largest": self.largest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that was checked, exactly."""
        priorities, leaves, generations = (
            state[key].to(self.priorities.device) for key in ("priorities", "leaves", "generations")
        )
        self.tree.set_all(leaves)
        self.extent = len(priorities)
        self.priorities[: self.extent], self.priorities[self.extent :] = priorities, ABSENT
        self.generations[: self.extent], self.generations[self.extent :] = generations, 0
        stored = self.priorities >= 0
        self.count, self.largest = int(stored.sum()), float(state["largest"])
        if self.lowest is not None:
            self.lowest.set_all(torch.where(stored, self.priorities, math.inf))
        if self.highest is not None:
            self.highest.set_all(self.priorities.clamp(min=0))

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that does not fit, or that nothing could have saved.

        Raises:
            ValueError: says what is wrong.
        """
        if state["capacity"] != self.capacity:
            raise ValueError(
                f"The state holds priorities of {state['capacity']} cells, "
                f"this sampler has max_capacity={self.capacity}."
            )
        dtypes = {"priorities": self.priorities.dtype, "leaves": self.tree.dtype, "generations": torch.int32}
        for key, dtype in dtypes.items():
            value = state[key]
            if not isinstance(value, Tensor) or value.dtype != dtype or value.ndim != 1 or len(value) > self.capacity:
                came = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"The state's {key} are {came}, expected {dtype} of at most [{self.capacity}].")
        sizes = [len(state[key]) for key in dtypes]
        if len(set(sizes)) > 1:
            raise ValueError(f"The state's {tuple(dtypes)} have the lengths {sizes}; they must be equal.")
        priorities, leaves = state["priorities"], state["leaves"]
        largest = float(state["largest"])
        sound = ((priorities >= 0) & priorities.isfinite()) | ((priorities == ABSENT) & (leaves == 0))
        if not (sound & (leaves >= 0) & leaves.isfinite()).all() or not 0 <= largest < math.inf:
            raise ValueError("The state holds priorities that are negative, not finite, or of cells that hold nothing.")

    def _follow(self, index: Tensor, priority: Tensor) -> None:
        for tree in (self.lowest, self.highest):
            if tree is not None:
                tree.assign(index, priority)

    def _error(self, index: Tensor, priority: Tensor, place: int) -> Exception:
        cell = int(index[place])
        if not -1 <= cell < self.capacity:
            return IndexError(f"index {cell} is out of range; there are priorities for {self.capacity} cells.")
        value = float(priority[place])
        return ValueError(f"A priority must be finite and not negative, got {value} for cell {cell}.")


def _mark(priorities: Any, generations: Any, index: Any, priority: float) -> int:
    fresh = 0
    for i in range(len(index)):
        cell = index[i]
        fresh += int(priorities[cell] < 0)
        priorities[cell] = priority
        generations[cell] += 1
    return fresh


def _accept(
    priorities: Any,
    generations: Any,
    index: Any,
    priority: Any,
    leaves: Any,
    given: Any,
    limit: float,
    kept: Any,
    accepted: Any,
) -> tuple[int, int, float]:
    for i in range(len(index)):
        sound = 0.0 <= priority[i] < np.inf and leaves[i] <= limit
        if index[i] < -1 or index[i] >= len(priorities) or not sound:
            return i, 0, 0.0
    size, largest = 0, 0.0
    for i in range(len(index)):
        cell = index[i]
        if cell < 0 or priorities[cell] < 0 or (len(given) and given[i] != generations[cell]):
            continue
        priorities[cell] = priority[i]
        kept[size], accepted[size] = cell, leaves[i]
        largest = max(largest, priority[i])
        size += 1
    return -1, size, largest
