"""Memory for what is stored, and checks that there is enough of it.

Sizes are checked before anything is allocated, so that a typo in a size is an error and not a killed process.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from torchrl_lightning.segment_kernels import allocate

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def check_room(
    needed: int, owner: str, remedy: str, *, device: torch.device | str = "cpu", folder: Path | None = None
) -> None:
    """Refuse to allocate more bytes than are free.

    Args:
        needed: bytes about to be allocated.
        owner: what needs them, for the message.
        remedy: what the user can do, for the message.
        device: where to allocate, unless ``folder`` is given.
        folder: a folder on the disk of memory-mapped files.

    Raises:
        ValueError: there is not enough room; the message gives both numbers.

    Example:
        >>> check_room(1 << 10, "a storage", "lower its size")
    """
    free = free_bytes(torch.device(device), folder)
    if free is not None and needed > free:
        where = f"on the disk of {folder}" if folder is not None else f"in the memory of {device}"
        raise ValueError(f"{owner} needs {readable(needed)}, but only {readable(free)} are free {where}; {remedy}.")


def reserve(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an uninitialised tensor; on the CPU by numpy, whose huge pages make scattered reads faster.

    Args:
        shape: shape of the tensor.
        dtype: any dtype of torch.
        device: where to allocate.

    Example:
        >>> reserve((3, 2), torch.bfloat16, torch.device("cpu")).shape
        torch.Size([3, 2])
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.empty(shape, dtype=dtype, device=device)
    return allocate(size, torch.uint8, device).view(dtype).view(shape)


def free_bytes(device: torch.device, folder: Path | None = None) -> int | None:
    """Return how many bytes are free on a device, or on the disk of a folder; None where that is unknown."""
    if folder is not None:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return shutil.disk_usage(folder).free
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    limits = [value for value in (_available(), _container()) if value is not None]
    return min(limits) if limits else None


def _available() -> int | None:
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


def _container() -> int | None:
    # Pages of memory-mapped files count as used here, but the kernel gives them up; only a limit of its own binds.
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - int(used["anon"])
    except (OSError, ValueError, KeyError):
        return None


def readable(count: int) -> str:
    """Format a number of bytes for a message.

    Example:
        >>> readable(3 << 20)
        '3 MiB'
    """
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.4g} {units[0]}"
