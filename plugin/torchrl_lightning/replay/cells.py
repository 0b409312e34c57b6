"""The leaves of a storage, prepared for fast reading and writing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._compat import new_tensordict
from torchrl_lightning.entries import Path, Plan, Tree, difference, leaves_of, level_of, match, plan_of

SMALL = 1024
"""Up to this many rows, numpy is faster because its overhead is smaller."""
TAKEN = 1 << 20
"""Up to this many bytes, numpy gathers faster; beyond, torch may use several threads."""
_PLANS = 16

Runs = Sequence[tuple[int, int, int]]
"""Pieces to copy: (first row of the data, first cell, how many)."""


class Cells:
    """Leaves that share their first dimension.

    Args:
        tree: nested dict of the leaves.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> cells = Cells({"a": torch.zeros(4, dtype=torch.long)})
        >>> cells.copy(cells.match(TensorDict({"a": torch.tensor([5, 6])}, [2]), 2), [(0, 1, 2)])
        >>> cells.gather(torch.tensor([2, 0]))["a"].tolist()
        [6, 0]
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.leaves = [leaf for _, leaf in leaves_of(tree)]
        self.places = {path: place for place, (path, _) in enumerate(leaves_of(tree))}
        self._view()
        self._plans: dict[int, Plan] = {}

    def _view(self) -> None:
        self._address = self.leaves[0].data_ptr()
        arrays = [_array(leaf) for leaf in self.leaves]
        self._arrays = [] if any(array is None for array in arrays) else arrays
        self._reading = _reading(self.tree, iter(arrays))

    def _follow(self) -> None:
        # Sharing a storage with another process moves its memory; the arrays would still point to the old one.
        if self.leaves[0].data_ptr() != self._address:
            self._view()

    def match(self, data: TensorDictBase, rows: int) -> list[Tensor]:
        """Return the leaves of ``data`` (``[rows]``) in the order of the cells, without gradients.

        Raises:
            ValueError: keys, shapes, dtypes or the device differ.
        """
        plan = self._plans.get(rows)
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            plan = self._plans[rows] = plan_of(self.tree, rows)
        found: list[Tensor] = []
        if not match(plan, level_of(data), found):
            wrong = difference(self.tree, data) or f"the batch size is {list(data.shape)}, expected [{rows}]"
            raise ValueError(
                f"The data does not fit what is stored: {wrong}. "
                "Write the same keys, shapes and dtypes every time (data.select, data.to), or use a new buffer."
            )
        return found

    def copy(self, leaves: list[Tensor], runs: Runs) -> None:
        """Copy matched leaves into runs of cells, slice by slice."""
        self._follow()
        stores: list[Any] = self.leaves
        rows: list[Any] = leaves
        whole = leaves[0].shape[0]
        if self._arrays and whole <= SMALL:
            try:
                stores, rows = self._arrays, [leaf.numpy() for leaf in leaves]
            except (TypeError, RuntimeError):  # lazily conjugated tensors, foreign subclasses
                stores, rows = self.leaves, leaves
        for row, cell, count in runs:
            if row or count != whole:
                for store, leaf in zip(stores, rows, strict=True):
                    store[cell : cell + count] = leaf[row : row + count]
            else:
                for store, leaf in zip(stores, rows, strict=True):
                    store[cell : cell + count] = leaf

    def scatter(self, leaves: list[Tensor], index: Tensor) -> None:
        """Copy matched leaves into scattered cells, by one indexed copy each."""
        index = index.to(self.leaves[0].device)
        for store, leaf in zip(self.leaves, leaves, strict=True):
            store.index_copy_(0, index, leaf)

    def gather(
        self, index: Tensor, names: Names = None, skip: Collection[Path] = (), after: Tensor | None = None
    ) -> dict[str, Any]:
        """Read entries of the cells ``index`` (any shape, on the device of the leaves), unchecked.

        Nested levels become TensorDicts of the index's shape.

        Args:
            index: cells, int64.
            names: names of the dimensions of nested levels.
            skip: leaves that are not read.
            after: the cells, of the same shape, of which everything below ``"next"`` is read; ``index`` if None.

        Raises:
            IndexError: a cell beyond the last one.
        """
        self._follow()
        return _gather(self._reading, index, _rows(index), names, skip, after)


Names = tuple[str | None, ...] | None
Reading = list[tuple[Path, Any, Any, int]]
"""One level of the tree: path, then the level below, or a leaf, its array and up to how many rows numpy reads."""


def _reading(tree: Tree, arrays: Iterator[NDArray[Any] | None], above: Path = ()) -> Reading:
    level: Reading = []
    for key, leaf in tree.items():
        path = (*above, key)
        if isinstance(leaf, dict):
            level.append((path, _reading(leaf, arrays, path), None, -1))
        else:
            array = next(arrays)
            size = max(1, leaf[:1].numel() * leaf.element_size())
            level.append((path, leaf, array, 0 if array is None else TAKEN // size))
    return level


def _rows(index: Tensor) -> NDArray[Any] | None:
    return index.numpy() if index.device.type == "cpu" else None


def _gather(
    level: Reading,
    index: Tensor,
    rows: NDArray[Any] | None,
    names: Names,
    skip: Collection[Path],
    after: Tensor | None = None,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    count, shape = index.numel(), index.shape
    for path, leaf, array, most in level:
        if path in skip:
            continue
        if most < 0:
            if after is None or path != ("next",):
                below = _gather(leaf, index, rows, names, skip)
            else:
                below = _gather(leaf, after, _rows(after), names, skip)
            found[path[-1]] = new_tensordict(below, shape, names, index.device)
        elif rows is not None and count <= most:
            found[path[-1]] = torch.from_numpy(array.take(rows, 0))
        else:
            found[path[-1]] = leaf.index_select(0, index.reshape(-1)).view(shape + leaf.shape[1:])
    return found


def _array(leaf: Tensor) -> NDArray[Any] | None:
    try:
        return leaf.numpy()
    except (TypeError, RuntimeError):  # another device, or a dtype that numpy does not know
        return None
