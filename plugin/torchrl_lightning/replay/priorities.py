"""A table of cell priorities, and sampling in proportion to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_lightning._core.memory import allocate, zeros
from torchrl_lightning._core.mixins import uniform
from torchrl_lightning.kernels import priority_kernels
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.kernels.indices import unique_last
from torchrl_lightning.kernels.scan import EXAMPLE_ARRAYS, Backend
from torchrl_lightning.kernels.segment_tree import MaxSegmentTree, MinSegmentTree, SumSegmentTree
from torchrl_lightning.replay.positions import Ints, steps_between

ABSENT = -1.0  # the priority of an empty cell
REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "max": torch.amax,
    "min": torch.amin,
    "mean": torch.mean,
    "median": lambda x, dim: x.median(dim).values,
}


ALL_CELLS: tuple[Ints, Ints, int] = (np.empty(0, np.int64), np.empty(0, np.int64), 0)
"""The kernel argument that allows every stored step to be drawn."""


class ValidStarts:
    """The valid start positions ``[begin, end)`` of every environment; empty before the first :meth:`update`.

    Examples:
        >>> starts = ValidStarts()
        >>> removed, added = starts.update(np.array([0, 0]), np.array([2, 1]), 3)
        >>> added.tolist()
        [0, 2, 1]
        >>> removed, added = starts.update(np.array([1, 0]), np.array([4, 1]), 3)
        >>> removed.tolist(), added.tolist()
        ([0], [4, 0])
        >>> starts.contains(torch.arange(6)).tolist()
        [True, True, True, False, True, False]
    """

    def __init__(self, begin: Ints = ALL_CELLS[0], end: Ints = ALL_CELLS[1], length: int = 1) -> None:
        self.begin, self.end, self.length = begin, end, length

    def state(self) -> dict[str, Any]:
        """Return the ranges as a state dict."""
        return {"begin": self.begin, "length": self.length, "end": self.end}

    def clear(self) -> None:
        """Remove all ranges."""
        self.__init__()  # type: ignore[misc]

    @property
    def arrays(self) -> tuple[Ints, Ints, int]:
        """The ranges as kernel argument."""
        return self.begin, self.end, self.length

    def update(self, begin: Ints, end: Ints, length: int) -> tuple[Tensor, Tensor] | None:
        """Set the ranges, for rings of ``length`` cells; return removed and added start cells, or None if unchanged."""
        if len(self.begin) == len(begin):
            previous_begin, previous_end = self.begin, self.end
            if (previous_begin == begin).all() and (previous_end == end).all():
                return None
        else:
            previous_begin = previous_end = np.zeros_like(begin)
        self.begin, self.end, self.length = begin, end, length
        return (
            self._cells_between(
                previous_begin, np.minimum(previous_end, begin), np.maximum(previous_begin, end), previous_end
            ),
            self._cells_between(begin, np.minimum(end, previous_begin), np.maximum(begin, previous_end), end),
        )

    def _cells_between(self, *bounds: Ints) -> Tensor:
        """Return the cells of the steps between pairs of bounds, in ascending order of steps."""
        run, position, _ = steps_between(np.concatenate(bounds[::2]), np.concatenate(bounds[1::2]) - 1)
        num_envs = len(self.begin)
        return torch.from_numpy(position % self.length * num_envs + run % num_envs)

    def contains(self, cells: Tensor) -> Tensor:
        """Return a mask of the cells that are valid starts, with the same computation as in the kernels."""
        if not len(self.begin):
            return torch.zeros_like(cells, dtype=torch.bool)
        begin, end = (torch.from_numpy(bounds).to(cells.device) for bounds in (self.begin, self.end))
        env = cells % len(begin)
        return (cells // len(begin) - begin[env]) % self.length < (end - begin)[env]


def reduce_priorities(priority: Tensor, count: int, reduction: str) -> Tensor:
    """Reduce priorities with further dimensions to one priority for each of ``count`` rows, ``[count]``."""
    value = priority if priority.is_floating_point() else priority.to(torch.float64)
    return REDUCTIONS[reduction](value.reshape(count, -1), 1)


class Priorities:
    """The priorities ``p`` of cells, and a sum tree of ``(p + eps) ** alpha`` for sampling.

    The table also stores the plain priorities, so that a change of ``alpha`` is exact and excluded cells keep their
    priorities. The generation of a cell counts the writes to the cell, and so reveals late updates.

    Args:
        capacity: number of cells.
        alpha: exponent of the priorities.
        eps: constant added to each priority.
        dtype: dtype of priorities and tree.
        device: device of priorities and tree.
        keep_lowest: track the lowest stored priority in another tree.
        keep_highest: track the highest stored priority in another tree, instead of the highest priority ever set.
        limited: draw only the cells that :meth:`limit` allows, instead of all stored cells.
        backend: backend of the trees.

    Examples:
        >>> table = Priorities(4, alpha=1.0, eps=0.0)
        >>> table.write(torch.tensor([0, 1]), 2.0)
        >>> table.write(torch.tensor([1, 3]), torch.tensor([6.0, 9.0], dtype=torch.float64))
        >>> table.priorities.tolist(), table.total
        ([2.0, 6.0, -1.0, -1.0], 8.0)
    """

    def __init__(
        self,
        capacity: int,
        alpha: float,
        eps: float,
        *,
        dtype: torch.dtype | str = torch.float64,
        device: torch.device | str = "cpu",
        keep_lowest: bool = False,
        keep_highest: bool = False,
        limited: bool = False,
        backend: Backend = "auto",
    ) -> None:
        self.tree = SumSegmentTree(capacity, dtype, device, "PrioritizedSampler", backend=backend)
        dtype = self.tree.dtype
        self.capacity, self.alpha, self.eps = capacity, alpha, eps
        self.priorities = allocate(capacity, dtype, device).fill_(ABSENT)
        self.generations = allocate(capacity, torch.int32, device).zero_()
        self.starts = ValidStarts() if limited else None
        self.count = 0
        self.extent = 0  # every cell that was ever written has a lower number
        self.largest = 0.0
        kwargs: dict[str, Any] = {"dtype": dtype, "device": device, "backend": backend}
        self.lowest = MinSegmentTree(capacity, initial=math.inf, **kwargs) if keep_lowest else None
        self.highest = MaxSegmentTree(capacity, initial=0.0, **kwargs) if keep_highest else None
        self._compiled = backend != "torch" and self.priorities.device.type == "cpu"
        self._numpy_dtype = EXAMPLE_ARRAYS[dtype].dtype
        self._limit = torch.finfo(dtype).max / capacity
        self._views: tuple[Any, ...] = ()
        self._address = 0

    def _arrays(self) -> tuple[Any, ...]:
        # NumPy views of nodes, priorities and generations. Passing the tensors to another process moves their memory.
        address = self.priorities.data_ptr()
        if address != self._address:
            tensors = (self.tree.nodes, self.priorities, self.generations)
            self._views, self._address = tuple(tensor.numpy() for tensor in tensors), address
        return self._views

    def __getstate__(self) -> dict[str, Any]:
        # Pickle arrays instead of tensors, because a new process would share the tensors but not the counts.
        written = {name: getattr(self, name).cpu().numpy().copy() for name in ("saved_priorities", "saved_generations")}
        attributes = {name: value for name, value in self.__dict__.items() if name not in ("priorities", "generations")}
        return {**attributes, "_views": (), "_address": 0, "written": written}

    def __setstate__(self, state: dict[str, Any]) -> None:
        written = {name: torch.from_numpy(array) for name, array in state.pop("written").items()}
        self.__dict__.update(state)
        device, extent = self.tree.device, self.extent
        self.priorities = allocate(self.capacity, self.tree.dtype, device).fill_(ABSENT)
        self.generations = zeros(self.capacity, torch.int32, device)
        self.priorities[:extent], self.generations[:extent] = (
            written[name].to(device) for name in ("saved_priorities", "saved_generations")
        )

    @property
    def total(self) -> float:
        """Sum of ``(p + eps) ** alpha`` over the stored cells."""
        return float(self.tree.summary())

    @property
    def maximum(self) -> float:
        """The highest stored priority with ``keep_highest``, else the highest priority ever set; zero at first."""
        return self.largest if self.highest is None else float(self.highest.summary())

    def power(self, priority: Tensor) -> Tensor:
        """Return ``(priority + eps) ** alpha``."""
        shifted = priority + self.eps
        return shifted if self.alpha == 1.0 else shifted.pow_(self.alpha)

    def write(self, index: Tensor, priority: Tensor | float, generations: Tensor | None = None) -> None:
        """Set priorities; a float is the priority of newly written cells, a tensor has the priorities of stored cells.

        Args:
            index: cells, ``[n]`` int64 on this device; -1 is skipped.
            priority: the priority of new data as a float, or priorities ``[n]``, float32 or float64.
            generations: generations of the cells when they were sampled, ``[n]``; cells with another generation are
                skipped. None disables this check.
        """
        if not index.numel():
            return
        if self._compiled:
            is_new = isinstance(priority, float)
            invalid, added, change, largest, last = jitted(priority_kernels.write)(
                self._arrays(),
                ALL_CELLS if self.starts is None else self.starts.arrays,
                _contiguous_array(index),
                np.array([priority]) if isinstance(priority, float) else _contiguous_array(priority),
                priority_kernels.NO_GENERATIONS if generations is None else _contiguous_array(generations),
                is_new,
                (self.eps, self.alpha, self._limit),
            )
            self.tree.count(change)
        else:
            invalid, added, largest, last = self._write_torch(index, priority, generations)
        if invalid >= 0:
            raise self._error(index, priority, invalid)
        self.count += added
        self.largest = max(self.largest, largest)
        self.extent = max(self.extent, last + 1)
        for tree in (self.lowest, self.highest):
            if tree is not None:
                cells = index[index >= 0]
                cells = cells[self.priorities[cells] >= 0]
                if tree is self.lowest and self.starts is not None:
                    cells = cells[self.starts.contains(cells)]
                tree.assign(cells, self.priorities[cells])

    def _write_torch(
        self, index: Tensor, priority: Tensor | float, generations: Tensor | None
    ) -> tuple[int, int, float, int]:
        is_new = isinstance(priority, float)
        values = torch.as_tensor(priority, dtype=self.priorities.dtype, device=index.device).expand(len(index))
        leaves = self.power(values)
        invalid = ((index < -1) | (index >= self.capacity) | ~self._is_valid(values, leaves)).nonzero()
        if len(invalid):
            return int(invalid[0]), 0, 0.0, -1
        valid, clamped = index >= 0, index.clamp(min=0)
        if not is_new:
            valid &= self.priorities[clamped] >= 0
        if generations is not None:
            valid &= self.generations[clamped] == generations
        cells, values, leaves = index[valid], values[valid], leaves[valid]
        if not cells.numel():
            return -1, 0, 0.0, -1
        rows = unique_last(cells)
        unique = cells[rows]
        added, last = (int((self.priorities[unique] < 0).sum()), int(unique.max())) if is_new else (0, -1)
        leaves = leaves[rows]
        self.tree.assign(
            unique, leaves if self.starts is None else torch.where(self.starts.contains(unique), leaves, 0.0)
        )
        self.priorities[unique] = values[rows]
        self.generations[unique] += int(is_new)
        return -1, added, 0.0 if is_new else float(values.max()), last

    def remove(self, index: Tensor) -> None:
        """Remove the priorities of emptied cells, ``[n]``, without duplicates."""
        cells = index[self.priorities[index] >= 0]
        self.tree.assign(cells, self.tree.leaves.new_zeros(1))
        self.priorities[cells] = ABSENT
        self.count -= len(cells)
        for tree, empty_value in ((self.lowest, math.inf), (self.highest, 0.0)):
            if tree is not None:
                tree.assign(cells, tree.leaves.new_full((1,), empty_value))

    def limit(self, begin: Ints, end: Ints, length: int) -> None:
        """Limit sampling to positions ``[begin, end)`` of each environment; all steps keep their priorities.

        The cost grows with the number of steps that become valid or invalid.
        """
        assert self.starts is not None
        changes = self.starts.update(begin, end, length)
        if changes is None:
            return
        removed, added = (cells.to(self.priorities.device) for cells in changes)
        self.tree.assign(removed, self.priorities.new_zeros(1))
        added_priorities = self.priorities[added]
        self.tree.assign(added, torch.where(added_priorities >= 0, self.power(added_priorities.clamp(min=0)), 0.0))
        if self.lowest is not None:
            self.lowest.assign(removed, self.priorities.new_full((1,), math.inf))
            self.lowest.assign(added, torch.where(added_priorities >= 0, added_priorities, math.inf))

    def check(self, priority: Tensor) -> None:
        """Raise ValueError if one of the priorities ``[n]`` is negative, NaN, infinite or too large."""
        invalid = (~self._is_valid(priority, self.power(priority))).nonzero()
        if len(invalid):
            row = int(invalid[0])
            raise ValueError(
                f"A priority must be finite and not negative, got {float(priority[row])} in row {row}; "
                "nothing was written."
            )

    def _is_valid(self, priority: Tensor, leaves: Tensor) -> Tensor:
        return (priority >= 0) & priority.isfinite() & (leaves <= self._limit)

    def uniform(self, count: int, generator: torch.Generator) -> NDArray[Any] | Tensor:
        """Draw numbers in [0, 1), ``[count]``, for :meth:`draw`: an array for the compiled path, else a tensor."""
        if self._compiled:
            return uniform(count, generator, self._numpy_dtype)
        return torch.rand(count, dtype=self.priorities.dtype, generator=generator, device=generator.device)

    def draw(
        self,
        numbers: NDArray[Any] | Tensor,
        stratified: bool,
        beta: float = 0.0,
        divisor: float = 0.0,
        windows: tuple[int, int, int] | None = None,
    ) -> tuple[Tensor, ...]:
        """Sample cells in proportion to ``(p + eps) ** alpha``.

        At least one leaf must be non-zero (``tree.nnz``).

        Args:
            numbers: uniform numbers in [0, 1), ``[B]``, in the dtype of the priorities; overwritten.
            stratified: draw one cell from each of ``B`` equal parts of the total.
            beta: exponent of the weights.
            divisor: divisor in the formula of the weights; zero selects the smallest leaf of the batch.
            windows: None, or three numbers that expand each cell to a window: steps per window, distance in cells
                between two steps, and number of cells (indices wrap around at this number).

        Returns:
            Cells ``[B]`` (int64), weights ``((p + eps) ** alpha / divisor) ** -beta`` (float32) and generations
            (int32). For windows, the shape is ``[B, T]``, and each step has the weight and generation of its window's
            first step. A fourth tensor is the leaf of that first step, divided by the mean of the non-zero leaves
            (float32).
        """
        if not self._compiled:
            mass_tensor = torch.as_tensor(numbers, device=self.priorities.device)
            return self._draw_torch(mass_tensor, stratified, beta, divisor, windows)
        mass, rows, layout = np.asarray(numbers), len(numbers), None
        if windows is not None:
            rows *= windows[0]
            layout = *windows, self.tree.nnz, np.empty(rows, np.float32)
        # np.empty costs a quarter of torch.empty.
        cells, weights, generations = np.empty(rows, np.int64), np.empty(rows, np.float32), np.empty(rows, np.int32)
        jitted(priority_kernels.draw)(
            self._arrays(), mass, stratified, beta, divisor, cells, weights, generations, layout
        )
        if layout is None:
            return torch.from_numpy(cells), torch.from_numpy(weights), torch.from_numpy(generations)
        return tuple(
            torch.from_numpy(values.reshape(-1, layout[0])) for values in (cells, weights, generations, layout[-1])
        )

    def _draw_torch(
        self, mass: Tensor, stratified: bool, beta: float, divisor: float, windows: tuple[int, int, int] | None
    ) -> tuple[Tensor, ...]:
        total, count = self.total, len(mass)
        if stratified:
            mass = (mass + torch.arange(count, dtype=mass.dtype, device=mass.device)) / count
        cells = self.tree.descend(mass * total)
        leaves = self.tree.leaves.index_select(0, cells)
        weights = (leaves / (divisor if divisor > 0 else leaves.amin())).pow_(-beta).to(torch.float32)
        window_values = (
            weights,
            self.generations.index_select(0, cells),
            (leaves * (self.tree.nnz / total)).to(torch.float32),
        )
        if windows is None:
            return cells, *window_values[:2]
        steps, stride, size = windows
        cells = (cells.unsqueeze(1) + torch.arange(steps, device=cells.device) * stride) % size
        return cells, *(values.unsqueeze(1).expand(cells.shape) for values in window_values)

    def change_alpha(self, alpha: float, new: float = 0.0) -> None:
        """Change the exponent and recompute the tree, in ``O(capacity)``.

        Args:
            alpha: the new exponent.
            new: the priority of new data.

        Raises:
            ValueError: the power of a stored priority or of ``new`` is too large; nothing changes.
        """
        if alpha == self.alpha:
            return
        stored = self.priorities[: self.extent]
        leaves = (stored.clamp(min=0) + self.eps).pow_(alpha)
        largest = (torch.tensor(new, dtype=leaves.dtype, device=leaves.device) + self.eps) ** alpha
        for priority, leaf in ((stored, leaves), (torch.tensor([new]), largest.reshape(1))):
            invalid = (~(leaf <= self._limit)).nonzero()
            if len(invalid):
                raise ValueError(
                    f"alpha must let (priority + eps) ** alpha be at most {self._limit:.3g} for all priorities, got "
                    f"{alpha} with a priority of {float(priority[invalid[0]]):g}. Lower alpha, or clip the priorities."
                )
        self.tree.set_all(torch.where(self._drawable(stored), leaves, 0.0))
        self.alpha = alpha

    def _drawable(self, priorities: Tensor) -> Tensor:
        """Return which of the first cells may be drawn if they have these priorities, as a mask."""
        is_drawable = priorities >= 0
        if self.starts is not None:
            is_drawable &= self.starts.contains(torch.arange(len(is_drawable), device=is_drawable.device))
        return is_drawable

    def clear(self) -> None:
        """Remove all priorities; keep the generations, so that late updates are detected."""
        self.priorities.fill_(ABSENT)
        self.count, self.largest = 0, 0.0
        if self.starts is not None:
            self.starts.clear()
        for tree in (self.tree, self.lowest, self.highest):
            if tree is not None:
                tree.clear()

    @property
    def saved_priorities(self) -> Tensor:
        """The priorities of the first ``extent`` cells; all cells ever written are among them."""
        return self.priorities[: self.extent]

    @saved_priorities.setter
    def saved_priorities(self, priorities: Tensor) -> None:
        self.extent = len(priorities)
        self.priorities[: self.extent], self.priorities[self.extent :] = priorities, ABSENT
        self.count = int((self.priorities >= 0).sum())

    @property
    def leaves(self) -> Tensor:
        """The tree leaves of the first ``extent`` cells."""
        return self.tree.leaves[: self.extent]

    @leaves.setter
    def leaves(self, leaves: Tensor) -> None:
        self.tree.set_all(leaves)

    @property
    def saved_generations(self) -> Tensor:
        """The generations of the first ``extent`` cells."""
        return self.generations[: self.extent]

    @saved_generations.setter
    def saved_generations(self, generations: Tensor) -> None:
        self.generations[: len(generations)], self.generations[len(generations) :] = generations, 0

    def rebuild(self) -> None:
        """Rebuild the trees of the lowest and highest priority."""
        if self.lowest is not None:
            self.lowest.set_all(torch.where(self._drawable(self.priorities), self.priorities, math.inf))
        if self.highest is not None:
            self.highest.set_all(self.priorities.clamp(min=0))

    def is_consistent(
        self, priorities: Tensor, leaves: Tensor, alpha: float, eps: float, starts: ValidStarts | None
    ) -> bool:
        """Return whether priorities and leaves ``[n]``, on any device, are consistent with each other."""
        priorities, leaves = priorities.cpu(), leaves.cpu()
        power = (priorities.clamp(min=0) + eps).pow(alpha)
        if starts is not None:
            power = torch.where(starts.contains(torch.arange(len(power))), power, 0.0)
        is_stored = (priorities >= 0) & priorities.isfinite() & torch.isclose(leaves, power, rtol=1e-4, atol=0)
        is_empty = (priorities == ABSENT) & (leaves == 0)
        return bool(((is_stored | is_empty) & (leaves >= 0) & (leaves <= self._limit)).all())

    def _error(self, index: Tensor, priority: Tensor | float, row: int) -> Exception:
        cell = int(index[row])
        if not -1 <= cell < self.capacity:
            if isinstance(priority, Tensor):
                return IndexError(f"index must be in [0, {self.capacity}), the cells with a priority, got {cell}.")
            return IndexError(
                f"max_capacity must be at least the max_size of the storage, got {self.capacity} and a write to cell "
                f"{cell}. Build the sampler with max_capacity=max_size."
            )
        if isinstance(priority, Tensor):
            value = float(priority[row])
            return ValueError(f"A priority must be finite and not negative, got {value} for cell {cell}.")
        return ValueError(f"The priority of new data is too large for alpha={self.alpha}, got {priority}. Lower alpha.")


def _contiguous_array(value: Tensor) -> Any:
    # Kernels are compiled for contiguous arrays.
    return value.numpy() if value.is_contiguous() else value.contiguous().numpy()
