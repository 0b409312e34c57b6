"""All hostile files."""

from __future__ import annotations

from hostile import checkpoints, data, folders
from hostile.running import Case


def all_cases() -> list[Case]:
    """Return all hostile files: checkpoints, folders, then data."""
    return [*checkpoints.cases(), *folders.cases(), *data.cases()]
