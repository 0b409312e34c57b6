"""Sums, minima and maxima of an array with few changes at a time: batched segment trees.

A tree over ``capacity`` leaves is one tensor of ``2 * width`` nodes. ``width`` is the next power of two. Node ``i`` has
the children ``2i`` and ``2i + 1``; leaf ``index`` is node ``width + index``. Updates and searches process a batch level
by level, so that the memory accesses of a level do not wait for each other. numba runs them on the CPU, torch on other
devices. Inner nodes are always computed from their children, never by differences. They depend only on the leaves, so
rounding errors do not accumulate. numba's kernels store only every third level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from torchrl_lightning._core.memory import allocate, zeros
from torchrl_lightning._core.state import Attribute, Stateful, tensor
from torchrl_lightning.kernels import segments
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.kernels.indices import as_integers
from torchrl_lightning.kernels.scan import Backend, runs_on_numba
from torchrl_lightning.kernels.segments import OPERATIONS, assign_torch, descend_torch, reduce_pairs

Index: TypeAlias = int | slice | Sequence[int] | Tensor
Operation: TypeAlias = str | Callable[..., Any]
TORCH_OPERATIONS: dict[Any, str] = {
    torch.add: "sum",
    torch.min: "min",
    torch.minimum: "min",
    torch.max: "max",
    torch.maximum: "max",
}
"""Name of the operation for each torch function."""


class SegmentTree(Stateful):
    """The sum, minimum or maximum of an array, updated in ``O(log capacity)`` for each changed element.

    Every leaf starts at ``initial``. The minimum of a new tree is therefore 0 until each leaf has been set.

    Args:
        capacity: number of leaves, any positive number.
        op: ``"sum"``, ``"min"`` or ``"max"``; or the equivalent ``torch.add``, ``torch.min`` (``torch.minimum``),
            ``torch.max`` (``torch.maximum``).
        dtype: ``torch.float64`` or ``torch.float32``, or its name.
        device: device of the nodes.
        name: name of this tree in error messages.
        initial: value of a leaf that was never set.
        backend: ``"numba"`` (CPU), ``"torch"`` (any device) or ``"auto"`` (numba if possible).

    Raises:
        TypeError: the dtype is not one of the two, or the capacity is not an integer.
        ValueError: the capacity is not positive, the initial value is invalid for a leaf, or the operation or the
            backend is unknown or does not support the device.

    Examples:
        >>> tree = SegmentTree(3, torch.max)
        >>> tree[[0, 2]] = [1.0, 5.0]
        >>> tree.summary().item(), tree[[2, 1]].tolist()
        (5.0, [5.0, 0.0])
    """

    OWNER, VERSION = "tree", 1
    STATE = {
        "op": Attribute(),
        "capacity": Attribute(),
        "leaves": Attribute(check_for=lambda tree: tree._check_saved_leaves, attribute="_used_leaves"),
    }

    def __init__(
        self,
        capacity: int,
        op: Operation,
        dtype: torch.dtype | str = torch.float64,
        device: torch.device | str = "cpu",
        name: str = "SegmentTree",
        *,
        initial: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        if not isinstance(capacity, int) or isinstance(capacity, bool):
            raise TypeError(f"{name}: capacity must be an integer, got {capacity!r}.")
        if capacity < 1:
            raise ValueError(f"{name}: capacity must be at least 1, got {capacity}.")
        operation = TORCH_OPERATIONS.get(op) if callable(op) else op
        if operation not in tuple(OPERATIONS):
            raise ValueError(
                f"{name}: op must be one of {tuple(OPERATIONS)}, or torch.add, torch.min or torch.max, got {op!r}."
            )
        node_dtype: Any = getattr(torch, dtype.removeprefix("torch."), dtype) if isinstance(dtype, str) else dtype
        if node_dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name}: dtype must be torch.float32 or torch.float64, got {dtype}.")
        if backend not in ("auto", "numba", "torch"):
            raise ValueError(f"{name}: backend must be 'auto', 'numba' or 'torch', got {backend!r}.")
        self.capacity = capacity
        self.op = operation
        self.name = name
        self.initial = float(initial)
        self._code, neutral = OPERATIONS[operation]
        self._neutral = float(neutral)
        self._width = 1 << (capacity - 1).bit_length()
        self._largest = torch.finfo(node_dtype).max / capacity  # values up to this limit cannot overflow a sum
        self._nodes = allocate(2 * self._width, node_dtype, device)
        self._compiled = backend != "torch" and runs_on_numba(self._nodes)
        if backend == "numba" and not self._compiled:
            raise ValueError(f"{name}: backend='numba' requires the CPU, got {device}; use backend='auto'.")
        self._nonzero: int | Tensor = 0
        self._check_leaves(torch.tensor([self.initial], dtype=torch.float64))
        self.clear()

    def __getstate__(self) -> dict[str, Any]:
        # Pickle arrays, because a new process would share a tensor's memory but not the count of nonzero leaves.
        num_used, levels, width = len(self._used_leaves), [], self._width
        while width:
            levels.append(self._nodes[width : width + num_used].cpu().numpy().copy())
            num_used, width = (num_used + 1) // 2, width // 2
        return {**self.__dict__, "_nodes": (levels, self.dtype, self.device), "_nonzero": int(self._nonzero)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        levels, dtype, device = state.pop("_nodes")
        self.__dict__.update(state)
        if self.initial == self._neutral == 0.0:
            self._nodes = zeros(2 * self._width, dtype, device)
        else:
            self._nodes = allocate(2 * self._width, dtype, device)
            self._fill()
        width = self._width
        for level in levels:
            self._nodes[width : width + len(level)] = torch.from_numpy(level).to(device)
            width //= 2

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the nodes."""
        return self._nodes.dtype

    @property
    def device(self) -> torch.device:
        """The device of the nodes."""
        return self._nodes.device

    @property
    def nodes(self) -> Tensor:
        """All nodes, for kernels of other modules; code that writes leaves into this tensor must call :meth:`count`.

        With numba, only every third level above the leaves and the levels near the root are up to date.
        """
        return self._nodes

    def count(self, change: int) -> None:
        """Change the number of nonzero leaves by ``change``."""
        self._nonzero = self._nonzero + change

    @property
    def leaves(self) -> Tensor:
        """All leaves in order, ``[capacity]``: a view for reading only."""
        return self._nodes[self._width : self._width + self.capacity]

    def __len__(self) -> int:
        return self.capacity

    def __repr__(self) -> str:
        return f"{type(self).__name__}(capacity={self.capacity}, op={self.op!r}, dtype={self.dtype})"

    def summary(self) -> Tensor:
        """Return the sum, minimum or maximum of all leaves, a scalar tensor."""
        return self._nodes[1].clone()

    def __getitem__(self, index: Index) -> Tensor:
        """Return leaves in the shape of ``index``; a scalar tensor for an integer.

        Raises:
            IndexError: an index is outside ``[0, capacity)``.
            TypeError: the indices are not integers.
        """
        indices = self._index(index)
        if indices.numel():
            low, high = (int(bound) for bound in indices.aminmax())
            if low < 0 or high >= self.capacity:
                raise self._out_of_range(low if low < 0 else high)
        return self._nodes[self._width + indices]

    def __setitem__(self, index: Index, values: float | Sequence[float] | Tensor) -> None:
        """Set leaves to one value, or to one value for each index; of equal indices the last value counts.

        Raises:
            IndexError: an index is outside ``[0, capacity)``.
            TypeError: the indices are not integers.
            ValueError: the numbers of indices and values differ, a value is NaN, or a value of a sum tree is negative
                or infinite.
        """
        indices = self._index(index).reshape(-1)
        leaf_values = torch.as_tensor(values, dtype=self.dtype, device=self.device).detach().reshape(-1)
        if leaf_values.numel() != 1 and leaf_values.numel() != indices.numel():
            raise ValueError(
                f"{self.name}: got {indices.numel()} indices and {leaf_values.numel()} values; "
                "give one value, or one for each index."
            )
        if indices.numel():
            self.assign(indices, leaf_values)

    def assign(self, index: Tensor, values: Tensor) -> None:
        """Set leaves like ``tree[index] = values``, but without converting the arguments.

        Args:
            index: ``[B]`` int64, on the tree's device.
            values: ``[B]`` or ``[1]``, of the tree's dtype, on its device.

        Raises:
            IndexError: an index is outside ``[0, capacity)``.
            ValueError: a value is NaN, or a value of a sum tree is negative or infinite.

        Examples:
            >>> tree = SumSegmentTree(4)
            >>> tree.assign(torch.tensor([1, 3]), torch.tensor([2.0], dtype=torch.float64))
            >>> tree.leaves.tolist()
            [0.0, 2.0, 0.0, 2.0]
        """
        if not index.numel():
            return
        tree = self._width, self.capacity, self._code
        if self._compiled:
            kernel, nodes = jitted(segments.assign), self._nodes.numpy()
            error_position, change = kernel(nodes, *tree, index.numpy(), values.numpy(), self._largest)
        else:
            error_position, change = assign_torch(self._nodes, *tree, index, values, self._largest)
        if error_position >= 0:
            count = index.numel()
            if error_position < count:
                raise self._out_of_range(int(index[error_position]))
            value = values[(error_position - count) % values.numel()].item()
            raise ValueError(f"{self.name}: a leaf must be {self._expected_values()}, got {value}.")
        self._nonzero = self._nonzero + change

    def clear(self) -> None:
        """Set every leaf back to its initial value."""
        self._fill()
        self._nonzero = int(self.leaves.count_nonzero())

    def _fill(self) -> None:
        """Set every leaf back to its initial value, and update the nodes above."""
        self._nodes.fill_(self._neutral)
        if self.initial != self._neutral:
            self.leaves.fill_(self.initial)
            self._reduce()

    @property
    def _used_leaves(self) -> Tensor:
        """The leaves up to the last one that differs from ``initial``."""
        differing = (self.leaves != self.initial).nonzero()
        return self.leaves[: int(differing[-1]) + 1 if len(differing) else 0]

    @_used_leaves.setter
    def _used_leaves(self, leaves: Tensor) -> None:
        self.set_all(leaves)

    def _check_saved_leaves(self, value: Any, name: str) -> Tensor:
        return self._to_leaves(tensor(self.dtype, None, anywhere=True)(value, name))

    def set_all(self, leaves: Tensor) -> None:
        """Set the first leaves, and reset all others to ``initial``, in ``O(capacity)``.

        Args:
            leaves: ``[n]`` with ``n <= capacity``.

        Raises:
            ValueError: there are more leaves than the capacity, or a value is invalid for a leaf.

        Examples:
            >>> tree = SumSegmentTree(4)
            >>> tree.set_all(torch.tensor([1.0, 2.0]))
            >>> tree.leaves.tolist(), tree.nnz
            ([1.0, 2.0, 0.0, 0.0], 2)
        """
        checked_leaves = self._to_leaves(leaves)
        self.leaves[: checked_leaves.numel()].copy_(checked_leaves)
        self.leaves[checked_leaves.numel() :].fill_(self.initial)
        self._rebuild()

    def _to_leaves(self, leaves: Tensor) -> Tensor:
        """Return leaves with the tree's dtype and device; raise a ValueError if they are too many or invalid."""
        checked_leaves = leaves.to(device=self.device, dtype=self.dtype).reshape(-1)
        if checked_leaves.numel() > self.capacity:
            raise ValueError(f"{self.name}: got {checked_leaves.numel()} leaves, but the capacity is {self.capacity}.")
        self._check_leaves(checked_leaves)
        return checked_leaves

    def _rebuild(self) -> None:
        self._reduce()
        self._nonzero = int(self.leaves.count_nonzero())

    def _reduce(self) -> None:
        level = self._width
        while level > 1:
            reduce_pairs(self._code, self._nodes[level : 2 * level], self._nodes[level // 2 : level])
            level //= 2

    def _index(self, index: Index) -> Tensor:
        if isinstance(index, slice):
            index = list(range(*index.indices(self.capacity)))
        return as_integers(index, f"{self.name}: indices", self.device).contiguous()

    def _out_of_range(self, index: int) -> IndexError:
        return IndexError(f"{self.name}: index {index} is out of range; the tree has {self.capacity} leaves.")

    def _check_leaves(self, leaves: Tensor) -> None:
        is_invalid = leaves.isnan() if self.op != "sum" else ~((leaves >= 0) & (leaves <= self._largest))
        if is_invalid.any():
            raise ValueError(
                f"{self.name}: a leaf must be {self._expected_values()}, got {leaves[is_invalid][0].item()}."
            )

    def _expected_values(self) -> str:
        return "a number" if self.op != "sum" else f"finite and not negative (at most {self._largest:.3g})"


class _NamedTree(SegmentTree):
    _operation: ClassVar[str]

    def __init__(
        self,
        capacity: int,
        dtype: torch.dtype | str = torch.float64,
        device: torch.device | str = "cpu",
        name: str | None = None,
        *,
        initial: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        name = name or type(self).__name__
        super().__init__(capacity, self._operation, dtype, device, name, initial=initial, backend=backend)


class SumSegmentTree(_NamedTree):
    """The sum of an array, and a search for the first element at which the partial sum exceeds a threshold.

    Arguments as in :class:`SegmentTree`.

    Examples:
        >>> tree = SumSegmentTree(5)
        >>> tree[[1, 3]] = [2.0, 1.0]
        >>> tree.find_sum_bound([0.0, 1.9, 2.0, 3.0]).tolist()
        [1, 1, 3, 3]
        >>> tree.nnz
        2
    """

    _operation = "sum"

    @property
    def nnz(self) -> int:
        """Number of nonzero leaves."""
        return int(self._nonzero)

    def find_sum_bound(self, thresholds: float | Sequence[float] | Tensor) -> Tensor:
        """Return for each threshold the smallest ``i`` with ``threshold < leaves[0] + ... + leaves[i]``.

        The leaf at ``i`` is never zero. For a threshold equal to the total, ``i`` is the last nonzero leaf.

        Args:
            thresholds: numbers in ``[0, summary()]``, any shape.

        Returns:
            int64 indices in the shape of the thresholds.

        Raises:
            ValueError: a threshold is negative, NaN or above the total, or every leaf is zero.
        """
        sums = torch.as_tensor(thresholds, dtype=self.dtype, device=self.device).detach()
        if not sums.numel():
            return torch.empty(sums.shape, dtype=torch.int64, device=self.device)
        total = float(self._nodes[1])
        if total <= 0:
            raise ValueError(f"{self.name}: every leaf is zero; set a leaf before the search.")
        low, high = (float(bound) for bound in sums.aminmax())
        if not (low >= 0 and high <= total):
            raise ValueError(
                f"{self.name}: thresholds must be between 0 and the total {total}, got values from {low} to {high}."
            )
        return self.descend(sums.reshape(-1).clone()).view(sums.shape)

    def descend(self, thresholds: Tensor) -> Tensor:
        """Search like :meth:`find_sum_bound`, but without checks; this overwrites the thresholds.

        Args:
            thresholds: ``[B]``, contiguous, of the tree's dtype, on its device, between 0 and a positive total.

        Examples:
            >>> tree = SumSegmentTree(2)
            >>> tree[1] = 2.0
            >>> tree.descend(torch.tensor([0.5], dtype=torch.float64)).tolist()
            [1]
        """
        if not self._compiled:
            return descend_torch(self._nodes, self._width, thresholds)
        index = torch.empty(thresholds.shape, dtype=torch.int64)
        jitted(segments.descend)(self._nodes.numpy(), self._width, thresholds.numpy(), index.numpy())
        return index


class MinSegmentTree(_NamedTree):
    """The minimum of an array (arguments as in :class:`SegmentTree`); ``initial=math.inf`` ignores unset leaves.

    Examples:
        >>> tree = MinSegmentTree(2)
        >>> tree[:] = [3.0, 2.0]
        >>> tree.summary().item()
        2.0
    """

    _operation = "min"


class MaxSegmentTree(_NamedTree):
    """The maximum of an array (arguments as in :class:`SegmentTree`); ``initial=-math.inf`` ignores unset leaves.

    Examples:
        >>> tree = MaxSegmentTree(3)
        >>> tree[1] = 4.0
        >>> tree.summary().item()
        4.0
    """

    _operation = "max"
