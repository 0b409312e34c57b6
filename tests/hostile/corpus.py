"""All hostile files."""

from __future__ import annotations

from hostile import checkpoints, data, folders
from hostile.running import Case


def all_cases() -> list[Case]:
    """Return them, in the order of their kinds."""
    return [*checkpoints.cases(), *folders.cases(), *data.cases()]
