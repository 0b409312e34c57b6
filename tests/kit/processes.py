"""Processes that run the package as a user would: their environment variables, and the processes that remain."""

from __future__ import annotations

import os
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """Return the variables of this process, with the checkout importable and one thread."""
    paths = [str(PROJECT / "plugin"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def members(session: int) -> list[int]:
    """Return the processes of a session from /proc. A process that outlives the session's leader is a leak."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[3] == str(session) and fields[0] != "Z":
            alive.append(int(stat.parent.name))
    return alive


def survivors(session: int, seconds: float = 300) -> list[int]:
    """Return the processes of a session that remain after ``seconds``.

    A helper process of multiprocessing outlives its parent by a moment.
    """
    deadline = time.monotonic() + seconds
    while (left := members(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def alive(pid: int) -> bool:
    """Return True if a process runs according to /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
