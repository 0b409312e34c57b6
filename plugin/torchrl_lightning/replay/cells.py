"""Fast reading and writing of the leaves of a storage."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.torchrl_compat import new_tensordict
from torchrl_lightning._core.tree import Path, Tree, difference, is_tensordict, leaves_of, name_of, raw_items
from torchrl_lightning.kernels import row_copies
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.replay.positions import Ints

_PLANS = 16
_STRIDED = torch.strided
_EVERYTHING: frozenset[Path] = frozenset()

Names = tuple[str | None, ...] | None
Level = list[tuple[str, Any]]
"""One level of a read: each key with the level below it, or with the number of its leaf."""
Plan = list[tuple[str, Any, torch.Size | None]]
"""One level of a write: each key with the level below it and None, or with dtype and shape of its leaf."""


class _Reading(NamedTuple):
    """A prepared read of some of the leaves."""

    level: Level
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
        self.places = {path: place for place, (path, _) in enumerate(leaves_of(tree))}
        self.count = len(self.leaves[0])
        self.device = self.leaves[0].device  # cached: tensor.device costs as much as a small copy
        self.on_cpu = self.device.type == "cpu"
        self._probe = next((leaf for leaf in self.leaves if leaf.numel()), self.leaves[0])
        self._plans: dict[int, Plan] = {}
        self._view()

    def _view(self) -> None:
        self._address = self._probe.data_ptr()
        self._table = _table(self.leaves)
        starts, sizes = self._table.T
        self._first, self._last = int(starts.min()), int((starts + sizes * self.count).max())
        self._readings: dict[frozenset[Path], _Reading] = {}

    @property
    def table(self) -> Ints:
        """Address and bytes per row of each leaf, ``[L, 2]``."""
        if self._probe.data_ptr() != self._address:  # sharing with another process moves the memory
            self._view()
        return self._table

    def match(self, data: TensorDictBase, rows: int) -> tuple[list[Tensor], tuple[Ints, Ints] | None]:
        """Validate ``data`` (``[rows]``) against the schema; return its leaves in the order of the cells.

        Returns:
            The leaves, copied on the CPU if they are not contiguous. Second, the arguments ``sources`` and ``leaves``
            of :func:`row_copies.write_steps`, valid while the leaves exist; None on another device.
        """
        plan = self._plans.get(rows)
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            plan = self._plans[rows] = _plan(self.schema, rows)
        found: list[Tensor] = []
        sources: list[int] = []
        if not _match(plan, raw_items(data), None if self.on_cpu else self.device, found, sources):
            wrong = difference(self.schema, data) or f"the batch size is {list(data.shape)}, expected [{rows}]"
            raise ValueError(
                f"The data does not fit what is stored: {wrong}; nothing was written. Write the same keys, shapes and "
                "dtypes every time (data.select, data.to). To add entries, extend a new buffer with data that has "
                "them; to replace one, use storage.write_entry."
            )
        table = self.table
        if not self.on_cpu:
            return self.apart(found), None
        if max(sources) >= self._first and min(sources) <= self._last:
            found = self.apart(found)
            sources = [leaf.data_ptr() for leaf in found]
        return found, (np.array(sources, np.int64), table)

    def apart(self, leaves: list[Tensor]) -> list[Tensor]:
        """Copy the leaves that are views of the cells, because writing would change them before they are read."""
        starts, sizes = self.table.T
        sources = np.array([leaf.data_ptr() for leaf in leaves], np.int64)[:, None]
        within = ((starts <= sources) & (sources < starts + sizes * self.count)).any(1)
        return [leaf.clone() if copied else leaf for leaf, copied in zip(leaves, within, strict=True)]

    def scatter(self, leaves: list[Tensor], index: Tensor) -> None:
        """Copy matched leaves into the cells ``index``, with one indexed copy per leaf."""
        index = index.to(self.device)
        for store, leaf in zip(self.leaves, leaves, strict=True):
            store.index_copy_(0, index, leaf.detach())

    def gather(
        self, index: Tensor, names: Names = None, skip: Collection[Path] = _EVERYTHING, after: Tensor | None = None
    ) -> dict[str, Any]:
        """Read all entries except ``skip`` of the cells ``index`` (any shape, int64, on the device of the leaves).

        Nested levels become TensorDicts with the shape of the index and these dimension names. If ``after`` is given,
        all entries below ``"next"`` are read from these cells.
        """
        if self._probe.data_ptr() != self._address:
            self._view()
        reading = self._readings.get(skip := frozenset(skip))
        if reading is None:
            reading = self._readings[skip] = self._prepare(skip)
        shape = index.shape
        if not self.on_cpu:
            where = [index.reshape(-1)] * 2 if after is None else [index.reshape(-1), after.reshape(-1)]
            found = [
                leaf.index_select(0, where[place >= reading.middle]).view(shape + leaf.shape[1:])
                for place, leaf in enumerate(reading.leaves)
            ]
            return _entries(reading.level, found, shape, names, self.device)
        index = index.contiguous()
        after = index if after is None else after.contiguous()
        sizes, found, addresses = tuple(shape), [], []
        for tail, kind, dtype in reading.rows:  # np.empty costs a quarter of torch.empty
            full = sizes + tail
            rows = torch.empty(full, dtype=dtype) if kind is None else torch.from_numpy(np.empty(full, kind))
            found.append(rows)
            addresses.append(rows.data_ptr())
        refused = jitted(row_copies.gather)(
            np.array(addresses, np.int64), reading.table, reading.middle,
            index.data_ptr(), after.data_ptr(), index.numel(), self.count,
        )  # fmt: skip
        if refused >= 0:
            raise IndexError(
                f"There are {self.count} cells, asked for was {(index if after is index else after).tolist()}."
            )
        return _entries(reading.level, found, shape, names, self.device)

    def _prepare(self, skip: frozenset[Path]) -> _Reading:
        kept = sorted((path for path in self.places if path not in skip), key=_is_next)
        leaves = [self.leaves[self.places[path]] for path in kept]
        numbers = {path: number for number, path in enumerate(kept)}
        middle = sum(not _is_next(path) for path in kept)
        return _Reading(_level(self.tree, numbers), leaves, middle, [_rows(leaf) for leaf in leaves], _table(leaves))


def _plan(tree: Tree, rows: int) -> Plan:
    return [
        (key, _plan(leaf, rows), None)
        if isinstance(leaf, dict)
        else (key, leaf.dtype, torch.Size((rows, *leaf.shape[1:])))
        for key, leaf in tree.items()
    ]


def _match(
    plan: Plan, entries: dict[str, Any], device: torch.device | None, found: list[Tensor], sources: list[int]
) -> bool:
    """Return whether entries match a plan, and append their leaves in order.

    A device of None means the CPU; leaves are then appended as plain contiguous tensors, and their addresses to
    ``sources``.
    """
    if len(entries) != len(plan):
        return False
    for key, dtype, shape in plan:
        value = entries.get(key)
        if shape is None:
            if not is_tensordict(value) or not _match(dtype, raw_items(value), device, found, sources):
                return False
        elif (
            isinstance(value, Tensor)
            and value.dtype is dtype
            and value.layout is _STRIDED
            and value.shape == shape
            and (value.is_cpu if device is None else value.device == device)
        ):
            if device is None:
                lazy = value.is_neg() or (dtype.is_complex and value.is_conj())
                if lazy or type(value) is not Tensor or not value.is_contiguous():
                    value = torch.empty(shape, dtype=dtype).copy_(value)
                sources.append(value.data_ptr())
            found.append(value)
        else:
            return False
    return True


def _is_next(path: Path) -> bool:
    return len(path) > 1 and path[0] == "next"


def _table(leaves: list[Tensor]) -> Ints:
    table = [(leaf.data_ptr(), leaf[:1].numel() * leaf.element_size()) for leaf in leaves]
    return np.array(table, np.int64).reshape(-1, 2)


def _rows(leaf: Tensor) -> tuple[tuple[int, ...], Any, torch.dtype]:
    try:
        kind: Any = torch.empty(0, dtype=leaf.dtype).numpy().dtype
    except TypeError:
        kind = None
    return tuple(leaf.shape[1:]), kind, leaf.dtype


def _level(tree: Tree, numbers: dict[Path, int], above: Path = ()) -> Level:
    return [
        (key, _level(leaf, numbers, (*above, key)) if isinstance(leaf, dict) else numbers[(*above, key)])
        for key, leaf in tree.items()
        if isinstance(leaf, dict) or (*above, key) in numbers
    ]


def _entries(
    level: Level, found: list[Tensor], shape: torch.Size, names: Names, device: torch.device
) -> dict[str, Any]:
    entries = {}
    for key, place in level:
        if type(place) is int:
            entries[key] = found[place]
        else:
            entries[key] = new_tensordict(_entries(place, found, shape, names, device), shape, names, device)
    return entries


def check_values(path: tuple[str, ...], leaf: Tensor, values: Tensor, shape: torch.Size) -> None:
    """Validate that values ``[*shape, ...]`` have the row shape and dtype of ``leaf``; raise ValueError otherwise."""
    expected = [*shape, *leaf.shape[1:]]
    if list(values.shape) != expected or values.dtype != leaf.dtype:
        raise ValueError(
            f"Entry {name_of(path)} is {list(values.shape)} {values.dtype}, to be written it must be {expected} "
            f"{leaf.dtype}; nothing was written."
        )
