"""The stored trajectories, for drawing one of them with equal chances."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torchrl_lightning.replay.episode_index import EpisodeIndex, Flags
from torchrl_lightning.replay.rings import Ints
from torchrl_lightning.replay.windows import Draw, IndexedRings, Starts, WindowRule, bounds, steps_since
from torchrl_lightning.state import LARGEST, check_state, tensor, whole


class TrajectoryList:
    """Begin of every stored trajectory.

    It grows by what was written since the last look, and is thinned out when it has doubled: O(1) per written step.
    Trajectories that were overwritten meanwhile stay in it and are rejected when drawn.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import ExperienceBuffer, RingStorage
        >>> buffer = ExperienceBuffer(storage=RingStorage(8))
        >>> done = torch.tensor([0, 0, 1, 0, 0], dtype=torch.bool).unsqueeze(-1)
        >>> _ = buffer.extend(TensorDict({"next": {"done": done}}, [5]))
        >>> trajectories = TrajectoryList()
        >>> trajectories.refresh(buffer.writer)
        >>> trajectories.begin.tolist()
        [0, 3]
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.env: Ints = np.zeros(0, np.int64)
        self.begin: Ints = np.zeros(0, np.int64)
        self._seen: Ints | None = None  # next position to look at, of every environment
        self._limit = 1024
        self._index: EpisodeIndex | None = None

    def refresh(self, rings: IndexedRings) -> None:
        """Add what was written since the last call."""
        positions, oldest = rings.positions.numpy(), rings.oldest.numpy()
        if self._seen is not None and (self._index is None or self._index is rings.index):
            if len(self._seen) != len(positions) or bool((self._seen > positions).any()):
                self.clear()
        else:
            self.clear()
        self._index = rings.index
        seen = np.full(rings.num_envs, -1) if self._seen is None else self._seen
        for env, position in steps_since(rings, np.maximum(seen, oldest)):
            begin, _ = bounds(rings, env, position)
            # The oldest stored step may be in an episode whose begin was overwritten before anybody saw it.
            fresh = (begin == position) | ((position == oldest[env]) & (begin >= seen[env]))
            self.env = np.concatenate([self.env, env[fresh]])
            self.begin = np.concatenate([self.begin, begin[fresh]])
        self._seen = positions.copy()
        if len(self.env) > self._limit:
            kept = self._starts(rings, self.env, self.begin)[2]
            self.env, self.begin = self.env[kept], self.begin[kept]
            self._limit = max(1024, 2 * len(self.env))

    def _starts(self, rings: IndexedRings, env: Ints, begin: Ints) -> tuple[Ints, Ints, Flags]:
        """Return first and last stored position of trajectories, and whether anything of them is stored."""
        first = np.maximum(begin, rings.oldest.numpy()[env])
        stored = first < rings.positions.numpy()[env]
        first = np.where(stored, first, rings.oldest.numpy()[env])
        found, end = bounds(rings, env, first)
        return first, end, stored & (found == begin)

    def draw(self, rings: IndexedRings, rule: WindowRule, count: int, draw: Draw, uniform: Draw) -> Starts | None:
        """Draw a trajectory, each that has room for a window equally likely, then a beginning in it.

        Args:
            rings: what is stored.
            rule: which steps are admissible.
            count: how many to draw.
            draw: source of random integers below one bound.
            uniform: source of random numbers in ``[0, 1)``: ``uniform(1, count)``.

        Returns:
            What was drawn; None if no trajectory has room.
        """
        self.refresh(rings)
        parts: list[tuple[Ints, Ints, Ints, Ints]] = []
        missing = count
        for size in (2 * count, 8 * count, 0):
            if not len(self.env) or not missing:
                break
            choice = draw(len(self.env), size) if size else np.arange(len(self.env))
            env, begin = self.env[choice], self.begin[choice]
            low, end, stored = self._starts(rings, env, begin)
            high = end - rule.reach
            if not rule.by_episode:
                high = np.minimum(end, rings.positions.numpy()[env] - 1 - rule.reach)
            kept = np.flatnonzero(stored & (low <= high))
            if not size:
                if not len(kept):
                    return None
                kept = kept[draw(len(kept), missing)]
            kept = kept[:missing]
            parts.append((env[kept], low[kept], high[kept], end[kept]))
            missing -= len(kept)
        if missing:
            return None
        env, low, high, end = (np.concatenate(part) for part in zip(*parts, strict=True))
        start = low + (uniform(1, count) * (high - low + 1)).astype(np.int64)
        return env, start, end

    def state_dict(self) -> dict[str, Any]:
        """Copy of the list: tensors and scalars."""
        return {
            "env": torch.from_numpy(self.env.copy()),
            "begin": torch.from_numpy(self.begin.copy()),
            "seen": torch.zeros(0, dtype=torch.int64) if self._seen is None else torch.from_numpy(self._seen.copy()),
            "limit": self._limit,
        }

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that does not fit; nothing is changed.

        Raises:
            ValueError: says what is wrong.
        """
        schema = {
            **{name: tensor(torch.int64, None, low=0, high=LARGEST) for name in ("env", "begin", "seen")},
            "limit": whole(1),
        }
        check_state(state_dict, schema, "trajectory list")
        env, begin, seen = (state_dict[name] for name in ("env", "begin", "seen"))
        if len(env) != len(begin) or (len(env) and int(env.max()) >= len(seen)):
            raise ValueError(
                f"The trajectory list state is foreign: {len(begin)} trajectories of {len(env)} environments, of which "
                f"{len(seen)} were looked at."
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the list; the episode index is taken to be the one it was made from."""
        self.clear()
        self.env = state_dict["env"].numpy().copy()
        self.begin = state_dict["begin"].numpy().copy()
        seen = state_dict["seen"].numpy().copy()
        self._seen = seen if len(seen) else None
        self._limit = int(state_dict["limit"])
