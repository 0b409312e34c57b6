"""Allocate stored rows in memory or in an unnamed file, and check that enough space is free.

Sizes are checked before the allocation, so that a typo in a size raises an error instead of killing the process.
"""

from __future__ import annotations

import errno
import logging
import math
import mmap
import os
import shutil
import tempfile
import weakref
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor
from torch import Tensor

from torchrl_lightning._core.tree import Tree, leaves_of, map_leaves

_logger = logging.getLogger(__name__)
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
DESCRIPTORS = Path("/proc/self/fd")
LINE = 64  # bytes of a cache line


def allocate(size: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Allocate uninitialised memory.

    On the CPU, NumPy allocates the memory, aligned to a cache line. NumPy requests huge pages, so scattered reads cause
    fewer page misses.
    """
    if torch.device(device).type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    raw = np.empty(size * dtype.itemsize + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return torch.from_numpy(raw[start : start + size * dtype.itemsize]).view(dtype)


def zeros(size: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Allocate zeros like :func:`allocate`; on the CPU, the system provides the memory at the first write."""
    if torch.device(device).type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    raw = np.zeros(size * dtype.itemsize + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return torch.from_numpy(raw[start : start + size * dtype.itemsize]).view(dtype)


def check_free_memory(
    needed: int, owner: str, remedy: str, *, device: torch.device | str = "cpu", folder: Path | None = None
) -> None:
    """Validate that enough bytes are free on a device, or on the disk of a folder.

    Raises:
        ValueError: Too few bytes are free; the message gives the needed and the free bytes, the owner and the remedy.
    """
    free = free_bytes(torch.device(device), folder)
    if free is not None and needed > free:
        location = f"on the disk of {folder}" if folder is not None else f"in the memory of {device}"
        raise ValueError(
            f"{owner} needs {format_bytes(needed)}, but only {format_bytes(free)} are free {location}; {remedy}."
        )


def allocate_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an uninitialised tensor; on the CPU, NumPy's huge pages speed up scattered reads."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.empty(shape, dtype=dtype, device=device)
    return allocate(size, torch.uint8, device).view(dtype).view(shape)


def pack_rows(leaf: Tensor, cells: Tensor | int) -> Tensor:
    """Copy the first ``cells`` rows, or the rows at the indices ``cells``, so that a pickle omits the other rows.

    A ``MemoryMappedTensor`` is returned unchanged, because its pickle refers to its file. An unpickled copy shares
    this file.
    """
    if isinstance(leaf, MemoryMappedTensor):
        return leaf
    if isinstance(cells, int):
        return leaf[:cells].clone()
    return leaf.index_select(0, cells.to(leaf.device))


def unpack_rows(rows: Tensor, cells: Tensor | int, count: int) -> Tensor:
    """Allocate ``count`` rows, and copy packed rows to their indices."""
    if isinstance(rows, MemoryMappedTensor):
        return rows
    leaf = allocate_tensor((count, *rows.shape[1:]), rows.dtype, rows.device)
    if isinstance(cells, int):
        leaf[:cells] = rows
    else:
        leaf.index_copy_(0, cells.to(leaf.device), rows)
    return leaf


def pack_tree(tree: Tree, cells: Tensor | int) -> Tree:
    """Copy the first ``cells`` rows of all leaves, or the rows at the indices ``cells``."""
    return map_leaves(lambda leaf: pack_rows(leaf, cells), tree)


def unpack_tree(tree: Tree, cells: Tensor | int, count: int) -> Tree:
    """Allocate ``count`` rows of all leaves, and copy packed rows to their indices."""
    with torch.inference_mode(False):
        return map_leaves(lambda rows: unpack_rows(rows, cells, count), tree)


class UnnamedFile:
    """A file without a name; the kernel removes it when the last process that uses it has ended.

    Its pickle refers to this process: another process of the same machine can open the file while this process lives.

    Args:
        descriptor: An open descriptor; it is closed when the object is deleted.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, folder: Path, size: int) -> UnnamedFile:
        """Create a file of ``size`` reserved bytes on the disk of ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            _reserve_blocks(file.fileno(), size, folder)
            return cls(os.dup(file.fileno()))

    @property
    def supports_reopening(self) -> bool:
        """Whether other processes can open the files of this process, as on Linux."""
        return DESCRIPTORS.exists()

    def __reduce__(self) -> Any:
        status = os.fstat(self.descriptor)
        return _reopen, (os.getpid(), self.descriptor, status.st_dev, status.st_ino)


def _reopen(process: int, descriptor: int, device: int, inode: int) -> UnnamedFile:
    """Open the unnamed file of another process, or of this process.

    Raises:
        RuntimeError: The process has ended, belongs to another user, or runs on another machine.
    """
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        file = UnnamedFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        status = os.fstat(file.descriptor)
        if (status.st_dev, status.st_ino) == (device, inode):
            return file
        reason = f"{path} is another file now"
    except OSError as error:
        reason = str(error)
    raise RuntimeError(
        f"A pickle of memory-mapped cells must be opened on the same machine while process {process} lives, which "
        f"pickled them, got {reason}. Save the buffer with dumps(path) and read it with loads(path), or pickle "
        "copy.deepcopy(buffer), whose cells are in memory."
    )


def map_cells(folder: Path, tree: Tree, rows: int) -> tuple[Tree, UnnamedFile]:
    """Create a file on the disk of ``folder``, and map leaves of ``rows`` rows from it; return leaves and file.

    The kernel removes the unnamed file when the last process that uses it has ended. So processes may share a folder,
    and a killed process leaves no files. All blocks are reserved first, because a write to a mapped page kills the
    process if the disk is full. A missing folder is created.

    Raises:
        OSError: The folder is not writable, or its disk has too little space; the message gives the needed and the
            free bytes.
    """
    file = UnnamedFile.create(folder, _offsets(tree, rows)[-1])
    return map_tree(file, tree, rows), file


def map_tree(file: UnnamedFile, tree: Tree, rows: int) -> Tree:
    """Map leaves of ``rows`` rows each from a file that :func:`map_cells` created for ``tree``."""
    *offsets, total = _offsets(tree, rows)
    memory, leaf_offsets = mmap.mmap(file.descriptor, total), iter(offsets)

    def map_leaf(leaf: Tensor) -> Tensor:
        shape, offset = torch.Size((rows, *leaf.shape[1:])), next(leaf_offsets)
        if not shape.numel():
            return torch.empty(shape, dtype=leaf.dtype)
        return torch.frombuffer(memory, dtype=leaf.dtype, count=shape.numel(), offset=offset).view(shape)

    return map_leaves(map_leaf, tree)


def _offsets(tree: Tree, rows: int) -> list[int]:
    """Return the offsets of all leaves in a file, as multiples of the page size, and finally the size of the file."""
    sizes = [rows * math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for _, leaf in leaves_of(tree)]
    *offsets, total = accumulate((-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes), initial=0)
    return [*offsets, max(total, mmap.PAGESIZE)]


def _reserve_blocks(descriptor: int, size: int, folder: Path) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except (OSError, AttributeError) as error:
        free = format_bytes(free_bytes(torch.device("cpu"), folder) or 0)
        if isinstance(error, OSError) and error.errno in _DISK_FULL_ERRORS:
            raise OSError(
                error.errno,
                f"The memory-mapped cells need {format_bytes(size)}, but only {free} are free on the disk of {folder}; "
                "lower max_size, store smaller dtypes, or give a scratch_dir= on a larger disk",
            ) from error
        # macOS and some file systems cannot reserve blocks.
        _logger.warning(
            "the disk of %s cannot reserve the %s of the memory-mapped cells (%s are free now): if it fills up, the "
            "process is killed.",
            folder,
            format_bytes(size),
            free,
        )
        os.ftruncate(descriptor, size)


def free_bytes(device: torch.device, folder: Path | None = None) -> int | None:
    """Return the number of free bytes on a device, or on the disk of a folder; None if it is unknown."""
    if folder is not None:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return shutil.disk_usage(folder).free
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    limits = [value for value in (_available_on_system(), _available_in_container()) if value is not None]
    return min(limits) if limits else None


def _available_on_system() -> int | None:
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _available_in_container() -> int | None:
    # Only anonymous memory counts as used, because the kernel can free the pages of memory-mapped files.
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - int(used["anon"])
    except (OSError, ValueError, KeyError):
        return None


def format_bytes(count: int) -> str:
    """Format a number of bytes for a message: ``3 MiB``."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.4g} {units[0]}"
