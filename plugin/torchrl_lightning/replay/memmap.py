"""Memory-mapped leaves: one file each, described by one small JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_lightning.replay.tree import Tree, leaves_of

DESCRIPTION = "ring.json"
VERSION = 1
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


def allocate_files(folder: Path, tree: Tree, rows: int) -> Tree:
    """Create one sparse file for each leaf, ``rows`` rows each, and map them.

    Raises:
        FileExistsError: the folder already holds a ring.
        TypeError: a leaf's dtype cannot be stored in a file.
    """
    if (folder / DESCRIPTION).exists():
        raise FileExistsError(
            f"{folder} already holds a ring; open it again (RingStorage.open, buffer.loads) or give another scratch_dir."
        )
    described = []
    for number, (path, leaf) in enumerate(leaves_of(tree)):
        if leaf.dtype not in DTYPES.values():
            raise TypeError(f"Entry {path} has dtype {leaf.dtype}, which cannot be stored in a file.")
        described.append(
            {
                "key": list(path),
                "file": f"leaf_{number:03d}.bin",
                "shape": list(leaf.shape[1:]),
                "dtype": str(leaf.dtype).removeprefix("torch."),
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    cells = map_files(folder, described, rows, create=True)
    (folder / DESCRIPTION).write_text(json.dumps({"version": VERSION, "max_size": rows, "leaves": described}, indent=1))
    return cells


def map_files(folder: Path, described: list[dict[str, Any]], rows: int, create: bool = False) -> Tree:
    """Map the files of a ring; the tree's leaves share their memory."""
    cells: Tree = {}
    for leaf in described:
        shape, dtype = (rows, *leaf["shape"]), DTYPES[leaf["dtype"]]
        node = cells
        for key in leaf["key"][:-1]:
            node = node.setdefault(key, {})
        node[leaf["key"][-1]] = _map(folder / leaf["file"], torch.Size(shape), dtype, create)
    return cells


def _map(file: Path, shape: torch.Size, dtype: torch.dtype, create: bool) -> Tensor:
    size = shape.numel() * dtype.itemsize
    if create:
        with file.open("wb") as handle:
            handle.truncate(max(size, 1))
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(str(file), shared=True, size=shape.numel(), dtype=dtype).view(shape)
