"""How much memory there is, asked before a rollout's memory is reserved."""

from __future__ import annotations

import os
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def available_bytes(device: torch.device | str) -> int | None:
    """Bytes that can still be had on a device; ``None`` where nobody says.

    Example:
        >>> available_bytes("meta") is None
        True
    """
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    known = [size for size in (_system_bytes(), _container_bytes()) if size is not None]
    return min(known) if known else None


def _system_bytes() -> int | None:
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _container_bytes() -> int | None:
    try:
        return int(CGROUP_LIMIT.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def check_room(needed: int, device: torch.device | str, what: str) -> None:
    """Refuse a reservation that does not fit.

    Raises:
        MemoryError: fewer than ``needed`` bytes are available; names both.
    """
    available = available_bytes(device)
    if available is not None and needed > available:
        raise MemoryError(
            f"{what} needs {needed} bytes ({needed / 2**30:.1f} GiB) on {device}, but only {available} bytes "
            f"({available / 2**30:.1f} GiB) are available. Take a smaller size or fewer environments, or store less."
        )
