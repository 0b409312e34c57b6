"""Rows ``[count]`` that contain their number."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict


def numbered(count: int, start: int = 0, *, ends: bool | int = 5, **entries: Any) -> TensorDict:
    """Make rows with their number, from ``start`` on, in every entry.

    Args:
        count: The number of rows.
        start: The first number.
        ends: True if every row ends an episode, False if no row does, or the number of steps in each episode.
        entries: Additional entries.
    """
    number = torch.arange(start, start + count)
    done = torch.full((count,), ends) if isinstance(ends, bool) else number % ends == ends - 1
    column = number.float().unsqueeze(-1)
    following = {"reward": column, "done": done.unsqueeze(-1), "deep": {"x": number.half()}}
    return TensorDict({"number": number, "a": number.float(), "next": following, **entries}, [count])


def episodes(lengths: list[int], **entries: Any) -> TensorDict:
    """Build one stream of complete episodes."""
    done = torch.cat([torch.arange(n) == n - 1 for n in lengths]).unsqueeze(-1)
    return TensorDict({"step": torch.arange(len(done)), "next": {"done": done}, **entries}, [len(done)])
