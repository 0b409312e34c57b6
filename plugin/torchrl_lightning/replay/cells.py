"""Fast reading and writing of the leaves of a storage."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.torchrl_compat import new_tensordict
from torchrl_lightning._core.tree import Path, Tree, difference, is_tensordict, key_text, leaves_of, raw_items
from torchrl_lightning.kernels import row_copies
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.replay.positions import Ints

_MAX_PLANS = 16
_STRIDED = torch.strided
_NO_PATHS: frozenset[Path] = frozenset()

Names = tuple[str | None, ...] | None
ReadLevel = list[tuple[str, Any]]
"""One level of a read plan: for each key, the level below the key or the number of its leaf."""
WritePlan = list[tuple[str, Any, torch.Size | None]]
"""One level of a write plan: for each key, the level below the key and None, or dtype and shape of its leaf."""


class _ReadPlan(NamedTuple):
    """A prepared read of some of the leaves."""

    level: ReadLevel
    leaves: list[Tensor]
    middle: int  # number of the first leaf below "next"
    rows: list[tuple[tuple[int, ...], Any, torch.dtype]]  # row shape, NumPy dtype or None, and torch dtype
    table: Ints


class Cells:
    """Leaves with the same first dimension.

    On the CPU, one compiled call copies the rows of all leaves between their addresses.

    Args:
        tree: nested dict of the leaves, each contiguous.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> cells = Cells({"a": torch.zeros(4, dtype=torch.long)})
        >>> leaves, _ = cells.match(TensorDict({"a": torch.tensor([5, 6])}, [2]), 2)
        >>> cells.scatter(leaves, torch.arange(2))
        >>> cells.gather(torch.tensor([2, 1]))["a"].tolist()
        [0, 6]
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = self.schema = tree  # the stored leaves, and the leaves to write
        self.leaves = [leaf for _, leaf in leaves_of(tree)]
        self.leaf_index = {path: number for number, (path, _) in enumerate(leaves_of(tree))}
        self.count = len(self.leaves[0])
        self.device = self.leaves[0].device  # cached, because tensor.device costs as much as a small copy
        self.on_cpu = self.device.type == "cpu"
        self._probe = next((leaf for leaf in self.leaves if leaf.numel()), self.leaves[0])
        self._write_plans: dict[int, WritePlan] = {}
        self._refresh_addresses()

    def _refresh_addresses(self) -> None:
        self._probe_address = self._probe.data_ptr()
        self._table = _address_table(self.leaves)
        starts, sizes = self._table.T
        self._address_ranges = sorted(zip(starts.tolist(), (starts + sizes * self.count).tolist(), strict=True))
        self._lowest_address = self._address_ranges[0][0]
        self._highest_address = max(end for _, end in self._address_ranges)
        self._read_plans: dict[frozenset[Path], _ReadPlan] = {}

    @property
    def table(self) -> Ints:
        """Address and bytes per row of each leaf, ``[L, 2]``."""
        if self._probe.data_ptr() != self._probe_address:  # sharing with another process moves the memory
            self._refresh_addresses()
        return self._table

    def match(self, data: TensorDictBase, rows: int) -> tuple[list[Tensor], tuple[Ints, Ints] | None]:
        """Validate ``data`` (``[rows]``) against the schema; return its leaves in the order of the cells.

        Returns:
            First, the leaves; on the CPU, leaves that are not contiguous are copied. Second, the arguments ``sources``
            and ``leaves`` of :func:`row_copies.write_steps`, valid while the leaves exist. On another device, the
            second value is None.
        """
        plan = self._write_plans.get(rows)
        if plan is None:
            if len(self._write_plans) >= _MAX_PLANS:
                self._write_plans.clear()
            plan = self._write_plans[rows] = _make_write_plan(self.schema, rows)
        leaves: list[Tensor] = []
        sources: list[int] = []
        if not _match(plan, raw_items(data), None if self.on_cpu else self.device, leaves, sources):
            problem = difference(self.schema, data) or f"the batch size is {list(data.shape)}, expected [{rows}]"
            raise ValueError(
                f"The data must have the keys, shapes and dtypes of the stored rows: {problem}; nothing was written. "
                "Convert it (data.select, data.to). To add an entry, write complete rows to a new buffer. To replace "
                "an entry of stored rows, use storage.write_entry."
            )
        table = self.table
        if not self.on_cpu:
            return self.copy_if_aliased(leaves), None
        if max(sources) >= self._lowest_address and min(sources) <= self._highest_address:
            leaves = self.copy_if_aliased(leaves)
            sources = [leaf.data_ptr() for leaf in leaves]
        return leaves, (np.array(sources, np.int64), table)

    def copy_if_aliased(self, leaves: list[Tensor]) -> list[Tensor]:
        """Copy the leaves that are views of the cells, because writing would change them before they are read."""
        _ = self.table  # has the present addresses
        return [leaf.clone() if self._contains(leaf.data_ptr()) else leaf for leaf in leaves]

    def _contains(self, address: int) -> bool:
        """Return whether an address is in the memory of a leaf of the cells."""
        place = bisect_right(self._address_ranges, (address, math.inf)) - 1
        return place >= 0 and address < self._address_ranges[place][1]

    def scatter(self, leaves: list[Tensor], index: Tensor) -> None:
        """Copy matched leaves into the cells ``index``, with one indexed copy per leaf."""
        index = index.to(self.device)
        for store, leaf in zip(self.leaves, leaves, strict=True):
            store.index_copy_(0, index, leaf.detach())

    def gather(
        self, index: Tensor, names: Names = None, skip: Collection[Path] = _NO_PATHS, after: Tensor | None = None
    ) -> dict[str, Any]:
        """Read all entries except ``skip`` of the cells ``index`` (any shape, int64, on the device of the leaves).

        Nested levels become TensorDicts with the shape of the index and the dimension names ``names``. If ``after`` is
        given, all entries below ``"next"`` are read from the cells ``after``.
        """
        if self._probe.data_ptr() != self._probe_address:
            self._refresh_addresses()
        plan = self._read_plans.get(skip := frozenset(skip))
        if plan is None:
            plan = self._read_plans[skip] = self._make_read_plan(skip)
        shape = index.shape
        if not self.on_cpu:
            indices = [index.reshape(-1)] * 2 if after is None else [index.reshape(-1), after.reshape(-1)]
            gathered = [
                leaf.index_select(0, indices[number >= plan.middle]).view(shape + leaf.shape[1:])
                for number, leaf in enumerate(plan.leaves)
            ]
            return _nest_leaves(plan.level, gathered, shape, names, self.device)
        index = index.contiguous()
        after = index if after is None else after.contiguous()
        sizes, gathered, addresses = tuple(shape), [], []
        for row_shape, numpy_dtype, dtype in plan.rows:  # np.empty costs a quarter of torch.empty
            full_shape = sizes + row_shape
            rows = (
                torch.empty(full_shape, dtype=dtype)
                if numpy_dtype is None
                else torch.from_numpy(np.empty(full_shape, numpy_dtype))
            )
            gathered.append(rows)
            addresses.append(rows.data_ptr())
        invalid = jitted(row_copies.gather)(
            np.array(addresses, np.int64), plan.table, plan.middle,
            index.data_ptr(), after.data_ptr(), index.numel(), self.count,
        )  # fmt: skip
        if invalid >= 0:
            raise IndexError(
                f"index must be in [0, {self.count}), got {(index if after is index else after).tolist()}."
            )
        return _nest_leaves(plan.level, gathered, shape, names, self.device)

    def _make_read_plan(self, skip: frozenset[Path]) -> _ReadPlan:
        paths = sorted((path for path in self.leaf_index if path not in skip), key=_is_next)
        leaves = [self.leaves[self.leaf_index[path]] for path in paths]
        leaf_numbers = {path: number for number, path in enumerate(paths)}
        middle = sum(not _is_next(path) for path in paths)
        return _ReadPlan(
            _read_level(self.tree, leaf_numbers),
            leaves,
            middle,
            [_row_spec(leaf) for leaf in leaves],
            _address_table(leaves),
        )


def _make_write_plan(tree: Tree, rows: int) -> WritePlan:
    return [
        (key, _make_write_plan(leaf, rows), None)
        if isinstance(leaf, dict)
        else (key, leaf.dtype, torch.Size((rows, *leaf.shape[1:])))
        for key, leaf in tree.items()
    ]


def _match(
    plan: WritePlan, entries: dict[str, Any], device: torch.device | None, leaves: list[Tensor], sources: list[int]
) -> bool:
    """Return whether entries match a plan, and append the leaves of the entries in order.

    A device of None means the CPU. Leaves are then appended as plain contiguous tensors, and the addresses of these
    tensors are appended to ``sources``.
    """
    if len(entries) != len(plan):
        return False
    for key, dtype, shape in plan:
        value = entries.get(key)
        if shape is None:
            if not is_tensordict(value) or not _match(dtype, raw_items(value), device, leaves, sources):
                return False
        elif (
            isinstance(value, Tensor)
            and value.dtype is dtype
            and value.layout is _STRIDED
            and value.shape == shape
            and (value.is_cpu if device is None else value.device == device)
        ):
            if device is None:
                is_lazy = value.is_neg() or (dtype.is_complex and value.is_conj())
                if is_lazy or type(value) is not Tensor or not value.is_contiguous():
                    value = torch.empty(shape, dtype=dtype).copy_(value)
                sources.append(value.data_ptr())
            leaves.append(value)
        else:
            return False
    return True


def _is_next(path: Path) -> bool:
    return len(path) > 1 and path[0] == "next"


def _address_table(leaves: list[Tensor]) -> Ints:
    table = [(leaf.data_ptr(), leaf[:1].numel() * leaf.element_size()) for leaf in leaves]
    return np.array(table, np.int64).reshape(-1, 2)


def _row_spec(leaf: Tensor) -> tuple[tuple[int, ...], Any, torch.dtype]:
    try:
        numpy_dtype: Any = torch.empty(0, dtype=leaf.dtype).numpy().dtype
    except TypeError:
        numpy_dtype = None
    return tuple(leaf.shape[1:]), numpy_dtype, leaf.dtype


def _read_level(tree: Tree, leaf_numbers: dict[Path, int], parent: Path = ()) -> ReadLevel:
    return [
        (
            key,
            _read_level(leaf, leaf_numbers, (*parent, key)) if isinstance(leaf, dict) else leaf_numbers[(*parent, key)],
        )
        for key, leaf in tree.items()
        if isinstance(leaf, dict) or (*parent, key) in leaf_numbers
    ]


def _nest_leaves(
    level: ReadLevel, leaves: list[Tensor], shape: torch.Size, names: Names, device: torch.device
) -> dict[str, Any]:
    entries = {}
    for key, child in level:
        if type(child) is int:
            entries[key] = leaves[child]
        else:
            entries[key] = new_tensordict(_nest_leaves(child, leaves, shape, names, device), shape, names, device)
    return entries


def check_values(path: tuple[str, ...], leaf: Tensor, values: Tensor, shape: torch.Size) -> None:
    """Raise ValueError if values ``[*shape, ...]`` have another row shape or dtype than ``leaf``."""
    expected = [*shape, *leaf.shape[1:]]
    if list(values.shape) != expected or values.dtype != leaf.dtype:
        raise ValueError(
            f"Entry {key_text(path)} must be {expected} {leaf.dtype}, got {list(values.shape)} {values.dtype}; "
            "nothing was written."
        )
