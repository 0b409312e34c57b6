"""Compiled recording of one step of all environments in an episode index."""

from __future__ import annotations

from typing import Any


def write_row(rows: Any, done_rows: Any, begin: Any, headless_end: Any, done: Any, position: int) -> bool:
    """Record one step of every environment (numba): one call instead of eight small ones.

    Args:
        rows: of the index, ``[length, num_envs]``: where a step's episode began, or the end for a first step.
        done_rows: flags, ``[length, num_envs]``.
        begin: of the running episodes, ``[num_envs]``.
        headless_end: end of the episodes whose first step is overwritten, ``[num_envs]``.
        done: which environments' episodes end with this step.
        position: of the step, the same for all.

    Returns:
        Whether any episode ends.
    """
    length = len(rows)
    slot, ended = position % length, False
    for env in range(len(done)):
        # The oldest step goes; was it the first of its episode?
        if position >= length and rows[slot, env] >= position - length:
            headless_end[env] = rows[slot, env]
        rows[slot, env] = begin[env]
        done_rows[slot, env] = done[env]
        ended |= done[env]
    return ended
