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
_MAX_BLOCK = 32  # maximum number of steps in a prepared block


class DemoPlayback:
    """A running demonstration. The replay returns its first step in the call with the number ``start``."""

    def __init__(self, demonstration: Demonstration, frame_stack: int, start: int) -> None:
        self.demonstration, self.start = demonstration, start
        self.length = demonstration.length
        steps, last = demonstration.steps, demonstration.last_observation
        self.observations: dict[NestedKey, Array] = {
            key: steps.get(key).numpy() for key in demonstration.observation_keys
        }
        # If the last observation is unknown, the previous observation replaces it.
        self._last: dict[NestedKey, Array] = {
            key: rows[-1] if last is None else last.get(key).numpy() for key, rows in self.observations.items()
        }
        self.actions: Array = steps.get("action").numpy()
        self.rewards: Array = demonstration.rewards.numpy()
        self._frame_stack = frame_stack

    def wait(self) -> None:
        """Delay the demonstration by one call."""
        self.start += 1

    @property
    def shapes(self) -> dict[NestedKey, tuple[int, ...]]:
        """The shapes of a step's observations and action. All demonstrations in one batch have equal shapes."""
        entries: dict[NestedKey, Array] = {**self.observations, "action": self.actions}
        return {key: rows.shape[1:] for key, rows in entries.items()}

    def remaining(self, now: int) -> int:
        """Return the number of remaining steps before call ``now``."""
        return self.length + self.start - now

    def layout(self, key: NestedKey) -> tuple[tuple[int, ...], int | None]:
        """Return the shape of an observation with a separate frame axis, and the index of this axis.

        The index is None without a frame stack. The frame axis precedes the channel axis, so that :meth:`merge_frames`
        only reshapes.
        """
        shape = self.observations[key].shape[1:]
        if self._frame_stack == 1 or not isinstance(key, str) or not is_image(shape):
            return shape, None
        axis = stack_axis(shape)
        return (*shape[:axis], self._frame_stack, *shape[axis:]), axis

    def write_observations(self, key: NestedKey, t: int, out: Array) -> None:
        """Write the observations before steps ``t``, ``t + 1``, ..., and after the last step, into ``out``."""
        _, axis = self.layout(key)
        if axis is None:
            out[:] = self._frames(key, t, t + len(out))
            return
        frames = self._frames(key, t - self._frame_stack + 1, t + len(out))
        windows = np.lib.stride_tricks.sliding_window_view(frames, self._frame_stack, 0)
        out[:] = np.moveaxis(windows, -1, axis + 1)

    def all_observations(self, key: NestedKey) -> Array:
        """Return the observations before all steps and after the last step."""
        shape, _ = self.layout(key)
        observations = np.empty((self.length + 1, *shape), self.observations[key].dtype)
        self.write_observations(key, 0, observations)
        return self.merge_frames(key, observations)

    def merge_frames(self, key: NestedKey, observations: Array) -> Array:
        """Convert observations ``[..., *layout]`` to the environment's shape: merge frames into channels."""
        shape, axis = self.layout(key)
        if axis is None or len(shape) != 4:  # frames are not stacked, or do not have channels
            return observations
        return observations.reshape(*observations.shape[:-4], *shape[:axis], -1, *shape[axis + 2 :])

    def _frames(self, key: NestedKey, begin: int, end: int) -> Array:
        rows = self.observations[key]
        parts = [rows[max(begin, 0) : end]]
        if begin < 0:
            parts.insert(0, np.repeat(rows[:1], -begin, 0))
        if end > self.length:
            parts.append(self._last[key][None])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class PlaybackBatch:
    """A fixed set of demonstrations that are played at the same time.

    Steps are prepared in small blocks. ``ends`` has the flags (terminated, truncated) for the last steps. If ``ends``
    is None, the recorded flags are used.
    """

    def __init__(
        self,
        running: Mapping[int, DemoPlayback],
        mask: Array,
        now: int,
        ends: tuple[bool, bool] | None,
        log_prob: float | None,
    ) -> None:
        self._playbacks = [running[env] for env in sorted(running)]
        self._mask, self._now, self._log_prob = mask, now, log_prob
        recorded = [playback.demonstration.ends for playback in self._playbacks]
        self._ends = np.array(recorded if ends is None else [ends] * len(recorded)).T
        self.remaining = min(playback.remaining(now) for playback in self._playbacks)
        self._serials = np.array([playback.demonstration.serial for playback in self._playbacks])
        self._all_false = np.zeros(len(self._playbacks), dtype=bool)
        self._prepared: Iterator[ReplayedRows] = iter(())
        self._block_length = 2

    def next_rows(self) -> ReplayedRows:
        """Return the next step and advance."""
        rows = next(self._prepared, None)
        if rows is None:
            # Begin with few steps: a new batch discards prepared steps.
            self._block_length = min(2 * self._block_length, self.remaining, _MAX_BLOCK)
            self._prepared = iter(self._prepare_rows(self._block_length))
            rows = next(self._prepared)
        self.remaining -= 1
        self._now += 1
        return rows

    def _prepare_rows(self, steps: int) -> list[ReplayedRows]:
        playbacks, now = self._playbacks, self._now
        blocks = [self._observation_block(key, steps + 1) for key in playbacks[0].observations]
        observations = [
            dict(zip(playbacks[0].observations, values, strict=True)) for values in zip(*blocks, strict=True)
        ]
        actions = np.empty((steps, len(playbacks), *playbacks[0].actions.shape[1:]), playbacks[0].actions.dtype)
        rewards = np.empty((steps, len(playbacks)), np.float32)
        for i, playback in enumerate(playbacks):
            t = now - playback.start
            actions[:, i], rewards[:, i] = playback.actions[t : t + steps], playback.rewards[t : t + steps]
        terminated, truncated = [self._all_false] * steps, [self._all_false] * steps
        if steps == self.remaining:
            is_over = np.array([not playback.remaining(now + steps) for playback in playbacks])
            terminated[-1], truncated[-1] = is_over & self._ends
        shared_fields = self._serials, self._log_prob
        return [
            ReplayedRows(
                self._mask,
                observations[t],
                actions[t],
                observations[t + 1],
                rewards[t],
                terminated[t],
                truncated[t],
                *shared_fields,
            )
            for t in range(steps)
        ]

    def _observation_block(self, key: NestedKey, steps: int) -> list[Array]:
        playbacks = self._playbacks
        shape, _ = playbacks[0].layout(key)
        block = np.empty((steps, len(playbacks), *shape), playbacks[0].observations[key].dtype)
        for i, playback in enumerate(playbacks):
            playback.write_observations(key, self._now - playback.start, block[:, i])
        return list(playbacks[0].merge_frames(key, block))
