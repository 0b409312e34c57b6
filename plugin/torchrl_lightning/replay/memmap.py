"""Memory-mapped cells in a file without a name, which no other process can open and which vanishes with this one."""

from __future__ import annotations

import errno
import logging
import math
import mmap
import os
import tempfile
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from torchrl_lightning.entries import Tree, leaves_of, map_leaves
from torchrl_lightning.replay.memory import free_bytes, readable

_logger = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def map_cells(folder: Path, tree: Tree, rows: int) -> Tree:
    """Map leaves of ``rows`` rows each from one new file on the disk of ``folder``.

    The file has no name, and the kernel removes it when its last user is gone. So processes may share a folder, and a
    killed process leaves nothing behind. The blocks are reserved at once, because a write to a mapped page for which
    the disk has no block left kills the process.

    Args:
        folder: made, with its parents, where it is missing.
        tree: leaves whose first dimension is replaced by ``rows``.
        rows: number of cells.

    Raises:
        OSError: the folder cannot be written, or its disk has no room; the message gives both numbers.

    Example:
        >>> leaf = map_cells(Path(tempfile.mkdtemp()), {"a": torch.zeros(1, 3)}, 4)["a"]
        >>> leaf.shape, leaf.sum()
        (torch.Size([4, 3]), tensor(0.))
    """
    sizes = [rows * math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for _, leaf in leaves_of(tree)]
    *offsets, total = accumulate((-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes), initial=0)
    total = max(total, mmap.PAGESIZE)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        _reserve(file.fileno(), total, folder)
        memory = mmap.mmap(file.fileno(), total)
    places = iter(offsets)

    def mapped(leaf: Tensor) -> Tensor:
        shape, offset = torch.Size((rows, *leaf.shape[1:])), next(places)
        if not shape.numel():
            return torch.empty(shape, dtype=leaf.dtype)
        return torch.frombuffer(memory, dtype=leaf.dtype, count=shape.numel(), offset=offset).view(shape)

    return map_leaves(mapped, tree)


def _reserve(descriptor: int, size: int, folder: Path) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except (OSError, AttributeError) as error:
        free = readable(free_bytes(torch.device("cpu"), folder) or 0)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise OSError(
                error.errno,
                f"The memory-mapped cells need {readable(size)}, but only {free} are free on the disk of {folder}; "
                "lower max_size, store smaller dtypes, or give a scratch_dir= on a larger disk",
            ) from error
        # Some file systems, and macOS, cannot reserve.
        _logger.warning(
            "the disk of %s cannot reserve the %s of the memory-mapped cells (%s are free now): if it fills up, the "
            "process is killed.",
            folder,
            readable(size),
            free,
        )
        os.ftruncate(descriptor, size)
