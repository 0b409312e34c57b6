"""The storage under every replay buffer: one flat array of cells."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._compat import StorageBase, entries_of, new_tensordict
from torchrl_lightning.replay.memory import check_room
from torchrl_lightning.replay.memmap import allocate_files
from torchrl_lightning.replay.tree import (
    Plan,
    Tree,
    difference,
    gather,
    leaves_of,
    match,
    plan_of,
    row_bytes,
    to_tensordict,
    tree_of,
)

if TYPE_CHECKING:
    from torchrl_lightning.replay.writer import RingWriter

SMALL = 1024
"""Up to so many rows, numpy's smaller overhead wins."""
Cells = Sequence[tuple[int, int, int]]
"""Runs of cells: (first row of the data, first cell, how many)."""


class RingStorage(StorageBase):
    """One flat array of ``max_size`` cells, read by ``index_select`` on cached leaves.

    A plain one-dimensional TorchRL storage: in memory, on a device, or in memory-mapped files that may be larger than
    memory. Memory is reserved at the first write, whose keys, shapes, dtypes and device become the schema; another
    schema is refused later. Gradients are not stored.

    Args:
        max_size: number of cells.
        device: where the cells lie; ``"auto"`` takes the device of the first data.
        scratch_dir: folder for memory-mapped files; None keeps the cells in memory.
        compilable: as in TorchRL: plain counters instead of ones that processes share.

    Raises:
        ValueError: ``max_size`` is not positive, or files are asked for on another device than the CPU.

    Example:
        >>> from tensordict import TensorDict
        >>> storage = RingStorage(4)
        >>> storage.set(slice(0, 2), TensorDict({"a": torch.arange(2)}, [2]))
        >>> len(storage), storage.get(torch.tensor([1, 0, 1]))["a"].tolist()
        (2, [1, 0, 1])
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        scratch_dir: str | Path | None = None,
        compilable: bool = False,
    ) -> None:
        if isinstance(max_size, bool) or int(max_size) != max_size or max_size < 1:
            raise ValueError(f"max_size must be a positive integer, got {max_size!r}.")
        if scratch_dir is not None and str(device) not in ("cpu", "auto"):
            raise ValueError(f"Memory-mapped files lie on the CPU, got device={device!r}; drop scratch_dir or device.")
        super().__init__(int(max_size), device=device, compilable=compilable)
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self.tree: Tree = {}
        self._leaves: list[Tensor] = []
        self._arrays: list[NDArray[Any]] = []
        self._plans: dict[int, Plan] = {}
        self._writer: weakref.ref[RingWriter] | None = None

    @property
    def writer(self) -> RingWriter | None:
        """The :class:`RingWriter` that fills this storage, if there is one."""
        return None if self._writer is None else self._writer()

    def set_writer(self, writer: RingWriter) -> None:
        """Remember, weakly, who fills this storage."""
        self._writer = weakref.ref(writer)

    @property
    def is_prefix(self) -> bool:
        """Whether the filled cells are exactly the first ``len(storage)`` ones."""
        writer = self.writer
        return writer is None or writer.is_even

    # ------------------------------------------------------------------ writing

    def check(self, data: TensorDictBase, rows: int) -> list[Tensor]:
        """Leaves of ``data`` (``[rows]``) in stored order; nothing is written, but memory is reserved at first use.

        Raises:
            ValueError: keys, shapes, dtypes or the device differ from what is stored, or there is not enough memory.
        """
        if not self.tree:
            self.allocate(data)
        plan = self._plans.get(rows)
        if plan is None:
            if len(self._plans) > 16:
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

    def allocate(self, data: TensorDictBase) -> None:
        """Reserve memory for ``max_size`` rows like those of ``data`` (batch size ``[n]``).

        Raises:
            ValueError: ``data`` has no leaves, lies on another device, or there is not enough room.
        """
        tree = tree_of(data)
        found = dict(leaves_of(tree))
        if not found:
            raise ValueError("Cannot store data without entries.")
        devices = {leaf.device for leaf in found.values()}
        device = next(iter(devices)) if self.device == "auto" else self.device
        if devices != {device}:
            raise ValueError(
                f"The data is on {sorted(map(str, devices))}, the storage on {device}; move it with data.to('{device}') "
                f"or build the storage with device=."
            )
        check_room(row_bytes(tree) * self.max_size, device, self.scratch_dir, f"RingStorage({self.max_size})")
        self.device = device
        with torch.inference_mode(False):
            if self.scratch_dir is not None:
                cells = allocate_files(self.scratch_dir, tree, self.max_size)
            else:
                cells = _empty_like(tree, self.max_size)
        self.adopt(cells)

    def adopt(self, cells: Tree) -> None:
        """Use these leaves (``[max_size, ...]``) as the cells."""
        self.tree = cells
        self._leaves = [leaf for _, leaf in leaves_of(cells)]
        self._arrays = _arrays(self._leaves)
        self._plans = {}
        self.data = to_tensordict(cells, torch.Size([self.max_size]), self.device)

    def _init(self, data: TensorDictBase) -> None:
        self.allocate(data.unsqueeze(0))

    def write_runs(self, leaves: list[Tensor], runs: Cells) -> None:
        """Copy checked leaves into runs of cells."""
        if self._arrays and len(leaves[0]) <= SMALL and all(type(leaf) is Tensor for leaf in leaves):
            stores, rows = self._arrays, [leaf.numpy() for leaf in leaves]
        else:
            stores, rows = self._leaves, leaves
        for row, cell, count in runs:
            if row or count != len(leaves[0]):
                for store, leaf in zip(stores, rows, strict=True):
                    store[cell : cell + count] = leaf[row : row + count]
            else:
                for store, leaf in zip(stores, rows, strict=True):
                    store[cell : cell + count] = leaf

    def write_cells(self, leaves: list[Tensor], index: Tensor) -> None:
        """Copy checked leaves into scattered cells."""
        index = index.to(self.device)
        for store, leaf in zip(self._leaves, leaves, strict=True):
            store.index_copy_(0, index, leaf)

    def set(self, cursor: Any, data: TensorDictBase, *, set_cursor: bool = True) -> None:
        """Write cells, as TorchRL's writers do; an integer cursor takes one row without batch dimension.

        Raises:
            ValueError: another schema than what is stored.
            IndexError: a cell out of range.
        """
        if isinstance(cursor, int) or (isinstance(cursor, Tensor) and cursor.ndim == 0):
            cursor, data = slice(int(cursor), int(cursor) + 1), data.unsqueeze(0)
        if isinstance(cursor, slice):
            cursor = range(*cursor.indices(self.max_size))
        index = torch.as_tensor(cursor)
        if index.dtype == torch.bool:
            index = index.nonzero().squeeze(1)
        index = index.long().reshape(-1)
        if index.numel() and (int(index.min()) < -self.max_size or int(index.max()) >= self.max_size):
            raise IndexError(f"Cell {int(index.max())} does not exist; the storage has {self.max_size} cells.")
        leaves = self.check(data, index.numel())
        self.write_cells(leaves, index % self.max_size)
        if set_cursor:
            self.record_cursor(int(index[-1]))
            self.set_length(min(max(len(self), int(index.max()) + 1), self.max_size))
        else:
            self.set_length(len(self))

    # ------------------------------------------------------------------ reading

    def gather(self, index: Tensor) -> dict[str, Any]:
        """Entries of the cells ``index`` (``[B]`` int64 on the storage's device), unchecked."""
        return gather(self.tree, index)

    def get(self, index: Any) -> TensorDictBase:
        """Read cells; a tensor of indices of any shape is gathered leaf by leaf, anything else is a view.

        Indices ``[B, T]`` give sequences named ``(None, "time")``.

        Raises:
            RuntimeError: nothing is stored.
            IndexError: a cell that holds nothing.
        """
        if not self.tree:
            raise RuntimeError("The storage is empty: write something first (extend).")
        if isinstance(index, list | tuple | range) and not isinstance(index, tuple):
            index = torch.as_tensor(index)
        if not isinstance(index, Tensor) or index.dtype == torch.bool or index.ndim == 0:
            return self._view(index)
        flat = index.reshape(-1).to(self.device)
        self.check_filled(flat)
        batch = new_tensordict(self.gather(flat), flat.shape, None, self.device)
        if index.ndim == 1:
            return batch
        batch = batch.reshape(index.shape)
        if index.ndim == 2:
            batch.names = [None, "time"]
        return batch

    def _view(self, index: Any) -> TensorDictBase:
        if isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0 and index.dtype != torch.bool):
            self.check_filled(torch.as_tensor(int(index)).reshape(1))
            return self.data[int(index)]
        if not self.is_prefix:
            raise IndexError(
                "The rings are unevenly filled, so that cells are not in one piece; read them by a tensor of indices "
                "(writer.cell), or fill the rings evenly."
            )
        return self.data[: len(self)][index]

    def check_filled(self, index: Tensor) -> None:
        """Refuse cells that hold nothing.

        Raises:
            IndexError: names the first such cell.
        """
        if not index.numel():
            return
        length = len(self)
        if self.is_prefix:
            low, high = torch.aminmax(index)
            wrong = index[(index < 0) | (index >= length)] if int(low) < 0 or int(high) >= length else None
        else:
            wrong = index[~self.writer.is_filled(index)]
        if wrong is not None and wrong.numel():
            raise IndexError(
                f"Cell {int(wrong[0])} holds nothing; {length} of {self.max_size} cells are filled"
                + ("." if self.is_prefix else " and the rings are uneven: sample with UniformSampler.")
            )

    def __len__(self) -> int:
        return self._len

    def draw(self, count: int) -> Tensor:
        """Uniformly drawn cells, for TorchRL's ``RandomSampler``.

        Raises:
            RuntimeError: the rings are unevenly filled.
        """
        self.check_even("RandomSampler")
        generator = self.generator
        device = self.device if generator is None else generator.device
        return torch.randint(len(self), (count,), generator=generator, device=device).to(self.device)

    def check_seam(self) -> None:
        """Refuse readers that take neighbouring cells for successive steps, where they are not.

        Raises:
            RuntimeError: there are several rings.
        """
        if self.writer is not None and self.writer.num_envs > 1:
            raise RuntimeError(
                f"The cells of {self.writer.num_envs} environments are interleaved, so that TorchRL's slice samplers "
                "and sequences would mix them; use SequenceSampler of torchrl_lightning."
            )

    def check_even(self, reader: str) -> None:
        """Refuse a reader that takes the first ``len(storage)`` cells for the filled ones.

        Raises:
            RuntimeError: the rings are unevenly filled.
        """
        if not self.is_prefix:
            raise RuntimeError(
                f"{reader} cannot read unevenly filled rings ({self.writer.filled.tolist()} steps of "
                f"{self.writer.num_envs} environments); use UniformSampler, PrioritizedSampler or SequenceSampler of "
                "torchrl_lightning."
            )


def _empty_like(tree: Tree, rows: int) -> Tree:
    return {
        key: _empty_like(leaf, rows) if isinstance(leaf, dict) else leaf.new_empty((rows, *leaf.shape[1:]))
        for key, leaf in tree.items()
    }


def _arrays(leaves: list[Tensor]) -> list[NDArray[Any]]:
    try:
        return [leaf.numpy() for leaf in leaves]
    except (TypeError, RuntimeError):  # another device, or a dtype that numpy does not know
        return []
