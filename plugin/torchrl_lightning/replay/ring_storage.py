"""The storage of every replay buffer: one flat array of cells."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.files import ChunkedTensor
from torchrl_lightning._core.memory import allocate_tensor, check_free_memory, map_cells
from torchrl_lightning._core.mixins import integers_below
from torchrl_lightning._core.state import Attribute, Stateful, bounded_integer, mapping, tensor
from torchrl_lightning._core.torchrl_compat import new_tensordict
from torchrl_lightning._core.tree import (
    Tree,
    check_tensordict,
    difference,
    entry_of,
    key_text,
    leaves_of,
    map_leaves,
    path_of,
    row_bytes,
    to_device,
    to_tensordict,
    tree_of,
)
from torchrl_lightning._core.tree_checks import check_tree
from torchrl_lightning._core.validators import Check, integer, optional
from torchrl_lightning.kernels.indices import as_integers
from torchrl_lightning.replay import process_owned
from torchrl_lightning.replay.cells import Cells, Names, check_values
from torchrl_lightning.replay.n_step import NStepReturns
from torchrl_lightning.replay.pickling import PickledCells
from torchrl_lightning.replay.positions import Ints
from torchrl_lightning.replay.rewrites import plan_entries
from torchrl_lightning.replay.rings import (
    Dependent,
    RingOwner,
    check_single_ring,
    reject_uneven_rings,
    ring_owner,
    rings_of,
    uneven_rings,
)


def _cells_validator(storage: Any) -> Check:
    return optional(tensor(torch.int64, None, low=0, high=storage.max_size - 1))


class RingStorage(Stateful, PickledCells):
    """A one-dimensional TorchRL storage: one flat array of ``max_size`` cells for each entry.

    The cells are in memory, on a device, or memory-mapped from a disk that may be larger than memory. The first write
    reserves the space and fixes the schema: keys, shapes, dtypes and device. Later data must have the same schema.
    Gradients are not stored.

    Args:
        max_size: number of cells.
        device: device of the cells; ``"auto"`` uses the device of the first data.
        scratch_dir: folder for memory-mapped cells, which are stored in a file without a name. The system removes the
            file when the last process that uses it ends or is killed; use ``dumps`` to keep the cells. On Linux,
            another process on the same machine that loads a pickle shares the cells, if this process is still alive.
            The counters are not shared, so only one process may write. ``deepcopy`` returns a copy in memory. None
            keeps the cells in memory; a pickle then contains a copy of them.

    Raises:
        ValueError: ``max_size`` is not positive, or ``scratch_dir`` is set for another device than the CPU.

    Examples:
        >>> from tensordict import TensorDict
        >>> storage = RingStorage(4)
        >>> storage.set(slice(0, 2), TensorDict({"a": torch.arange(2)}, [2]))
        >>> len(storage), storage.get(torch.tensor([1, 0, 1]))["a"].tolist()
        (2, [1, 0, 1])
    """

    OWNER, VERSION = "storage", 3
    STATE = {
        "max_size": Attribute(),
        "count": Attribute(check_for=lambda storage: bounded_integer(0, storage.max_size), attribute="_len"),
        "cells": Attribute(check_for=_cells_validator, attribute="_uneven_cells"),
        "cursor": Attribute(check_for=lambda storage: bounded_integer(-1, storage.max_size - 1)),
        "data": Attribute(optional(mapping), "_filled"),
    }

    def __init__(
        self,
        max_size: int = 100_000,
        *,
        device: torch.device | str = "cpu",
        scratch_dir: str | Path | None = None,
    ) -> None:
        if isinstance(max_size, float) and max_size % 1 == 0:  # 1e6
            max_size = int(max_size)
        max_size = integer(max_size, "max_size")
        if scratch_dir is not None and str(device) not in ("cpu", "auto"):
            raise ValueError(
                f"device must be 'cpu' or 'auto' with a scratch_dir, got {str(device)!r}. Omit scratch_dir or device."
            )
        super().__init__(max_size, device=device)
        self.claim_ownership()
        self.device: torch.device | str
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self.cells: Cells | None = None
        self.watched: set[tuple[str, ...]] = set()
        """Entries from which episodes or other stored entries are computed."""
        self.dependents: list[tuple[Dependent, frozenset[tuple[str, ...]]]] = []
        """Components that compute stored entries from other entries, each with the paths of these other entries."""

    @property
    def tree(self) -> Tree:
        """Nested dict of the leaves, ``[max_size, ...]`` each; empty before the first write."""
        return {} if self.cells is None else self.cells.tree

    @property
    def writer(self) -> RingOwner | None:
        """The :class:`RingWriter` that fills this storage, or None."""
        return ring_owner(self)

    @property
    def is_prefix(self) -> bool:
        """Whether the filled cells are exactly the first ``len(storage)`` cells."""
        return uneven_rings(self) is None

    @property
    def is_shared(self) -> bool:  # type: ignore[override]
        """Whether the cells are in shared memory."""
        return self._shared

    def share(self) -> None:
        """Move cells and counters into shared memory; cells reserved later are also shared.

        Raises:
            ValueError: the cells are memory-mapped files.
        """
        self.check_shareable()
        if not self._shared:
            self.share_counters()
            process_owned.share_leaves(self.tree)

    def check_shareable(self) -> None:
        """Validate that other processes can use the cells; raise ValueError if not."""
        if self.scratch_dir is not None:
            raise ValueError(
                "A RingStorage with a scratch_dir cannot be shared with other processes, got "
                f"{str(self.scratch_dir)!r}. Build it without scratch_dir."
            )

    # ------------------------------------------------------------------ writing

    def check(self, data: TensorDictBase, rows: int) -> tuple[list[Tensor], tuple[Ints, Ints] | None]:
        """Return the leaves of ``data`` as :meth:`Cells.match` does, without writing; the first call reserves memory.

        Raises:
            ValueError: keys, shapes, dtypes or the device differ from the schema, or the memory is too small.
        """
        if self.cells is None:
            self.allocate(data)
        assert self.cells is not None
        return self.cells.match(data, rows)

    def allocate(self, data: TensorDictBase) -> None:
        """Reserve memory for ``max_size`` rows with the schema of ``data`` (batch size ``[n]``).

        Raises:
            ValueError: ``data`` is without leaves or on another device, or the memory or disk is too small.
            OSError: the ``scratch_dir`` is not writable, or its disk has become full.
            RuntimeError: another process created the storage.
        """
        if self._shared and self._process != process_owned.current:
            raise RuntimeError(process_owned.EXAMPLE_FIRST)
        self.check_process()
        tree = tree_of(data)
        leaves = dict(leaves_of(tree))
        if not leaves:
            raise ValueError("Cannot store data without entries.")
        devices = {leaf.device for leaf in leaves.values()}
        device = next(iter(devices)) if self.device == "auto" else torch.device(self.device)
        if devices != {device}:
            raise ValueError(
                f"The data must be on {device}, the device of the storage, got {sorted(map(str, devices))}. Move it "
                f"with data.to('{device}'), or build the storage with another device=."
            )
        self._check_room(tree, device)
        self.device = device
        with torch.inference_mode(False):
            if self.scratch_dir is not None:
                cells, self._file = map_cells(self.scratch_dir, tree, self.max_size)
            else:
                cells = map_leaves(
                    lambda leaf: allocate_tensor((self.max_size, *leaf.shape[1:]), leaf.dtype, leaf.device), tree
                )
        if self._shared:
            process_owned.share_leaves(cells)
        self.take_ownership(cells)

    def _check_room(self, tree: Tree, device: torch.device | str) -> None:
        place = "to keep the data on disk" if self.scratch_dir is None else "on a larger disk"
        remedy = f"lower max_size, store smaller dtypes, or pass scratch_dir= {place}"
        name, needed = f"RingStorage({self.max_size})", row_bytes(tree) * self.max_size
        check_free_memory(needed, name, remedy, device=device, folder=self.scratch_dir)

    def take_ownership(self, tree: Tree) -> None:
        """Use these leaves (``[max_size, ...]``) as the cells."""
        self.cells = Cells(tree)
        self.data = to_tensordict(tree, torch.Size([self.max_size]), torch.device(self.device))

    def _init(self, data: TensorDictBase) -> None:
        self.allocate(data.unsqueeze(0))

    def set(self, cursor: Any, data: TensorDictBase, *, set_cursor: bool = True) -> None:
        """Write cells, as TorchRL's writers do; with an integer cursor, ``data`` is one row without batch dimension.

        If enough cells are filled, slices and negative numbers refer to the filled cells, as in :meth:`get`. The data
        may be a view of stored cells. The data may lack the entry ``index`` that TorchRL's writers add.

        Raises:
            TypeError: the data is not a TensorDict, or the cells are not integers.
            ValueError: the data has another schema than the storage.
            IndexError: a cell is out of range, or is empty although a :class:`RingWriter` fills the storage.
        """
        self.check_owner()
        check_tensordict(data)
        is_ring = self.writer is not None  # the writer's counters define the filled cells
        if isinstance(cursor, int) or getattr(cursor, "ndim", None) == 0:
            cursor, data = [int(cursor)], data.unsqueeze(0)
        if isinstance(cursor, slice):
            if is_ring:
                self._check_prefix()
            filled = range(*cursor.indices(len(self)))
            cursor = filled if is_ring or len(filled) == len(data) else range(*cursor.indices(self.max_size))
        if getattr(cursor, "dtype", None) in (torch.bool, np.bool_):
            cursor = torch.as_tensor(cursor).nonzero()
        index = as_integers(cursor, "Cells").reshape(-1)
        if not index.numel():
            return
        if int(index.min()) < -self.max_size or int(index.max()) >= self.max_size:
            raise IndexError(f"Cell {int(index.max())} does not exist; the storage has {self.max_size} cells.")
        index = self._from_end(index)
        if is_ring:
            self.check_filled(index)
        index = index % self.max_size
        leaves, _ = self.check(self._match_index_entry(data, index), index.numel())
        assert self.cells is not None
        leaf_numbers = self.cells.leaf_index
        after_write = self.plan(
            {path: leaves[leaf_numbers[path]] for path in self.watched if path in leaf_numbers}, index
        )
        self.cells.scatter(leaves, index)
        if after_write is not None:
            after_write()
        if set_cursor and not is_ring:
            self.record_cursor(int(index[-1]))
            self.set_length(min(max(len(self), int(index.max()) + 1), self.max_size))
        else:
            self.set_length(len(self))

    def _match_index_entry(self, data: TensorDictBase, index: Tensor) -> TensorDictBase:
        """Add or remove TorchRL's entry ``index`` to match the schema; TorchRL's writers add it only to some rows."""
        leaf_number = None if self.cells is None else self.cells.leaf_index.get(("index",))
        if self.cells is None or (leaf_number is None) == (entry_of(data, "index") is None):
            return data
        if leaf_number is None:
            return data.exclude("index")
        return data.copy().set("index", index.view(-1, *self.cells.leaves[leaf_number].shape[1:]))

    def write_entry(self, key: NestedKey, cells: Tensor, values: Tensor) -> None:
        """Replace one entry of stored steps, e.g. with a value that is only known at the end of the episode.

        New flags, rewards and successors also update the episodes and all derived entries. Clearing a done flag joins
        the step to the next step, unless a flag, another trajectory id or a cut begins an episode at the next step.

        Args:
            key: key of a leaf.
            cells: cells of the steps, ``[n]``, without duplicates.
            values: new values, ``[n, ...]``.

        Raises:
            KeyError: ``key`` is not a stored leaf.
            IndexError: a cell is empty.
            ValueError: a shape or dtype differs from the storage.

        Examples:
            >>> from tensordict import TensorDict
            >>> storage = RingStorage(4)
            >>> storage.set(slice(0, 3), TensorDict({"a": torch.arange(3)}, [3]))
            >>> storage.write_entry("a", torch.tensor([0, 2]), torch.tensor([5, 6]))
            >>> storage.get(torch.arange(3))["a"].tolist()
            [5, 1, 6]
        """
        (path, leaf), *_ = self.leaves(key)
        if path != path_of(key):
            raise KeyError(f"key must be a leaf, got {key!r} with the entry {key_text(path)} below it.")
        check_values(path, leaf, values, torch.Size([len(cells)]))
        plan_entries(self, {path: values}, cells)()

    def watch(self, dependent: Dependent, paths: Iterable[tuple[str, ...]]) -> None:
        """Register a component that recomputes its derived entries when the entries ``paths`` are replaced."""
        self.dependents.append((dependent, frozenset(paths)))
        self.watched |= set(paths)

    def plan(self, changes: Mapping[tuple[str, ...], Tensor], cells: Tensor) -> Callable[[], None] | None:
        """Validate new values of watched entries; return the function to call after writing them, or None."""
        writer = self.writer
        return None if writer is None or not changes else writer.plan_rewrite(changes, cells)

    # ------------------------------------------------------------------ reading

    def gather(
        self,
        index: Tensor,
        names: Names = None,
        skip: Collection[tuple[str, ...]] = (),
        n_step: NStepReturns | None = None,
    ) -> dict[str, Any]:
        """Read entries of filled cells ``index`` (int64 on the storage's device); see :meth:`Cells.gather`.

        Every batch is read by this method.
        """
        assert self.cells is not None
        if n_step is None:
            return self.cells.gather(index, names, skip)
        rings = rings_of(self)
        return n_step.gather(self.cells, None if rings is None else rings.index, index, names, skip)

    def leaves(self, key: NestedKey) -> list[tuple[tuple[str, ...], Tensor]]:
        """Return the paths and leaves, ``[max_size, ...]``, at or below a key; the leaves include empty cells.

        Raises:
            KeyError: the key is not stored.
        """
        path = path_of(key)
        leaves = [(other, leaf) for other, leaf in leaves_of(self.tree) if other[: len(path)] == path]
        if not leaves:
            raise KeyError(f"The storage has no entry {key!r}; it has {sorted(self.tree)}.")
        return leaves

    def get(self, index: Any, n_step: NStepReturns | None = None) -> TensorDictBase:
        """Read cells; an integer or slice returns a view, and a tensor, a sequence or a mask returns a copy.

        Writing into a view does not update episodes, returns and other derived entries. Use :meth:`write_entry` or
        :meth:`set` to replace flags, rewards or successors of stored steps.

        For indices ``[B, T]``, the dimensions of the result are named ``(None, "time")``. A negative integer or list
        item counts back from the last filled cell, as in a Python list. A negative number in a tensor raises an
        IndexError.

        Args:
            index: the cells.
            n_step: n-step returns; each step of a tensor of indices is then folded with the following steps.

        Raises:
            RuntimeError: the storage is empty.
            IndexError: a cell is empty.
            TypeError: the indices are not integers.
        """
        if self.cells is None:
            raise RuntimeError("The storage is empty. Call extend first.")
        if isinstance(index, tuple) and len(index) == 1:  # TorchRL's slice samplers return coordinates
            index = index[0]
        if isinstance(index, list | range | np.ndarray) and np.asarray(index).dtype != np.bool_:
            index = self._from_end(as_integers(index, "Cells"))
        if not isinstance(index, Tensor) or index.dtype == torch.bool or index.ndim == 0:
            return self._view(index)
        index = as_integers(index, "Cells").to(self.device)
        self.check_filled(index)
        names = (None, "time") if index.ndim == 2 else None
        return new_tensordict(self.gather(index, names, (), n_step), index.shape, names, index.device)

    def _view(self, index: Any) -> TensorDictBase:
        assert self.data is not None
        if isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0 and index.dtype != torch.bool):
            cell = self._from_end(torch.tensor([int(index)]))
            self.check_filled(cell)
            return self.data[int(cell)]
        self._check_prefix()
        return self.data[: len(self)][index]

    def _check_prefix(self) -> None:
        if not self.is_prefix:
            raise IndexError(
                "The rings are unevenly filled, so the filled cells are not contiguous. Pass a tensor of cells "
                "(writer.cell), or fill the rings evenly."
            )

    def _from_end(self, index: Tensor) -> Tensor:
        # The last cell is defined only if the filled cells are the first cells.
        size = len(self) if self.is_prefix else 0
        return torch.where((index < 0) & (index >= -size), index + size, index)

    def check_filled(self, index: Tensor) -> None:
        """Validate that cells are filled; raise IndexError with the first empty cell."""
        if not index.numel():
            return
        length, rings = len(self), uneven_rings(self)
        if rings is None:
            low, high = torch.aminmax(index)
            empty = index[(index < 0) | (index >= length)] if int(low) < 0 or int(high) >= length else None
        else:
            empty = index[~rings.is_filled(index).to(index.device)]
        if empty is not None and empty.numel():
            raise IndexError(
                f"Cell {int(empty[0])} is empty; {length} of {self.max_size} cells are filled"
                + ("." if rings is None else ", and the rings are unevenly filled. Sample with UniformSampler.")
            )

    def __len__(self) -> int:
        return self._len if self._shared else self._own_length  # half as many calls

    def draw(self, count: int) -> Tensor:
        """Draw cells uniformly from evenly filled rings, for TorchRL's ``RandomSampler``."""
        self.check_uniformly_filled("RandomSampler")
        return to_device(integers_below(len(self), count, self.generator), self.device)

    def check_last_cursor(self) -> None:
        """Validate for TorchRL's slice samplers that neighbouring cells are successive steps of one ring."""
        check_single_ring(rings_of(self))

    def check_uniformly_filled(self, reader: str) -> None:
        """Raise RuntimeError, naming ``reader``, unless the filled cells are the first ``len(storage)`` cells."""
        reject_uneven_rings(uneven_rings(self), reader)

    # ------------------------------------------------------------------ state

    @property
    def _uneven_cells(self) -> Tensor | None:
        rings = uneven_rings(self)
        return None if rings is None else rings.filled_cells()

    @property
    def _filled(self) -> Tree | None:
        cells = self._uneven_cells

        def filled_rows(leaf: Tensor) -> Any:
            return leaf[: len(self)] if cells is None else ChunkedTensor(leaf, cells)

        return map_leaves(filled_rows, self.tree) if self.tree else None

    def validate_state(self, state_dict: Any) -> dict[str, Any]:
        """Validate a state; raise RuntimeError if other processes use the storage."""
        self.check_loadable()
        return super().validate_state(state_dict)

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        data, count, cells = values["data"], values["count"], values["cells"]
        if data is None and count:
            raise ValueError(f"The state is foreign: it has {count} filled cells of {self.max_size}, but no rows.")
        if cells is not None and (len(cells) != count or bool((cells[1:] <= cells[:-1]).any())):
            raise ValueError(
                f"The state is foreign: it lists {len(cells)} cells, expected {count} cells in ascending order."
            )
        if data is None:
            return
        check_tree(data, torch.Size([count]), self.OWNER)
        problem = difference(self.tree, to_tensordict(data, torch.Size([count])), devices=False) if self.tree else ""
        if problem:
            raise ValueError(f"The rows of the state differ from the rows of this storage: {problem}.")
        if self.cells is None:
            self._check_room(data, "cpu" if self.device == "auto" else self.device)

    def apply_state(self, values: Mapping[str, Any]) -> None:
        """Restore the filled cells."""
        count, cells = values["count"], values["cells"]
        if values["data"] is not None:
            data = to_tensordict(values["data"], torch.Size([count])).to(self.device)
            leaves, _ = self.check(data, count)
            assert self.cells is not None
            if count:
                self.cells.scatter(leaves, torch.arange(count) if cells is None else cells)
        self.record_cursor(values["cursor"])
        self.set_length(count)

    def _filled_cells(self) -> Tensor | int:
        """Return the filled cells, or their number if they are the first cells."""
        cells = self._uneven_cells
        return len(self) if cells is None else cells
