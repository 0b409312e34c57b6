"""Memory-mapped leaves: one file each, described by one small JSON file."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_lightning.replay.tree import Tree, leaves_of, name_of

DESCRIPTION = "ring.json"
MARKS = "written.bin"
VERSION = 1
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_LEAF = re.compile(r"leaf_\d{3,}\.bin")


def allocate_files(folder: Path, tree: Tree, rows: int) -> Tree:
    """Create one sparse file for each leaf, ``rows`` rows each, and map them.

    Raises:
        FileExistsError: the folder already holds a ring.
        TypeError: a leaf's dtype cannot be stored in a file.
    """
    if (folder / DESCRIPTION).exists():
        raise FileExistsError(
            f"{folder} already holds a ring. Before the first write, buffer.loads goes on with it from a state that "
            "refers to these very files (one saved around them, or by dumps(..., copy=False)); for anything else give "
            "another scratch_dir."
        )
    described: list[dict[str, Any]] = []
    for number, (path, leaf) in enumerate(leaves_of(tree)):
        if leaf.dtype not in DTYPES.values():
            raise TypeError(f"Entry {name_of(path)} has dtype {leaf.dtype}, which cannot be stored in a file.")
        shape, dtype = list(leaf.shape[1:]), str(leaf.dtype).removeprefix("torch.")
        described.append({"key": list(path), "file": f"leaf_{number:03d}.bin", "shape": shape, "dtype": dtype})
    folder.mkdir(parents=True, exist_ok=True)
    for entry in described:
        with (folder / entry["file"]).open("wb") as file:
            file.truncate(_size(entry, rows))
    (folder / DESCRIPTION).write_text(json.dumps({"version": VERSION, "max_size": rows, "leaves": described}, indent=1))
    return map_files(folder)[0]


def map_files(folder: Path) -> tuple[Tree, int]:
    """Map the files of a ring: its leaves, which share the files' memory, and its number of cells.

    Raises:
        FileNotFoundError: there is no ring in the folder.
        ValueError: the description is foreign, or a file has another size than described.
    """
    if not (folder / DESCRIPTION).is_file():
        raise FileNotFoundError(f"{folder} holds no ring (no {DESCRIPTION}).")
    cells: Tree = {}
    try:
        content = json.loads((folder / DESCRIPTION).read_text())
        rows = content["max_size"]
        if content["version"] != VERSION or type(rows) is not int or rows < 1:
            raise ValueError(f"expected version {VERSION} and a positive max_size")
        for leaf in content["leaves"]:
            node = cells
            for key in leaf["key"][:-1]:
                node = node.setdefault(str(key), {})
            node[str(leaf["key"][-1])] = _map(folder, leaf, rows)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"The ring in {folder} is damaged or foreign: {error}.") from error
    return cells, rows


def _size(leaf: dict[str, Any], rows: int) -> int:
    return math.prod([rows, *leaf["shape"]]) * DTYPES[leaf["dtype"]].itemsize


def _map(folder: Path, leaf: dict[str, Any], rows: int) -> Tensor:
    shape, file = [rows, *leaf["shape"]], folder / leaf["file"]
    if not _LEAF.fullmatch(leaf["file"]) or not all(type(number) is int and number >= 0 for number in shape):
        raise ValueError(f"{leaf['file']!r} is not the name of a leaf, or {shape} is not a shape")
    expected, found = _size(leaf, rows), file.stat().st_size if file.is_file() else -1
    if found != expected:
        raise ValueError(f"{file.name} has {found} bytes, expected {expected}")
    dtype, count = DTYPES[leaf["dtype"]], math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(str(file), shared=True, size=count, dtype=dtype).view(shape)


def sync_files(folder: Path) -> None:
    """Make all cells of a ring reach the disk."""
    for file in folder.iterdir():
        if _LEAF.fullmatch(file.name) or file.name in (MARKS, DESCRIPTION):
            with file.open("rb") as handle:
                os.fsync(handle.fileno())


class WriteMarks:
    """How far every ring was ever written, in a file of its own, noted before the cells change.

    A state that was saved earlier than the last write finds here which of its steps have been overwritten since. Marks
    never decrease: they count positions plus a :attr:`base` that grows when the rings start again.

    Args:
        folder: the folder of the ring.
        num_envs: number of rings.
        length: cells of each ring.

    Raises:
        ValueError: the file was written for another number of rings.
    """

    def __init__(self, folder: Path, num_envs: int, length: int) -> None:
        file, size = folder / MARKS, num_envs * 8
        if not file.exists():
            with file.open("wb") as handle:
                handle.truncate(size)
        elif file.stat().st_size != size:
            raise ValueError(
                f"The ring in {folder} was written for {file.stat().st_size // 8} environments, not for {num_envs}."
            )
        self.length = length
        self.base = 0
        self._marks: NDArray[np.int64] = np.memmap(file, np.int64, "r+")

    def note(self, positions: NDArray[np.int64]) -> None:
        """Note that everything below these positions is about to be written."""
        np.maximum(self._marks, positions + self.base, out=self._marks)

    def restart(self) -> None:
        """Start counting anew, above everything noted so far: no earlier state is valid any more."""
        highest = int(self._marks.max())
        self.base = (highest // self.length + 2) * self.length
        self._marks[:] = self.base

    def overwritten(self) -> NDArray[np.int64]:
        """Positions below these are no longer in their cells."""
        return np.asarray(self._marks - self.length - self.base)
