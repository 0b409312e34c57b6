"""The leaves of a storage, prepared for fast reading and writing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._compat import entries_of
from torchrl_lightning.replay.tree import Plan, Tree, difference, gather, leaves_of, match, plan_of

SMALL = 1024
"""Up to so many rows, numpy's smaller overhead wins."""
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
        self._arrays = _arrays(self.leaves)
        self._plans: dict[int, Plan] = {}

    def match(self, data: TensorDictBase, rows: int) -> list[Tensor]:
        """The leaves of ``data`` (``[rows]``) in the order of the cells, without gradients.

        Raises:
            ValueError: keys, shapes, dtypes or the device differ.
        """
        plan = self._plans.get(rows)
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            plan = self._plans[rows] = plan_of(self.tree, rows)
        found: list[Tensor] = []
        if not match(plan, entries_of(data), found):
            wrong = difference(self.tree, data) or f"the batch size is {list(data.shape)}, expected [{rows}]"
            raise ValueError(
                f"The data does not fit what is stored: {wrong}. "
                "Write the same keys, shapes and dtypes every time (data.select, data.to), or use a new buffer."
            )
        return found

    def copy(self, leaves: list[Tensor], runs: Runs) -> None:
        """Copy matched leaves into runs of cells, slice by slice."""
        stores: list[Any] = self.leaves
        rows: list[Any] = leaves
        if self._arrays and len(leaves[0]) <= SMALL:
            try:
                stores, rows = self._arrays, [leaf.numpy() for leaf in leaves]
            except (TypeError, RuntimeError):  # lazily conjugated tensors, foreign subclasses
                stores, rows = self.leaves, leaves
        for row, cell, count in runs:
            if row or count != len(leaves[0]):
                for store, leaf in zip(stores, rows, strict=True):
                    store[cell : cell + count] = leaf[row : row + count]
            else:
                for store, leaf in zip(stores, rows, strict=True):
                    store[cell : cell + count] = leaf

    def scatter(self, leaves: list[Tensor], index: Tensor) -> None:
        """Copy matched leaves into scattered cells, in one indexed copy each."""
        index = index.to(self.leaves[0].device)
        for store, leaf in zip(self.leaves, leaves, strict=True):
            store.index_copy_(0, index, leaf)

    def gather(self, index: Tensor) -> dict[str, Any]:
        """Entries of the cells ``index`` (``[B]``), by one ``index_select`` each."""
        return gather(self.tree, index)


def _arrays(leaves: list[Tensor]) -> list[NDArray[Any]]:
    try:
        return [leaf.numpy() for leaf in leaves]
    except (TypeError, RuntimeError):  # another device, or a dtype that numpy does not know
        return []
