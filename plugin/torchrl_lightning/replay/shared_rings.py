"""Rings that processes share: what others did to them, and what one that died left half done."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning.replay.episode_index import EpisodeIndex
from torchrl_lightning.replay.rings import Ints, Rings, steps_between

_logger = logging.getLogger(__name__)

EVERYTHING = np.iinfo(np.int64).max


class SharedRings(Rings):
    """Rings with counters and an episode index, which may lie in memory that processes share.

    Who writes holds a lock between the processes, calls :meth:`follow` on entering and :meth:`leave` on leaving it, and
    :meth:`expose` before anything changes.

    Args:
        num_envs: number of rings.
    """

    ARRAYS = (*Rings.ARRAYS, "_counters", "_pending")
    _is_locked = False  # whether this process holds the lock

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        # Rows written; an era, which grows when the rings start again, so that stamps never repeat. Of processes that
        # share the rings: how many changes they made, whether one of them is at it, and whether nobody waits any more.
        self._counters: Ints = np.zeros(5, np.int64)
        # Which steps of a ring, all those below a position, are lost if the process dies that is at it.
        self._pending: Ints = np.zeros(num_envs, np.int64)
        self.index: EpisodeIndex | None = None
        # Number of changes, era, positions and oldest steps that this process knows of.
        self._seen: tuple[int, int, Ints, Ints] = 0, 0, self._positions, self._floor

    @property
    def _era(self) -> int:
        return int(self._counters[1])

    def share(self) -> None:
        """Move positions, counters and episode index into memory that processes share."""
        self.share_arrays()
        if self.index is not None:
            self.index.attach(self._positions, self._floor)
            self.index.share_arrays()
        self._see()

    def follow(self) -> tuple[bool, Tensor, Tensor] | None:
        """Take note of what other processes did, under the lock that was just entered; mend what a dead one left.

        Returns:
            None if they did nothing; otherwise whether they emptied the rings, cells that hold nothing any more, and
            cells that were written.
        """
        if self._counters.item(3):
            self._mend()
            self.leave()
        self._is_locked = True
        changes, era, positions, oldest = self._seen
        if self._counters.item(2) == changes:
            return None
        emptied = era != self._era
        if emptied:
            positions = oldest = np.zeros_like(positions)
        self._refresh()
        now = self._oldest()
        gone = self._cells_between(np.maximum(oldest, self._positions - self.length), np.minimum(now, positions))
        written = self._cells_between(np.maximum(positions, now), self._positions)
        self._see()
        return emptied, gone, written

    def leave(self) -> None:
        """Declare that everything is whole, before the lock is given back."""
        if self._counters.item(3):
            self._pending[:] = 0
            self._counters[3] = 0  # last, as it was the first to be set
        self._is_locked = False

    def expose(self, env: Any, below: Any = EVERYTHING) -> None:
        """Note which steps are lost if this process dies before it leaves the lock; before anything changes.

        Args:
            env: the environments.
            below: those before these positions; none of the ring can be told to be whole where it is ``EVERYTHING``.
        """
        if self._is_locked:
            self._counters[3] = 1
            self._pending[env] = below

    def stop(self) -> None:
        """Let nobody wait for room or for steps any more, in any process."""
        self._counters[4] = 1

    @property
    def is_stopped(self) -> bool:
        """Whether nobody shall wait any more."""
        return bool(self._counters.item(4))

    def _mend(self) -> None:
        env = np.flatnonzero(self._pending)
        end, held = self._pending[env], self._positions[env] - self._oldest()[env]
        torn = end == EVERYTHING
        if self.index is not None:
            self.index.keep_headless_end(env[~torn], end[~torn])
            self.index.forget(env[torn])
        self._floor[env] = np.minimum(end, self._positions[env])
        self._settle()
        self._counters[2] += 1
        if torn.any():
            _logger.warning(
                "a process died while it wrote steps of the environments %s: the %d steps stored of them were dropped, "
                "because nobody knows which are whole, and what comes next begins new episodes.",
                env[torn].tolist(), int(held[torn].clip(0).sum()),
            )  # fmt: skip

    def _cells_between(self, low: Ints, high: Ints) -> Tensor:
        env, position, _ = steps_between(low, high - 1)
        return self.cell(torch.from_numpy(env), torch.from_numpy(position))

    def _see(self) -> None:
        if self._memory is not None:
            self._seen = self._counters.item(2), self._era, self._positions.copy(), self._oldest()

    def _note_change(self) -> None:
        if self._memory is not None:
            self._counters[2] += 1
            self._see()

    def _settle(self) -> None:
        """Take note of positions that changed."""
        self._refresh()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_is_locked": False}
