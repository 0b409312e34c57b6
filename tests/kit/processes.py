"""Variables of processes that run the package as a user would, installed or from the checkout."""

from __future__ import annotations

import os
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """Return the variables of this process, with the checkout importable and one thread."""
    paths = [str(PROJECT / "plugin"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
