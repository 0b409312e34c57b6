"""The steps at which windows may begin, and draws of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning.replay.episode_index import EpisodeIndex, Flags
from torchrl_lightning.replay.rings import Ints

MAX_DRAWS = 1 << 16
"""So many steps are drawn before all of them are looked at."""
CHUNK = 1 << 18
Draw = Callable[[int, int], Ints]
"""``draw(high, count)``: integers in ``[0, high)``."""
Starts = tuple[Ints, Ints, Ints]
"""Environments, first positions, and last positions that may be read; each ``[B]``."""
Candidates = tuple[int, Callable[[Ints], tuple[Ints, Ints]]]
"""How many steps may begin a window as far as room goes, and where the n-th of them is: environment and position."""


class IndexedRings(Protocol):
    """Rings that know their episodes, as those of a ``RingWriter`` do."""

    num_envs: int
    length: int

    @property
    def index(self) -> EpisodeIndex | None:
        """Where episodes begin and end, if it is known."""

    @property
    def positions(self) -> Tensor:
        """Next position of every environment."""

    @property
    def oldest(self) -> Tensor:
        """Oldest stored position of every environment."""

    @property
    def common_oldest(self) -> int | None:
        """Oldest stored position, if it is that of all environments, and all are equally filled."""


@dataclass(frozen=True)
class WindowRule:
    """Which steps may begin a window.

    Args:
        length: steps of a window.
        burn_in: how many of them only warm up a recurrent state.
        episode_ends: ``"inside"`` (a window lies in one episode), ``"across"`` (in one ring) or ``"pad"`` (in one
            episode, at least one step that counts, the rest is padding).

    Example:
        >>> WindowRule(4).reach, WindowRule(4, 1, "pad").reach
        (3, 1)
    """

    length: int
    burn_in: int = 0
    episode_ends: str = "inside"

    @property
    def reach(self) -> int:
        """How far behind its first step a window has to be stored."""
        return self.burn_in if self.episode_ends == "pad" else self.length - 1

    @property
    def by_episode(self) -> bool:
        """Whether a window ends with its episode."""
        return self.episode_ends != "across"


def bounds(rings: IndexedRings, env: Ints, position: Ints) -> tuple[Ints, Ints]:
    """Return first and last position of the episodes of stored steps; a first one may be overwritten."""
    if rings.index is None:
        raise RuntimeError("There is no episode index.")
    begin, end = rings.index.bounds(torch.from_numpy(env), torch.from_numpy(position), clip=False)
    return begin.numpy(), end.numpy()


def draw_steps(rings: IndexedRings, rule: WindowRule, count: int, draw: Draw) -> Starts | None:
    """Draw beginnings, every admissible one equally likely, by drawing steps and rejecting those that are none.

    Only steps that are at least ``rule.reach`` before the newest of their environment are drawn, so that none has to be
    rejected unless an episode ends in between.

    Args:
        rings: what is stored.
        rule: which steps are admissible.
        count: how many to draw.
        draw: source of random integers.

    Returns:
        What was drawn; None if too many steps were rejected.
    """
    candidates = _aligned(rings, rule.reach) or _unaligned(rings, rule.reach)
    if candidates is None:
        return None
    total, locate = candidates
    sure = not rule.by_episode or not rule.reach
    found: list[tuple[Ints, Ints]] = []
    missing, drawn, size = count, 0, count if sure else 2 * count
    while missing:
        env, start = locate(draw(total, size))
        if not sure:
            if rings.index is None:
                raise RuntimeError("There is no episode index.")
            last = (start + rule.reach) % rings.length * rings.num_envs + env
            kept = rings.index.covers(last, start).nonzero()[0][:missing]
            env, start = env[kept], start[kept]
        found.append((env, start))
        missing, drawn = missing - len(env), drawn + size
        if missing and drawn >= min(MAX_DRAWS, max(total, 64)):
            return None
        size = min(4 * size, MAX_DRAWS)
    if len(found) > 1:
        env, start = (np.concatenate(part) for part in zip(*found, strict=True))
    return env, start, bounds(rings, env, start)[1] if rule.episode_ends == "pad" else start + rule.reach


def _aligned(rings: IndexedRings, reach: int) -> Candidates | None:
    oldest = rings.common_oldest
    if oldest is None:
        return None
    num_envs = rings.num_envs
    total = (int(rings.positions.numpy()[0]) - oldest - reach) * num_envs

    def locate(rank: Ints) -> tuple[Ints, Ints]:
        slot, env = np.divmod(rank, num_envs)
        return env, slot + oldest

    return (total, locate) if total > 0 else None


def _unaligned(rings: IndexedRings, reach: int) -> Candidates | None:
    oldest = rings.oldest.numpy()
    room = np.maximum(rings.positions.numpy() - oldest - reach, 0)
    until = room.cumsum()
    shift = oldest - until + room
    total = int(until[-1])

    def locate(rank: Ints) -> tuple[Ints, Ints]:
        env = np.searchsorted(until, rank, side="right")
        return env, rank + shift[env]

    return (total, locate) if total > 0 else None


def all_starts(rings: IndexedRings, rule: WindowRule) -> Starts:
    """Find all admissible beginnings, in order: O(stored steps)."""
    found: list[Starts] = []
    newest = rings.positions.numpy() - 1
    for env, start in steps_since(rings, rings.oldest.numpy()):
        end = bounds(rings, env, start)[1] if rule.by_episode else newest[env]
        kept = start + rule.reach <= end
        found.append((env[kept], start[kept], end[kept]))
    return _joined(found)


def longest_run(rings: IndexedRings, rule: WindowRule) -> int:
    """Count the steps of the longest stored episode, or of the fullest ring across episodes: O(stored steps)."""
    if not rule.by_episode:
        return int((rings.positions - rings.oldest).max())
    runs = (bounds(rings, env, start)[1] - start + 1 for env, start in steps_since(rings, rings.oldest.numpy()))
    return max((int(run.max()) for run in runs), default=0)


def steps_since(rings: IndexedRings, first: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield environments and positions of the steps from ``first`` (``[num_envs]``) to the newest, in pieces."""
    count = np.maximum(rings.positions.numpy() - first, 0)
    until = count.cumsum()
    total = int(until[-1])
    for low in range(0, total, CHUNK):
        rank = np.arange(low, min(low + CHUNK, total))
        env = np.searchsorted(until, rank, side="right")
        yield env, first[env] + rank - (until - count)[env]


def lay_out(rings: IndexedRings, rule: WindowRule, starts: Starts, steps: Ints) -> tuple[Ints, Flags | None]:
    """Compute the cells ``[B, T]`` of windows, and which steps count (None: all).

    Padding repeats the last cell of the episode.

    Args:
        rings: what is stored.
        rule: what a window is.
        starts: drawn beginnings.
        steps: ``0 .. rule.length - 1``.
    """
    env, start, end = starts
    first = start % rings.length * rings.num_envs + env
    mask: Flags | None = None
    if rule.episode_ends == "pad":
        left = (end - start)[:, None]
        mask = steps <= left
        steps = np.minimum(steps, left)
    cells = first[:, None] + steps * rings.num_envs
    size = rings.length * rings.num_envs
    if int(np.maximum.reduce(first)) + rule.length * rings.num_envs > size:
        cells[cells >= size] -= size
    if rule.burn_in:
        mask = np.ones(cells.shape, np.bool_) if mask is None else mask
        mask[:, : rule.burn_in] = False
    return cells, mask


def _joined(found: list[Starts]) -> Starts:
    if not found:
        none = np.zeros(0, np.int64)
        return none, none, none
    env, start, end = (np.concatenate(part) for part in zip(*found, strict=True))
    return env, start, end
