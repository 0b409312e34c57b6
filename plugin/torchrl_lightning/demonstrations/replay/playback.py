"""Play demonstrations in parallel and return their steps in the environment's format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensordict.utils import NestedKey

from torchrl_lightning._core.images import stack_axis
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.environments import ReplayedRows
from torchrl_lightning.environments.wrappers.frame_stack import is_image

Array = NDArray[Any]
_AT_ONCE = 32


class DemoPlayback:
    """A running demonstration, over its own tensors; its first step belongs to call ``began`` of the replay."""

    def __init__(self, demonstration: Demonstration, frame_stack: int, began: int) -> None:
        self.demonstration, self.began = demonstration, began
        self.length = demonstration.length
        steps, last = demonstration.steps, demonstration.last_observation
        self.observations: dict[NestedKey, Array] = {
            key: steps.get(key).numpy() for key in demonstration.observation_keys
        }
        # If the last observation is unknown, the previous one replaces it.
        self._last: dict[NestedKey, Array] = {
            key: seen[-1] if last is None else last.get(key).numpy() for key, seen in self.observations.items()
        }
        self.actions: Array = steps.get("action").numpy()
        self.rewards: Array = demonstration.rewards.numpy()
        self._frame_stack = frame_stack

    def wait(self) -> None:
        """Delay the demonstration by one call."""
        self.began += 1

    @property
    def shapes(self) -> dict[NestedKey, tuple[int, ...]]:
        """The shapes of a step's observations and action, equal for all demonstrations that run together."""
        entries: dict[NestedKey, Array] = {**self.observations, "action": self.actions}
        return {key: rows.shape[1:] for key, rows in entries.items()}

    def left(self, now: int) -> int:
        """Return the number of remaining steps before call ``now``."""
        return self.length + self.began - now

    def layout(self, key: NestedKey) -> tuple[tuple[int, ...], int | None]:
        """Return an observation's layout: its shape with a separate frame axis, and that axis, or None without a stack.

        The frame axis precedes the channel axis, so that :meth:`joined` only reshapes.
        """
        shape = self.observations[key].shape[1:]
        if self._frame_stack == 1 or not isinstance(key, str) or not is_image(shape):
            return shape, None
        axis = stack_axis(shape)
        return (*shape[:axis], self._frame_stack, *shape[axis:]), axis

    def show(self, key: NestedKey, t: int, out: Array) -> None:
        """Write the observations before steps ``t``, ``t + 1``, ..., and after the last one, into ``out``."""
        _, axis = self.layout(key)
        if axis is None:
            out[:] = self._frames(key, t, t + len(out))
            return
        frames = self._frames(key, t - self._frame_stack + 1, t + len(out))
        windows = np.lib.stride_tricks.sliding_window_view(frames, self._frame_stack, 0)
        out[:] = np.moveaxis(windows, -1, axis + 1)

    def whole(self, key: NestedKey) -> Array:
        """Return the observations before all steps and after the last one."""
        shape, _ = self.layout(key)
        shown = np.empty((self.length + 1, *shape), self.observations[key].dtype)
        self.show(key, 0, shown)
        return self.joined(key, shown)

    def joined(self, key: NestedKey, shown: Array) -> Array:
        """Convert observations ``[..., *layout]`` to the environment's shape: frames are merged into channels."""
        shape, axis = self.layout(key)
        if axis is None or len(shape) != 4:  # without a stack, or frames without channels
            return shown
        return shown.reshape(*shown.shape[:-4], *shape[:axis], -1, *shape[axis + 2 :])

    def _frames(self, key: NestedKey, begin: int, end: int) -> Array:
        rows = self.observations[key]
        parts = [rows[max(begin, 0) : end]]
        if begin < 0:
            parts.insert(0, np.repeat(rows[:1], -begin, 0))
        if end > self.length:
            parts.append(self._last[key][None])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class PlaybackBatch:
    """The demonstrations that run together until one begins or ends; their steps are prepared in small blocks.

    They end with the flags ``ends`` (terminated, truncated), or with the recorded ones if None.
    """

    def __init__(
        self,
        running: Mapping[int, DemoPlayback],
        mask: Array,
        now: int,
        ends: tuple[bool, bool] | None,
        log_prob: float | None,
    ) -> None:
        self._players = [running[env] for env in sorted(running)]
        self._mask, self._now, self._log_prob = mask, now, log_prob
        recorded = [player.demonstration.ends for player in self._players]
        self._ends = np.array(recorded if ends is None else [ends] * len(recorded)).T
        self.left = min(player.left(now) for player in self._players)
        self._serials = np.array([player.demonstration.serial for player in self._players])
        self._never = np.zeros(len(self._players), dtype=bool)
        self._told: Iterator[ReplayedRows] = iter(())
        self._at_once = 2

    def next_rows(self) -> ReplayedRows:
        """Return the next step and advance."""
        rows = next(self._told, None)
        if rows is None:
            # Prepare few steps first, because a changed cast discards them.
            self._at_once = min(2 * self._at_once, self.left, _AT_ONCE)
            self._told = iter(self._tell(self._at_once))
            rows = next(self._told)
        self.left -= 1
        self._now += 1
        return rows

    def _tell(self, steps: int) -> list[ReplayedRows]:
        players, now = self._players, self._now
        shown = [self._seen(key, steps + 1) for key in players[0].observations]
        seen = [dict(zip(players[0].observations, values, strict=True)) for values in zip(*shown, strict=True)]
        actions = np.empty((steps, len(players), *players[0].actions.shape[1:]), players[0].actions.dtype)
        rewards = np.empty((steps, len(players)), np.float32)
        for i, player in enumerate(players):
            t = now - player.began
            actions[:, i], rewards[:, i] = player.actions[t : t + steps], player.rewards[t : t + steps]
        terminated, truncated = [self._never] * steps, [self._never] * steps
        if steps == self.left:
            over = np.array([not player.left(now + steps) for player in players])
            terminated[-1], truncated[-1] = over & self._ends
        constant = self._serials, self._log_prob
        return [
            ReplayedRows(
                self._mask, seen[t], actions[t], seen[t + 1], rewards[t], terminated[t], truncated[t], *constant
            )
            for t in range(steps)
        ]

    def _seen(self, key: NestedKey, steps: int) -> list[Array]:
        players = self._players
        shape, _ = players[0].layout(key)
        block = np.empty((steps, len(players), *shape), players[0].observations[key].dtype)
        for i, player in enumerate(players):
            player.show(key, self._now - player.began, block[:, i])
        return list(players[0].joined(key, block))
