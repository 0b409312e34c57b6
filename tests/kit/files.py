"""States and logs that are read back from files."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import torch


def through_file(state: Any, weights_only: bool = True) -> Any:
    """Save a state as in a checkpoint, and load it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def logged(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a run's CSV log."""
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))
